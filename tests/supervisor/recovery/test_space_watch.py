"""What the watch over the space of a run says, to whom, and what it makes of the end of an attempt."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from supervisor_testing import create

from hpcrl.reporting import reports
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.events import Event, read_events
from hpcrl.storage.disk_space import Space
from hpcrl.supervisor.recovery.space_watch import SpaceTrend, SpaceWatch
from hpcrl.supervisor.status.status_writer import StatusWriter

MODULE = "hpcrl.supervisor.recovery.space_watch"
MIB, GIB = 1 << 20, 1 << 30
PLENTY = Space("the filesystem", 1 << 50, 1 << 30)
FULL = Space("the filesystem", 1, None)


class Scene:
    """A watch whose limits, problems and clocks a test says."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = create(root)
        self.board = StatusWriter(self.run, run_id="r", attempt=self.run.start_attempt())
        self.limits: list[Space] = [PLENTY]
        self.problems: list[str] = []
        self.now, self.time_s = 0.0, 5000.0
        self.refuses: OSError | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self.told = 0
        self.watch = SpaceWatch(self.run, board=self.board, find=self.find, clock=lambda: self.now)
        monkeypatch.setattr(f"{MODULE}._VERDICT_S", 60.0)
        monkeypatch.setattr(reports, "problems", lambda: list(self.problems))
        monkeypatch.setattr(f"{MODULE}.time", SimpleNamespace(time=lambda: self.time_s))
        monkeypatch.setattr(self.board, "changed", self.changed)

    def changed(self) -> None:
        self.told += 1

    def find(self, directory: Path) -> list[Space]:
        assert directory == self.run.path
        assert self.go_on.wait(60.0)
        if self.refuses:
            raise self.refuses
        return self.limits

    def events(self, kind: str) -> list[Event]:
        assert reports.flush(30.0, directory=self.run.path)
        return list(read_events(self.run, kind=kind))

    def ended(self, kind: CauseKind = CauseKind.EXIT, *, after_s: float = 0.0, message: str = "it ended") -> Cause:
        return Cause(kind=kind, time_s=self.time_s + after_s, message=message)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(tmp_path, monkeypatch)
    yield scene
    scene.board.close()


@pytest.mark.parametrize(
    ("left", "inodes", "words"),
    [
        (256 << 10, 4, None),
        ((256 << 10) - 1, 4, "262,143 bytes left"),
        (0, None, "0 bytes left"),
        (None, 3, "3 inodes left"),
        (None, None, None),
    ],
)
async def test_what_is_too_little_for_a_line_of_a_log_is_none(
    scene: Scene, left: int | None, inodes: int | None, words: str | None
) -> None:
    scene.limits = [Space("the quota of user 7", left, inodes)]
    await scene.watch.look()
    where = f"the quota of user 7 at {scene.run.path} is full: {words}"
    assert scene.board.warnings == ([] if words is None else [where])
    assert [event.data for event in scene.events("run.space_gone")] == ([] if words is None else [{"what": where}])


async def test_the_end_of_the_space_is_reported_each_time_it_begins(scene: Scene) -> None:
    for limit in (FULL, FULL, PLENTY, FULL):
        scene.limits = [limit]
        await scene.watch.look()
    assert len(scene.events("run.space_gone")) == 2
    assert scene.told == 3  # what has not changed is not told again


@pytest.mark.parametrize(
    ("problem", "gone"),
    [
        ("events.jsonl cannot be written: [Errno 28] No space left on device", True),
        ("events.jsonl cannot be written: [Errno 122] Disk quota exceeded", True),
        ("events.jsonl cannot be written: [Errno 116] Stale file handle", False),
    ],
)
async def test_a_report_that_was_refused_for_want_of_space_shows_a_limit_that_cannot_be_asked(
    scene: Scene, problem: str, gone: bool
) -> None:
    scene.problems = ["another: [Errno 5]", problem]
    await scene.watch.look()
    found = [f"the filesystem at {scene.run.path} refuses writes: {problem}"] if gone else []
    assert scene.board.warnings == [*found, *scene.problems]
    assert ((await scene.watch.explain(scene.ended())).kind is CauseKind.DISK_FULL) is gone


