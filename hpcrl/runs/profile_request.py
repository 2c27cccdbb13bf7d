"""Request to profile a rank of the trainer, and the answer of the rank: two files of an attempt.

::

    attempts/0001/profile-trainer-3.json          the request; removed by the rank when it has answered
    attempts/0001/profiles/<id>/answer.json       the answer, next to what was recorded

The command makes the request and waits for the answer; removing the request withdraws it, and the rank then records
nothing more. There is one request for a rank at a time. Rank 0 lists the directory of the attempt once a step, for
requests to save, and passes on the ranks that are asked (`hpcrl.trainer.loop`): a rank without a request reads nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hpcrl.errors import RunDirError
from hpcrl.runs.rundir import RunDir
from hpcrl.storage import lost_replies
from hpcrl.storage.files import atomic_create, atomic_write
from hpcrl.storage.msgspec_types import decode_json

TRACE, SNAPSHOT = "trace.json.gz", "memory.pickle"
"""Files of a profile: the trace of torch's profiler, and the snapshot of the CUDA allocator."""
_NAME = re.compile(r"profile-trainer-(\d{1,9})\.json")


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to profile a rank.

    Attributes
    ----------
    id:
        Name of the directory with the result, in ``profiles`` of the attempt.
    rank, steps:
        The rank, and the number of whole steps to record.
    memory:
        Record allocations as well, and on CUDA take a snapshot of the allocator.
    limit_s:
        The rank ends the record after the step in which it has lasted for this many seconds.
    most_bytes:
        Maximum size of the uncompressed trace, and of the snapshot.
    time_s, wait_s:
        Time of the request (seconds since the epoch), and the seconds after which its maker withdraws it.
    by:
        User and host that made it.
    """

    id: str
    rank: int
    steps: int
    memory: bool
    limit_s: float
    most_bytes: int
    time_s: float
    wait_s: float
    by: str

    def place(self, run: RunDir, attempt: int) -> None:
        """Make the request, and the directory of its result.

        Raises
        ------
        RunDirError
            There is a request for this rank, and its maker still waits for the answer.
        OSError
            The filesystem refuses; there is no request.
        """
        path = request_path(run, attempt, self.rank)
        directory = profile_dir(run, attempt, self.id)
        directory.mkdir(parents=True)
        try:
            _drop_expired(path, time.time())
            try:
                atomic_create(path, msgspec.json.encode(self))
            except FileExistsError:
                raise RunDirError(_in_use(path, self.rank)) from None
        except BaseException:
            with contextlib.suppress(OSError):
                directory.rmdir()
            raise

    def withdraw(self, run: RunDir, attempt: int) -> None:
        """Remove the request, unless it is answered or another one, and its directory where nothing is in it."""
        path = request_path(run, attempt, self.rank)
        current = read_profile_request(path)
        if current is not None and current.id == self.id:
            lost_replies.unlink(path)
        with contextlib.suppress(OSError):
            profile_dir(run, attempt, self.id).rmdir()


class ProfileAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a rank to a request.

    Attributes
    ----------
    problem:
        Reason why there is no profile; empty where there is one.
    first, last:
        First and last step that were recorded; 0 without a profile.
    device:
        Type of the rank's device: ``cpu`` or ``cuda``.
    files:
        Names of the files of the profile.
    notes:
        What is missing of it, and why: a sentence each.
    held_s:
        Seconds for which the rank was held up to start, stop and write the profile.
    """

    problem: str = ""
    first: int = 0
    last: int = 0
    device: str = ""
    files: list[str] = []
    notes: list[str] = []
    held_s: float = 0.0

    def write(self, directory: Path) -> None:
        """Write the answer; not synchronised to disk, as it is not needed after a crash of the machine."""
        atomic_write(directory / "answer.json", msgspec.json.encode(self) + b"\n", durable=False)

    @classmethod
    def read(cls, directory: Path) -> ProfileAnswer | None:
        """Return the answer; None where there is none yet."""
        # a listing, because an NFS client may remember for a minute that a name did not exist
        if "answer.json" not in os.listdir(directory):
            return None
        answer: ProfileAnswer = decode_json((directory / "answer.json").read_bytes(), cls)
        return answer


def request_path(run: RunDir, attempt: int, rank: int) -> Path:
    """Return the path of the request for a rank."""
    return run.attempt_dir(attempt) / f"profile-trainer-{rank}.json"


def profile_dir(run: RunDir, attempt: int, name: str) -> Path:
    """Return the directory of a profile of an attempt."""
    return run.attempt_dir(attempt) / "profiles" / Path(name).name


def requested_ranks(names: Iterable[str]) -> tuple[int, ...]:
    """Return the ranks for which there are requests among the ``names`` of files in an attempt's directory."""
    return tuple(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))


def read_profile_request(path: Path) -> ProfileRequest | None:
    """Return a request; None where there is none (any more).

    Raises
    ------
    OSError, msgspec.DecodeError
        It exists, and cannot be read.
    """
    os.listdir(path.parent)  # an NFS client may remember for a minute that a name did not exist
    try:
        found: ProfileRequest = decode_json(path.read_bytes(), ProfileRequest)
    except FileNotFoundError:
        return None
    return found


def _drop_expired(path: Path, now_s: float) -> None:
    """Remove a request whose maker would have withdrawn it by now, and was killed before it could."""
    request = _readable_request(path)
    if request is not None and now_s > request.time_s + request.wait_s:
        lost_replies.unlink(path)


def _in_use(path: Path, rank: int) -> str:
    request = _readable_request(path)
    whose = "" if request is None else f", since {time.strftime('%H:%M:%S', time.localtime(request.time_s))}"
    by = "" if request is None else f", by {request.by}"
    return (
        f"rank {rank} of the trainer is being profiled already{whose}{by}\n"
        f"    hint: wait for that, or withdraw it: rm {path}"
    )


def _readable_request(path: Path) -> ProfileRequest | None:
    try:
        return read_profile_request(path)
    except (OSError, msgspec.DecodeError):
        return None
