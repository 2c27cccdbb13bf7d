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

import msgspec

from hpcrl import __version__, procfs
from hpcrl.decoding import prepared
from hpcrl.errors import RunDirError
from hpcrl.fs import write_json
from hpcrl.ours import files_as
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId

__all__ = ["Origin", "RunRecord", "Submission", "hash_text", "this_process", "user_name"]

FORMAT_VERSION = 1
_RUN_ID_BYTES = 16
"""128 bits: nobody prepares a job with the comment of a run that does not exist yet."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One hand-over of the run: the first, or a resume.

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
        Slurm may start the job again by itself (``slurm``): a failed attempt is the end of the run only when its job
        has ended, too.
    slurm_conf:
        ``SLURM_CONF`` of the submit (``slurm``); empty where Slurm finds its configuration by itself.
    slurm_cluster:
        Cluster of the job, where Slurm has several (``slurm``); empty where it was not asked for one. None in records
        of earlier versions.
    user_id:
        Whose job it is (``slurm``): a later job of somebody else under the same number is not ours. None in records
        of earlier versions.
    process:
        The job's controller on this machine (``local``).
    in_job:
        Id of the allocation that it was started in, which is not the run's own (``local``); empty for none.
    after_attempt:
        Newest attempt at that time; the submission begins the next one.
    submitted_by:
        User, process and machine that handed it over; empty in records of earlier versions.
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
    """What a run began with that another one has learned (`hpcrl.runs.start.origin`).

    Attributes
    ----------
    run, run_id, run_dir:
        The other run.
    kind, number, path:
        ``checkpoint`` or ``version``, its step or number, and where it was.
    taken_at_s:
        Seconds since the epoch.
    hpcrl_version, recipe_sha256:
        Of the other run, by its record.
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


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Identity and origin of a run.

    Attributes
    ----------
    run_id:
        128 random bits, hexadecimal; every process of the run carries it in its environment as ``HPCRL_RUN_ID``, and
        its jobs in their comment.
    name, created_at_s, user, host, cwd, argv:
        Who called what, where and when.
    hpcrl_version, git_commit:
        Version of the package; commit of the directory hpcrl was called in (empty where it is no checkout).
    recipe_sha256, cluster_sha256:
        Hashes of ``recipe.yaml`` and ``cluster.yaml`` as resolved.
    provenance:
        Where values that are no defaults came from, by dotted key.
    submissions:
        In time order.
    origin:
        Whose weights it began with; None where ``model.path`` says it.
    run_dir:
        Where it was made or last handed over (`hpcrl.runs.copies`); empty in records of earlier versions.
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
    format_version: int = FORMAT_VERSION

    @classmethod
    def new(
        cls,
        run: RunDir,
        *,
        name: str,
        provenance: Mapping[str, str],
        origin: Origin | None = None,
        run_dir: Path | None = None,
    ) -> RunRecord:
        """The record of a run whose configuration was just written to ``run``, and which will lie in ``run_dir``."""
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
        )

    @staticmethod
    def new_id() -> str:
        """A run id that nobody has."""
        return secrets.token_hex(_RUN_ID_BYTES)

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
            record = msgspec.json.decode(run.record_path.read_bytes(), type=prepared(cls))
        except FileNotFoundError as error:
            raise RunDirError(f"{run.path} is no run directory: it has no {run.record_path.name}") from error
        except msgspec.DecodeError as error:
            raise RunDirError(f"{run.record_path} cannot be read: {error}") from error
        if record.format_version != FORMAT_VERSION:
            raise RunDirError(
                f"{run.record_path} has format {record.format_version}, this hpcrl reads {FORMAT_VERSION}\n"
                "    hint: use the version of hpcrl that submitted the run"
            )
        return record

    def with_submission(self, submission: Submission) -> RunRecord:
        """A copy with one submission more."""
        return msgspec.structs.replace(self, submissions=[*self.submissions, submission])

    def with_cancel(self, user: str, now_s: float) -> RunRecord:
        """A copy whose newest submission says that somebody asked it to stop."""
        if not self.submissions:
            return self
        newest = msgspec.structs.replace(self.submissions[-1], cancel_requested_at_s=now_s, cancelled_by=user)
        return msgspec.structs.replace(self, submissions=[*self.submissions[:-1], newest])


def hash_text(data: bytes) -> str:
    """The SHA-256 of ``data`` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def this_process() -> str:
    """User, process and machine, for `Submission.submitted_by`."""
    return f"{user_name()} (pid {os.getpid()} on {procfs.hostname()})"


def user_name() -> str:
    """The name of whoever calls; the number of the user where that has no name."""
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
