"""Coordination of the jobs of one run in its directory (layout ``elastic``): held nodes and wanted replicas.

::

    replicas/held/<role>-<replica>-<job>.json   nodes that a job holds; written and removed by its holder
    replicas/wanted.json                        replicas that a person asked for; written by `hpcrl scale`
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hpcrl.config.plan import Plan
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import make_directory, write_json
from hpcrl.storage.msgspec_types import prepared

_log = logging.getLogger(__name__)


class HeldNodes(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that wait for their replica, as the holder in their job says.

    Attributes
    ----------
    role, replica:
        Role and replica that hold the nodes.
    submission:
        Number of the submission of the run that the job is part of.
    job_id, restart:
        The job, and how often Slurm has requeued it: after a requeue it may have other nodes.
    nodes:
        Names in Slurm's order.
    since_s:
        Seconds since the epoch.
    """

    role: str
    replica: int
    submission: int
    job_id: int
    restart: int
    nodes: list[str]
    since_s: float

    def path(self, run: RunDir) -> Path:
        """Return the path of the file that the holder writes."""
        return _directory(run) / f"{self.role}-{self.replica}-{self.job_id}.json"

    def write(self, run: RunDir) -> None:
        """Write the file, which records that this job holds the nodes."""
        path = self.path(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self)

    def remove(self, run: RunDir) -> None:
        """Remove the file: this job does not hold the nodes any more."""
        self.path(run).unlink(missing_ok=True)

    @staticmethod
    def read_all(run: RunDir) -> list[HeldNodes]:
        """Return the statements of all holders.

        A job that was killed leaves its file: only Slurm knows which jobs are running.
        """
        try:
            names = os.listdir(_directory(run))
        except FileNotFoundError:
            return []
        found = []
        for name in sorted(names):
            if name.startswith(".") or not name.endswith(".json"):
                continue
            with contextlib.suppress(FileNotFoundError):  # removed since
                path = _directory(run) / name
                try:
                    found.append(msgspec.json.decode(path.read_bytes(), type=prepared(HeldNodes)))
                except msgspec.DecodeError as error:
                    _log.warning("%s cannot be read: %s", path, error)
        return found


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Replica counts that `hpcrl scale` requested last. They outlast attempts and resumes.

    Attributes
    ----------
    counts:
        Replicas by role; other roles have the number of the plan.
    user, time_s:
        User who requested them, and the time.
    """

    counts: dict[str, int]
    user: str
    time_s: float

    @staticmethod
    def path(run: RunDir) -> Path:
        return run.path / "replicas" / "wanted.json"

    @classmethod
    def read(cls, run: RunDir) -> Wanted | None:
        """Return the last request; None where there was none."""
        try:
            return msgspec.json.decode(cls.path(run).read_bytes(), type=prepared(cls))
        except FileNotFoundError:
            return None

    @classmethod
    def ask(cls, run: RunDir, counts: Mapping[str, int], *, user: str) -> Wanted:
        """Request numbers of replicas; earlier requests for other roles are kept."""
        before = cls.read(run)
        wanted = cls(counts={**(before.counts if before else {}), **counts}, user=user, time_s=time.time())
        make_directory(cls.path(run).parent)
        write_json(cls.path(run), wanted)
        return wanted


def wanted_replicas(run: RunDir, plan: Plan) -> dict[str, int]:
    """Return the wanted number of replicas of each role that has its own jobs."""
    wanted = Wanted.read(run)
    counts = {} if wanted is None else wanted.counts
    groups = (group for group in plan.groups if plan.own_jobs(group))
    return {group.role.value: counts.get(group.role.value, group.replicas) for group in groups}


def _directory(run: RunDir) -> Path:
    return run.path / "replicas" / "held"
