"""Role side of a run: identity and endpoints of a role process, its ready file, its failure record.

The supervisor sets ``HPCRL_RUN_DIR``, ``HPCRL_ATTEMPT``, ``HPCRL_ROLE`` and ``HPCRL_REPLICA``; the launcher of a
trainer's ranks (`hpcrl.trainer.launcher`) sets ``RANK``.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from hpcrl.errors import HpcrlError, PeerLostError
from hpcrl.network.credentials import Credentials
from hpcrl.reporting.log_format import start_logging
from hpcrl.reporting.reports import ReportedFile
from hpcrl.runs.clocks import Clocks, own_node
from hpcrl.runs.events import EventWriter
from hpcrl.runs.progress import ProgressReporter, progress_path
from hpcrl.runs.reserve import release_reserve
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import atomic_write
from hpcrl.storage.msgspec_types import prepared

_log = logging.getLogger(__name__)
_SAY_S = 5.0
"""Maximum time in seconds that a role waits for its ready file to be written; a later write is not lost."""
_BEFORE_RESERVE_S = 1.0
_LAST_WORD_S = 10.0
"""Maximum time in seconds for which a failing role tries to write its failure record."""


class Member(msgspec.Struct, frozen=True):
    """Replica of a role whose replicas join and leave.

    Attributes
    ----------
    start:
        Number of the start of the replica: a restarted one has lost its state, also where it has the same address.
    url:
        URL of its first server.
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
        """Return the URL of a role that has one replica."""
        (url,) = self.urls[role]
        return url

    def fixed(self, role: str) -> list[Member]:
        """Return the replicas of a role that do not join or leave; none where the attempt has none."""
        urls = self.urls.get(role, [])
        servers: list[tuple[str, ...]] = self.servers.get(role) or [()] * len(urls)
        return [Member(i, 1, url, own) for i, (url, own) in enumerate(zip(urls, servers, strict=True))]

    @staticmethod
    def path(run: RunDir, attempt: int) -> Path:
        return run.attempt_dir(attempt) / "endpoints.json"

    def encode(self) -> bytes:
        """Return the content of the file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def write(self, run: RunDir, attempt: int) -> None:
        atomic_write(self.path(run, attempt), self.encode())

    @classmethod
    def read(cls, run: RunDir, attempt: int) -> Endpoints:
        return msgspec.json.decode(cls.path(run, attempt).read_bytes(), type=prepared(cls))


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Failure that a role recorded about itself.

    Attributes
    ----------
    time_s:
        Seconds since the epoch; in the file by the clock of the node.
    secondary:
        True where it failed because another role was lost.
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
        """Return the failure records of an attempt in time order, with times by the supervisor's clock."""
        records = []
        directory = run.attempt_dir(attempt) / "failures"
        try:
            names = sorted(os.listdir(directory))
        except FileNotFoundError:
            names = []
        except OSError as error:
            _log.warning("the failure records of roles cannot be read now: %s", error)
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
        """Read the environment (KeyError where the supervisor did not start this process)."""
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
        """Return the writer's name in event files."""
        return f"{self.role}-{self.replica}" + (f".{self.rank}" if self.rank else "")

    @property
    def credentials(self) -> Credentials:
        """Return the credentials for requests to other roles of the attempt.

        Raises
        ------
        RunDirError
            The token cannot be read.
        """
        return Credentials.of_run(self.run.path, self.attempt)

    def events(self) -> EventWriter:
        """Return a writer for the events of this process."""
        return EventWriter(self.run, attempt=self.attempt, writer=self.writer)

    def progress(self) -> ProgressReporter:
        """Return the reporter of this replica's progress for the supervisor's watchdog (rank 0 only)."""
        return ProgressReporter(progress_path(self.run, self.attempt, self.role, self.replica))

    def endpoints(self) -> Endpoints:
        """Return the addresses of this attempt."""
        return Endpoints.read(self.run, self.attempt)

    def ready(self) -> None:
        """Report to the supervisor that this replica is ready (for roles with a `FileProbe`)."""
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
            _log.error("this process could not write its failure record to %s within %g s", file.path, _LAST_WORD_S)

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
    """Report of one role about another that only the supervisor can act on, such as an engine that rejects weights.

    Attributes
    ----------
    role, replica:
        The replica that it is about.
    message:
        The problem, as the end of a sentence that begins with the replica.
    node:
        Slurm's name of the reporter's node; empty outside of Slurm.
    wrong_weights:
        Whether it is an engine that computes with other weights than those of the version that it reports.
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
        """Return the newest complaint about each replica, with times by the supervisor's clock."""
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
    """Return the path of the file that marks a replica as ready, and since when."""
    return run.attempt_dir(attempt) / "ready" / f"{role}-{replica}.json"


def write_left_out(run: RunDir, attempt: int, engines: Collection[str]) -> None:
    """Replace the names of the engines that a router which is started from now on gets no addresses of.

    Raises
    ------
    OSError
        The filesystem refuses.
    """
    # not durable: the attempt ends with the machine
    atomic_write(_left_out_path(run, attempt), msgspec.json.encode(sorted(engines)), durable=False)


def read_left_out(run: RunDir, attempt: int) -> set[str]:
    """Return what `write_left_out` wrote last (OSError, or msgspec.DecodeError, where it cannot be read)."""
    try:
        return msgspec.json.decode(_left_out_path(run, attempt).read_bytes(), type=set[str])
    except FileNotFoundError:
        return set()


def _left_out_path(run: RunDir, attempt: int) -> Path:
    return run.attempt_dir(attempt) / "router_leaves_out.json"


def restore_path(run: RunDir, attempt: int) -> Path:
    """Return the path of the trainer's decision about the restored checkpoint (`hpcrl.checkpoints.restore`)."""
    return run.attempt_dir(attempt) / "restore.json"


def save_answer_path(run: RunDir, attempt: int) -> Path:
    """Return the path of the trainer's answer: ``step`` of the checkpoint, or null and the ``reason``."""
    return run.attempt_dir(attempt) / "save_answered.json"


def save_request_path(run: RunDir, attempt: int) -> Path:
    """Return the path of the supervisor's request for a checkpoint after the current step, before an attempt ends."""
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
