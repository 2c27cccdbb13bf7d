"""Directory of a sweep, ``<runs root>/.sweep-<name>``, and the files in it.

::

    sweep.json      what the sweep is; written before its members are made, and again when all of them are there
    queue.json      what its queue last did, where one starts the members (`hpcrl.sweeps.queue`)
    queue.log       log of that process
    cancelled       the sweep was cancelled, by whom; `hpcrl sweep resume` removes it

Which members were started is in their own records, and in no other place: no two files can disagree about it.

The directory is hidden between the runs, and its user's alone as they are: users may share a directory of runs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hpcrl.errors import RunDirError
from hpcrl.processes import procfs
from hpcrl.runs.record import Withdrawal
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId
from hpcrl.storage.files import StagedDirectory, decode_versioned, write_json
from hpcrl.storage.msgspec_types import decode_json
from hpcrl.storage.trusted_paths import CLOSED_UMASK

FORMAT_VERSION = 1
_PREFIX = ".sweep-"


class PlannedMember(msgspec.Struct, frozen=True, kw_only=True):
    """Run of a sweep.

    Attributes
    ----------
    number:
        From 1, in the order in which they are started.
    name:
        Name of the run, which is next to the directory of sweeps.
    values:
        Swept values by dotted key, as JSON; the seed of a replicate among them.
    """

    number: int
    name: str
    values: dict[str, str] = {}


class SweepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``sweep.json``.

    Attributes
    ----------
    sweep_id:
        Random; members carry it in their records.
    name, created_at_s, user, cwd, argv, recipe, cluster:
        Name, time, caller, directory, command line, recipe and profile.
    executor:
        ``local``, or ``slurm`` for jobs that Slurm queues.
    max_running:
        Maximum number of members that run at a time; None: no limit.
    after:
        Directories of runs whose end the first members wait for.
    members:
        All of them.
    made:
        All members have their directories, and are started from now on.
    maker:
        Process that makes them.
    """

    sweep_id: str
    name: str
    created_at_s: float
    user: str
    cwd: str
    argv: list[str]
    recipe: str
    cluster: str
    executor: str
    max_running: int | None
    after: list[str]
    members: list[PlannedMember]
    made: bool = False
    maker: ProcessId | None = None
    format_version: int = FORMAT_VERSION

    @property
    def keys(self) -> list[str]:
        """Return the swept keys, in the order in which they were given."""
        return list(dict.fromkeys(key for member in self.members for key in member.values))

    @staticmethod
    def new_id() -> str:
        """Return an unused id."""
        return secrets.token_hex(16)


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """``queue.json``: the queue of a sweep as it last reported.

    Attributes
    ----------
    process, heartbeat_s:
        The process, and when it wrote this; seconds since the epoch.
    targets:
        Number of submissions that members get, by number of the member, where it is not one: `hpcrl sweep resume` asks
        for another attempt of those that were ended with the sweep.
    problems:
        Reason why a member could not be started, by its number; it is tried again.
    waits_for:
        What the queue waits for, in words.
    """

    process: ProcessId | None = None
    heartbeat_s: float = 0.0
    targets: dict[int, int] = {}
    problems: dict[int, str] = {}
    waits_for: str = ""
    format_version: int = FORMAT_VERSION


