"""Makes the command line and the environment with which a replica is started."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpcrl.config.plan import RoleGroup
from hpcrl.processes.environment_marks import KIND_VARIABLE, RUN_ID_VARIABLE
from hpcrl.processes.interpreter import with_safe_path
from hpcrl.runs.rundir import RunDir

_PLACEHOLDER = re.compile(r"\{(python|run_dir|replica|host|port)(?:\+(\d+))?\}")
#: variables of submitit and of an outer run, which roles must not inherit
_DROPPED_PREFIXES = ("SUBMITIT_", "HPCRL_")


def fill_placeholders(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Replace ``{python}``, ``{run_dir}``, ``{replica}``, ``{host}``, ``{port}`` and ``{port+N}``.

    Other braces stay (JSON in an argument is not a placeholder), and filled-in values are not searched again.
    """
    return [_PLACEHOLDER.sub(lambda match: _filled(match, values), part) for part in command]


def _filled(match: re.Match[str], values: Mapping[str, str]) -> str:
    name, above = match.groups()
    if above is None:
        return values[name]
    return str(int(values[name]) + int(above)) if name == "port" else match[0]


def role_environment(
    group: RoleGroup, replica: int, *, run: RunDir, run_id: str, attempt: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the whole environment of a replica: inherited variables, those of the plan, and its identity."""
    kept = {key: value for key, value in inherited.items() if not key.startswith(_DROPPED_PREFIXES)}
    return {
        # logs are followed while they are written; a recipe may say otherwise
        **with_safe_path({"PYTHONUNBUFFERED": "1", **kept, **group.env}),
        RUN_ID_VARIABLE: run_id,
        KIND_VARIABLE: "role",
        "HPCRL_RUN_DIR": str(run.path),
        "HPCRL_ATTEMPT": str(attempt),
        "HPCRL_ROLE": group.role.value,
        "HPCRL_REPLICA": str(replica),
    }
