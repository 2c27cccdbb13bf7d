"""A run that fills its filesystem: warned of before, ended in order, named by its cause, resumed when it has space."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from supervisor_testing import create, end_everything, start, wait_ended, wait_for, wait_running

from hpcrl.errors import HpcrlError, refusal
from hpcrl.runs import rundir
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.contents import RunContents
from hpcrl.runs.events import read_events
from hpcrl.runs.observe import observe
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.reserve import SIZES, keep_reserve, keep_start_reserve
from hpcrl.runs.role import FailureRecord, RoleContext
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.runs.views.diagnosis import diagnose
from hpcrl.storage.disk_space import Space
from hpcrl.storage.files import atomic_write
from hpcrl.submit import jobs
from hpcrl.submit.submission import cancel, prepare_resume, submit_attempt
from hpcrl.supervisor.recovery.space_watch import SpaceTrend, SpaceWatch
from hpcrl.supervisor.status.status_writer import StatusWriter


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"A FULL DISK IS NOT TESTED: only root mounts a filesystem ({mounted.stderr.strip()})")
    yield path
    for run_dir in (path / "runs").glob("*"):
        end_everything(RunDir(run_dir))
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(directory: Path) -> Path:
    """Take all space that there is."""
    path, size = directory / "filler", 1 << 20
    with path.open("wb", buffering=0) as stream:
        while size:
            try:
                stream.write(bytes(size))
            except OSError:
                size //= 2
    return path


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_run_that_fills_its_disk_ends_in_order_and_can_be_resumed(disk: Path) -> None:
    run = start(disk / "runs", trainer="fill")
    view = wait_ended(run)
    assert os.statvfs(run.path).f_bavail * os.statvfs(run.path).f_frsize < sum(SIZES.values())
    assert view.state is RunState.FAILED
    assert view.cause is not None
    assert view.cause.kind is CauseKind.DISK_FULL
    diagnosis = diagnose(run)
    assert diagnosis.sentence.startswith(f"the filesystem at {run.path} is full: ")
    assert "trainer 0" in diagnosis.sentence
    assert "free space" in diagnosis.hint
    assert diagnosis.state is RunState.FAILED
    assert read_events(run, kind="run.space_gone")
    # what was kept for its end is given back, what the next attempt would begin with is not
    assert list(run.path.glob(".reserve-*")) == [run.path / ".reserve-start"]

    (run.path / "filler").unlink()
    prepare_resume(run)
    submit_attempt(RunContents.read(run))
    wait_for(lambda: observe(run).attempt == 2, 20, "the second attempt")
    view = wait_ended(run)
    assert (view.state, view.attempts) == (RunState.COMPLETED, 2)


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_run_on_a_full_disk_can_be_cancelled(disk: Path) -> None:
    run = start(disk / "runs")
    wait_running(run)
    filler = fill(disk)
    view = cancel(run, user="me")
    assert view.state is RunState.CANCELLED
    assert view.cause is not None
    assert view.cause.message == "cancelled by me"
    filler.unlink()


#: what the batch process does, less patient
BATCH = """
import sys
from hpcrl.supervisor import supervisor
from hpcrl.supervisor.job import Supervise
supervisor._START_PATIENCE_S = 0.5
Supervise(sys.argv[1])()
"""


@pytest.mark.timeout(600)
def test_an_attempt_that_begins_on_a_full_disk_says_so(disk: Path) -> None:
    """There was room when it was submitted, and none any more when its turn came."""
    run = create(disk / "runs")
    keep_start_reserve(run)
    filler = fill(disk)
    done = subprocess.run([sys.executable, "-c", BATCH, run.path], capture_output=True, text=True, check=False)
    assert "FAILED" in done.stderr
    view = observe(run)
    assert (view.state, view.attempt) == (RunState.FAILED, 1)
    assert view.cause is not None
    assert view.cause.kind is CauseKind.DISK_FULL
    assert "No space left on device" in view.cause.message
    assert [event.data["state"] for event in read_events(run, kind="run.state")] == ["STARTING", "STOPPING", "FAILED"]
    assert not list(run.path.glob(".reserve-*"))
    # the next one would have no words: it is not begun
    with pytest.raises(OSError, match="No space left"):
        submit_attempt(RunContents.read(run))
    filler.unlink()
    submit_attempt(RunContents.read(run))
    assert (run.path / ".reserve-start").exists()
    wait_running(run)
    assert observe(run).attempt == 2
    cancel(run, user="me")


def test_a_hand_over_that_cannot_be_recorded_is_distinguished_from_one_that_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_RECORD_S", 2.0)
    run = create(tmp_path / "runs")
    submission = Submission(submitted_at_s=0.0, executor="local", job_id="77", folder="/f", after_attempt=0)
    record, tries = RunRecord.read(run).with_submission(submission), []

    def full(self: RunRecord, run: RunDir) -> None:
        tries.append(1)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(RunRecord, "write", full)
    with pytest.raises(HpcrlError, match=r"was handed over \(job 77\) and continues, .* quota exceeded\n    hint:"):
        jobs.write_submission(run, record)
    assert len(tries) > 1


def test_an_attempt_that_could_not_begin_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create(tmp_path / "runs")

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(rundir, "fsync_dir", full)
        with pytest.raises(OSError, match="No space left"):
            run.start_attempt()
    assert run.attempts() == []
    assert run.start_attempt() == 1


def test_a_role_says_why_it_fails_on_a_full_disk(disk: Path) -> None:
    run = create(disk / "runs")
    context = RoleContext(run, attempt=run.start_attempt(), role="trainer", replica=0, rank=0)
    keep_reserve(run)
    fill(disk)
    context.record_failure(OSError(errno.ENOSPC, "No space left on device"))
    (record,) = FailureRecord.read_all(run, 1)
    assert "No space left" in record.message
    # what is kept for the supervisor is still there
    assert (run.path / ".reserve-supervisor").stat().st_size == SIZES["supervisor"]


def test_a_command_on_a_full_disk_says_so(disk: Path) -> None:
    fill(disk)
    with pytest.raises(OSError, match="No space left") as error:
        atomic_write(disk / "run.json", bytes(1 << 16))
    refused = refusal(error.value)
    assert refused is not None
    assert str(disk / "run.json") in str(refused)
    assert "hint: make room there" in str(refused)


def test_the_last_status_is_written_on_a_full_disk(disk: Path) -> None:
    run = create(disk / "runs")
    board = StatusWriter(run, run_id="r", attempt=run.start_attempt())
    board.enter(RunState.RUNNING)
    keep_reserve(run)
    fill(disk)
    board.enter(RunState.FAILED, Cause(kind=CauseKind.DISK_FULL, time_s=time.time(), message="full"))
    board.close(30.0)
    status = RunStatus.read(run)
    assert status is not None
    assert status.state is RunState.FAILED
    assert [event.data["state"] for event in read_events(run, kind="run.state")] == ["RUNNING", "FAILED"]


# -- before it is full ---------------------------------------------------------------------------------------------


def trend(left: Callable[[float], float], seconds: int, *, every: int = 5) -> tuple[float, float] | None:
    found = SpaceTrend()
    for now in range(0, seconds + 1, every):
        found.see(float(now), int(left(float(now))))
    return found.full_in_s()


@pytest.mark.parametrize(
    ("left", "seconds", "sight"),
    [
        (lambda now: 400_000 - 100 * now, 2000, 2000),  # half an hour of it, and it ends within the hour
        (lambda now: 4_000_000 - 100 * now, 2000, None),  # far away
        (lambda now: 30_000 - 100 * now, 100, 200),  # seen for a short time, and it ends soon
        (lambda now: 200_000 - 100 * now, 100, None),  # seen for too short a time to say
        (lambda now: 400_000 + 100 * now, 2000, None),
        # versions and checkpoints come and go
        (lambda now: 400_000 - 1000 * (now % 300), 2000, None),
        (lambda now: 800_000 - 1000 * (now % 300) - 200 * now, 2000, 1000),
    ],
)
def test_trends(left: Callable[[float], float], seconds: int, sight: float | None) -> None:
    found = trend(left, seconds)
    if sight is None:
        assert found is None
    else:
        assert found is not None
        assert found[0] == pytest.approx(sight, rel=0.25)


class Scene:
    """A watch over limits that a test says."""

    def __init__(self, tmp_path: Path) -> None:
        self.run = create(tmp_path / "runs")
        self.board = StatusWriter(self.run, run_id="r", attempt=self.run.start_attempt())
        self.limits: list[Space] | OSError = []
        self.now = 0.0
        self.watch = SpaceWatch(self.run, board=self.board, find=self.find, clock=lambda: self.now)

    def find(self, directory: Path) -> list[Space]:
        if isinstance(self.limits, OSError):
            raise self.limits
        return self.limits

    async def looks(self, left: Callable[[float], float], seconds: float, what: str = "the filesystem") -> None:
        end = self.now + seconds
        while self.now < end:
            self.limits = [Space(what, int(left(self.now)), None)]
            await self.watch.look()
            self.now += 5.0

    def warnings(self) -> list[str]:
        """As a reader of the status sees them."""
        self.board.write()
        assert self.board._file.flush(30)
        return observe(self.run).warnings


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_the_status_warns_before_the_space_is_gone(scene: Scene) -> None:
    gib = 1 << 30
    await scene.looks(lambda now: 2000 * gib - gib * now, 900, "the quota of user 7")
    (warning,) = scene.warnings()
    assert warning.startswith(
        f"the quota of user 7 at {scene.run.path} leaves 1.1e+03 GiB; at the rate of the last 15 min"
    )
    assert "it is full in about" in warning
    # somebody made space, and the trend is another one
    await scene.looks(lambda now: 9000 * gib, 2400)
    assert scene.warnings() == []
    scene.board.close()
    (low,) = read_events(scene.run, kind="run.space_low")
    assert low.data["what"] == "the quota of user 7"


async def test_what_followed_from_a_full_disk_is_named_by_it(scene: Scene) -> None:
    cause = Cause(kind=CauseKind.EXIT, time_s=time.time(), message="trainer 0 exited with code 1", role="trainer")
    scene.limits = [Space("the filesystem", 5 << 30, 1000)]
    assert await scene.watch.explain(cause) == cause
    scene.limits = [Space("the filesystem", 5 << 30, 1)]
    found = await scene.watch.explain(cause)
    assert found.kind is CauseKind.DISK_FULL
    assert found.role == "trainer"
    assert found.message == f"the filesystem at {scene.run.path} is full: 1 inodes left; trainer 0 exited with code 1"
    # also where the dying role gave the space back
    scene.limits = [Space("the filesystem", 5 << 30, 1000)]
    assert (await scene.watch.explain(cause)).kind is CauseKind.DISK_FULL
    # not what came long after, and not what has another reason
    later = Cause(kind=CauseKind.EXIT, time_s=time.time() + 3600, message="engine 0 was killed by SIGKILL")
    assert await scene.watch.explain(later) == later
    cancelled = Cause(kind=CauseKind.CANCELLED, time_s=time.time(), message="cancelled by me")
    assert await scene.watch.explain(cancelled) == cancelled


async def test_a_role_that_names_the_full_disk_is_believed(scene: Scene) -> None:
    scene.limits = OSError(errno.ESTALE, "Stale file handle")
    words = f"trainer 0 failed: OSError: [Errno 122] Disk quota exceeded: '{scene.run.path}/weights/v000003'"
    cause = Cause(kind=CauseKind.ERROR, time_s=time.time(), message=words)
    found = await scene.watch.explain(cause)
    assert found.kind is CauseKind.DISK_FULL
    # what was seen, and not that it is full, which nobody has seen
    begins = f"the filesystem at {scene.run.path} refused writes ([Errno 122]); the filesystem leaves "
    assert found.message.startswith(begins)
    assert found.message.endswith(f" now; {words}")
    elsewhere = Cause(
        kind=CauseKind.ERROR, time_s=time.time(), message="OSError: [Errno 28] No space left: '/dev/shm/x'"
    )
    assert await scene.watch.explain(elsewhere) == elsewhere
