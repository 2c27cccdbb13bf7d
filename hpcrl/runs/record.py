"""``run.json``: what a run is, who submitted it, from what, and to whom it was handed."""

from __future__ import annotations

import getpass
import hashlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl import __version__
from hpcrl.errors import RunDirError
from hpcrl.processes import procfs
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId
from hpcrl.storage.files import write_json
from hpcrl.storage.msgspec_types import decode_json
from hpcrl.storage.trusted_paths import files_as

FORMAT_VERSION = 2
"""Format of runs whose records of steps may be in several files, of which some are compressed. The record of a run
keeps its format: programs of the version that began the run may still read it."""
_ONE_FILE = 1
"""Format of runs of earlier versions, which look for one file an attempt."""
_RUN_ID_BYTES = 16
"""Size of a run id: with 128 bits, a job with the comment of a future run cannot be prepared."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """Submission of the run: the first, or a resume.

    Attributes
    ----------
    submitted_at_s:
        Seconds since the epoch.
    executor:
        ``local`` or ``slurm``.
    job_id, folder:
        Submitit's job id and folder; under Slurm the id of the job (of a heterogeneous one, of its first component).
    components:
        Components of the job (``slurm``).
    requeues:
        Slurm may start the job again by itself (``slurm``): a failed attempt ends the run only when its job has ended
        as well.
    slurm_conf:
        ``SLURM_CONF`` of the submit (``slurm``); empty where Slurm finds its configuration by itself.
    slurm_cluster:
        Cluster of the job, where Slurm has several (``slurm``); empty where none was requested. None in records
        of earlier versions.
    user_id:
        Owner of the job (``slurm``): a later job of another user under the same number does not belong to the run. None
        in records of earlier versions.
    process:
        Controller of the job on this machine (``local``).
    in_job:
        Id of the allocation that it was started in, which is not the run's own (``local``); empty for none.
    after_attempt:
        Newest attempt at that time; the submission begins the next one.
    submitted_by:
        User, process and machine of the submission; empty in records of earlier versions.
    cancel_requested_at_s, cancelled_by:
        Set by ``hpcrl cancel``.
    """

    submitted_at_s: float
    executor: str
    job_id: str
    folder: str
    after_attempt: int
    process: ProcessId | None = None
    components: int = 1
    requeues: bool = False
    slurm_conf: str = ""
    slurm_cluster: str | None = None
    submitted_by: str = ""
    user_id: int | None = None
    in_job: str = ""
    cancel_requested_at_s: float | None = None
    cancelled_by: str = ""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a start model that another run has trained (`hpcrl.runs.start.origin`).

    Attributes
    ----------
    run, run_id, run_dir:
        The other run.
    kind, number, path:
        ``checkpoint`` or ``version``, its step or number, and its path.
    taken_at_s:
        Seconds since the epoch.
    hpcrl_version, recipe_sha256:
        Values of the other run, by its record.
    """

    run: str
    run_id: str
    run_dir: str
    kind: str
    number: int
    path: str
    taken_at_s: float
    hpcrl_version: str
    recipe_sha256: str

    def __str__(self) -> str:
        what = "the checkpoint of step" if self.kind == "checkpoint" else "version"
        return f"{what} {self.number} of {self.run}"


