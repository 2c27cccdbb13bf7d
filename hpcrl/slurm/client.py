"""Client that runs Slurm's commands which change state; `hpcrl.slurm.queries` has those that only ask."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from hpcrl.slurm import parse
from hpcrl.slurm.errors import (
    SlurmAnswerError,
    SlurmError,
    SlurmRejectedError,
    SlurmUnavailableError,
    SubmitUnclearError,
)
from hpcrl.slurm.queries import SlurmQueries, job_comment
from hpcrl.slurm.records import StartEstimate, Submitted

_SUBMIT_TIMEOUT_S = 60.0
_LOOK_AGAIN_S = 2.0
_SETTLE_S = 10.0
"""Time in seconds for which the controller may still process a submission after a lost answer; a missing job counts
only then."""


_JOB_ID_LINE = re.compile(r"([0-9]{1,18})(?:;(\S+))?")
"""Output of ``sbatch --parsable``: the job's number, and the cluster's name where there are several."""


class SlurmClient(SlurmQueries):
    """Slurm's commands; see `hpcrl.slurm.queries.SlurmQueries` for parameters and errors."""

    def submit(
        self, script: Path, *, name: str, token: str, options: Sequence[str] = (), again: bool = False
    ) -> Submitted:
        """Submit a script once, however often this is called with the same token.

        The token goes into the job's comment. A job that has it is returned, not submitted again; and where ``sbatch``
        gives no answer, the job is searched until the controller reports that it does not exist.

        Parameters
        ----------
        name:
            Name of the job.
        token:
            Names this submission: the run id, and a number where the run is submitted again later.
        options:
            Further options of ``sbatch``.
        again:
            Replace a job with this token that has ended: only one that has not ended is returned.

        Raises
        ------
        SlurmRejectedError
            Slurm refused the script.
        SlurmAnswerError
            ``sbatch`` succeeded and printed no recognizable job number, and no job was found.
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
            # a wrapper of the site may fail after sbatch has submitted the job
            if job_id := self._found_after(name, token, ended, error):
                return Submitted(job_id, recovered=True)
            raise
        matches = [match for line in result.stdout.splitlines() if (match := _JOB_ID_LINE.fullmatch(line.strip()))]
        if len({match[1] for match in matches}) == 1:
            cluster = next((match[2] for match in matches if match[2]), "")
            return Submitted(int(matches[0][1]), recovered=False, cluster=cluster)
        # sites print banners here; where these hide the number, or look like one, the job is found by its comment
        unreadable = SlurmAnswerError(
            f"sbatch ended well, but its output is not one job number: {result.stdout!r}\n"
            "    hint: submit again (an existing job is found, not duplicated), and ask the admins which script "
            "prints this"
        )
        try:
            return self._look_up(name, token, unreadable, ended)
        except SubmitUnclearError as error:
            raise unreadable from error

    def _found_after(self, name: str, token: str, before: Collection[int], error: SlurmError) -> int | None:
        """Return the id of the job that a failed submission created after all; None where it created none.

        Slurm keeps a refused submission for a while as a failed job, which does not count.
        """
        try:
            found = self.find(name=name, token=token)
            jobs = [job for job in found if job.job_id not in before and not job.state.ended]
        except SlurmError:
            raise error from None
        return jobs[-1].job_id if jobs else None

    def _look_up(self, name: str, token: str, lost: SlurmError, before: Collection[int]) -> Submitted:
        """Find the job of a submission without a usable answer, which is none of those ``before``."""
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
                    "    hint: submit again; a late job is found, not duplicated"
                ) from lost
            if absent_since is None and now >= deadline:
                raise SubmitUnclearError(
                    f"the submission got no answer, and Slurm cannot be asked about it\n    {lost}\n"
                    "    hint: submit again when the controller answers; it looks for the job first"
                ) from lost
            self._sleep(_LOOK_AGAIN_S)

    def test_only(self, script: Path) -> StartEstimate:
        """Ask whether Slurm would take a script, and when it would start. Submits nothing.

        Raises
        ------
        SlurmRejectedError
            It would be refused; says why.
        """
        result = self._run(["sbatch", "--test-only", str(script)])
        return parse.parse_start_estimate(f"{result.stderr}\n{result.stdout}")

    def cancel(
        self,
        job_id: int,
        *,
        component: int | None = None,
        signal: str | None = None,
        batch: bool = False,
    ) -> None:
        """Cancel a job, or send it a signal. A job that has ended already does not cause an error.

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
        """Exclude nodes from a waiting job with all its components; replaces an earlier list.

        Raises
        ------
        SlurmRejectedError
            The job does not wait: Slurm changes only those.
        """
        names = [str(job_id)] if components == 1 else [f"{job_id}+{offset}" for offset in range(components)]
        for name in names:
            self._run(["scontrol", "update", f"JobId={name}", f"ExcNodeList={','.join(nodes)}"])

    def start_after(self, job_ids: Sequence[int], first: int) -> None:
        """Make waiting jobs depend on the start of another one, in one call, as there may be little time.

        Raises
        ------
        SlurmRejectedError
            One of them does not wait: Slurm changes only those that do.
        """
        self._run(["scontrol", "update", f"JobId={','.join(map(str, job_ids))}", f"Dependency=after:{first}"])

    def update_node(self, name: str, state: str, *, reason: str = "") -> None:
        """Set the state of a node (for administrators)."""
        reasons = [f"Reason={reason}"] if reason else []
        self._run(["scontrol", "update", f"NodeName={name}", f"State={state}", *reasons])

    def add_cluster(self, name: str) -> None:
        """Enter a cluster into the accounting database (for administrators), unless it exists."""
        try:
            self._run(["sacctmgr", "--immediate", "add", "cluster", name])
        except SlurmRejectedError as error:
            if "already exists" not in str(error):
                raise
