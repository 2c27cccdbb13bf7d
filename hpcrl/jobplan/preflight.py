"""Checks of a run's inputs before anything is started."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.load import Loaded
from hpcrl.config.plan import Plan, Role, RoleGroup
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding, UsageError
from hpcrl.installing import install_command
from hpcrl.jobplan.model_rules import check_model_rules
from hpcrl.jobplan.packages import has_package
from hpcrl.models import load_arch, load_facts
from hpcrl.processes.interpreter import module_command
from hpcrl.storage.trusted_paths import read_secret

_STORE = "store"
"""An extra of hpcrl, not a distribution."""
_FLAGS_TIMEOUT_S = 900.0
"""Loading vLLM takes ten seconds of one core, on a busy login node many times that."""
_PLACEHOLDER = re.compile(r"\{(run_dir|replica|host|port|node_rank|node_host)(?:[+*](\d+))?\}")
_ANY_PORT = 20000
_OTHER_FAMILY = (
    "choose a model of a family that the trainer has (docs/training.md); more families can be planned than trained"
)


def with_model_of(recipe: Loaded[Recipe], config_dir: Path, *, named: str) -> Loaded[Recipe]:
    """Return the recipe with the model of another run in place of its own (ConfigError where its shape differs).

    Parameters
    ----------
    config_dir:
        Holds the configuration of that model.
    named:
        Description of the model for messages.
    """
    where, own = recipe.where("model.path"), Path(recipe.value.model.path)
    if not (config_dir / "config.json").is_file():
        hint = "restore it: its configuration and tokenizer are needed"
        what = f"the start model of the other run, {config_dir}, is gone ({named})"
        raise ConfigError([Finding("--from", "model.path", what, hint)])
    if (own / "config.json").is_file():
        try:
            wanted, given = dataclasses.asdict(load_arch(own)), dataclasses.asdict(load_arch(config_dir))
        except ValueError as error:
            raise ConfigError([Finding(where, "model.path", str(error), _OTHER_FAMILY)]) from error
        different = [f"{key} is {given[key]}, not {wanted[key]}" for key in wanted if given[key] != wanted[key]]
        if different:
            what = f"the model of {named} is another one than the recipe's, {own}: {'; '.join(different)}"
            raise ConfigError([Finding(where, "model.path", what, "submit the recipe of that run, or of its model")])
    model = recipe.value.model.model_copy(update={"path": str(config_dir)})
    return dataclasses.replace(recipe, value=recipe.value.model_copy(update={"model": model}))


def check_sizes(recipe: Loaded[Recipe], cluster: Loaded[ClusterProfile]) -> None:
    """Check a recipe against the sizes of its model, where these are known: the model may be made later.

    Raises
    ------
    ConfigError
        With every conflict; or there is a ``config.json``, but of an architecture that hpcrl has no facts of.
    """
    try:
        facts = load_facts(recipe.value.model.path)
    except FileNotFoundError:
        return
    except ValueError as error:
        hint = "choose a model of a known architecture"
        raise ConfigError([Finding(recipe.where("model.path"), "model.path", str(error), hint)]) from error
    check_model_rules(recipe, cluster, facts)


def check_planned_sizes(recipe: Loaded[Recipe], cluster: Loaded[ClusterProfile]) -> None:
    """Check as `check_sizes` does, but say nothing of an unknown architecture: the planner says what it lacks."""
    try:
        facts = load_facts(recipe.value.model.path)
    except (FileNotFoundError, ValueError):
        return
    check_model_rules(recipe, cluster, facts)


def check_pythons(plan: Plan, site: Loaded[ClusterProfile]) -> None:
    """Check that the interpreters of roles are there, as far as that can be seen from here.

    On a Slurm site a directory that is not visible here may be on the nodes; a file that is missing in a visible one
    is missing.

    Raises
    ------
    ConfigError
        An interpreter is missing.
    """
    for group in plan.groups:
        if group.python is None or plan.container is not None:
            continue
        python = Path(group.python)
        hidden = site.value.uses_slurm and not python.parent.is_dir()
        if python.is_file() or hidden:
            continue
        key, hint = "python_by_role", "correct the path"
        if site.value.vllm_python is not None and "engine" not in site.value.python_by_role:
            key, hint = "vllm_python", "make the environment of engines: python3 tools/bootstrap.py --vllm"
        what = f"{python}, the interpreter of {group.role}, does not exist"
        raise ConfigError([Finding(site.where(key), f"cluster.{key}", what, hint)])


def check_secrets(plan: Plan, site: Loaded[ClusterProfile]) -> None:
    """Check that the files of secrets are there and closed, as far as that can be seen from here.

    Raises
    ------
    ConfigError
        One is missing, or others may read it.
    """
    check_secret_files({name: file for group in plan.groups for name, file in group.secrets.items()}, site)


def check_secret_files(files: Mapping[str, str], site: Loaded[ClusterProfile]) -> None:
    """Check files of secrets by name, with absolute paths; errors as of `check_secrets`."""
    for name, file in files.items():
        if site.value.uses_slurm and not Path(file).parent.is_dir():
            continue  # it may exist on the nodes
        try:
            read_secret(Path(file))
        except OSError as error:
            hint = f"make it a file of yours with the value in it: chmod 600 {file}"
            raise ConfigError([Finding(site.where("secrets"), f"secrets.{name}", str(error), hint)]) from error


def check_engine_flags(recipe: Loaded[Recipe], plan: Plan) -> list[str]:
    """Let the installed vLLM's own parser check the commands of engines.

    Takes about ten seconds of a processor. Does nothing for other backends, and for the payload ``probe``.

    Returns
    -------
    list of str
        Why a check was not possible, for the user to read; empty where all flags are good.

    Raises
    ------
    ConfigError
        vLLM refuses the flags.
    UsageError
        The interpreter of engines cannot load vLLM and hpcrl, or does not answer.
    """
    if recipe.value.engine.backend != "vllm" or recipe.value.job.payload == "probe":
        return []
    notes, asked = [], dict[str, list[RoleGroup]]()
    for group in plan.groups:
        if _engine_words(group) is None:
            continue
        python = group.python or plan.python or sys.executable
        if plan.container is not None or not Path(python).is_file():
            where = "in the container" if plan.container is not None else f"visible here ({python})"
            notes.append(f"flags of {group.role} were not checked: its vLLM is not {where}")
            continue
        asked.setdefault(python, []).append(group)
    for python, groups in asked.items():
        for group, refusal in zip(groups, _ask_parser(python, groups), strict=True):
            if refusal is not None:
                what = f"vLLM refuses flags of {group.role}: {refusal}"
                raise ConfigError([Finding(recipe.where("engine"), "engine.vllm_args", what, "correct them")])
    return notes


class _Package(NamedTuple):
    """Package that a role needs: the key of its setting, its names, and the setting that works without it."""

    key: str
    name: str
    distribution: str
    instead: str


def check_packages(recipe: Loaded[Recipe], plan: Plan) -> list[str]:
    """Check that what router, pools and the fabric are made of is installed for the interpreters of their roles.

    Returns
    -------
    list of str
        Why that could not be seen from here; empty where all is there.

    Raises
    ------
    ConfigError
        It is not.
    """
    if recipe.value.job.payload == "probe":
        return []
    dynamo = recipe.value.engine.router.kind == "dynamo"
    package, distribution = ("dynamo.llm", "ai-dynamo-runtime") if dynamo else ("vllm_router", "vllm-router")
    wanted = {Role.ROUTER: _Package("engine.router.kind", package, distribution, "kind: direct")}
    if recipe.value.rollouts.warehouse.backend == "mooncake":
        pooled = _Package("rollouts.warehouse.backend", "mooncake", _STORE, "backend: embedded")
        wanted |= {Role.ORCHESTRATOR: pooled, Role.TRAINER: pooled}
    if recipe.value.engine.kv_store is not None and recipe.value.engine.backend == "embedded":
        kept = _Package("engine.kv_store", "mooncake", _STORE, "engine.kv_store: null")
        wanted |= dict.fromkeys((Role.STORE, Role.ENGINE, Role.PREFILL, Role.DECODE), kept)
    if recipe.value.handoff.transport == "fabric":
        pulled = _Package("handoff.transport", "mooncake", _STORE, "handoff.transport: share")
        wanted = dict.fromkeys((Role.TRAINER, Role.ENGINE, Role.PREFILL, Role.DECODE), pulled) | wanted
    notes = []
    for group in plan.groups:
        if group.role in wanted:
            notes += _package_notes(recipe, plan, group, wanted[group.role])
    return notes


def _package_notes(recipe: Loaded[Recipe], plan: Plan, group: RoleGroup, package: _Package) -> list[str]:
    """Return notes where the presence of a package could not be checked (ConfigError where it is missing)."""
    python = group.python or plan.python or sys.executable
    found = has_package(plan, python, package.name)
    if found is False:
        what = f"{python} has no {package.name}"
        install = f"{shlex.quote(python)} -m pip install {package.distribution}"
        if package.distribution == _STORE:
            install = install_command(_STORE, python=python)
        hint = f"{install}, name another in cluster.python_by_role.{group.role}, or {package.instead}"
        raise ConfigError([Finding(recipe.where(package.key), package.key, what, hint)])
    return [f"whether {package.name} is installed for the {group.role} {found}"] if isinstance(found, str) else []


def _stand_in(placeholder: re.Match[str]) -> str:
    """Return a value that the supervisor could fill in."""
    name, above = placeholder.groups()
    return {"port": str(_ANY_PORT + int(above or 0)), "host": "127.0.0.1"}.get(name, "0")


def _engine_words(group: RoleGroup) -> list[str] | None:
    """Return the words after vLLM's program in a command; None where it does not start vLLM."""
    for i, word in enumerate(group.command):
        if word.startswith("vllm.entrypoints."):
            return list(group.command[i + 1 :])
    return None


