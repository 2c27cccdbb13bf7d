"""Options of sbatch that a recipe may pass on (``job.sbatch_options``), and those that are hpcrl's own.

The names are those of sbatch(1), 22.05 to 25.11. One that the site's version does not know is refused by sbatch itself,
before there is a job. Which options a heterogeneous job passes on from component to component stands in Slurm's
documentation of heterogeneous jobs; the others are repeated in each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Literal

_Value = Literal["value", "maybe", "none"]

#: of the whole job: Slurm passes them on to all components, or takes them from the first one only
_JOB: dict[str, _Value] = {
    "acctg-freq": "value",
    "batch": "value",
    "bb": "value",
    "bbf": "value",
    "begin": "value",
    "deadline": "value",
    "delay-boot": "value",
    "dependency": "value",
    "extra": "value",
    "hold": "none",
    "kill-on-invalid-dep": "value",
    "licenses": "value",
    "mail-type": "value",
    "mail-user": "value",
    "mcs-label": "value",
    "nice": "maybe",
    "oom-kill-step": "maybe",
    "priority": "value",
    "profile": "value",
    "propagate": "maybe",
    "reboot": "none",
    "stepmgr": "none",
    "wait-all-nodes": "value",
    "wckey": "value",
}

#: of the nodes of one component: each component says them again
_COMPONENT: dict[str, _Value] = {
    "consolidate-segments": "none",
    "contiguous": "none",
    "core-spec": "value",
    "cores-per-socket": "value",
    "cpu-freq": "value",
    "gpu-freq": "value",
    "gres-flags": "value",
    "hint": "value",
    "mem-bind": "value",
    "mincpus": "value",
    "network": "value",
    "power": "value",
    "prefer": "value",
    "sockets-per-node": "value",
    "spread-segments": "none",
    "switches": "value",
    "thread-spec": "value",
    "threads-per-core": "value",
    "tmp": "value",
    "use-min-nodes": "none",
}

_LOGS = "what the batch process prints is kept in the run directory, under submitit/"
_SIZES = "the plan sets it from trainer.nodes, engine.replicas, engine.nodes and the node of the profile"
_GPUS = "the plan asks for all GPUs of its nodes, as `gres` of the profile says"
_MEMORY = "the plan asks for whole nodes (capabilities.exclusive and node.memory_gib of the profile)"
_CPUS = "the plan asks for whole nodes (capabilities.exclusive and node.cpus of the profile)"
_WHERE = (
    "roles go to any node of their partition: narrow it by job.reservation or constraint of the profile's partition"
)
_COMMAND = "it is about the command sbatch, which hpcrl runs and reads itself"
_USER = "a run belongs to the user who submits it"
_CLEAN = "the job starts from a clean environment: launch.inherit and env of the profile say what roles get"

#: set by hpcrl itself: why, and where to set it instead
_OWN: dict[str, str] = {
    "account": "set job.account",
    "array": "a run is one job with one supervisor; submit several runs",
    "chdir": "roles work in the directory where hpcrl is called",
    "cluster-constraint": "a run is on one cluster: set SLURM_CLUSTERS or SLURM_CONF",
    "clusters": "a run is on one cluster: set SLURM_CLUSTERS or SLURM_CONF",
    "comment": "hpcrl uses the comment to find the job",
    "constraint": "set constraint of the profile's partition",
    "container": "set container of the profile",
    "container-id": "set container of the profile",
    "cpus-per-gpu": _CPUS,
    "cpus-per-task": _CPUS,
    "distribution": "tasks of a replica are spread by the plan",
    "error": _LOGS,
    "exclude": "nodes that failed are avoided by job.exclude_failed_nodes_h; " + _WHERE,
    "exclusive": _CPUS,
    "export": _CLEAN,
    "export-file": _CLEAN,
    "extra-node-info": _CPUS,
    "get-user-env": _CLEAN,
    "gid": _USER,
    "gpu-bind": _GPUS,
    "gpus": _GPUS,
    "gpus-per-node": _GPUS,
    "gpus-per-socket": _GPUS,
    "gpus-per-task": _GPUS,
    "gres": _GPUS,
    "help": _COMMAND,
    "ignore-pbs": _COMMAND,
    "input": "the batch process reads nothing",
    "job-name": "the job is called after the run: give --name",
    "mem": _MEMORY,
    "mem-per-cpu": _MEMORY,
    "mem-per-gpu": _MEMORY,
    "no-kill": "set job.spare_nodes: the supervisor handles lost nodes",
    "no-requeue": "set job.requeue: never",
    "nodefile": _WHERE,
    "nodelist": _WHERE,
    "nodes": _SIZES,
    "ntasks": _SIZES,
    "ntasks-per-core": _SIZES,
    "ntasks-per-gpu": _SIZES,
    "ntasks-per-node": _SIZES,
    "ntasks-per-socket": _SIZES,
    "open-mode": _LOGS,
    "output": _LOGS,
    "overcommit": _CPUS,
    "oversubscribe": _CPUS,
    "parsable": _COMMAND,
    "partition": "set job.partition",
    "qos": "set job.qos",
    "quiet": _COMMAND,
    "requeue": "set job.requeue",
    "reservation": "set job.reservation",
    "resv-ports": "set ports of the profile",
    "segment": "set block_nodes of the profile's partition",
    "signal": "the warning before the end comes from limits.save_timeout_s of the profile",
    "spread-job": _WHERE,
    "test-only": _COMMAND + "; `hpcrl render` writes the script for it",
    "time": "set job.time_limit_h",
    "time-min": "the supervisor needs the end of the job: set job.time_limit_h",
    "tres-bind": _GPUS,
    "tres-per-task": _SIZES,
    "uid": _USER,
    "usage": _COMMAND,
    "verbose": _COMMAND,
    "version": _COMMAND,
    "wait": _COMMAND + "; `hpcrl submit --follow` waits",
    "wrap": "the batch process is the supervisor",
}
_KNOWN = {**_JOB, **_COMPONENT}


def option_faults(options: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the faults of a recipe's options: the index of each option that cannot be passed on, and the reason."""
    seen: set[str] = set()
    for index, option in enumerate(options):
        name = _name(option)
        if fault := _fault(option, name):
            yield index, fault
        elif name in seen:
            yield index, f"--{name} appears twice"
        seen.add(name)


def repeats_in_components(option: str) -> bool:
    """Return whether each component of a heterogeneous job must repeat an option (one without faults)."""
    return _name(option) in _COMPONENT


def _name(option: str) -> str:
    return option.removeprefix("--").partition("=")[0]


def _fault(option: str, name: str) -> str:
    if not option.startswith("--") or option != option.strip() or "\n" in option:
        return f"{option!r} is not of the form --name=value (the long name, one option an entry)"
    if name in _OWN:
        return f"--{name} is hpcrl's own: {_OWN[name]}"
    if name not in _KNOWN:
        close = get_close_matches(name, [*_KNOWN, *_OWN], n=1)
        return f"sbatch has no option --{name}" + (f"; did you mean --{close[0]}?" if close else "")
    _, equals, value = option.partition("=")
    if _KNOWN[name] == "value" and not value:
        # sbatch would take the next option as the value
        return f"--{name} needs a value: --{name}=..."
    if _KNOWN[name] == "none" and equals:
        return f"--{name} takes no value"
    return ""
