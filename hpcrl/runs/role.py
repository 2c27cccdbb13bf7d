"""The side of a role process: who am I, where is the rest, I am ready, this is why I failed.

The supervisor sets ``HPCRL_RUN_DIR``, ``HPCRL_ATTEMPT``, ``HPCRL_ROLE`` and ``HPCRL_REPLICA``; the launcher of a
trainer's ranks (`hpcrl.trainer.launcher`) sets ``RANK``.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from hpcrl.credentials import Credentials
from hpcrl.decoding import prepared
from hpcrl.errors import HpcrlError, PeerLostError
from hpcrl.fs import atomic_write
from hpcrl.log_format import start_logging
from hpcrl.reporting import ReportedFile
from hpcrl.runs.clocks import Clocks, own_node
from hpcrl.runs.events import EventWriter
from hpcrl.runs.progress import ProgressReporter, progress_path
from hpcrl.runs.reserve import release_reserve
from hpcrl.runs.rundir import RunDir

__all__ = [
    "Complaint",
    "Endpoints",
    "FailureRecord",
    "Member",
    "RoleContext",
    "ready_path",
    "restore_path",
    "run_role",
    "save_answer_path",
    "save_request_path",
]

_log = logging.getLogger(__name__)
_SAY_S = 5.0
"""How long a role waits for the file that says it is ready; it is written later where that is too short."""
_BEFORE_RESERVE_S = 1.0
_LAST_WORD_S = 10.0
"""How long a role that fails tries to say why."""


class Member(msgspec.Struct, frozen=True):
    """A replica of a role whose replicas come and go.

    Attributes
    ----------
    start:
        Which start of the replica this is: one that came back knows nothing of what it was told before, also where it
        has the same address.
    url:
        Of its first server.
    servers:
        URLs of all of its servers, in the order of ranks; empty where it has one.
    """

    replica: int
    start: int
    url: str
    servers: tuple[str, ...] = ()


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of an attempt.

    Attributes
    ----------
    urls:
        ``http://host:port`` of each replica (of its first server), by role; chosen at the start of the attempt.
    servers:
        URLs of all servers of each replica, in the order of ranks, for the roles whose replicas have several; empty for
        a replica that has one.
    members:
        Ready replicas of the roles that come and go (layout ``elastic``), by role. The supervisor replaces the file
        whenever one comes or goes: who works with them reads it again and again.
    """

    urls: dict[str, list[str]]
    servers: dict[str, list[tuple[str, ...]]] = {}
    members: dict[str, list[Member]] = {}

    def one(self, role: str) -> str:
        """The URL of a role that has one replica."""
        (url,) = self.urls[role]
        return url

    def fixed(self, role: str) -> list[Member]:
        """The replicas of a role that do not come and go; none where the attempt has none."""
        urls = self.urls.get(role, [])
        servers: list[tuple[str, ...]] = self.servers.get(role) or [()] * len(urls)
        return [Member(i, 1, url, own) for i, (url, own) in enumerate(zip(urls, servers, strict=True))]

    @staticmethod
    def path(run: RunDir, attempt: int) -> Path:
        return run.attempt_dir(attempt) / "endpoints.json"

    def encode(self) -> bytes:
        """As the file has it."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def write(self, run: RunDir, attempt: int) -> None:
        atomic_write(self.path(run, attempt), self.encode())

    @classmethod
    def read(cls, run: RunDir, attempt: int) -> Endpoints:
        return msgspec.json.decode(cls.path(run, attempt).read_bytes(), type=prepared(cls))


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a role said about its own failure.

    Attributes
    ----------
    time_s:
        Seconds since the epoch; in the file by the clock of the node.
    secondary:
        True where it failed because another role went away.
    node:
        Slurm's name of the node; empty outside of Slurm.
    """

    time_s: float
    role: str
    replica: int
    rank: int
    error: str
    message: str
    traceback: str
    secondary: bool
    node: str = ""

    @staticmethod
    def read_all(run: RunDir, attempt: int) -> list[FailureRecord]:
        """The failure records of an attempt in time order, with times by the supervisor's clock."""
        records = []
        directory = run.attempt_dir(attempt) / "failures"
        try:
            names = sorted(os.listdir(directory))
        except FileNotFoundError:
            names = []
        except OSError as error:
            _log.warning("what roles say about their failure cannot be read now: %s", error)
            names = []
        for name in names:
            if name.startswith(".") or not name.endswith(".json"):
                continue
            try:
                records.append(msgspec.json.decode((directory / name).read_bytes(), type=prepared(FailureRecord)))
            except msgspec.DecodeError:
                _log.warning("%s is not a failure record", directory / name)
            except OSError as error:
                _log.warning("%s cannot be read now: %s", directory / name, error)
        if any(record.node for record in records):
            clocks = Clocks.read(run, attempt)
            records = [replace(r, time_s=clocks.corrected(r.time_s, r.node)) for r in records]
        return sorted(records, key=lambda record: record.time_s)


