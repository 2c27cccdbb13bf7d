"""Sinks are given each step once, whatever ends in between; notifiers are told in a bounded time."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outlets_lab import EventBoard, outlets, record, until, write_steps
from patience import patience
from supervisor_testing import create, make_cluster, make_plan, make_recipe

from hpcrl.config.outlets import NotifierConfig, SinkConfig
from hpcrl.extend import ExtensionError
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.events import read_events
from hpcrl.runs.outlets.feed import SinkFeed
from hpcrl.runs.outlets.flat import flat_metrics
from hpcrl.runs.outlets.making import make_notifier, make_sink
from hpcrl.runs.outlets.trial import find_problems
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sink_position import position_path
from hpcrl.runs.status import RunState
from hpcrl.submit.submission import create_run
from hpcrl.supervisor.outlets import Outlets

MODULE = """
import json, os, time
from pathlib import Path


class Steps:
    def __init__(self, *, file="steps.txt", breaks_at=0, hangs=False):
        self.file, self.breaks_at, self.hangs = file, breaks_at, hangs

    def open(self, run):
        self.path = run.directory / "sinks" / self.file
        self.say(f"open {run.name} {run.attempt} after {run.last_step} {run.recipe['name']}")

    def say(self, text):
        with self.path.open("a") as stream:
            stream.write(text + "\\n")

    def log(self, step, metrics):
        if step == self.breaks_at and not self.path.with_suffix(".broke").exists():
            self.path.with_suffix(".broke").touch()
            raise RuntimeError("no connection")
        self.say(f"{step} {metrics['reward_by_env/words']}")

    def close(self):
        while self.hangs:
            time.sleep(60)
        self.say("close")


class Word:
    def __init__(self, where, *, hangs=False):
        self.where, self.hangs = where, hangs

    def notify(self, notice):
        while self.hangs:
            time.sleep(60)
        seen = {name: value for name, value in os.environ.items() if name.startswith(("HPCRL_", "OF_THE_SITE"))}
        words = [notice.name, notice.attempt, notice.event, notice.step, notice.why[0], seen]
        Path(self.where).write_text(json.dumps(words))


class Silent:
    pass


