"""Imports of each role's interpreter on a node: one process for each library, with a deadline.

A library that crashes, hangs or prints does not affect the others. `hpcrl.sites.library_findings` interprets the
answers; the versions that work are in `hpcrl.versions`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.cluster_slurm import NoContainer
from hpcrl.processes.daemon_threads import DaemonExecutor
from hpcrl.sites.foreign_script import ScriptEnd, one_line, run_script
from hpcrl.storage.msgspec_types import prepared
from hpcrl.versions import LIBRARIES, NCCL, RequiredLibrary

SCRIPT = Path(__file__).with_name("library_script.py")
_LIMIT_S = 240.0
"""Longest import of torch and vLLM from a busy shared filesystem."""
_BUDGET_S = 480.0
"""Longest time for all imports of a node."""
_LEAST_S = 5.0
"""With less time left a library is not asked any more."""
_WORKERS = 4
_KNOWN = tuple(name for library in (*LIBRARIES, NCCL) for name in library.distributions)


class LibraryQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """One library that one interpreter imports.

    Attributes
    ----------
    python:
        The interpreter, absolute.
    roles:
        Roles that have it.
    library:
        Name in `hpcrl.versions.LIBRARIES`.
    needed:
        Whether one of the roles cannot start without.
    gpus:
        Whether the node has GPUs by the profile.
    environ:
        Variables of the role.
    """

    python: str
    roles: tuple[str, ...]
    library: str
    needed: bool
    gpus: bool = False
    environ: dict[str, str] = {}


class CudaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """State of CUDA as torch reports it.

    Attributes
    ----------
    built, driver:
        CUDA version that torch is built for, and that the driver supports; empty where there is none.
    problem:
        Reason why torch cannot start CUDA.
    gpus:
        GPUs that torch finds.
    nccl:
        Version of NCCL that torch loads.
    """

    built: str = ""
    driver: str = ""
    problem: str = ""
    gpus: int = 0
    nccl: str = ""


class LibraryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a question about a library.

    Attributes
    ----------
    question:
        The question.
    kind:
        ``good``, ``absent`` (not installed), ``failed``, ``crash``, ``hang``, ``missing`` (no such interpreter),
        ``unreadable`` (an invalid answer) or ``skipped`` (no time was left).
    problem:
        The reason, where it is not good.
    python_version, version, distribution:
        Texts as they were reported; empty where unknown.
    missing:
        Attributes that hpcrl uses and the library lacks.
    unmet:
        Unmet requirements of the library for other libraries.
    printed:
        First line that the import printed on stdout.
    build_problem:
        Triton on nodes with GPUs: why it cannot build its module in C; empty where it can.
    """

    question: LibraryQuestion
    kind: str = "good"
    problem: str = ""
    python_version: str = ""
    version: str = ""
    distribution: str = ""
    missing: list[str] = []
    unmet: list[str] = []
    printed: str = ""
    cuda: CudaAnswer | None = None
    build_problem: str = ""


class _Answered(msgspec.Struct, frozen=True):
    """All lines of the script's answer, one over the other."""

    python: str = ""
    distribution: str = ""
    version: str = ""
    absent: bool = False
    imported: bool = False
    error: str = ""
    missing: list[str] = []
    unmet: list[str] = []
    cuda: CudaAnswer | None = None
    build_problem: str = ""


def interpreters(cluster: SlurmCluster) -> dict[str, str]:
    """Return the interpreters that a profile names, by role, absolute; ``vllm`` is for engines of that backend."""
    named = {str(role): python for role, python in cluster.python_by_role.items()}
    if cluster.vllm_python is not None:
        named["vllm"] = cluster.vllm_python
    return {role: os.path.abspath(os.path.expanduser(os.path.expandvars(python))) for role, python in named.items()}


def probe_environment(cluster: SlurmCluster, role: str) -> dict[str, str]:
    """Return the profile's own variables of a role, without those that are filled on each node."""
    by_role = {str(name): env for name, env in cluster.env_by_role.items()}
    env = {**cluster.env, **by_role.get("engine" if role == "vllm" else role, {})}
    return {name: value for name, value in env.items() if "{node_" not in value}


