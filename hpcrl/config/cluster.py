"""The cluster profile: what a site is. Every field is documented here; docs/configuration.md is made from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpcrl.config.base import Name, PositiveFloat, PositiveInt, StrictModel

__all__ = ["ClusterProfile", "LimitsConfig", "PathsConfig", "PortsConfig"]


class PathsConfig(StrictModel):
    """Directories of a site. ``~`` and ``$NAME`` are expanded; relative ones start where hpcrl is called."""

    runs_root: str
    """Holds a directory for each run; visible under the same name from all nodes."""


class PortsConfig(StrictModel):
    """Where the supervisor looks for free TCP ports."""

    first: Annotated[int, Field(ge=1024, le=65535)] = 20000
    """Lowest port. Stay below the kernel's ephemeral range (32768 by default), or a connection may take it."""
    last: Annotated[int, Field(ge=1024, le=65535)] = 29999
    """Highest port."""


class LimitsConfig(StrictModel):
    """Deadlines that depend on the site."""

    start_timeout_s: PositiveFloat = 300.0
    """Longest start of one role, from process start to ready, in seconds."""
    stop_timeout_s: PositiveFloat = 5.0
    """Time between asking a role to stop and killing it, in seconds."""
    time_limit_h: PositiveFloat = 168.0
    """Longest run in hours."""


class ClusterProfile(StrictModel):
    """A site."""

    name: Name
    """Name of the profile; equals its file name without ``.yaml``."""
    description: str = ""
    """One sentence for ``hpcrl cluster list``."""
    kind: Literal["local"]
    """``local``: everything runs on this machine, without Slurm."""
    paths: PathsConfig
    """Directories."""
    ports: PortsConfig = PortsConfig()
    """Free ports."""
    limits: LimitsConfig = LimitsConfig()
    """Deadlines."""
    max_processes: PositiveInt = 64
    """Refuse plans with more processes than this."""
    env: dict[str, str] = {}
    """Environment variables for all roles."""
