"""The page of runs in a real headless Chromium: plots, marks, rollouts, texts of others, dark and light, narrow."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_lab import GROUPS, MEMBERS, SCRIPT, browser, draw_whole, make_page_run, needs_chromium, serious

from hpcrl.analysis.page.write_html import write_page

pytestmark = [needs_chromium, pytest.mark.slow]
STEPS = 30
#: of each plot the points that the run has for it: lines times steps
POINTS = {
    "reward": 2 * STEPS,
    "heldout": 4,
    "reward-env": STEPS,
    "loss": STEPS,
    "entropy": STEPS,
    "mismatch": STEPS,
    "masked-share": STEPS,
    "grad-norm": STEPS,
    "staleness": 2 * STEPS,
    "lengths": 4 * STEPS,
    "drops": STEPS,
    "phases": 6 * STEPS,
    "updates": 2 * (STEPS + 1),
    "checkpoints": 2,
}
MARKS = 3
"""A restart, and two events of an engine that fails."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    return write_page([make_page_run(root, steps=STEPS)], root / "report.html")


async def test_every_plot_has_its_points_and_marks_and_nothing_is_fetched(path: Path) -> None:
    async with browser.chromium_page() as page:
        await page.look(1280)
        await page.open(path)
        await draw_whole(page)
        assert page.messages == []
        assert page.requests == [path.as_uri()]
        found = await page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('.canvas')].map((canvas) => [canvas.id.slice(7), {"
            "points: +canvas.dataset.points, marks: +canvas.dataset.marks, drawn: [...canvas.querySelectorAll("
            "'.trace path.js-line, .trace .point path, .trace path.js-fill')].filter((each) => !each.closest('.xy9'))"
            ".length, lines: canvas.querySelectorAll('.xy9 .trace path.js-line').length, marked: canvas.data.filter("
            "(trace) => trace.meta === 'marks').map((trace) => trace.x.length / 3)}]))"
        )
        assert {name: found[name]["points"] for name in POINTS} == POINTS
        for name, each in found.items():
            assert each["points"] > 0, name
            assert each["drawn"] > 0, name
            assert each["marks"] == MARKS, name
            assert each["lines"] == MARKS, name
            # two looks: faults, and the restart
            assert sorted(each["marked"]) == [1, 2], name
        # a point of the plot is where the record has it
        values = await page.evaluate("document.getElementById('canvas-entropy').data[0].y")
        assert values == pytest.approx([1.2 - step / STEPS for step in range(1, STEPS + 1)], rel=1e-4)
        bands = await page.evaluate("document.getElementById('canvas-reward').dataset.bands")
        assert bands == "1"


async def test_every_curve_leads_to_its_definition(path: Path) -> None:
    async with browser.chromium_page() as page:
        await page.look(1280)
        await page.open(path)
        broken = await page.evaluate(
            "[...document.querySelectorAll('a[href^=\"#\"]')].map((a) => a.getAttribute('href').slice(1))"
            ".filter((id) => !document.getElementById(id))"
        )
        assert broken == []
        without = await page.evaluate(
            "[...document.querySelectorAll('figure:not(.wide)')].filter((f) => !f.querySelector('.defs a')).length"
        )
        assert without == 0
        words = await page.evaluate("document.getElementById('def-mismatch-kl').nextElementSibling.textContent")
        assert "KL of engine and trainer at trained tokens" in words


async def test_texts_of_others_stay_texts(path: Path) -> None:
    async with browser.chromium_page() as page:
        await page.look(1280)
        await page.open(path)
        await page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        await page.wait_for("[...document.querySelectorAll('details.rollout')].every((each) => each.dataset.mode)")
        for mode in ("logprob", "version", "kind"):
            await page.evaluate(
                f"colour.value = '{mode}'; colour.dispatchEvent(new Event('change')); document.body.offsetHeight"
            )
            said = await page.evaluate(
                "[...document.querySelectorAll('.turns')].map((each) => each.textContent).join()"
            )
            assert SCRIPT in said, mode
        rows = await page.evaluate("document.getElementById('recipe').parentElement.textContent")
        assert SCRIPT in rows
        assert await page.evaluate("window.taken") is None
        assert await page.evaluate("document.querySelectorAll('main img, main b').length") == 0
        # a message in the hover text of a mark
        await draw_whole(page)
        shown = await page.evaluate(
            "(() => { const box = document.getElementById('canvas-loss'); const last = box.data.length - 1;"
            "Plotly.Fx.hover(box, [{ curveNumber: last, pointNumber: 0 }]);"
            "return box.querySelector('.hoverlayer').textContent; })()"
        )
        assert "<script>window.taken=1</script>" in shown
        assert await page.evaluate("window.taken") is None
        assert page.messages == []
        assert page.requests == [path.as_uri()]


async def test_a_rollout_opens_by_the_keyboard_and_its_tokens_have_colours(path: Path) -> None:
    async with browser.chromium_page() as page:
        await page.look(1280)
        await page.open(path)
        names = await page.evaluate("[...document.querySelectorAll('.rollout summary')].map((s) => s.textContent)")
        assert [name.split(" · ")[0].split()[-1] for name in names] == ["worst", "median", "best"]
        await page.evaluate("document.querySelector('.rollout summary').focus()")
        await page.press("Enter", 13, "\r")
        await page.wait_for("document.querySelector('.rollout').open && document.querySelector('.rollout .piece')")
        await page.evaluate("colour.value = 'logprob'; colour.dispatchEvent(new Event('change'))")
        spans = await page.evaluate(
            "[...document.querySelectorAll('.rollout[open] .token-text span')].map((s) => "
            "[s.textContent, s.title, getComputedStyle(s).backgroundColor])"
        )
        assert spans
        assert all("log-probability -0.25, version" in title for _, title, _ in spans)
        assert len({colour for _, _, colour in spans}) == 1
        await page.evaluate("colour.value = 'version'; colour.dispatchEvent(new Event('change'))")
        colours = await page.evaluate(
            "[...document.querySelectorAll('.rollout[open] .token-text span')].map((s) => "
            "[s.title.split('version ')[1], getComputedStyle(s).backgroundColor])"
        )
        # tokens of two versions have two colours
        assert len({version for version, _ in colours}) == len({colour for _, colour in colours}) == 2


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
async def test_dark_and_light_narrow_and_wide(path: Path, width: int, dark: bool) -> None:
    async with browser.chromium_page() as page:
        await page.look(width, dark=dark)
        await page.open(path)
        await page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        await page.evaluate("colour.value = 'logprob'; colour.dispatchEvent(new Event('change'))")
        await draw_whole(page)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        outside = await page.evaluate(
            "[...document.querySelectorAll('figure, figure .main-svg')]"
            ".filter((each) => each.getBoundingClientRect().right > innerWidth + 1).length"
        )
        assert outside == 0
        ink = await page.evaluate("getComputedStyle(document.querySelector('#canvas-loss .xtick text')).fill")
        assert ink == ("rgb(232, 234, 236)" if dark else "rgb(28, 33, 38)")
        assert await serious(page) == []
        assert page.messages == []


async def test_plots_follow_a_change_of_the_colour_scheme(path: Path) -> None:
    async with browser.chromium_page() as page:
        await page.look(1280)
        await page.open(path)
        await draw_whole(page)
        await page.look(1280, dark=True)
        dark = "getComputedStyle(document.querySelector('#canvas-{} .xtick text')).fill === 'rgb(232, 234, 236)'"
        await page.wait_for(dark.format("reward"))
        # one that is far from the window when a reader comes to it
        await page.evaluate("document.getElementById('canvas-checkpoints').scrollIntoView({ behavior: 'instant' })")
        await page.wait_for(dark.format("checkpoints"))
        assert await page.evaluate("+document.getElementById('canvas-checkpoints').dataset.points") == 2


async def test_plots_are_drawn_when_a_reader_comes_to_them(path: Path) -> None:
    drawn = "[...document.querySelectorAll('.canvas')].filter((each) => 'points' in each.dataset).map((c) => c.id)"
    async with browser.chromium_page() as page:
        await page.look(1280)
        await page.open(path)
        first = await page.evaluate(drawn)
        assert "canvas-reward" in first
        # no more than one height of the window below what it shows
        far = await page.evaluate(
            "[...document.querySelectorAll('.canvas')].filter((each) => each.getBoundingClientRect().top > "
            "2 * innerHeight + 1).map((each) => each.id)"
        )
        assert "canvas-checkpoints" in far
        assert not set(first) & set(far)
        for anchor, id in (("fleet", "canvas-checkpoints"), ("policy", "canvas-loss")):
            await page.evaluate(f"document.querySelector('nav a[href=\"#{anchor}\"]').click()")
            await page.wait_for(f"'points' in document.getElementById('{id}').dataset")
        await page.wait_for("document.documentElement.dataset.state === 'drawn'")
        assert page.messages == []


async def test_the_numbers_of_a_plot_are_a_table(path: Path) -> None:
    async with browser.chromium_page() as page:
        await page.look(1280)
        await page.open(path)
        await page.evaluate("document.getElementById('numbers-lengths').open = true")
        await page.wait_for("document.querySelector('#numbers-lengths table')")
        rows = await page.evaluate(
            "[...document.querySelectorAll('#numbers-lengths tr')]"
            ".map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        assert rows[0] == ["step", "mean", "10% quantile", "50% quantile", "90% quantile"]
        assert len(rows) == STEPS + 1
        assert float(rows[1][1]) == pytest.approx(1024 / (GROUPS * MEMBERS), rel=1e-4)
