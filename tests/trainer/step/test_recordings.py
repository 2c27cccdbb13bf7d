"""A profile step by step, with stand-ins for torch's profiler, the memory of CUDA, and a clock that they turn."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from hpcrl.runs.profile_request import SNAPSHOT, TRACE, ProfileAnswer, ProfileRequest, profile_dir, request_path
from hpcrl.runs.role import RoleContext
from hpcrl.runs.rundir import RunDir
from hpcrl.trainer.step import step_profiler
from hpcrl.trainer.step.step_profiler import StepProfiler

RANK, ATTEMPT = 3, 1


class Scene:
    """A profiler of rank 3, and what it does, in order. Starting takes 1 s, stopping 2 s, and writing 4 s."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, device: str = "cuda") -> None:
        self.done: list[Any] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.now, self.trace, self.snapshot, self.working = 100.0, b"a trace", b"memory", 0
        self.fails = ""
        self.run = RunDir(path / "run")
        self.run.path.mkdir(parents=True)
        assert self.run.start_attempt() == ATTEMPT
        self.shortage: Any = lambda directory, *, size, files: None
        scene = self

        class Profile:
            def __init__(self, *, activities: list[ProfilerActivity], profile_memory: bool) -> None:
                scene.done.append(("profile", tuple(activities), profile_memory))

            def start(self) -> None:
                scene.do("start", 1.0)

            def stop(self) -> None:
                scene.do("stop", 2.0)

            def export_chrome_trace(self, path: str) -> None:
                Path(path).write_bytes(scene.trace)
                scene.do("export", 4.0)

        @contextmanager
        def span(name: str) -> Iterator[None]:
            scene.done.append(f"begin {name}")
            yield
            scene.done.append(f"end {name}")

        def history(enabled: Any = "all", *, max_entries: int | None = None) -> None:
            scene.done.append(("history", enabled, max_entries))

        def dump(path: str) -> None:
            Path(path).write_bytes(scene.snapshot)
            scene.do("dump", 0.0)

        monkeypatch.setattr(step_profiler, "profile", Profile)
        monkeypatch.setattr(step_profiler, "record_function", span)
        monkeypatch.setattr(step_profiler, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(step_profiler, "find_shortage", self._find_shortage)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", history)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
        context = RoleContext(self.run, attempt=ATTEMPT, role="trainer", replica=0, rank=RANK)
        self.profiler = StepProfiler(
            context,
            RANK,
            torch.device(device),
            emit=lambda kind, **data: self.events.append((kind, data)),
            on_work=self._work,
        )

    def _find_shortage(self, directory: Path, *, size: int, files: int) -> Any:
        return self.shortage(directory, size=size, files=files)

    def _work(self) -> None:
        self.working += 1

    def do(self, what: str, seconds: float) -> None:
        self.done.append(what)
        self.now += seconds
        if self.fails == what:
            raise RuntimeError(f"cannot {what}")

    def ask(self, **changes: Any) -> ProfileRequest:
        values: dict[str, Any] = {"id": "mine", "rank": RANK, "steps": 2, "memory": False, "limit_s": 600.0}
        values |= {"most_bytes": 1000, "time_s": 0.0, "wait_s": 1e9, "by": "me"}
        made = ProfileRequest(**{**values, **changes})
        made.place(self.run, ATTEMPT)
        return made

    def steps(self, *numbers: int, requested: Any = (1, RANK)) -> None:
        for number in numbers:
            self.profiler.between_steps(number, requested)
            self.now += 10.0

    @property
    def directory(self) -> Path:
        return profile_dir(self.run, ATTEMPT, "mine")

    @property
    def answer(self) -> ProfileAnswer | None:
        return ProfileAnswer.read(self.directory)

    @property
    def asked(self) -> bool:
        return request_path(self.run, ATTEMPT, RANK).exists()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_two_whole_steps_are_recorded(scene: Scene) -> None:
    scene.ask()
    scene.steps(7, 8)
    assert scene.answer is None
    scene.steps(9)
    both = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
    assert scene.done == [
        ("profile", both, False),
        "start",
        "begin step 8",
        "end step 8",
        "begin step 9",
        "end step 9",
        "stop",
        "export",
    ]
    assert scene.answer == ProfileAnswer(first=8, last=9, device="cuda", files=[TRACE], held_s=1.0 + 2.0 + 4.0)
    assert gzip.decompress((scene.directory / TRACE).read_bytes()) == b"a trace"
    assert sorted(path.name for path in scene.directory.iterdir()) == ["answer.json", TRACE]
    assert scene.events == [
        ("trainer.profiling", {"rank": RANK, "after_step": 7, "steps": 2, "by": "me"}),
        ("trainer.profiled", {"rank": RANK, "first": 8, "last": 9, "held_s": 7.0}),
    ]
    # before it began, and before it was written
    assert (scene.working, scene.asked) == (2, False)
    scene.steps(10)
    assert len(scene.events) == 2


def test_one_step_is_enough(scene: Scene) -> None:
    scene.ask(steps=1)
    scene.steps(7, 8)
    assert scene.answer is not None
    assert (scene.answer.first, scene.answer.last) == (8, 8)


def test_a_snapshot_of_memory_is_taken_before_the_profile_stops(scene: Scene) -> None:
    scene.ask(memory=True, steps=1)
    scene.steps(7, 8)
    assert scene.done[0] == ("profile", (ProfilerActivity.CPU, ProfilerActivity.CUDA), True)
    assert scene.done[1:] == [
        ("history", "all", 200_000),
        "start",
        "begin step 8",
        "end step 8",
        "dump",
        "stop",
        # without it every allocation would keep its stack from now on
        ("history", None, None),
        "export",
    ]
    assert scene.answer is not None
    assert (scene.answer.files, scene.answer.notes) == ([SNAPSHOT, TRACE], [])
    assert (scene.directory / SNAPSHOT).read_bytes() == b"memory"
    assert sorted(path.name for path in scene.directory.iterdir()) == sorted(["answer.json", SNAPSHOT, TRACE])


@pytest.mark.parametrize("memory", [True, False])
def test_a_processor_has_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: bool) -> None:
    scene = Scene(tmp_path, monkeypatch, device="cpu")
    scene.ask(memory=memory, steps=1)
    scene.steps(7, 8)
    assert scene.done[0] == ("profile", (ProfilerActivity.CPU,), memory)
    assert not [what for what in scene.done if what == "dump" or what[0] == "history"]
    assert scene.answer is not None
    assert (scene.answer.files, scene.answer.device, len(scene.answer.notes)) == ([TRACE], "cpu", int(memory))


