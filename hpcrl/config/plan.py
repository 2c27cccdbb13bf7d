"""The plan: a recipe on a cluster, resolved. Pure data; written to ``plan.json`` and read by the supervisor."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hpcrl.config.base import NonNegativeInt, PositiveFloat, PositiveInt, StrictModel

__all__ = ["FileProbe", "HttpProbe", "Plan", "Role", "RoleGroup", "RolePolicy"]


class Role(StrEnum):
    """What a process is for (docs: words)."""

    TRAINER = "trainer"
    ENGINE = "engine"
    ORCHESTRATOR = "orchestrator"


class HttpProbe(StrictModel):
    """Ready when ``GET path`` on the replica's port answers 200."""

    kind: Literal["http"] = "http"
    path: str


class FileProbe(StrictModel):
    """Ready when the replica has written its ready file (`hpcrl.runs.role.RoleContext.ready`)."""

    kind: Literal["file"] = "file"


class RolePolicy(StrictModel):
    """What the end of a replica means for the run."""

    ends_run: bool = False
    """A clean end (exit code 0) of this role ends the run with success."""
    drain_order: NonNegativeInt = 0
    """Roles are asked to stop in rising order; a role is asked when all before it are gone."""
    stop_timeout_s: PositiveFloat
    """Time between SIGTERM and SIGKILL in seconds."""


class RoleGroup(StrictModel):
    """The replicas of one role.

    ``command`` holds placeholders that the supervisor fills for each replica: ``{python}``, ``{run_dir}``,
    ``{replica}``, ``{host}``, ``{port}`` (the replica's own).
    """

    role: Role
    replicas: PositiveInt
    ranks: PositiveInt
    """Processes of one replica (torchrun workers of a trainer)."""
    command: tuple[str, ...]
    env: dict[str, str] = {}
    after: tuple[Role, ...] = ()
    """Roles that must be ready before this one is started."""
    ready: Annotated[HttpProbe | FileProbe, Field(discriminator="kind")]
    start_timeout_s: PositiveFloat
    policy: RolePolicy


class Plan(StrictModel):
    """All that the supervisor needs."""

    format_version: Literal[1] = 1
    run: str
    """Name of the run."""
    recipe: str
    cluster: str
    run_dir: Path
    groups: tuple[RoleGroup, ...]
    first_port: PositiveInt
    last_port: PositiveInt
    time_limit_s: PositiveFloat

    def group(self, role: Role) -> RoleGroup:
        """The group of a role (KeyError where the plan has none)."""
        for group in self.groups:
            if group.role is role:
                return group
        raise KeyError(role)

    @property
    def processes(self) -> int:
        """Role processes, launchers not counted."""
        return sum(group.replicas * group.ranks for group in self.groups)
