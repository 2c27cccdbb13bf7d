"""The one place that runs Slurm's commands.

Everything is asked for many jobs at once, and what Slurm does not say is UNKNOWN: never ended. The controller
being away is `hpcrl.slurm.errors.SlurmUnavailableError`; whoever watches a job takes it as a warning
(`hpcrl.slurm.watch`).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from hpcrl.slurm import parse
from hpcrl.slurm.command import CommandResult, Runner, command_environment, run_command
from hpcrl.slurm.errors import (
    NoAccountingError,
    NoSuchJobError,
    SlurmAnswerError,
    SlurmError,
    SlurmMissingError,
    SlurmRejectedError,
    SlurmUnavailableError,
    SubmitUnclearError,
    classify,
)
from hpcrl.slurm.records import HetComponent, Job, Node, StartEstimate, Submitted

__all__ = ["COMMENT_PREFIX", "SlurmClient", "job_comment"]

COMMENT_PREFIX = "hpcrl:"
_SUBMIT_TIMEOUT_S = 60.0
_LOOK_AGAIN_S = 2.0
_SETTLE_S = 10.0
"""After a lost answer the controller may still be working on the submission; only then is 'not there' believed."""


_JOB_ID_LINE = re.compile(r"(\d+)(?:;\S+)?")
"""What ``sbatch --parsable`` prints: the job's number, and the cluster's name where there are several."""


def job_comment(token: str) -> str:
    """The comment by which the job of a submission is found again.

    Everybody can read it in ``squeue``, and write the same into a job: only jobs of our own user count.
    """
    return f"{COMMENT_PREFIX}{token}"


class SlurmClient:
    """Slurm's commands.

    All methods raise `hpcrl.slurm.errors.SlurmMissingError` where Slurm is not installed and
    `hpcrl.slurm.errors.SlurmUnavailableError` where it does not answer.

    Parameters
    ----------
    conf:
        ``slurm.conf`` of the cluster; None for the one that Slurm finds by itself.
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
        run: Runner = run_command,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.conf = conf
        self._run_command = run
        self._timeout_s = timeout_s
        self._clock, self._sleep = clock, sleep
        self._json_squeue = False
        self._accounting = True

    # -- reading -------------------------------------------------------------------------------------------------

    def jobs(self, job_ids: Iterable[int], *, expected: Mapping[int, int] | None = None) -> dict[int, Job]:
        """What Slurm knows about jobs: one ``squeue``, and one ``sacct`` for those that are no longer there.

        Parameters
        ----------
        job_ids:
            Ids of jobs; of heterogeneous ones the leader's.
        expected:
            Number of components by job id, where known: fewer ended ones do not make an ended job. Give it: right
            after the end, ``sacct`` shows a heterogeneous job as a plain one for a second or two (seen on 22.05).

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
        """Our own user's jobs of one submission (see `submit`), newest last, ended ones as long as the controller
        keeps them. A job of somebody else with our name and comment is none of them."""
        found = self._own([f"--name={name}"])
        leaders = {c.leader_id for c in found if c.offset == 0 and c.comment == job_comment(token)}
        return list(_by_job(found, sorted(leaders), {}).values())

    def of_run(self, run_id: str) -> dict[int, tuple[str, Job]]:
        """All jobs of a run that the controller knows, with their tokens: one ``squeue`` of our own jobs."""
        found = [c for c in self._own([]) if c.comment.startswith(job_comment(run_id))]
        tokens = {c.leader_id: c.comment.removeprefix(COMMENT_PREFIX) for c in found}
        return {job_id: (tokens[job_id], job) for job_id, job in _by_job(found, sorted(tokens), {}).items()}

    def details(self, job_id: int) -> list[dict[str, str]]:
        """All that ``scontrol show job`` says, one record a component; times are seconds since the epoch.

        Works without accounting, as long as the controller keeps the job (``MinJobAge`` after its end).

        Raises
        ------
        NoSuchJobError
            The controller does not know it.
        """
        return self.show("job", str(job_id))

    def nodes(self, names: Collection[str] | None = None) -> list[Node]:
        """The nodes of these names; None: all nodes of the site.

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
        """Records of ``scontrol show KIND [NAME]`` as Slurm's keys and words."""
        name_argument = [] if name is None else [name]
        result = self._run(["scontrol", "--oneliner", "show", kind, *name_argument])
        return parse.parse_oneliner(result.stdout)

    def config(self) -> dict[str, str]:
        """The controller's configuration (``scontrol show config``)."""
        return parse.parse_config(self._run(["scontrol", "show", "config"]).stdout)

    def version(self, *, program: str = "sbatch") -> tuple[int, int]:
        """Major version of Slurm here, for example (22, 5); a daemon's program tells it without a cluster, too."""
        return parse.parse_version(self._run([program, "-V"]).stdout)

    def answers(self) -> bool:
        """Whether a controller answers now."""
        try:
            return " is UP" in self._run(["scontrol", "ping"]).stdout
        except (SlurmUnavailableError, SlurmRejectedError):
            return False

    # -- acting --------------------------------------------------------------------------------------------------

    def submit(
        self, script: Path, *, name: str, token: str, options: Sequence[str] = (), again: bool = False
    ) -> Submitted:
        """Submit a script once, however often this is called with the same token.

        The token goes into the job's comment. A job that has it is returned, not submitted again; and where
        ``sbatch`` gives no answer, it is looked for until the controller says that it is not there.

        Parameters
        ----------
        name:
            Name of the job.
        token:
            Names this submission: the run id, and a number where the run is submitted again later.
        options:
            Further options of ``sbatch``.
        again:
            A job with this token that has ended is to be replaced: only one that has not is returned.

        Raises
        ------
        SlurmRejectedError
            Slurm refused the script.
        SlurmAnswerError
            ``sbatch`` ended well and printed no job number that could be told from other lines, and no job was found.
        SubmitUnclearError
            No answer, and no job was found; calling again with the same token is safe.
        """
        jobs = self.find(name=name, token=token)
        ended = frozenset(job.job_id for job in jobs if again and job.state.ended)
        if alive := [job for job in jobs if job.job_id not in ended]:
            return Submitted(alive[-1].job_id, recovered=True)
        argv = ["sbatch", "--parsable", f"--job-name={name}", f"--comment={job_comment(token)}", *options, str(script)]
        try:
            result = self._run(argv, reading=False, timeout_s=max(self._timeout_s, _SUBMIT_TIMEOUT_S))
        except SlurmUnavailableError as error:
            return self._look_up(name, token, error, ended)
        except SlurmRejectedError as error:
            # a wrapper of the site may fail after sbatch has done its work
            if job_id := self._found_after(name, token, ended, error):
                return Submitted(job_id, recovered=True)
            raise
        numbers = {match[1] for line in result.stdout.splitlines() if (match := _JOB_ID_LINE.fullmatch(line.strip()))}
        if len(numbers) == 1:
            return Submitted(int(numbers.pop()), recovered=False)
        # sites print banners here; where they hide the number, or look like one, the job says itself which it is
        unreadable = SlurmAnswerError(
            f"sbatch ended well, but its output is not one job number: {result.stdout!r}\n"
            "    hint: submit again (a job that exists is found, not doubled), and ask the admins what prints here"
        )
        try:
            return self._look_up(name, token, unreadable, ended)
        except SubmitUnclearError as error:
            raise unreadable from error

    def _found_after(self, name: str, token: str, before: Collection[int], error: SlurmError) -> int | None:
        """The id of the job of a submission that failed, if there is one all the same.

        Slurm keeps a record of what it refused for a while, as a job that has failed: that is none.
        """
        try:
            found = self.find(name=name, token=token)
            jobs = [job for job in found if job.job_id not in before and not job.state.ended]
        except SlurmError:
            raise error from None
        return jobs[-1].job_id if jobs else None

    def _look_up(self, name: str, token: str, lost: SlurmError, before: Collection[int]) -> Submitted:
        """Find the job of a submission without an answer that helps, which is none of those ``before``."""
        deadline = self._clock() + self._timeout_s + _SETTLE_S
        absent_since: float | None = None
        while True:
            try:
                if jobs := [job for job in self.find(name=name, token=token) if job.job_id not in before]:
                    return Submitted(jobs[-1].job_id, recovered=True)
                absent_since = self._clock() if absent_since is None else absent_since
            except SlurmUnavailableError:
                absent_since = None
            now = self._clock()
            if absent_since is not None and now - absent_since >= _SETTLE_S:
                raise SubmitUnclearError(
                    f"the submission got no answer, and Slurm has no job {name!r} of it\n    {lost}\n"
                    "    hint: submit again; a job that turns up late is found, not doubled"
                ) from lost
            if absent_since is None and now >= deadline:
                raise SubmitUnclearError(
                    f"the submission got no answer, and Slurm cannot be asked about it\n    {lost}\n"
                    "    hint: submit again when the controller answers; it looks for the job first"
                ) from lost
            self._sleep(_LOOK_AGAIN_S)

    def test_only(self, script: Path, *, options: Sequence[str] = ()) -> StartEstimate:
        """Ask whether Slurm would take a script, and when it would start. Submits nothing.

        Raises
        ------
        SlurmRejectedError
            It would be refused; says why.
        """
        result = self._run(["sbatch", "--test-only", *options, str(script)])
        return parse.parse_start_estimate(f"{result.stderr}\n{result.stdout}")

    def cancel(
        self,
        job_id: int,
        *,
        component: int | None = None,
        signal: str | None = None,
        batch: bool = False,
    ) -> None:
        """Cancel a job, or send it a signal. A job that has ended already is no error.

        Parameters
        ----------
        component:
            Only this component of a running heterogeneous job.
        signal:
            Name without ``SIG``; the job is not cancelled then.
        batch:
            The signal goes to the batch script alone, not to its steps.
        """
        target = str(job_id) if component is None else f"{job_id}+{component}"
        options = [] if signal is None else [f"--signal={signal}"]
        try:
            self._run(["scancel", *options, *(["--batch"] if batch else []), target])
        except SlurmRejectedError as error:
            if "already completing or completed" not in str(error):
                raise

    def requeue(self, job_id: int) -> None:
        """Put a running job, all components of it, back into the queue under its id."""
        self._run(["scontrol", "requeue", str(job_id)])

    def exclude_nodes(self, job_id: int, nodes: Sequence[str], *, components: int = 1) -> None:
        """Let a waiting job, all components of it, stay away from nodes; replaces an earlier list.

        Raises
        ------
        SlurmRejectedError
            The job does not wait: Slurm changes only those.
        """
        names = [str(job_id)] if components == 1 else [f"{job_id}+{offset}" for offset in range(components)]
        for name in names:
            self._run(["scontrol", "update", f"JobId={name}", f"ExcNodeList={','.join(nodes)}"])

    def start_after(self, job_ids: Sequence[int], first: int) -> None:
        """Let waiting jobs start only once another one has started; in one call, as there may be little time.

        Raises
        ------
        SlurmRejectedError
            One of them does not wait: Slurm changes only those that do.
        """
        self._run(["scontrol", "update", f"JobId={_join(job_ids)}", f"Dependency=after:{first}"])

    def update_node(self, name: str, state: str, *, reason: str = "") -> None:
        """Set the state of a node (for administrators)."""
        reasons = [f"Reason={reason}"] if reason else []
        self._run(["scontrol", "update", f"NodeName={name}", f"State={state}", *reasons])

    def add_cluster(self, name: str) -> None:
        """Enter a cluster into the accounting database (for administrators); one that is there is no error."""
        try:
            self._run(["sacctmgr", "--immediate", "add", "cluster", name])
        except SlurmRejectedError as error:
            if "already exists" not in str(error):
                raise

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
            return []  # what squeue says where the only job asked for is gone

    def _own(self, selection: Sequence[str]) -> list[HetComponent]:
        """Jobs of the user that we are; what says that it is somebody else's is left out, whoever let it through."""
        me = os.getuid()
        return [c for c in self._squeue(["--me", *selection]) if c.user_id is None or c.user_id == me]

    def _sacct(self, job_ids: Sequence[int]) -> list[HetComponent]:
        """History; nothing where the cluster keeps none, or it cannot be read now."""
        if not self._accounting:
            return []
        argv = ["sacct", "--noheader", "--allocations", "--whole-hetjob=yes", "--parsable2"]
        argv += [f"--delimiter={parse.SEPARATOR}", f"--format={parse.SACCT_FORMAT}", f"--jobs={_join(job_ids)}"]
        try:
            return parse.parse_sacct(self._run(argv).stdout)
        except (NoAccountingError, SlurmMissingError):
            self._accounting = False
        except (SlurmUnavailableError, SlurmRejectedError):
            pass  # the database is away: these jobs stay unknown, the others are known
        return []

    def _run(self, argv: Sequence[str], *, reading: bool = True, timeout_s: float | None = None) -> CommandResult:
        env = command_environment(conf=self.conf, reading=reading)
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        result = self._run_command(argv, env=env, timeout_s=wait_s)
        if reading and result.exit_code == -signal.SIGTERM:
            # Slurm ends a job by SIGTERM to all of its processes, also to the command by which we ask about that
            result = self._run_command(argv, env=env, timeout_s=wait_s)
        if result.exit_code:
            raise classify(argv, result.exit_code, f"{result.stderr}\n{result.stdout}")
        return result


def _join(job_ids: Sequence[int]) -> str:
    return ",".join(map(str, job_ids))


def _by_job(found: Sequence[HetComponent], wanted: Sequence[int], expected: Mapping[int, int]) -> dict[int, Job]:
    """Jobs of the wanted ids; where two sources know a component, the first one counts."""
    groups: dict[int, dict[int, HetComponent]] = {job_id: {} for job_id in wanted}
    for component in found:
        if component.leader_id in groups:
            groups[component.leader_id].setdefault(component.offset, component)
    return {
        job_id: Job.of(list(components.values()), expected=expected.get(job_id))
        for job_id, components in groups.items()
        if components
    }
