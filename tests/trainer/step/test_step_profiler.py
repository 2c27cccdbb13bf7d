"""A rank profiles its own steps when it is asked to, and nothing of that fails or stops a step."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from trainer_testing import StubDock, make_recipe, start_attempt, write_model_dir, write_recipe

from hpcrl.errors import RunDirError
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.profile_request import TRACE, ProfileAnswer, ProfileRequest, profile_dir, request_path
from hpcrl.runs.role import RoleContext, save_request_path
from hpcrl.runs.rundir import RunDir
from hpcrl.trainer.loop import train
from hpcrl.trainer.state.attempt_requests import RequestReader
from hpcrl.trainer.step import step_profiler
from hpcrl.trainer.step.step_profiler import StepProfiler


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("profiled") / "model")


def new_run(path: Path, model_dir: Path, steps: int = 6) -> RunDir:
    run = RunDir(path)
    write_recipe(run, make_recipe(model_dir, steps=steps))
    return run


def request(**changes: Any) -> ProfileRequest:
    values = {"id": "mine", "rank": 0, "steps": 2, "memory": False, "limit_s": 600.0, "most_bytes": 50_000_000}
    values |= {"time_s": time.time(), "wait_s": 600.0, "by": "me on here"}
    return ProfileRequest(**{**values, **changes})


class Asking(StubDock):
    """A dock that does something when the trainer asks for the batch of a step."""

    def __init__(self, at: dict[int, Callable[[], Any]]) -> None:
        super().__init__()
        self._at = at

    def get(self, path: str) -> Any:
        act = self._at.pop(int(urlsplit(path).path.rsplit("/", 1)[1]), None)
        if act is not None:
            act()
        return super().get(path)


def trained(run: RunDir, at: dict[int, Callable[[], Any]]) -> list[int]:
    """Train with a dock; the steps that were recorded."""
    with Asking(at).serving() as dock:
        train(start_attempt(run, dock))
    return [record.step for record in read_metrics(run)]


def spans(directory: Path) -> list[str]:
    """Names of our own spans in a trace, in the order of time."""
    events = json.loads(gzip.decompress((directory / TRACE).read_bytes()))["traceEvents"]
    ours = [event for event in events if event.get("cat") == "user_annotation" and event["ph"] == "X"]
    return [event["name"] for event in sorted(ours, key=lambda event: (event["ts"], -event["dur"]))]


def kinds(run: RunDir) -> list[str]:
    return [event.kind for event in read_events(run) if event.kind.startswith("trainer.profil")]


def test_a_request_records_whole_steps_and_is_answered(tmp_path: Path, model_dir: Path) -> None:
    run = new_run(tmp_path / "run", model_dir, steps=7)
    assert trained(run, {3: lambda: request(memory=True).place(run, 1)}) == list(range(1, 8))
    directory = profile_dir(run, 1, "mine")
    answer = ProfileAnswer.read(directory)
    assert answer is not None
    assert (answer.problem, answer.files, answer.device) == ("", [TRACE], "cpu")
    assert answer.last == answer.first + 1
    assert "no snapshot of memory: the device of the rank is cpu" in answer.notes[0]
    names = [name for name in spans(directory) if not name.startswith(("Optimizer.", "ProfilerStep"))]
    own = [name for name in names if name.startswith("step ") or name in ("wait_batch", "forward_backward", "publish")]
    phases = ["wait_batch", "forward_backward", "publish"]
    assert own == [f"step {answer.first}", *phases, f"step {answer.last}", *phases]
    trace = gzip.decompress((directory / TRACE).read_bytes()).decode()
    assert "aten::mm" in trace
    assert "[memory]" in trace
    # nothing but the result is left, and the request is gone
    assert sorted(path.name for path in directory.iterdir()) == ["answer.json", TRACE]
    assert not request_path(run, 1, 0).exists()
    assert kinds(run) == ["trainer.profiling", "trainer.profiled"]


def test_a_request_for_another_rank_is_left_alone(tmp_path: Path, model_dir: Path) -> None:
    run = new_run(tmp_path / "run", model_dir, steps=4)
    assert trained(run, {1: lambda: request(rank=1).place(run, 1)}) == [1, 2, 3, 4]
    assert request_path(run, 1, 1).exists()
    assert kinds(run) == []


def test_a_withdrawn_request_leaves_nothing(tmp_path: Path, model_dir: Path) -> None:
    run = new_run(tmp_path / "run", model_dir, steps=9)
    asked = request(steps=20)
    at = {2: lambda: asked.place(run, 1), 6: lambda: asked.withdraw(run, 1)}
    assert trained(run, at) == list(range(1, 10))
    assert not profile_dir(run, 1, "mine").exists()
    assert kinds(run) == ["trainer.profiling"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"most_bytes": 1000}, "MB, more than 0 MB"),
        ({"most_bytes": 1 << 60}, "there is too little room for a profile"),
    ],
)
def test_what_has_no_room_is_answered(tmp_path: Path, model_dir: Path, changes: dict[str, Any], problem: str) -> None:
    run = new_run(tmp_path / "run", model_dir, steps=6)
    assert trained(run, {1: lambda: request(**changes).place(run, 1)}) == list(range(1, 7))
    answer = ProfileAnswer.read(profile_dir(run, 1, "mine"))
    assert answer is not None
    assert problem in answer.problem
    assert [path.name for path in profile_dir(run, 1, "mine").iterdir()] == ["answer.json"]
    assert kinds(run)[-1] == "trainer.profile_failed"


@pytest.mark.parametrize("call", ["start", "stop", "export_chrome_trace"])
def test_an_error_of_the_profiler_fails_no_step(
    tmp_path: Path, model_dir: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise RuntimeError("kineto says no")

    monkeypatch.setattr(step_profiler.profile, call, refuses)
    run = new_run(tmp_path / "run", model_dir, steps=6)
    try:
        assert trained(run, {1: lambda: request().place(run, 1)}) == list(range(1, 7))
    finally:
        if torch.autograd._profiler_enabled():  # the one that could not be stopped
            torch.autograd._disable_profiler()
    answer = ProfileAnswer.read(profile_dir(run, 1, "mine"))
    assert answer == ProfileAnswer(problem="RuntimeError: kineto says no")
    assert not request_path(run, 1, 0).exists()
    assert kinds(run)[-1] == "trainer.profile_failed"


def test_a_damaged_request_is_removed(tmp_path: Path, model_dir: Path) -> None:
    run = new_run(tmp_path / "run", model_dir, steps=4)
    path = request_path(run, 1, 0)
    assert trained(run, {1: lambda: path.write_text("{")}) == [1, 2, 3, 4]
    assert not path.exists()
    assert kinds(run) == ["trainer.profile_failed"]


def test_a_limit_ends_a_profile_early(tmp_path: Path, model_dir: Path) -> None:
    run = new_run(tmp_path / "run", model_dir, steps=8)
    trained(run, {1: lambda: request(steps=20, limit_s=0.0).place(run, 1)})
    answer = ProfileAnswer.read(profile_dir(run, 1, "mine"))
    assert answer is not None
    assert answer.first == answer.last
    assert answer.notes == ["ended early: the record has lasted for 0 s"]


def test_the_end_of_a_run_ends_a_profile(tmp_path: Path, model_dir: Path) -> None:
    run = new_run(tmp_path / "run", model_dir, steps=5)
    trained(run, {2: lambda: request(steps=20).place(run, 1)})
    answer = ProfileAnswer.read(profile_dir(run, 1, "mine"))
    assert answer is not None
    assert answer.last == 5
    assert answer.notes == ["the run has no more steps"]


def test_one_request_for_a_rank_at_a_time(tmp_path: Path, model_dir: Path) -> None:
    run = new_run(tmp_path / "run", model_dir)
    run.start_attempt()
    first = request()
    first.place(run, 1)
    with pytest.raises(RunDirError, match=r"rank 0 of the trainer is being profiled already.*by me on here"):
        request(id="second").place(run, 1)
    request(id="other", rank=1).place(run, 1)
    # withdrawing a request that was refused leaves the first one
    request(id="second").withdraw(run, 1)
    assert request_path(run, 1, 0).exists()
    first.withdraw(run, 1)
    assert not request_path(run, 1, 0).exists()
    # one whose maker was killed does not block for ever
    request(id="old", time_s=time.time() - 700.0).place(run, 1)
    request(id="new").place(run, 1)
    assert json.loads(request_path(run, 1, 0).read_text())["id"] == "new"


def test_requests_that_cannot_be_read_change_nothing(tmp_path: Path, model_dir: Path) -> None:
    run = new_run(tmp_path / "run", model_dir)
    context = RoleContext(run, attempt=run.start_attempt(), role="trainer", replica=0, rank=0)
    found: list[str] = []
    profiler = StepProfiler(
        context, 0, torch.device("cpu"), emit=lambda kind, **_: found.append(kind), on_work=lambda: None
    )
    request().place(run, 1)
    profiler.between_steps(1, None)
    assert found == []
    profiler.between_steps(1, (0,))
    profiler.between_steps(2, None)
    assert ProfileAnswer.read(profile_dir(run, 1, "mine")) is None
    profiler.between_steps(3, None)
    answer = ProfileAnswer.read(profile_dir(run, 1, "mine"))
    assert answer is not None
    assert (answer.first, answer.last) == (2, 3)
    assert found == ["trainer.profiling", "trainer.profiled"]


def test_a_request_to_save_is_returned_once(tmp_path: Path, model_dir: Path) -> None:
    run = new_run(tmp_path / "run", model_dir)
    context = RoleContext(run, attempt=run.start_attempt(), role="trainer", replica=0, rank=0)
    reader = RequestReader(context)
    assert reader.read() == (False, ())
    save_request_path(run, 1).write_text("{}")
    request(rank=3).place(run, 1)
    request(rank=12, id="other").place(run, 1)
    save, ranks = reader.read()
    assert (save, sorted(ranks or ())) == (True, [3, 12])
    assert reader.read().save is False
    shutil.rmtree(run.attempt_dir(1))
    assert reader.read() == (False, None)
