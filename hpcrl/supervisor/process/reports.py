"""Types of the reports of guards, as the supervisor reads them; other content is refused."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class _Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="report"):
    """Origin of a report: its task, its node, and its time by the node's clock."""

    task: int
    node: str
    time_s: float


class Started(_Report, frozen=True, kw_only=True, tag="started"):
    """The role runs."""

    pid: int


class SpawnFailed(_Report, frozen=True, kw_only=True, tag="spawn_failed"):
    """The role could not be started."""

    error: str


class Dumped(_Report, frozen=True, kw_only=True, tag="dumped"):
    """Stacks were taken, or could not be."""

    path: str
    frames: list[str]
    stopped: list[int]
    problem: str


class Signalled(_Report, frozen=True, kw_only=True, tag="signalled"):
    """Another process than the supervisor wants the role to end."""

    signal: int


class RoleEnded(_Report, frozen=True, kw_only=True, tag="ended"):
    """The role has ended; one of the two is None."""

    exit_code: int | None
    signal: int | None


class Gone(_Report, frozen=True, kw_only=True, tag="gone"):
    """Nothing of the role is left but what hangs in the kernel."""

    left: list[int]


Report: TypeAlias = Started | SpawnFailed | Dumped | Signalled | RoleEnded | Gone