class RoleContext:
    """Identity and surroundings of this process."""

    def __init__(self, run: RunDir, *, attempt: int, role: str, replica: int, rank: int) -> None:
        self.run, self.attempt, self.role, self.replica, self.rank = run, attempt, role, replica, rank

    @classmethod
    def from_env(cls) -> RoleContext:
        """Read the environment (KeyError where the supervisor did not start us)."""
        env = os.environ
        return cls(
            RunDir(Path(env["HPCRL_RUN_DIR"])),
            attempt=int(env["HPCRL_ATTEMPT"]),
            role=env["HPCRL_ROLE"],
            replica=int(env["HPCRL_REPLICA"]),
            rank=int(env.get("RANK", "0")),
        )

    @property
    def writer(self) -> str:
        """Name in event files."""
        return f"{self.role}-{self.replica}" + (f".{self.rank}" if self.rank else "")

    @property
    def credentials(self) -> Credentials:
        """Credentials for requests to other roles of the attempt (RunDirError where the token cannot be read)."""
        return Credentials.of_run(self.run.path, self.attempt)

    def events(self) -> EventWriter:
        """A writer for the events of this process."""
        return EventWriter(self.run, attempt=self.attempt, writer=self.writer)

    def progress(self) -> ProgressReporter:
        """Tells the watchdog of the supervisor what this replica does (rank 0 only)."""
        return ProgressReporter(progress_path(self.run, self.attempt, self.role, self.replica))

    def endpoints(self) -> Endpoints:
        """Addresses of this attempt."""
        return Endpoints.read(self.run, self.attempt)

    def ready(self) -> None:
        """Tell the supervisor that this replica does its work now (for roles with a `FileProbe`)."""
        file = ReportedFile(ready_path(self.run, self.attempt, self.role, self.replica))
        file.put(msgspec.json.encode({"time_s": time.time()}))
        file.flush(_SAY_S)

    def record_failure(self, error: BaseException) -> None:
        """Write why this process fails, for ``hpcrl why``."""
        record = FailureRecord(
            time_s=time.time(),
            role=self.role,
            replica=self.replica,
            rank=self.rank,
            error=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            secondary=isinstance(error, PeerLostError),
            node=own_node(),
        )
        file = ReportedFile(self.run.attempt_dir(self.attempt) / "failures" / f"{self.writer}.json")
        file.put(msgspec.json.format(msgspec.json.encode(record), indent=2))
        if not file.flush(_BEFORE_RESERVE_S):
            release_reserve(self.run, "roles")  # the disk may be full
        if not file.flush(_LAST_WORD_S):
            _log.error("why this process fails could not be written to %s within %g s", file.path, _LAST_WORD_S)

    def redirect_output(self) -> None:
        """Send the output of ranks above 0 to a log of their own; rank 0 shares its launcher's."""
        if self.rank:
            path = self.run.log_path(self.attempt, self.role, self.replica, self.rank)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.close(fd)


class Complaint(msgspec.Struct, frozen=True, kw_only=True):
    """What one role says about another that only the supervisor can help with: an engine that takes no weights, say.

    Attributes
    ----------
    role, replica:
        Whom it is about.
    message:
        What is wrong, as the end of a sentence that begins with the replica.
    node:
        Slurm's name of the node of who complains; empty outside of Slurm.
    wrong_weights:
        Whether it is an engine that computes with other weights than those of the version that it says.
    """

    time_s: float
    role: str
    replica: int
    message: str
    node: str = ""
    wrong_weights: bool = False

    @staticmethod
    def _directory(run: RunDir, attempt: int) -> Path:
        return run.attempt_dir(attempt) / "complaints"

    def write(self, run: RunDir, attempt: int) -> None:
        """Replace an earlier complaint about the same replica. Does not wait for the filesystem."""
        ReportedFile(self._directory(run, attempt) / f"{self.role}-{self.replica}.json").put(msgspec.json.encode(self))

    @classmethod
    def read_all(cls, run: RunDir, attempt: int) -> list[Complaint]:
        """The newest complaint about each replica, with times by the supervisor's clock."""
        complaints, clocks = [], None
        for path in cls._directory(run, attempt).glob("[!.]*.json"):
            try:
                complaint = msgspec.json.decode(path.read_bytes(), type=prepared(cls))
            except (OSError, msgspec.DecodeError):
                continue  # being replaced
            clocks = clocks or Clocks.read(run, attempt)
            complaints.append(replace(complaint, time_s=clocks.corrected(complaint.time_s, complaint.node)))
        return complaints


def ready_path(run: RunDir, attempt: int, role: str, replica: int) -> Path:
    """The file with which a replica says that it is ready; it is there from then on, and says since when."""
    return run.attempt_dir(attempt) / "ready" / f"{role}-{replica}.json"


def restore_path(run: RunDir, attempt: int) -> Path:
    """Where the trainer says which checkpoint the attempt restores (`hpcrl.checkpoints.restore`)."""
    return run.attempt_dir(attempt) / "restore.json"


def save_answer_path(run: RunDir, attempt: int) -> Path:
    """Where the trainer answers that request: ``step`` of the checkpoint, or null and the ``reason``."""
    return run.attempt_dir(attempt) / "save_answered.json"


def save_request_path(run: RunDir, attempt: int) -> Path:
    """Where the supervisor asks the trainer for a checkpoint after its step: the attempt is about to end."""
    return run.attempt_dir(attempt) / "save_requested.json"


def run_role(main: Callable[[RoleContext], None]) -> NoReturn:
    """Run a role, and exit: 0 when ``main`` returns, 1 when it raises. The last line of a role's ``__main__``.

    Output goes to the role's log. What ``main`` raises, `KeyboardInterrupt` included, is written down as the failure of
    this rank, which is how the run learns its cause; a message for people (`HpcrlError`) is logged without a traceback.
    """
    context = RoleContext.from_env()
    context.redirect_output()
    start_logging(f"%(levelname)s {context.writer} %(name)s: %(message)s")
    try:
        main(context)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            raise
        context.record_failure(error)
        if isinstance(error, HpcrlError):
            _log.error("%s", error)
        else:
            _log.exception("%s failed", context.writer)
        sys.exit(1)
    sys.exit(0)
