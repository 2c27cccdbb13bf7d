"""Queries about jobs and nodes.

Each query covers many jobs, and a job about which Slurm gives no answer is UNKNOWN, never ended. A controller that does
not answer raises `hpcrl.slurm.errors.SlurmUnavailableError`; a watcher treats it as a warning (`hpcrl.slurm.watch`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from hpcrl.slurm import parse
from hpcrl.slurm.command import CommandResult, Runner, command_environment, run_command
from hpcrl.slurm.errors import (
    NoAccountingError,
    NoSuchJobError,
    SlurmMissingError,
    SlurmRejectedError,
    SlurmUnavailableError,
    classify,
)
from hpcrl.slurm.records import HetComponent, Job, Node

COMMENT_PREFIX = "hpcrl:"


def job_comment(token: str) -> str:
    """Return the comment by which the job of a submission is found again.

    Every user can read it in ``squeue``, and give a job the same comment: only jobs of the current user count.
    """
    return f"{COMMENT_PREFIX}{token}"


class SlurmQueries:
    """Slurm's commands that ask.

    All methods raise `hpcrl.slurm.errors.SlurmMissingError` where Slurm is not installed and
    `hpcrl.slurm.errors.SlurmUnavailableError` where it does not answer.

    Parameters
    ----------
    conf:
        ``slurm.conf`` of the cluster; None for the one that Slurm finds by itself.
    cluster:
        Cluster that is asked, of several (see `hpcrl.slurm.command.command_environment`).
    run:
        Runs the commands; tests put a fake here.
    timeout_s:
        Longest wait for one command.
    clock, sleep:
        Time, for tests.
    """

    def __init__(
        self,
        *,
        conf: Path | None = None,
        cluster: str | None = None,
        run: Runner = run_command,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.conf, self.cluster = conf, cluster
        self._run_command = run
        self._timeout_s = timeout_s
        self._clock, self._sleep = clock, sleep
        self._json_squeue = False
        self._accounting = True

    def jobs(self, job_ids: Iterable[int], *, expected: Mapping[int, int] | None = None) -> dict[int, Job]:
        """Return the jobs that Slurm knows: one ``squeue``, and one ``sacct`` for those that it does not list any more.

        Parameters
        ----------
        job_ids:
            Ids of jobs; of heterogeneous ones the leader's.
        expected:
            Number of components by job id, where known: a job with fewer ended components has not ended. Pass it where
            you can: right after the end, ``sacct`` shows a heterogeneous job as a plain one for a second or two
            (observed on 22.05).

        Returns
        -------
        dict
            By job id. **A job that is not in it is unknown, not ended.**
        """
        wanted = sorted(set(job_ids))
        if not wanted:
            return {}
        found = self._squeue([f"--jobs={_join(wanted)}"])
        missing = sorted(set(wanted) - {component.leader_id for component in found})
        if missing:
            found += self._sacct(missing)
        return _by_job(found, wanted, expected or {})

    def find(self, *, name: str, token: str) -> list[Job]:
        """Return the user's jobs of one submission (see `submit`), newest last.

        Ended jobs are included as long as the controller keeps them. Jobs of other users with this name and comment are
        not.
        """
        found = self._own([f"--name={name}"])
        leaders = {c.leader_id for c in found if c.offset == 0 and c.comment == job_comment(token)}
        return list(_by_job(found, sorted(leaders), {}).values())

    def of_run(self, run_id: str) -> dict[int, tuple[str, Job]]:
        """Return all jobs of a run that the controller knows, with their tokens: one ``squeue`` of the user's jobs."""
        found = [c for c in self._own([]) if c.comment.startswith(job_comment(run_id))]
        tokens = {c.leader_id: c.comment.removeprefix(COMMENT_PREFIX) for c in found}
        return {job_id: (tokens[job_id], job) for job_id, job in _by_job(found, sorted(tokens), {}).items()}

    def details(self, job_id: int) -> list[dict[str, str]]:
        """Return the records of ``scontrol show job``, one per component; times are seconds since the epoch.

        Works without accounting, as long as the controller keeps the job (``MinJobAge`` after its end).

        Raises
        ------
        NoSuchJobError
            The controller does not know it.
        """
        return self.show("job", str(job_id))

    def nodes(self, names: Collection[str] | None = None) -> list[Node]:
        """Return the nodes of these names; None: all nodes of the site.

        A name that Slurm does not know (any more) is left out.
        """
        if names is None:
            return [parse.parse_node(record) for record in self.show("node") if "NodeName" in record]
        if not names:
            return []
        try:
            records = self.show("node", ",".join(sorted(names)))
        except SlurmRejectedError as error:
            if "not found" not in str(error).lower():
                raise
            return [node for node in self.nodes() if node.name in names]
        return [parse.parse_node(record) for record in records if record.get("NodeName") in names]

    def show(self, kind: str, name: str | None = None) -> list[dict[str, str]]:
        """Return the records of ``scontrol show KIND [NAME]`` with Slurm's keys and values."""
        name_argument = [] if name is None else [name]
        result = self._run(["scontrol", "--oneliner", "show", kind, *name_argument])
        return parse.parse_oneliner(result.stdout)

    def config(self) -> dict[str, str]:
        """Return the controller's configuration (``scontrol show config``)."""
        return parse.parse_config(self._run(["scontrol", "show", "config"]).stdout)

    def version(self, *, program: str = "sbatch") -> tuple[int, int]:
        """Return the major version of Slurm here, for example (22, 5); a daemon's program works without a cluster."""
        return parse.parse_version(self._run([program, "-V"]).stdout)

    def answers(self) -> bool:
        """Return whether a controller answers now."""
        try:
            return " is UP" in self._run(["scontrol", "ping"]).stdout
        except (SlurmUnavailableError, SlurmRejectedError):
            return False

    # -- commands ------------------------------------------------------------------------------------------------

    def _squeue(self, selection: Sequence[str]) -> list[HetComponent]:
        argv = ["squeue", "--noheader", "--states=all", *selection]
        try:
            if not self._json_squeue:
                try:
                    columns = self._run([*argv, f"--Format={parse.SQUEUE_FORMAT}"])
                    return parse.parse_squeue(columns.stdout)
                except SlurmRejectedError as error:
                    # a column that a version no longer has; JSON names may have stayed
                    if "format" not in str(error).lower():
                        raise
                    self._json_squeue = True
            return parse.parse_squeue_json(self._run([*argv, "--json"]).stdout)
        except NoSuchJobError:
            return []  # squeue's answer where the only requested job is gone

    def _own(self, selection: Sequence[str]) -> list[HetComponent]:
        """Return the jobs of the current user; jobs of others in the answer are left out."""
        me = os.getuid()
        return [c for c in self._squeue(["--me", *selection]) if c.user_id is None or c.user_id == me]

    def _sacct(self, job_ids: Sequence[int]) -> list[HetComponent]:
        """Return ended jobs; none where the cluster keeps no history, or it cannot be read now."""
        if not self._accounting:
            return []
        argv = ["sacct", "--noheader", "--allocations", "--whole-hetjob=yes", "--parsable2"]
        argv += [f"--delimiter={parse.SEPARATOR}", f"--format={parse.SACCT_FORMAT}", f"--jobs={_join(job_ids)}"]
        # the only one of Slurm's commands that does not read SLURM_CLUSTERS
        argv += [f"--clusters={name}"] if (name := self._cluster_name()) else []
        try:
            return parse.parse_sacct(self._run(argv).stdout)
        except (NoAccountingError, SlurmMissingError):
            self._accounting = False
        except (SlurmUnavailableError, SlurmRejectedError):
            pass  # the database does not answer: these jobs stay unknown, the others are known
        return []

    def _cluster_name(self) -> str:
        return os.environ.get("SLURM_CLUSTERS", "") if self.cluster is None else self.cluster

    def _run(self, argv: Sequence[str], *, reading: bool = True, timeout_s: float | None = None) -> CommandResult:
        env = command_environment(conf=self.conf, reading=reading, cluster=self.cluster)
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        result = self._run_command(argv, env=env, timeout_s=wait_s)
        if reading and result.exit_code == -signal.SIGTERM:
            # Slurm ends a job by SIGTERM to all of its processes, also to this query command
            result = self._run_command(argv, env=env, timeout_s=wait_s)
        if result.exit_code:
            raise classify(argv, result.exit_code, f"{result.stderr}\n{result.stdout}")
        return result


def _join(job_ids: Sequence[int]) -> str:
    return ",".join(map(str, job_ids))


def _by_job(found: Sequence[HetComponent], wanted: Sequence[int], expected: Mapping[int, int]) -> dict[int, Job]:
    """Return the jobs of the wanted ids; where two sources know a component, the first one counts."""
    groups: dict[int, dict[int, HetComponent]] = {job_id: {} for job_id in wanted}
    for component in found:
        if component.leader_id in groups:
            groups[component.leader_id].setdefault(component.offset, component)
    return {
        job_id: Job.of(list(components.values()), expected=expected.get(job_id))
        for job_id, components in groups.items()
        if components
    }