class SweepDir:
    """Directory of a sweep.

    Parameters
    ----------
    path:
        ``<runs root>/.sweep-<name>``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"SweepDir({str(self.path)!r})"

    @classmethod
    def below(cls, root: Path, name: str) -> SweepDir:
        """Return the directory of a sweep in a directory of runs."""
        return cls(root / f"{_PREFIX}{name}")

    @property
    def name(self) -> str:
        """Return the name of the sweep."""
        return self.path.name.removeprefix(_PREFIX)

    @property
    def root(self) -> Path:
        """Return the directory of runs in which its members are."""
        return self.path.parent

    @property
    def record_path(self) -> Path:
        """Return the path of ``sweep.json``."""
        return self.path / "sweep.json"

    @property
    def queue_path(self) -> Path:
        """Return the path of ``queue.json``."""
        return self.path / "queue.json"

    @property
    def log_path(self) -> Path:
        """Return the path of the log of the queue."""
        return self.path / "queue.log"

    @property
    def cancelled_path(self) -> Path:
        """Return the path of the file that says that the sweep was cancelled."""
        return self.path / "cancelled"

    def run_of(self, member: PlannedMember) -> RunDir:
        """Return the run directory of a member, whether it is there or not."""
        return RunDir(self.root / member.name)

    def create(self, record: SweepRecord) -> None:
        """Make the directory with the record: complete at once, or not at all (FileExistsError where it is there)."""
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        stage = StagedDirectory(self.path, token=f"{procfs.hostname()}-{os.getpid()}")
        previous = os.umask(CLOSED_UMASK)
        try:
            stage.create()
            write_json(SweepDir(stage.path).record_path, record)
            stage.commit()
        finally:
            os.umask(previous)
            stage.discard()

    def write(self, record: SweepRecord) -> None:
        """Replace the record."""
        write_json(self.record_path, record)

    def read(self) -> SweepRecord:
        """Read the record.

        Raises
        ------
        RunDirError
            It is missing, damaged, or of a format that this code does not know.
        """
        try:
            return decode_versioned(self.record_path.read_bytes(), SweepRecord, FORMAT_VERSION)
        except FileNotFoundError as error:
            raise RunDirError(f"{self.path} is not a sweep: it has no {self.record_path.name}") from error
        except ValueError as error:
            raise RunDirError(f"{self.record_path} cannot be read: {error}") from error

    def queue(self) -> QueueState:
        """Return what the queue last reported, for people; an empty state where that cannot be read."""
        try:
            return self.stored_queue()
        except OSError:
            return QueueState()

    def stored_queue(self) -> QueueState:
        """Return what the queue last reported, and what was asked of it, to be written again.

        The state is empty where there is none, or its file is damaged (OSError where it cannot be read now).
        """
        try:
            return decode_versioned(self.queue_path.read_bytes(), QueueState, FORMAT_VERSION)
        except (FileNotFoundError, ValueError):
            return QueueState()

    def write_queue(self, state: QueueState) -> None:
        """Replace what the queue reports."""
        write_json(self.queue_path, state)

    @property
    def cancelled(self) -> Withdrawal | None:
        """Return who cancelled the sweep, and when; None where it was not cancelled."""
        try:
            return decode_json(self.cancelled_path.read_bytes(), Withdrawal)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:  # it is there: that is what counts
            return Withdrawal(user="an unknown user", time_s=0.0)

    @property
    def cancelled_by(self) -> str:
        """Return who cancelled the sweep; empty where it was not cancelled."""
        found = self.cancelled
        return "" if found is None else found.user

    def cancel(self, user: str) -> None:
        """Record that the sweep is cancelled: its queue starts no more members."""
        write_json(self.cancelled_path, Withdrawal(user=user, time_s=time.time()))

    def remove(self) -> None:
        """Remove the directory, not the members."""
        shutil.rmtree(self.path, ignore_errors=True)


def sweeps_below(roots: Iterable[Path]) -> list[SweepDir]:
    """Return the readable sweeps of directories of runs, newest first."""
    found: dict[Path, tuple[float, SweepDir]] = {}
    for root in roots:
        try:
            names = [name for name in os.listdir(root) if name.startswith(_PREFIX)]
        except OSError:
            continue
        for name in names:
            sweep = SweepDir((root / name).resolve())
            if sweep.path in found:
                continue
            try:
                found[sweep.path] = (sweep.record_path.stat().st_mtime, sweep)
            except OSError:
                continue
    return [sweep for _, sweep in sorted(found.values(), key=lambda each: each[0], reverse=True)]


def find_sweep(name: str, roots: Iterable[Path]) -> SweepDir:
    """Return the sweep of this name (or at this path).

    Raises
    ------
    RunDirError
        There is none, or there are several.
    """
    if os.sep in name:
        given = SweepDir(Path(name).expanduser().resolve())
        given.read()
        return given
    every = sweeps_below(roots)
    found = [sweep for sweep in every if sweep.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        ways = "".join(f"\n    hint: by its directory: {sweep.path}" for sweep in found)
        raise RunDirError(f"there are {len(found)} sweeps {name}; which one?{ways}")
    known = ", ".join(sweep.name for sweep in every[:5])
    hint = f"the newest are {known}" if known else "hpcrl submit RECIPE --grid KEY=V1,V2 starts one"
    raise RunDirError(f"there is no sweep {name}\n    hint: {hint}")