def _ask_parser(python: str, groups: Sequence[RoleGroup]) -> list[str | None]:
    """Return the complaints of an interpreter's vLLM about the command of each group of engines; None where it accepts.

    Raises
    ------
    UsageError
        The interpreter cannot load vLLM and hpcrl, or does not answer.
    """
    lines = [_filled(group) for group in groups]
    roles, command = ", ".join(group.role for group in groups), module_command(python, "hpcrl.inference.vllm.flags")
    try:
        result = subprocess.run(
            command, input=json.dumps(lines), capture_output=True, text=True, timeout=_FLAGS_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"flags of {roles} cannot be checked: {error}") from error
    if result.returncode:
        last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        raise UsageError(
            f"{python} cannot check the flags of {roles}: {last}\n"
            "    hint: install vLLM and hpcrl for this interpreter (python3 tools/bootstrap.py --vllm)"
        )
    answer: dict[str, list[str | None]] = json.loads(result.stdout.splitlines()[-1])
    return answer["refused"]


def _filled(group: RoleGroup) -> list[str]:
    """Return the words after vLLM's program, with values like those of the supervisor."""
    words = _engine_words(group)
    assert words is not None
    if words[0] == "serve":
        words = ["--model", *words[1:]]
    # vLLM compares ports with each other: they must differ as in the run
    return [_PLACEHOLDER.sub(_stand_in, word) for word in words]