@pytest.mark.parametrize(("size", "files"), [(1000, [SNAPSHOT, TRACE]), (1001, [SNAPSHOT])])
def test_a_trace_may_be_as_large_as_the_limit(scene: Scene, size: int, files: list[str]) -> None:
    scene.trace = bytes(size)
    scene.ask(memory=True, steps=1)
    scene.steps(7, 8)
    assert scene.answer is not None
    assert (scene.answer.files, scene.answer.problem, len(scene.answer.notes)) == (files, "", 2 - len(files))
    assert (scene.answer.first, scene.answer.last) == (8, 8)
    assert {path.name for path in scene.directory.iterdir()} == {"answer.json", *files}


def test_a_snapshot_that_is_too_large_is_left_out(scene: Scene) -> None:
    scene.snapshot = bytes(1001)
    scene.ask(memory=True, steps=1)
    scene.steps(7, 8)
    assert scene.answer is not None
    assert (scene.answer.files, scene.answer.problem, len(scene.answer.notes)) == ([TRACE], "", 1)
    assert {path.name for path in scene.directory.iterdir()} == {"answer.json", TRACE}


def test_without_any_file_the_notes_are_the_problem(scene: Scene) -> None:
    scene.trace = scene.snapshot = bytes(2_000_000)
    scene.ask(memory=True, steps=1)
    scene.steps(7, 8)
    answer = scene.answer
    assert answer is not None
    assert (answer.files, answer.first, answer.last) == ([], 0, 0)
    assert answer.problem == "; ".join(answer.notes)
    assert len(answer.notes) == 2
    assert all("2 MB, more than 0 MB" in note for note in answer.notes)
    assert [path.name for path in scene.directory.iterdir()] == ["answer.json"]
    assert scene.events[-1] == ("trainer.profile_failed", {"rank": RANK, "problem": answer.problem})