async def test_where_the_filesystem_does_not_answer_nothing_is_reported(scene: Scene) -> None:
    scene.refuses = OSError(errno.ESTALE, "Stale file handle")
    scene.problems = ["status.json cannot be written"]
    await scene.watch.look()
    assert (scene.board.warnings, scene.told) == ([], 0)


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (2 * GIB, "2 GiB"),
        (GIB, "1 GiB"),
        (GIB - MIB, "1.02e+03 MiB"),
        (700 * MIB, "700 MiB"),
        (MIB, "1 MiB"),
        (MIB - 1, "1,048,575 bytes"),
    ],
)
async def test_amounts_are_in_units_that_people_read(scene: Scene, left: int, words: str) -> None:
    await shrink(scene, "bytes", left=left, every_s=10.0)
    (warning,) = scene.board.warnings
    assert f"leaves {words}; at the rate of the last 30 s it is full in about " in warning


async def shrink(scene: Scene, what: str, *, left: int, every_s: float, step: int | None = None) -> None:
    """Four looks, after which ``left`` is left; each sees ``step`` less than the one before."""
    step = max(left // 5, 1) if step is None else step
    for number in range(4):
        scene.now = every_s * number
        amount = left + step * (3 - number)
        scene.limits = [Space("a quota", *((amount, None) if what == "bytes" else (None, amount)))]
        await scene.watch.look()


@pytest.mark.parametrize(("every_s", "words"), [(40.0, "2 min"), (39.9, "120 s"), (39.0, "117 s"), (200.0, "10 min")])
async def test_times_are_in_minutes_from_two_on(scene: Scene, every_s: float, words: str) -> None:
    await shrink(scene, "inodes", left=6000, every_s=every_s)
    (warning,) = scene.board.warnings
    assert f"a quota at {scene.run.path} leaves 6,000 inodes; at the rate of the last {words} it is full" in warning


async def test_that_the_space_will_end_is_reported_each_time_it_comes_into_sight(scene: Scene) -> None:
    await shrink(scene, "inodes", left=6000, every_s=40.0)
    scene.now += 40.0
    scene.limits = [Space("a quota", None, 4800)]
    await scene.watch.look()
    (told,) = scene.events("run.space_low")
    # of the first four looks: twice 1,200 in a minute, and 6,000 are left
    assert told.data == {"what": "a quota", "left": 6000, "of": "inodes", "full_in_s": 150.0}
    scene.limits = []
    await scene.watch.look()
    assert scene.board.warnings == []
    scene.limits, scene.now = [Space("a quota", None, 4000)], 200.0
    await scene.watch.look()
    assert len(scene.events("run.space_low")) == 2


async def test_a_full_disk_ends_the_forecast_of_a_full_disk(scene: Scene) -> None:
    await shrink(scene, "inodes", left=2, step=10, every_s=10.0)
    (warning,) = scene.board.warnings
    assert "is full: 2 inodes left" in warning


async def test_limits_are_followed_each_by_itself(scene: Scene) -> None:
    """One that grows does not hide one that shrinks, and bytes are no inodes."""
    for number in range(4):
        scene.now = 10.0 * number
        scene.limits = [
            Space("the filesystem", GIB + number, 9000 - 1000 * number),
            Space("a quota", GIB + number, 90_000),
        ]
        await scene.watch.look()
    (warning,) = scene.board.warnings
    assert warning.startswith(f"the filesystem at {scene.run.path} leaves 6,000 inodes")


@pytest.mark.parametrize(
    ("looks", "sight"),
    [
        # by the best of either half: 20 less in 15 s; what is left lasts as long as that rate says
        ([(0.0, 100), (10.0, 90), (20.0, 80), (30.0, 70)], (52.5, 30.0)),
        # four times as far as was looked, and no further
        ([(0.0, 110), (10.0, 110), (20.0, 100), (30.0, 79)], (118.5, 30.0)),
        ([(0.0, 110), (10.0, 110), (20.0, 100), (30.0, 80)], None),
        # an hour, and no further
        ([(0.0, 4499), (500.0, 4499), (1000.0, 3749), (1500.0, 3599)], (3599.0, 1500.0)),
        ([(0.0, 4500), (500.0, 4500), (1000.0, 3750), (1500.0, 3600)], None),
        # of what was seen more than half an hour ago nothing counts; of just as long ago it does
        ([(0.0, 900), (600.0, 800), (1200.0, 500), (1800.0, 400)], (900.0, 1800.0)),
        ([(0.0, 900), (1.0, 900), (600.0, 800), (1200.0, 500), (1801.0, 400)], (900.0, 1800.0)),
    ],
)
def test_how_far_a_trend_is_carried(looks: list[tuple[float, int]], sight: tuple[float, float] | None) -> None:
    trend = SpaceTrend()
    for now, left in looks:
        trend.see(now, left)
    assert trend.full_in_s() == sight


@pytest.mark.parametrize(("after_s", "follows"), [(59.9, True), (60.0, False)])
async def test_what_ended_within_a_minute_of_a_full_disk_ended_by_that(
    scene: Scene, after_s: float, follows: bool
) -> None:
    scene.limits = [FULL]
    await scene.watch.look()
    scene.limits = [PLENTY]
    assert ((await scene.watch.explain(scene.ended(after_s=after_s))).kind is CauseKind.DISK_FULL) is follows


async def test_before_anything_was_full_nothing_ended_by_that(scene: Scene) -> None:
    cause = scene.ended()
    assert await scene.watch.explain(cause) == cause


FOLLOWS = ("ERROR", "EXIT", "EARLY_EXIT", "SPAWN", "NO_STEP", "START_TIMEOUT", "HUNG", "STALE", "SUPERVISOR_ERROR")
CAUSES = [kind for kind in CauseKind if kind is not CauseKind.DISK_FULL]


@pytest.mark.parametrize("kind", CAUSES)
async def test_a_full_disk_explains_failures_and_no_decision_of_a_person(scene: Scene, kind: CauseKind) -> None:
    scene.limits = [FULL]
    found = await scene.watch.explain(scene.ended(kind))
    assert (found.kind is CauseKind.DISK_FULL) is (kind.name in FOLLOWS)
    assert found.message.endswith("it ended")


@pytest.mark.parametrize("where", ["message", "traceback"])
async def test_a_role_that_was_refused_space_in_the_run_is_believed(scene: Scene, where: str) -> None:
    said = {"message": "it ended", where: f"OSError: [Errno 28] No space left on device: '{scene.run.path}/x'"}
    cause = Cause(kind=CauseKind.ERROR, time_s=scene.time_s, **said)  # type: ignore[arg-type]
    found = await scene.watch.explain(cause)
    assert found.kind is CauseKind.DISK_FULL
    assert found.message.startswith(f"the filesystem at {scene.run.path} refused writes ([Errno 28]); ")


async def test_the_last_look_does_not_hold_up_the_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}._VERDICT_S", 0.05)
    scene.limits, cause = [FULL], scene.ended()
    scene.go_on.clear()
    # the look ends only after the answer
    assert await scene.watch.explain(cause) == cause
    scene.go_on.set()


async def test_it_looks_again_and_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        assert scene.told == len(pauses)
        scene.limits = [FULL if len(pauses) % 2 else PLENTY]
        if len(pauses) == 3:
            raise KeyError("enough")

    scene.limits = [Space("another", 1, None)]
    monkeypatch.setattr(f"{MODULE}.asyncio.sleep", sleep)
    with pytest.raises(KeyError, match="enough"):
        await scene.watch.run()
    assert pauses == [5.0] * 3
