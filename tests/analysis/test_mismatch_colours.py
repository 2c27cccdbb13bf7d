"""Tokens coloured by mismatch on the page of a run: those whose log-ratios the trainer recorded, and no others."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from page_lab import browser, make_page_run, needs_chromium, record_ratios

from hpcrl.analysis.finished_rollouts import FinishedRollouts, read_finished
from hpcrl.analysis.page.chosen_rollouts import choose_shown, recorded_rollouts, rollout_documents, shown_rollouts
from hpcrl.analysis.page.write_html import write_page
from hpcrl.dock.ledger.replay import Held
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.token_ratios import RolloutRatios, StepRatios, ratios_path, read_ratios

OPTION = '<option value="mismatch">'
STEPS = 12


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_page_run(tmp_path, steps=STEPS)


def names_of(chosen: list[tuple[str, Held]]) -> list[str]:
    return [word for word, _ in chosen]


def tokens_of(document: dict[str, object]) -> list[list[object]]:
    return [token for turn in document["turns"] for token in turn["tokens"]]  # type: ignore[attr-defined]


def other_rollout(finished: FinishedRollouts) -> Held:
    """Return a rollout of the newest step whose reward none of those has that a page shows."""
    rewards = {held.entry.reward for _, held in choose_shown(finished)}
    return next(held for held in finished.trained[STEPS] if held.entry.reward not in rewards)


def change_record(run: RunDir, **changes: object) -> None:
    """Replace fields of the only recorded rollout."""
    ((key, record),) = read_ratios(run).items()
    changed = msgspec.structs.replace(record, **changes)
    ratios_path(run, key[0]).write_bytes(StepRatios(key[0], 2, [changed]).encode())


def test_a_run_without_records_has_no_such_choice(run: RunDir, tmp_path: Path) -> None:
    text = write_page([run], tmp_path / "report.html").read_text()
    assert '<option value="version">' in text
    assert OPTION not in text
    shown = shown_rollouts(run, read_finished(run))
    assert [document["mismatch"] for document in shown] == [False] * 3
    assert {len(token) for document in shown for token in tokens_of(document)} == {3}


def test_tokens_have_the_recorded_values(run: RunDir, tmp_path: Path) -> None:
    chosen = choose_shown(read_finished(run))
    wanted = record_ratios(run, chosen[2][1], [round(0.01 * index - 0.2, 5) for index in range(50)])
    worst, median, best = shown_rollouts(run, read_finished(run))
    assert [document["mismatch"] for document in (worst, median, best)] == [False, False, True]
    assert [token[3] for token in tokens_of(best)] == wanted
    assert len(wanted) > 20
    assert {len(token) for token in [*tokens_of(worst), *tokens_of(median)]} == {3}
    assert OPTION in write_page([run], tmp_path / "report.html").read_text()


def test_a_value_that_is_not_finite_is_left_out(run: RunDir) -> None:
    chosen = choose_shown(read_finished(run))
    wanted = record_ratios(run, chosen[0][1], [0.5, None, 0.25])
    (document,) = rollout_documents(run, chosen[:1], 1_000_000)
    assert [token[3] if len(token) == 4 else None for token in tokens_of(document)] == wanted


@pytest.mark.parametrize("what", ["digest", "log_ratios"])
def test_a_record_of_other_tokens_is_not_shown(run: RunDir, what: str) -> None:
    chosen = choose_shown(read_finished(run))
    ratios = record_ratios(run, chosen[0][1], [0.5])
    change_record(run, **{"digest": {"digest": 1}, "log_ratios": {"log_ratios": ratios[1:]}}[what])
    (document,) = rollout_documents(run, chosen[:1], 1_000_000)
    assert not document["mismatch"]
    assert {len(token) for token in tokens_of(document)} == {3}


def test_of_equal_rewards_a_recorded_rollout_is_shown(tmp_path: Path) -> None:
    run = make_page_run(tmp_path, steps=STEPS, gain=2.0)  # all rewards are 1
    finished = read_finished(run)
    held = finished.trained[STEPS - 2][4]
    assert held.id not in [each.id for _, each in choose_shown(finished)]
    record_ratios(run, held, [0.5])
    chosen = choose_shown(finished, recorded_rollouts(run, finished))
    assert names_of(chosen) == ["worst", "median", "best"]
    assert {each.id for _, each in chosen} == {held.id}


def test_where_no_shown_rollout_is_recorded_one_that_is_recorded_is_added(run: RunDir) -> None:
    finished = read_finished(run)
    usual, held = choose_shown(finished), other_rollout(finished)
    record_ratios(run, held, [0.5])
    chosen = choose_shown(finished, recorded_rollouts(run, finished))
    assert chosen[:3] == usual
    assert [(word, each.id) for word, each in chosen[3:]] == [("with mismatch", held.id)]
    # its tokens are no longer kept
    shutil.rmtree(run.rollouts_dir / "payload")
    assert choose_shown(finished, recorded_rollouts(run, finished)) == usual


@pytest.mark.parametrize(
    "content",
    [b"", b'{"step": 1', b"\xff" * 99, b"[" * 100_000, b'{"step": "1", "attempt": 1, "rollouts": []}', None],
    ids=["empty", "torn", "binary", "nested", "another type", "directory"],
)
def test_damaged_records_end_no_page(run: RunDir, tmp_path: Path, content: bytes | None) -> None:
    path = ratios_path(run, STEPS)
    path.parent.mkdir()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert OPTION not in write_page([run], tmp_path / "report.html").read_text()


def test_numbers_beyond_those_of_json_end_no_page(run: RunDir, tmp_path: Path) -> None:
    chosen = choose_shown(read_finished(run))
    record_ratios(run, chosen[0][1], [1.5])
    path = ratios_path(run, chosen[0][1].step or 0)
    path.write_bytes(path.read_bytes().replace(b"1.5", b"1e308"))
    assert isinstance(next(iter(read_ratios(run).values())), RolloutRatios)
    assert OPTION in write_page([run], tmp_path / "report.html").read_text()


@needs_chromium
@pytest.mark.slow
async def test_tokens_have_colours_by_sign_and_size(run: RunDir, tmp_path: Path) -> None:
    chosen = choose_shown(read_finished(run))
    record_ratios(run, chosen[2][1], [0.5, -0.5, 0.01, 0.00001, None])
    shown = (
        "[...document.querySelectorAll('.rollout')].map((each) => ({ notes: each.querySelector('.turns').textContent,"
        " tokens: [...each.querySelectorAll('.token-text span')].map((s) => [s.title.split('engine ')[1] ?? '',"
        " s.style.background]) }))"
    )
    async with browser.chromium_page() as page:
        await page.look(1280)
        await page.open(write_page([run], tmp_path / "report.html"))
        await page.evaluate("document.querySelectorAll('.rollout').forEach((each) => { each.open = true; })")
        await page.evaluate("colour.value = 'mismatch'; colour.dispatchEvent(new Event('change'))")
        await page.wait_for("[...document.querySelectorAll('.rollout')].every((e) => e.dataset.mode === 'mismatch')")
        worst, _, best = await page.evaluate(shown)
        assert page.messages == []
    assert "are not recorded" in worst["notes"]
    assert {colour for _, colour in worst["tokens"]} == {""}
    assert "more probable for the trainer" in best["notes"]
    colours = {value: {colour for own, colour in best["tokens"] if own == value} for value, _ in best["tokens"]}
    assert set(colours) == {"0.5", "-0.5", "0.01", "0.00001", ""}
    assert colours["0.00001"] == colours[""] == {""}
    strong = [colours[value] for value in ("0.5", "-0.5", "0.01")]
    assert all(len(each) == 1 and each != {""} for each in strong)
    assert len({next(iter(each)) for each in strong}) == 3
