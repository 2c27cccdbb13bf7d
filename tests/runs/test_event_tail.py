"""Following the events of a run: only new bytes are read; a torn line and a replaced file are not misread."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from runs_testing import make_run

from hpcrl.runs import event_tail
from hpcrl.runs.clocks import Clocks, NodeClock
from hpcrl.runs.event_tail import EventTail
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.run_progress import read_evaluations, valid_evaluations
from hpcrl.runs.rundir import RunDir


def evaluate(run: RunDir, *versions: int, attempt: int = 1, writer: str = "orchestrator") -> Path:
    """Write held-out evaluations, each beside an event of another kind; return the file."""
    log = EventWriter(run, attempt=attempt, writer=writer)
    for version in versions:
        log.emit("engine.weights_updated", version=version)
        log.emit("evaluation", version=version, reward=0.5, prompts=8, by_env={}, parts={})
    log.close()
    return run.events_dir / f"{attempt:04d}-{writer}.jsonl"


def versions(tail: EventTail) -> list[int]:
    return [event.data["version"] for event in tail.read()]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


def test_events_of_all_writers_and_attempts_come_as_they_are_written(run: RunDir) -> None:
    tail = EventTail(run, "evaluation")
    assert tail.read() == []
    evaluate(run, 0, 2)
    assert versions(tail) == [0, 2]
    assert versions(tail) == [0, 2]
    evaluate(run, 4)
    evaluate(run, 6, attempt=2)
    evaluate(run, 7, attempt=2, writer="another")
    assert versions(tail) == [0, 2, 4, 6, 7]
    assert tail.read() == read_events(run, kind="evaluation")
    assert valid_evaluations(run, tail.read()) == read_evaluations(run)


def test_bytes_that_were_read_are_not_read_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = EventTail(run, "evaluation")
    path = evaluate(run, 0)
    # blocks smaller than a line: lines are joined from several
    monkeypatch.setattr(event_tail, "_BLOCK_BYTES", 7)
    assert versions(tail) == [0]
    with path.open("r+b") as stream:
        stream.write(b"x" * (path.stat().st_size - 1))
    evaluate(run, 2)
    assert versions(tail) == [0, 2]


def test_a_torn_line_counts_when_it_is_whole(run: RunDir) -> None:
    tail = EventTail(run, "evaluation")
    path = evaluate(run, 0, 2)
    whole = path.read_bytes()
    with path.open("r+b") as stream:
        stream.truncate(len(whole) - 20)
    assert versions(tail) == [0]
    with path.open("ab") as stream:
        stream.write(whole[-20:-1])
    assert versions(tail) == [0]
    with path.open("ab") as stream:
        stream.write(whole[-1:])
    evaluate(run, 4)
    assert versions(tail) == [0, 2, 4]


def test_a_line_that_stays_torn_is_left_out(run: RunDir) -> None:
    tail = EventTail(run, "evaluation")
    path = evaluate(run, 0)
    with path.open("ab") as stream:
        stream.write(b'{"kind":"evaluation","ti\n')
    evaluate(run, 2)
    assert versions(tail) == [0, 2]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_file_that_was_replaced_or_cut_is_read_again(run: RunDir, in_place: bool) -> None:
    tail = EventTail(run, "evaluation")
    path = evaluate(run, 0, 2, 4)
    assert versions(tail) == [0, 2, 4]
    other = make_run(run.path.parent, "run-2")
    new = evaluate(other, 10)
    if in_place:
        path.write_bytes(new.read_bytes())
    else:
        # larger than what was read, so that the size does not tell
        evaluate(other, *range(11, 20))
        os.replace(new, path)
    assert versions(tail) == ([10] if in_place else list(range(10, 20)))
    path.unlink()
    assert versions(tail) == []


def test_times_are_by_the_clock_of_the_supervisor(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    tail = EventTail(run, "evaluation")
    evaluate(run, 0)
    (before,) = tail.read()
    run.attempt_dir(1).mkdir(parents=True, exist_ok=True)
    Clocks.path(run, 1).write_bytes(Clocks({"n1": NodeClock(100.0, 0.1)}).encode())
    (after,) = tail.read()
    assert after.time_s == pytest.approx(before.time_s - 100.0)
