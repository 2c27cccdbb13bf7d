"""Scripts of a run, for `hpcrl render`, a submit, a resume and elastic replicas.

One function makes them all, so that the rendered script is the one that Slurm gets.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.mounts import check_working_directory
from hpcrl.config.plan import Plan
from hpcrl.processes.environment_marks import KIND_VARIABLE, RUN_ID_VARIABLE
from hpcrl.processes.interpreter import module_command
from hpcrl.slurm.render import Script, ScriptPart, planned_parts, render_jobs, render_part

JOB_FOLDER = "submitit"
"""Logs of batch processes, and submitit's pickles."""
STAND_IN_ID = "0" * 32
"""Run id in scripts that are only shown; a real run id is random."""


def batch_process(folder: Path | str) -> list[str]:
    """Return the command that runs the supervisor which submitit has pickled into ``folder``."""
    return module_command(sys.executable, "hpcrl.slurm.batch", str(folder), unbuffered=True)


def submission_id(run_id: str, number: int) -> str:
    """Return the run id, with a number from the second submission on, so that ended jobs of the first are not found."""
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
    """Return the scripts of one submission of a run; called from the working directory that its roles will have.

    Parameters
    ----------
    plan, cluster:
        The jobs and where they run.
    run_id, number:
        Id of the run, and number of the submission, from 1.
    run_dir:
        Present directory of the run; that of the plan by default.
    exclude, templates, parts:
        See `hpcrl.slurm.render.render_jobs`, also for the errors.
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
    """Return the script that starts the supervisor inside an existing allocation: a job's environment without options.

    It keeps submitit's variables, by which the process finds its pickled arguments.
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
    """Return a command with variables set for it alone, as the script's last line: ``env`` becomes the command."""
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
