"""``#SBATCH`` options of a job, decided in Python; templates only write them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpcrl.config.layout import JobComponent
from hpcrl.config.plan import Plan
from hpcrl.config.sbatch_options import repeats_in_components
from hpcrl.errors import UsageError
from hpcrl.slurm.launch_arguments import gpu_options

_MAX_SIGNAL_S = 65535


class JobIdentity:
    """Identity by which a job is found again: a name for people, a comment for hpcrl. A requeue keeps both.

    Parameters
    ----------
    run:
        Name of the run.
    run_id:
        Its id.
    part:
        ``main``, or ``<role>-<replica>`` for a job of one replica.
    """

    def __init__(self, run: str, run_id: str, part: str = "main") -> None:
        self.part = part
        self.name = f"hpcrl-{run}" if part == "main" else f"hpcrl-{run}-{part}"
        self.token = f"{run_id}:{part}"

    @property
    def comment(self) -> str:
        """Return the comment of the job."""
        return f"hpcrl:{self.token}"


def directive(option: str) -> str:
    """Return an option quoted as sbatch reads it from a script.

    sbatch groups by quotes as a shell does, but treats a backslash as an escape between single quotes as well.

    Raises
    ------
    UsageError
        The option contains a line break.
    """
    if "\n" in option:
        raise UsageError(f"a line break cannot be passed to Slurm: {option!r}")
    name, separator, value = option.partition("=")
    return name + separator + (shlex.quote(value).replace("\\", "\\\\") if separator else "")


def job_options(
    plan: Plan, identity: JobIdentity, *, output: Path, cwd: Path, exclude: tuple[str, ...] = ()
) -> list[str]:
    """Return the options of the whole job, which Slurm takes from the first component.

    UsageError where ``output`` has a backslash.
    """
    options = [
        f"--output={output_pattern(output)}",
        # a requeued job writes into the same file, which must keep the log of earlier attempts
        "--open-mode=append",
        f"--chdir={cwd}",
        # the script itself clears the environment: NONE would make Slurm run a login shell on the node and wait for
        # it, and hide the environment from steps
        "--export=ALL",
        *repeated_options(plan, identity),
    ]
    if plan.attempts.signal_lead_s and identity.part == "main":
        # B: only to the batch script, which is the supervisor; without it, every role would get it as well.
        # A job of one replica has nothing to save: it is replaced
        options.append(f"--signal=B:USR2@{min(plan.attempts.signal_lead_s, _MAX_SIGNAL_S)}")
    if exclude:
        options.append(f"--exclude={','.join(exclude)}")
    return [*options, *(option for option in plan.layout.sbatch_options if not repeats_in_components(option))]


def component_options(component: JobComponent, more: Sequence[str] = ()) -> list[str]:
    """Return the options of one component, with those of the recipe (``more``).

    Slurm does not propagate them: each component has all of them.
    """
    options = [f"--partition={component.partition}"]
    for name in ("account", "qos", "reservation", "constraint"):
        value = getattr(component, name)
        if value is not None:
            options.append(f"--{name}={value}")
    options += [f"--nodes={component.asked}", "--ntasks-per-node=1", *gpu_options(component)]
    if component.exclusive:
        options += ["--exclusive", "--mem=0"]
    else:
        options += [f"--cpus-per-task={component.cpus}", f"--mem={int(component.memory_gib * 1024)}M"]
    if component.segment is not None:
        options.append(f"--segment={component.segment}")
    return [*options, *(option for option in more if repeats_in_components(option))]


def repeated_options(plan: Plan, identity: JobIdentity) -> list[str]:
    """Return the options that each component of a heterogeneous job has, although Slurm propagates some of them."""
    # a heterogeneous job ends with the first of its components that does not have it, whichever loses a node
    survives = ["--no-kill"] if plan.layout.spares and identity.part == "main" else []
    return [
        f"--job-name={identity.name}",
        f"--comment={identity.comment}",
        f"--time={_time(plan.time_limit_s)}",
        "--requeue" if plan.attempts.requeue else "--no-requeue",
        *survives,
    ]


def _time(seconds: float) -> str:
    """Return ``D-HH:MM:SS``, rounded down to a minute as Slurm does."""
    minutes = max(1, int(seconds // 60))
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


def output_pattern(path: Path) -> str:
    """Return a file name in which Slurm replaces only ``%j``, and that only in its last part.

    Raises
    ------
    UsageError
        The path contains a backslash.
    """
    if "\\" in str(path):
        raise UsageError(f"Slurm cannot write to {str(path)!r}: a backslash has a special meaning in its paths")
    name = path.name.replace("%", "%%").replace("%%j", "%j")
    return str(path.parent).replace("%", "%%") + f"/{name}"