def broken():
    raise OSError("no such server")
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write sinks and notifiers that processes can import."""
    path = tmp_path / "modules"
    path.mkdir()
    (path / "own_outlets.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH")))))
    monkeypatch.syspath_prepend(str(path))
    yield path
    sys.modules.pop("own_outlets", None)


def sink(name: str = "steps", kind: str = "Steps", *, close_timeout_s: float = 30.0, **parameters: Any) -> SinkConfig:
    return SinkConfig(
        name=name, sink=f"own_outlets:{kind}", parameters=parameters, close_timeout_s=close_timeout_s * patience()
    )


def notifier(name: str = "word", kind: str = "Word", *, timeout_s: float = 30.0, **more: Any) -> NotifierConfig:
    events = more.pop("events", ("completed", "failed"))
    return NotifierConfig(
        name=name, notifier=f"own_outlets:{kind}", parameters=more, timeout_s=timeout_s * patience(), events=events
    )


def lines(run: RunDir, file: str = "steps.txt") -> list[str]:
    path = run.sinks_dir / file
    return path.read_text().splitlines() if path.exists() else []


def test_metrics_are_flat_and_finite() -> None:
    flat = flat_metrics(record(3))
    assert flat["reward_by_env/words"] == 0.5
    assert flat["phases_s/wait_batch"] == 0.25
    assert flat["loss_metrics/gain"] == 2.0
    assert flat["skipped"] == 0.0
    assert not {"loss", "step", "rollouts_digest", "teacher_kl"} & set(flat)


async def test_a_sink_is_given_all_steps_and_closed(modules: Path, tmp_path: Path) -> None:
    run, board = create(tmp_path / "runs"), EventBoard()
    write_steps(run, range(1, 4))
    sinks = outlets(run, board, (sink(),))
    await sinks.start()
    await until(lambda: len(lines(run)) == 4, "the steps that were there")
    write_steps(run, range(4, 6))
    await sinks.end_sinks(left_s=None, requeued=False)
    assert lines(run) == ["open run-1 1 after 0 stand-ins", *(f"{step} 0.5" for step in range(1, 6)), "close"]
    assert board.events == []
    # the next attempt begins at step 4 again: its steps are given from the 6th on
    write_steps(run, range(4, 8), attempt=2, reward=0.75)
    sinks = Outlets(run, plan=run.plan().model_copy(update={"sinks": (sink(),)}), attempt=2, board=board)  # type: ignore[arg-type]
    await sinks.start()
    await until(lambda: lines(run)[-1].startswith("7 "), "the steps of the second attempt")
    await sinks.end_sinks(left_s=None, requeued=False)
    assert lines(run)[7:] == ["open run-1 2 after 5 stand-ins", "6 0.75", "7 0.75", "close"]


async def test_a_sink_that_fails_is_started_again_where_it_was(modules: Path, tmp_path: Path) -> None:
    run, board = create(tmp_path / "runs"), EventBoard()
    write_steps(run, range(1, 5))
    sinks = outlets(run, board, (sink(breaks_at=3), sink("good", file="good.txt")))
    await sinks.start()
    await until(lambda: lines(run)[-1:] == ["4 0.5"] and len(lines(run, "good.txt")) == 5, "both sinks")
    await sinks.end_sinks(left_s=None, requeued=False)
    steps = [f"{step} 0.5" for step in range(1, 5)]
    again = "open run-1 1 after 2 stand-ins"
    assert lines(run) == ["open run-1 1 after 0 stand-ins", *steps[:2], again, *steps[2:], "close"]
    assert lines(run, "good.txt")[1:] == [*steps, "close"]
    assert [(kind, data["sink"]) for kind, data in board.events] == [("sink.failed", "steps")]
    assert "RuntimeError: no connection" in (run.sinks_dir / "steps.log").read_text()


async def test_one_that_cannot_be_made_is_tried_after_longer_and_longer_pauses(modules: Path, tmp_path: Path) -> None:
    """It is never given up: a service may be away for longer than some tries last, and an attempt runs for days."""
    run, board = create(tmp_path / "runs"), EventBoard()
    sinks = outlets(run, board, (sink(kind="broken"),))
    await sinks.start()
    await until(lambda: len(board.events) == 4, "four starts")
    await sinks.end_sinks(left_s=None, requeued=False)
    assert [data["error"] for _, data in board.events] == ["it ended with 1"] * 4
    pauses = [data["pause_s"] for _, data in board.events]
    assert [pause / pauses[0] for pause in pauses] == [1.0, 2.0, 4.0, 8.0]
    assert "own_outlets:broken raised OSError: no such server" in (run.sinks_dir / "steps.log").read_text()


async def test_hanging_ones_are_killed(modules: Path, tmp_path: Path) -> None:
    run, board = create(tmp_path / "runs"), EventBoard()
    write_steps(run, range(1, 2))
    sinks = outlets(
        run,
        board,
        (sink(hangs=True, close_timeout_s=0.2),),
        # time enough for a try to begin on a busy machine
        (notifier(where="nowhere", hangs=True, timeout_s=4.0),),
    )
    await sinks.start()
    await until(lambda: lines(run), "the sink")
    await sinks.end_sinks(left_s=None, requeued=False)
    await sinks.notify(RunState.COMPLETED, None, left_s=None)
    assert [kind for kind, _ in board.events] == ["sink.killed"]
    (failed,) = read_events(run, kind="notify.failed")
    assert "it took longer than" in failed.data["error"]
    assert lines(run)[-1] != "close"


async def test_there_is_no_waiting_where_slurm_ends_us(modules: Path, tmp_path: Path) -> None:
    run, board = create(tmp_path / "runs"), EventBoard()
    sinks = outlets(run, board, (sink(hangs=True, close_timeout_s=600),), (notifier(where="nowhere", timeout_s=600),))
    await sinks.start()
    await until(lambda: lines(run), "the sink")
    async with asyncio.timeout(60 * patience()):
        await sinks.end_sinks(left_s=1.0, requeued=False)
        await sinks.notify(RunState.FAILED, None, left_s=1.0)
    assert [kind for kind, _ in board.events] == ["sink.killed", "notify.failed"]


async def test_a_notifier_gets_the_end(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRL_RUN_ID", "secret-of-the-run")
    run, board = create(tmp_path / "runs"), EventBoard()
    run.start_attempt()
    write_steps(run, range(1, 4))
    words = [notifier("word", where=str(tmp_path / "word")), notifier("broken", "broken")]
    words.append(notifier("other", where=str(tmp_path / "other"), events=("cancelled",)))
    sinks = outlets(run, board, notify=tuple(words))
    await sinks.start()
    cause = Cause(kind=CauseKind.EXIT, time_s=1.0, message="the trainer ended with 1")
    await sinks.notify(RunState.FAILED, cause, left_s=None)
    said = json.loads((tmp_path / "word").read_text())
    assert said == ["run-1", 1, "failed", 3, "the trainer ended with 1", {}]
    assert not (tmp_path / "other").exists()
    assert board.events == []
    assert {(event.kind, event.data["notifier"]) for event in read_events(run)} == {
        ("notify.sent", "word"),
        ("notify.failed", "broken"),
    }
    assert sinks.pids() == set()


async def test_secrets_of_the_profile_reach_who_tells_others(modules: Path, tmp_path: Path) -> None:
    """``env`` refuses them, and a job does not inherit them: without this no key of a service comes to a sink."""
    key = tmp_path / "key"
    key.write_text("opens it\n")
    key.chmod(0o600)
    files = {"OF_THE_SITE": str(key), "OF_THE_SITE_TOO": str(tmp_path / "missing")}
    (tmp_path / "runs").mkdir()
    plan = make_plan(tmp_path / "runs" / "run-1")
    run = create_run(make_recipe(), make_cluster().model_copy(update={"secrets": files}), plan).run
    run.start_attempt()
    sinks = outlets(run, EventBoard(), notify=(notifier("word", where=str(tmp_path / "word")),))
    await sinks.start()
    await sinks.notify(RunState.FAILED, None, left_s=None)
    assert json.loads((tmp_path / "word").read_text())[-1] == {"OF_THE_SITE": "opens it"}


def test_what_cannot_be_made_is_found_before(modules: Path) -> None:
    wrong = [sink("a", "Silent"), sink("b", "Nothing"), sink("c", colour="red")]
    off = wrong[1].model_copy(update={"name": "d", "try_before_submit": False})
    found = find_problems([sink("good"), *wrong, off], [notifier("w", "broken"), notifier("good", where="x")])
    assert [(each["key"], each["what"].partition("\n")[0]) for each in found] == [
        ("sinks.a", "own_outlets:Silent gave a Silent, which has no open, log, close"),
        ("sinks.b", "'own_outlets' has no callable 'Nothing'"),
        ("sinks.c", "own_outlets:Steps raised TypeError: Steps.__init__() got an unexpected keyword argument 'colour'"),
        ("notify.w", "own_outlets:broken raised OSError: no such server"),
    ]
    with pytest.raises(ExtensionError, match=r"registers notifier\.telex"):
        make_notifier(NotifierConfig(name="telex", notifier="telex"))


def test_a_torn_line_is_read_when_it_is_whole(modules: Path, tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    run.sinks_dir.mkdir()
    feed = SinkFeed(run, 1, "steps", make_sink(sink()))
    feed.open()
    write_steps(run, range(1, 3))
    path = run.metrics_dir / "0001.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    feed.poll()
    assert lines(run)[1:] == ["1 0.5"]
    path.write_bytes(whole)
    feed.poll()
    assert lines(run)[1:] == ["1 0.5", "2 0.5"]
    assert json.loads(position_path(run, "steps").read_bytes()) == {"last_step": 2}