@pytest.mark.parametrize(("limit_s", "last"), [(11.0, 8), (11.5, 9), (21.0, 9), (500.0, 11)])
def test_a_record_ends_after_the_step_in_which_its_time_is_over(scene: Scene, limit_s: float, last: int) -> None:
    """Starting took a second, and each step takes ten."""
    scene.ask(steps=4, limit_s=limit_s)
    scene.steps(7, 8, 9, 10, 11)
    assert scene.answer is not None
    assert (scene.answer.first, scene.answer.last, len(scene.answer.notes)) == (8, last, int(last < 11))


def test_room_is_asked_for_before_anything_begins(scene: Scene) -> None:
    asked: list[Any] = []

    def shortage(directory: Path, *, size: int, files: int) -> str:
        asked.append((directory, size, files))
        return "7 bytes"

    scene.shortage = shortage
    scene.ask(most_bytes=500)
    scene.steps(7, 8)
    # the trace before it is compressed, too
    assert asked == [(scene.directory, 1000, 4)]
    assert scene.done == []
    assert scene.answer is not None
    assert scene.answer.problem.endswith("7 bytes")
    assert [kind for kind, _ in scene.events] == ["trainer.profile_failed"]
    assert (scene.working, scene.asked) == (0, False)


@pytest.mark.parametrize("requested", [(), (1, 2)])
def test_others_are_not_profiled(scene: Scene, requested: Any) -> None:
    scene.ask()
    scene.steps(7, 8, requested=requested)
    assert (scene.done, scene.events, scene.asked) == ([], [], True)


def test_a_record_continues_while_requests_cannot_be_read(scene: Scene) -> None:
    scene.ask()
    scene.steps(7, requested=None)
    assert scene.done == []
    scene.steps(7)
    scene.steps(8, 9, requested=None)
    assert scene.answer is not None
    assert (scene.answer.first, scene.answer.last, scene.answer.problem) == (8, 9, "")


def test_a_record_whose_request_is_gone_leaves_nothing(scene: Scene) -> None:
    scene.ask(memory=True, steps=5)
    scene.steps(7, 8)
    scene.steps(9, requested=(1,))
    assert scene.done[-3:] == ["end step 9", "stop", ("history", None, None)]
    assert not scene.directory.exists()
    assert [kind for kind, _ in scene.events] == ["trainer.profiling"]
    # it has ended: nothing follows
    before = len(scene.done)
    scene.steps(10, requested=())
    scene.profiler.end()
    assert len(scene.done) == before


@pytest.mark.parametrize("steps", [(), (8,), (8, 9)])
def test_the_end_of_a_trainer_ends_a_record(scene: Scene, steps: tuple[int, ...]) -> None:
    scene.ask(steps=9)
    scene.steps(7, *steps)
    scene.profiler.end()
    answer = scene.answer
    assert answer is not None
    if not steps:
        assert (answer.files, answer.first, answer.problem) == ([], 0, "the run has no more steps")
        assert "export" not in scene.done
        assert [path.name for path in scene.directory.iterdir()] == ["answer.json"]
    else:
        assert (answer.files, answer.first, answer.last) == ([TRACE], 8, steps[-1])
        assert answer.notes == ["the run has no more steps"]
    assert scene.done.count("stop") == 1
    assert not scene.asked
    scene.profiler.end()
    assert scene.done.count("stop") == 1


@pytest.mark.parametrize("call", ["start", "stop", "export"])
def test_an_error_is_answered_and_stops_the_record(scene: Scene, call: str) -> None:
    scene.ask(memory=True, steps=1)
    scene.fails = call
    scene.steps(7, 8)
    problem = f"RuntimeError: cannot {call}"
    assert scene.answer == ProfileAnswer(problem=problem)
    assert scene.events[-1] == ("trainer.profile_failed", {"rank": RANK, "problem": problem})
    assert not scene.asked
    # the history of memory is not kept on
    histories = [what for what in scene.done if what[0] == "history"]
    assert histories == [("history", "all", 200_000), ("history", None, None)]
    before = len(scene.events)
    scene.fails = ""
    scene.steps(9, 10)
    assert len(scene.events) == before


def test_spans_have_names_in_a_record_alone(scene: Scene) -> None:
    with scene.profiler.span("publish"):
        pass
    assert scene.done == []
    scene.ask()
    scene.steps(7)
    with scene.profiler.span("publish"):
        assert scene.done[-1] == "begin publish"
    assert scene.done[-1] == "end publish"