def library_questions(cluster: SlurmCluster, partition: str | None = None) -> list[LibraryQuestion]:
    """Return what interpreters of roles import; nothing in containers.

    Roles that the profile gives no interpreter have that of the command line. An interpreter of engines alone may be
    vLLM's or that of embedded engines: it needs what both have.

    Parameters
    ----------
    partition:
        Its roles only; None: all roles.
    """
    if not isinstance(cluster.container, NoContainer):
        return []
    by_role = interpreters(cluster)
    roles_of: dict[str, list[str]] = {}
    for role in ("trainer", "orchestrator", "env", "engine", "vllm"):
        if (role == "engine" and role not in by_role and "vllm" in by_role) or (role == "vllm" and role not in by_role):
            continue
        named = by_role.get("orchestrator" if role == "env" else role, sys.executable)
        if partition is None or partition in _partitions_of(cluster, role):
            roles_of.setdefault(named, []).append(role)
    places = cluster.partitions if partition is None else [partition]
    gpus = any(cluster.partitions[name].node.gpus > 0 for name in places)
    return [
        LibraryQuestion(
            python=python,
            roles=tuple(roles),
            library=library.name,
            needed=needed,
            gpus=gpus,
            environ=probe_environment(cluster, roles[0]),
        )
        for python, roles in roles_of.items()
        for library in LIBRARIES
        if (needed := _is_needed(library, roles, gpus=gpus)) is not None
    ]


def _partitions_of(cluster: SlurmCluster, role: str) -> set[str]:
    if role in ("engine", "vllm"):
        return {cluster.partition_name(each) for each in ("engine", "prefill", "decode")}
    return {cluster.partition_name("orchestrator" if role == "env" else role)}


def _is_needed(library: RequiredLibrary, roles: Sequence[str], *, gpus: bool) -> bool | None:
    """Return whether roles need a library; None where they have nothing to do with it."""
    if library.on_gpus and not gpus:
        return None
    if list(roles) == ["engine"]:
        # a profile may name vLLM's environment as that of engines
        if {"engine", "vllm"} <= set(library.needed):
            return True
        return False if {"engine", "vllm"} & {*library.needed, *library.used} else None
    if set(roles) & set(library.needed):
        return True
    return False if set(roles) & set(library.used) else None


def probe_libraries(
    questions: Iterable[LibraryQuestion],
    *,
    limit_s: float = _LIMIT_S,
    budget_s: float = _BUDGET_S,
    workers: int = _WORKERS,
    script: Path = SCRIPT,
) -> list[LibraryAnswer]:
    """Ask all questions, some at once; answers are in the order of questions. Blocks for ``budget_s`` at most.

    Parameters
    ----------
    limit_s:
        Longest time of one import.
    budget_s:
        Longest time of all; what is not begun until then is ``skipped``.
    """
    deadline = time.monotonic() + budget_s
    pool = DaemonExecutor(workers, "library")

    def ask(question: LibraryQuestion) -> LibraryAnswer:
        left_s = min(limit_s, deadline - time.monotonic())
        if left_s < min(_LEAST_S, limit_s):
            return LibraryAnswer(question=question, kind="skipped", problem="no time was left to import it")
        return _ask(question, left_s, script)

    futures = [pool.submit(ask, question) for question in questions]
    try:
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False)


def _ask(question: LibraryQuestion, limit_s: float, script: Path) -> LibraryAnswer:
    library = library_named(question.library)
    asked = {
        "module": library.module,
        "distributions": library.distributions,
        "attributes": library.attributes,
        "known": _KNOWN,
        "nccl": NCCL.distributions,
        "gpus": question.gpus,
        # before it is killed it prints its stack
        "hang_s": max(0.1, limit_s * 0.9),
    }
    end = run_script(question.python, script, asked, limit_s=limit_s, environ=question.environ)
    return answer_of(question, end)


def answer_of(question: LibraryQuestion, end: ScriptEnd) -> LibraryAnswer:
    """Combine the answers of a script with its end."""
    merged: Mapping[str, object] = {key: value for line in end.answers for key, value in line.items()}
    try:
        said = msgspec.convert(merged, type=prepared(_Answered))
    except msgspec.ValidationError as error:
        return LibraryAnswer(question=question, kind="unreadable", problem=f"its answer cannot be read: {error}")
    kind, problem = end.kind, end.problem
    if kind == "good" and said.absent:
        kind, problem = "absent", "it is not installed"
    elif kind == "good" and said.error:
        kind, problem = "failed", said.error
    elif kind == "good" and not said.imported:
        kind, problem = "failed", "it ended the interpreter while it was imported"
    elif kind != "good" and said.imported:
        problem = f"after its import: {problem}"
    return LibraryAnswer(
        question=question,
        kind=kind,
        problem=one_line(problem),
        python_version=said.python,
        version=said.version,
        distribution=said.distribution,
        missing=said.missing,
        unmet=said.unmet,
        printed=next((line for line in end.printed.splitlines() if line.strip()), "").strip(),
        cuda=said.cuda,
        build_problem=one_line(said.build_problem),
    )


def library_named(name: str) -> RequiredLibrary:
    """Return the row of `hpcrl.versions.LIBRARIES` with a name."""
    return next(library for library in LIBRARIES if library.name == name)
