"""The scripts of a run, as a submit sends them: what `hpcrl render` shows, and what a resume and elastic replicas use.

One function makes them all, so that nobody looks at another script than Slurm gets.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.mounts import check_working_directory
from hpcrl.config.plan import Plan
from hpcrl.interpreter import module_command
from hpcrl.marks import KIND_VARIABLE, RUN_ID_VARIABLE
from hpcrl.slurm.render import Script, ScriptPart, planned_parts, render_jobs, render_part

__all__ = ["JOB_FOLDER", "STAND_IN_ID", "batch_process", "in_job_script", "run_scripts", "submission_id"]

JOB_FOLDER = "submitit"
"""Logs of batch processes, and submitit's pickles."""
STAND_IN_ID = "0" * 32
"""In scripts that are only looked at; a run id is random."""


def batch_process(folder: Path | str) -> list[str]:
    """What runs the supervisor that submitit has pickled into ``folder``."""
    return module_command(sys.executable, "hpcrl.slurm.batch", str(folder), unbuffered=True)


def submission_id(run_id: str, number: int) -> str:
    """The run id, with a number from the second submission on: an ended job of the first must not be found."""
    return run_id if number == 1 else f"{run_id}-{number}"


def run_scripts(
    plan: Plan,
    cluster: SlurmCluster,
    *,
    run_id: str,
    run_dir: Path | None = None,
    number: int = 1,
    exclude: Sequence[str] = (),
    templates: Path | None = None,
    parts: Sequence[ScriptPart] | None = None,
) -> list[Script]:
    """The scripts of one submission of a run, called from the working directory that its roles will have.

    Parameters
    ----------
    plan, cluster:
        What the jobs are and where.
    run_id, number:
        Of the run, and of the submission, from 1.
    run_dir:
        Where the run is now; where the plan has it by default.
    exclude, templates, parts:
        See `hpcrl.slurm.render.render_jobs`, as are the errors.
    """
    check_working_directory(plan.container, Path.cwd())
    run_dir = plan.run_dir if run_dir is None else run_dir
    folder = run_dir / JOB_FOLDER

    def command(part: str) -> list[str]:
        variables = {RUN_ID_VARIABLE: run_id, KIND_VARIABLE: "launch"}
        if part == "main":
            # submitit's process asks by this which kind of job it is in
            return _with_variables({"SUBMITIT_EXECUTOR": "slurm", **variables}, batch_process(folder))
        role, _, replica = part.rpartition("-")
        words = [str(run_dir), role, replica, str(number)]
        return _with_variables(variables, module_command(sys.executable, "hpcrl.supervisor.elastic.holder", *words))

    return render_jobs(
        plan,
        cluster,
        run_id=submission_id(run_id, number),
        command=command,
        cwd=Path.cwd(),
        output=lambda part: folder / ("%j_0_log.out" if part == "main" else f"{part}.log"),
        exclude=exclude,
        templates=templates,
        parts=parts,
    )


def in_job_script(plan: Plan, cluster: SlurmCluster, *, run_id: str, run_dir: Path) -> str:
    """What starts the supervisor inside of an allocation that is there: the environment of a job, nothing for sbatch.

    It keeps submitit's variables, by which the process finds what was handed over to it.
    """
    check_working_directory(plan.container, Path.cwd())
    site = cluster.model_copy(
        update={"launch": cluster.launch.model_copy(update={"inherit": (*cluster.launch.inherit, "SUBMITIT_*")})}
    )
    variables = {RUN_ID_VARIABLE: run_id, KIND_VARIABLE: "launch"}
    command = _with_variables(variables, batch_process(run_dir / JOB_FOLDER))
    (part,) = planned_parts(plan)
    return render_part(plan, site, part, options=[[]], command=command)


def _with_variables(variables: dict[str, str], command: Sequence[str]) -> list[str]:
    """A command with variables set for it alone, as the script's last line: ``env`` becomes the command."""
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