class SweepMember(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a run in a sweep (`hpcrl.sweeps`).

    Attributes
    ----------
    sweep, sweep_id, directory:
        Name, id and directory of the sweep.
    number:
        Number of the member, from 1.
    values:
        Swept values by dotted key, as JSON.
    """

    sweep: str
    sweep_id: str
    directory: str
    number: int
    values: dict[str, str] = {}


class Withdrawal(msgspec.Struct, frozen=True, kw_only=True):
    """Cancel of a member of a sweep that was not started yet."""

    user: str
    time_s: float


class Labels(NamedTuple):
    """Tags of a new run, and its place in a sweep."""

    tags: tuple[str, ...] = ()
    sweep: SweepMember | None = None


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Identity and origin of a run.

    Attributes
    ----------
    run_id:
        128 random bits, hexadecimal; every process of the run carries it in its environment as ``HPCRL_RUN_ID``, and
        its jobs in their comment.
    name, created_at_s, user, host, cwd, argv:
        Caller, command line, machine, directory and time.
    hpcrl_version, git_commit:
        Version of the package; commit of the directory hpcrl was called in (empty where it is not a checkout).
    recipe_sha256, cluster_sha256:
        Hashes of ``recipe.yaml`` and ``cluster.yaml`` as resolved.
    provenance:
        Sources of values that are not defaults, by dotted key.
    submissions:
        In time order.
    origin:
        Origin of its start weights; None where it is ``model.path``.
    run_dir:
        Directory in which it was created or last submitted (`hpcrl.runs.copies`); empty in records of earlier versions.
    tags:
        Words of the user by which runs are found (``hpcrl ls --tag``); a sweep's name is a tag of its members.
    sweep:
        Its place in a sweep; None where it belongs to none.
    withdrawn:
        Set where it was cancelled before its sweep started it; removed when it is started all the same.
    """

    run_id: str
    name: str
    created_at_s: float
    user: str
    host: str
    cwd: str
    argv: list[str]
    hpcrl_version: str
    git_commit: str
    recipe_sha256: str
    cluster_sha256: str
    provenance: dict[str, str] = {}
    submissions: list[Submission] = []
    origin: Origin | None = None
    run_dir: str = ""
    tags: list[str] = []
    sweep: SweepMember | None = None
    withdrawn: Withdrawal | None = None
    format_version: int = _ONE_FILE

    @classmethod
    def new(
        cls,
        run: RunDir,
        *,
        name: str,
        provenance: Mapping[str, str],
        origin: Origin | None = None,
        run_dir: Path | None = None,
        labels: Labels | None = None,
    ) -> RunRecord:
        """Return the record of a run whose configuration was just written to ``run``, to be moved to ``run_dir``."""
        return cls(
            run_id=cls.new_id(),
            name=name,
            created_at_s=time.time(),
            user=user_name(),
            host=procfs.hostname(),
            cwd=os.getcwd(),
            argv=list(sys.argv),
            hpcrl_version=__version__,
            git_commit=_git_commit(Path.cwd()),
            recipe_sha256=hash_text(run.recipe_path.read_bytes()),
            cluster_sha256=hash_text(run.cluster_path.read_bytes()),
            provenance=dict(provenance),
            origin=origin,
            run_dir="" if run_dir is None else os.path.realpath(run_dir),
            tags=[] if labels is None else list(labels.tags),
            sweep=None if labels is None else labels.sweep,
            format_version=FORMAT_VERSION,
        )

    @staticmethod
    def new_id() -> str:
        """Return an unused run id."""
        return secrets.token_hex(_RUN_ID_BYTES)

    @property
    def allows_parts(self) -> bool:
        """Return whether records of steps may be in several files (`hpcrl.runs.metrics_files`)."""
        return self.format_version > _ONE_FILE

    def write(self, run: RunDir) -> None:
        """Replace ``run.json``."""
        with files_as(run.path):
            write_json(run.record_path, self)

    @classmethod
    def read(cls, run: RunDir) -> RunRecord:
        """Read ``run.json``.

        Raises
        ------
        RunDirError
            It is missing, damaged, or of a format this code does not know.
        """
        try:
            record: RunRecord = decode_json(run.record_path.read_bytes(), cls)
        except FileNotFoundError as error:
            raise RunDirError(f"{run.path} is not a run directory: it has no {run.record_path.name}") from error
        except msgspec.DecodeError as error:
            raise RunDirError(f"{run.record_path} cannot be read: {error}") from error
        if record.format_version not in (_ONE_FILE, FORMAT_VERSION):
            known = f"{_ONE_FILE} and {FORMAT_VERSION}"
            raise RunDirError(
                f"{run.record_path} has format {record.format_version}, this hpcrl reads {known}\n"
                "    hint: use the version of hpcrl that submitted the run"
            )
        return record

    @property
    def queued(self) -> bool:
        """Return whether it waits for its sweep to start it for the first time."""
        return self.sweep is not None and not self.submissions and self.withdrawn is None

    def with_submission(self, submission: Submission) -> RunRecord:
        """Return a copy with one more submission."""
        return msgspec.structs.replace(self, submissions=[*self.submissions, submission], withdrawn=None)

    def with_cancel(self, user: str, now_s: float) -> RunRecord:
        """Return a copy whose newest submission records a requested cancel."""
        if not self.submissions:
            return self
        newest = msgspec.structs.replace(self.submissions[-1], cancel_requested_at_s=now_s, cancelled_by=user)
        return msgspec.structs.replace(self, submissions=[*self.submissions[:-1], newest])


def hash_text(data: bytes) -> str:
    """Return the SHA-256 of ``data`` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def this_process() -> str:
    """Return user, process and machine, for `Submission.submitted_by`."""
    return f"{user_name()} (pid {os.getpid()} on {procfs.hostname()})"


def user_name() -> str:
    """Return the name of the current user, or the uid where that has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in many containers
        return str(os.getuid())


def _git_commit(directory: Path) -> str:
    try:
        result = subprocess.run(
            ["git", "-C", str(directory), "rev-parse", "HEAD"], capture_output=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.decode().strip() if result.returncode == 0 else ""
