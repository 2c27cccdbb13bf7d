"""A board in a real headless Chromium: pages, plots, a run that continues, dark and light, narrow, by the keyboard."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from board_lab import Served, served
from page_lab import MEMBERS, SCRIPT, browser, draw_whole, make_page_run, needs_chromium, record_ratios, serious
from runs_testing import make_run, step_record, write_event, write_log, write_status, write_steps

from hpcrl.runs.metrics import MetricsWriter
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ProcessId, RunState
from hpcrl.runs.views.rollouts import find_rollout, read_ledger

pytestmark = [needs_chromium, pytest.mark.slow]
STEPS = 30
TOTAL = 60
TALL = 12_000
"""Height of a window that shows all plots: others are drawn when a reader comes to them."""
WELCOMED = "location.search === '' && document.documentElement?.dataset.state === 'drawn'"
"""True on the list, behind the page that takes the token."""
LAST_BEST = f"{4 * STEPS - 1}/{MEMBERS - 1}"
"""The best rollout of the last group."""
PAGES = ["/", "/run/night-1", "/run/night-1/nodes", "/run/night-1/logs", "/run/night-1/rollouts"]
PAGES += [f"/run/night-1/rollouts/{LAST_BEST}", "/compare?run=night-1&run=night-2", "/run/waits"]


class Shown(NamedTuple):
    """A page of Chromium that has the cookie of a board over some runs.

    Attributes
    ----------
    living:
        A run that has not ended.
    """

    page: Any
    board: Served
    living: RunDir


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name, gain in (("night-1", 0.0), ("night-2", 0.1)):
        run = make_page_run(root / "runs", name, steps=STEPS, gain=gain)
        write_log(run, "".join(f"line {i} of the engine {SCRIPT}\n" for i in range(300)), attempt=3)
        write_log(run, "ready\n", role="trainer", attempt=3)
        record_ratios(run, find_rollout(read_ledger(run), LAST_BEST), [0.5, -0.5])
    make_run(root / "runs", "waits")
    return root / "runs"


@pytest.fixture
async def shown(root: Path, tmp_path: Path) -> AsyncIterator[Shown]:
    living = make_run(tmp_path, "living", steps=TOTAL)
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_status(living, RunState.RUNNING, supervisor=me, component_state=ComponentState.READY)
    write_steps(living, STEPS, total=TOTAL)
    write_log(living, "first line\n")
    async with served(root, tmp_path) as board, browser.chromium_page() as page:
        await page.look(1280)
        await page.open(board.link, WELCOMED)
        yield Shown(page, board, living)


def arrived(path: str) -> str:
    """True on a drawn page of that path; between two pages there is no document."""
    return f"location.pathname === {path!r} && document.documentElement?.dataset.state === 'drawn'"


def own_requests(shown: Shown) -> bool:
    return all(each.startswith((shown.board.url, "data:", "about:")) for each in shown.page.requests)


async def test_pages_load_without_errors_and_plots_have_their_points(shown: Shown) -> None:
    page = shown.page
    for path in PAGES:
        await page.open(shown.board.url + path)
        assert page.messages == [], path
        assert await page.evaluate("document.querySelectorAll('main img, main b').length") == 0, path
        assert await page.evaluate("window.taken") is None, path
        if path in ("/run/night-1", PAGES[-2]):
            await draw_whole(page)
            found = await page.evaluate(
                "Object.fromEntries([...document.querySelectorAll('.canvas')].map((canvas) => [canvas.id.slice(7), {"
                "points: +canvas.dataset.points, drawn: [...canvas.querySelectorAll('.trace path.js-line, "
                ".trace .point path, .trace path.js-fill')].filter((each) => !each.closest('.xy9')).length}]))"
            )
            assert len(found) >= 15
            for name, each in found.items():
                assert each["points"] > 0, (path, name)
                assert each["drawn"] > 0, (path, name)
            values = await page.evaluate("document.getElementById('canvas-entropy').data[0].y")
            assert values == pytest.approx([1.2 - step / STEPS for step in range(1, STEPS + 1)], rel=1e-4)
    assert own_requests(shown)


async def test_the_token_is_in_no_address_and_no_script_sees_it(shown: Shown) -> None:
    assert await shown.page.evaluate("location.href") == f"{shown.board.url}/"
    assert await shown.page.evaluate("document.cookie") == ""
    names = await shown.page.evaluate("[...document.querySelectorAll('.runs th[scope=row]')].map((n) => n.textContent)")
    assert sorted(names) == ["living", "night-1", "night-2", "waits"]


async def test_a_run_that_lives_continues_without_a_reload(shown: Shown) -> None:
    page = shown.page
    await page.look(1280, TALL)
    await page.open(f"{shown.board.url}/run/living")
    await page.evaluate("window.kept = 1; document.getElementById('numbers-loss').open = true")
    loss = "+document.getElementById('canvas-loss').dataset.points"
    assert await page.evaluate(loss) == STEPS
    writer = MetricsWriter(shown.living, 1)
    writer.write(step_record(STEPS + 1, total=TOTAL))
    writer.close()
    await page.wait_for(f"{loss} === {STEPS + 1}")
    await page.wait_for(f"document.querySelectorAll('#numbers-loss tr').length === {STEPS + 2}")
    await page.wait_for(f"document.getElementById('live-overview').textContent.includes('{STEPS + 1} of {TOTAL}')")
    # a plot that had no data before
    assert not await page.evaluate("document.getElementById('canvas-checkpoints') !== null")
    write_event(shown.living, "trainer.checkpoint_saved", time_s=1.79e9 + 100, step=10, seconds=0.7, blocked_s=0.3)
    await page.wait_for("document.getElementById('canvas-checkpoints')?.dataset.points === '2'")
    write_status(shown.living, RunState.COMPLETED)
    await page.wait_for("document.getElementById('live-head').textContent.includes('COMPLETED')")
    assert await page.evaluate("window.kept") == 1
    assert page.messages == []
    assert own_requests(shown)


async def test_the_first_step_of_a_run_brings_its_plots(shown: Shown) -> None:
    run = make_run(shown.living.path.parent, "young")
    await shown.page.look(1280, TALL)
    await shown.page.open(f"{shown.board.url}/run/young")
    assert "no step yet" in await shown.page.evaluate("document.getElementById('main').textContent")
    write_steps(run, 2)
    await shown.page.wait_for("document.getElementById('canvas-loss')?.dataset.points === '2'")


async def test_the_list_finds_runs_and_shows_new_ones(shown: Shown) -> None:
    page = shown.page
    rows = "[...document.querySelectorAll('.runs th[scope=row]')].map((n) => n.textContent).sort().join()"
    await page.evaluate("document.querySelector('input[name=run][value=\"night-1\"]').checked = true")
    make_run(shown.living.path.parent, "later")
    await page.wait_for(f"{rows} === 'later,living,night-1,night-2,waits'")
    assert await page.evaluate("document.querySelector('input[name=run][value=\"night-1\"]').checked")
    await page.evaluate("document.querySelector('[name=q]').focus()")
    await page.call("Input.insertText", text="night")
    await page.wait_for(f"{rows} === 'night-1,night-2'")
    assert await page.evaluate("location.search") == "?q=night"
    assert await page.evaluate("document.activeElement.name") == "q"
    await page.evaluate(
        "const s = document.querySelector('[name=state]'); s.value = 'FAILED';"
        "s.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    await page.wait_for("document.getElementById('live-list').textContent.includes('No run matches.')")
    assert page.messages == []


async def test_runs_are_opened_and_compared_by_the_keyboard(shown: Shown) -> None:
    page = shown.page
    for name in ("night-1", "night-2"):
        await page.evaluate(f"document.querySelector('input[name=run][value=\"{name}\"]').focus()")
        await page.press(" ", 32, " ")
    await page.evaluate("document.querySelector('form[action=\"/compare\"] button').focus()")
    await page.press("Enter", 13, "\r")
    await page.wait_for(arrived("/compare"))
    assert "more than noise?" in await page.evaluate("document.getElementById('live-side').textContent")
    await page.evaluate("document.querySelector('header a[href=\"/run/night-1\"]').focus()")
    await page.press("Enter", 13, "\r")
    await page.wait_for(arrived("/run/night-1"))
    # from the top: the link that skips, then the content
    await page.press("Tab", 9)
    assert await page.evaluate("document.activeElement.className") == "skip"
    assert page.messages == []


async def test_logs_follow_and_are_searched(shown: Shown) -> None:
    page = shown.page
    await page.open(f"{shown.board.url}/run/living/logs")
    log = shown.living.log_path(1, "engine", 0)
    with log.open("a") as stream:
        stream.write("".join(f"more {i}\n" for i in range(150)) + "the end\n")
    await page.wait_for("document.getElementById('log').textContent.includes('the end')")
    assert await page.evaluate(
        "(() => { const l = document.getElementById('log');"
        "return l.scrollTop + l.clientHeight >= l.scrollHeight - 2; })()"
    )
    await page.evaluate("document.querySelector('[name=q]').focus()")
    await page.call("Input.insertText", text="MORE 14")
    await page.wait_for("document.querySelectorAll('#log mark').length === 11")
    assert await page.evaluate("[...document.querySelectorAll('#log mark')].every((m) => m.textContent === 'more 14')")
    assert page.messages == []


async def test_a_rollout_is_shown_with_coloured_tokens(shown: Shown) -> None:
    page = shown.page
    await page.open(f"{shown.board.url}{PAGES[5]}")
    assert SCRIPT in await page.evaluate("document.querySelector('.turns').textContent")
    for mode in ("version", "mismatch"):
        await page.evaluate(f"colour.value = '{mode}'; colour.dispatchEvent(new Event('change'))")
        colours = await page.evaluate(
            "[...document.querySelectorAll('.token-text span')].map((s) => getComputedStyle(s).backgroundColor)"
        )
        assert len(set(colours)) == 2, mode
    assert await page.evaluate("window.taken") is None
    assert page.messages == []


async def test_a_board_that_has_ended_is_reported(root: Path) -> None:
    async with browser.chromium_page() as page:
        await page.look(1280)
        async with served(root) as board:
            await page.open(board.link, WELCOMED)
        await page.wait_for("!document.getElementById('trouble').hidden")
        assert "does not answer" in await page.evaluate("document.getElementById('trouble').textContent")
        assert await page.evaluate("document.querySelectorAll('.runs tbody tr').length") == 3


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
async def test_every_page_dark_and_light_narrow_and_wide(shown: Shown, width: int, dark: bool) -> None:
    page = shown.page
    await page.look(width, dark=dark)
    for path in [*PAGES, "/run/nothing"]:
        await page.open(shown.board.url + path)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width, path
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)"), path
        assert await serious(page) == [], path
    assert [each for each in page.messages if "404" not in each] == []
