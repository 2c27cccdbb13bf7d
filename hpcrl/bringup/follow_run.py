"""Follow a run of a stage to its end: its events are printed, and it ends together with the command."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable
from pathlib import Path

from hpcrl.bringup.stage import SiteBench, StageStoppedError, quoted
from hpcrl.config.plan import Plan
from hpcrl.errors import HpcrlError, RunDirError
from hpcrl.runs.job_facts import set_job_query
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.diagnosis import diagnose
from hpcrl.slurm.lookup import ask_soon, look_up
from hpcrl.submit.submission import cancel

_POLL_S = 2.0
_LATE_S = 180.0
"""Maximum seconds after its time limit until the end of a job is visible."""
_LAST_WORDS = 15


def follow_to_end(run: RunDir, plan: Plan, *, wait_s: float, say: Callable[[str], None]) -> None:
    """Wait until a run has completed, and say what happens meanwhile.

    Parameters
    ----------
    wait_s:
        Maximum time in the queue in seconds; then comes the time limit of its job.

    Raises
    ------
    StageStoppedError
        It has not completed; with what ended it, and its last words. Where the time was over it still runs.
    """
    set_job_query(look_up)
    view = _wait(run, plan, wait_s, say)
    if view.state is RunState.COMPLETED:
        return
    found = diagnose(run)
    words = "\n".join(f"    | {line}" for line in found.last_words[-_LAST_WORDS:])
    hint = f"\n    hint: {found.hint}" if found.hint else ""
    raise StageStoppedError(
        f"{run.name} is {view.state}: {found.sentence}{hint}" + (f"\n{words}" if words else ""),
        commands=[f"hpcrl why {quoted(run.path)}    # all that followed: --events", f"hpcrl logs {quoted(run.path)}"],
    )


def end_open_run(bench: SiteBench) -> None:
    """End the run that a call has submitted and not seen to its end, and forget it; says what became of it."""
    if not bench.state.open_run:
        return
    run = RunDir(Path(bench.state.open_run))
    set_job_query(look_up)
    if run.record_path.is_file() and not observe(run).state.ended:
        bench.say(f"ending {run.name}")
        try:
            bench.say(f"{run.name} is {cancel(run, user=getpass.getuser()).state}")
        except RunDirError as error:
            # it has ended meanwhile, or was never submitted
            bench.say(str(error).partition("\n")[0])
        except HpcrlError as error:
            bench.say(f"{run.name} may still have a job: {error}\n    hint: hpcrl cancel {quoted(run.path)}")
            return
    bench.state.open_run = ""


def _wait(run: RunDir, plan: Plan, wait_s: float, say: Callable[[str], None]) -> RunView:
    begun = time.monotonic()
    deadline, has_nodes = begun + wait_s, False
    said, steps = "", 0
    while True:
        if not has_nodes:
            # without this the known state of a waiting job may be ten seconds old
            ask_soon()
        view = observe(run)
        if (words := _words(view)) != said:
            said = words
            say(words)
        for record in read_metrics(run)[steps:]:
            steps += 1
            say(f"step {record.step} after {time.monotonic() - begun:.0f} s, reward {record.reward_mean:.3f}")
        if view.state.ended:
            return view
        if not has_nodes and view.state not in (RunState.SUBMITTED, RunState.REQUEUED):
            has_nodes, deadline = True, time.monotonic() + plan.time_limit_s + _LATE_S
        if time.monotonic() > deadline:
            why = f" ({view.job.reason})" if view.job is not None and view.job.reason else ""
            if has_nodes:
                raise StageStoppedError(f"{run.name} has not ended {_LATE_S:g} s after its time limit; it is cancelled")
            raise StageStoppedError(
                f"{run.name} had no nodes within {wait_s:g} s{why}; it is cancelled\n"
                "    hint: --wait with more seconds, or when nodes are free (`sinfo`, `squeue`)"
            )
        time.sleep(_POLL_S)


def _words(view: RunView) -> str:
    """Return the state of a run in a line."""
    job = view.job
    if view.state is RunState.SUBMITTED and job is not None:
        return f"job {job.job_id} {job.state.lower()}" + (f" ({job.reason})" if job.reason else "")
    roles = ", ".join(f"{c.role} {str(c.state).lower()}" for c in view.components)
    return f"{str(view.state).lower()}: {roles}" if roles and not view.state.ended else str(view.state).lower()
