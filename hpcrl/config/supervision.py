"""Settings of a recipe for replicas that fail or hang."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.base import (
    NonNegativeInt,
    PositiveFloat,
    StrictModel,
)


class RolePolicyConfig(StrictModel):
    """Actions of the supervisor for one role. Each role has its own defaults."""

    critical: bool = True
    """The run ends when a replica is lost for good. ``false`` (engines): it continues while the role has another."""
    restart: Literal["never", "on-failure"] = "never"
    """``on-failure`` (engines): a replica that fails or hangs is started again in its place."""
    max_restarts: NonNegativeInt = 3
    """Restarts of one replica within ``restart_window_s``; one failure more, and it is lost for good."""
    restart_window_s: PositiveFloat = 3600.0
    """Restarts longer ago than this do not count, in seconds."""
    grace_s: PositiveFloat | None = None
    """Time between asking a replica to stop and killing it, in seconds; a checkpoint that is being written is waited
    for before. None: the site's ``limits.stop_timeout_s``."""
    drain_order: NonNegativeInt = 0
    """At the end roles are asked to stop in rising order; a role is asked when all before it are gone."""


class OrchestratorPolicyConfig(RolePolicyConfig):
    """The orchestrator: it stops after the trainer."""

    drain_order: NonNegativeInt = 1
    """At the end roles are asked to stop in rising order; a role is asked when all before it are gone."""


class EnginePolicyConfig(RolePolicyConfig):
    """Engines: they are restarted in place, and stop last."""

    restart: Literal["never", "on-failure"] = "on-failure"
    """``on-failure``: a replica that fails or hangs is started again in its place."""
    drain_order: NonNegativeInt = 2
    """At the end roles are asked to stop in rising order; a role is asked when all before it are gone."""


class RouterPolicyConfig(RolePolicyConfig):
    """The router: it is started again on its port, and stops with the engines."""

    restart: Literal["never", "on-failure"] = "on-failure"
    """``on-failure``: it is started again, on its port, when it fails or does not answer."""
    drain_order: NonNegativeInt = 2
    """At the end roles are asked to stop in rising order; a role is asked when all before it are gone."""


class StorePolicyConfig(RolePolicyConfig):
    """The master of the KV pool: it is started again on its ports, and stops after the engines."""

    restart: Literal["never", "on-failure"] = "on-failure"
    """``on-failure``: it is started again, on its ports; engines compute prompts anew until it is back."""
    drain_order: NonNegativeInt = 3
    """At the end roles are asked to stop in rising order; a role is asked when all before it are gone."""


class EnvironmentPolicyConfig(RolePolicyConfig):
    """Workers of environments: they are started again, and stop after the orchestrator."""

    critical: bool = False
    """The run ends when a worker is lost for good. ``false``: it continues while there is another."""
    restart: Literal["never", "on-failure"] = "on-failure"
    """``on-failure``: a worker that fails or hangs is started again in its place."""
    max_restarts: NonNegativeInt = 20
    """Restarts of one worker within ``restart_window_s``; one failure more, and it is lost for good."""
    drain_order: NonNegativeInt = 2
    """At the end roles are asked to stop in rising order; a role is asked when all before it are gone."""


class SupervisionConfig(StrictModel):
    """Actions after the failure or hang of a replica."""

    trainer: RolePolicyConfig = RolePolicyConfig()
    """The trainer; its failures end the attempt, see ``job.retry_failures``."""
    orchestrator: OrchestratorPolicyConfig = OrchestratorPolicyConfig()
    """The orchestrator; its failures end the attempt, as it must be at the trainer's step."""
    engine: EnginePolicyConfig = EnginePolicyConfig()
    """Engines of all kinds."""
    router: RouterPolicyConfig = RouterPolicyConfig()
    """Their router, where there is one; requests wait until it is back."""
    store: StorePolicyConfig = StorePolicyConfig()
    """The master of their KV pool, where there is one; blocks in the pool are lost with it."""
    env: EnvironmentPolicyConfig = EnvironmentPolicyConfig()
    """Workers of environments, where there are some; rollouts of a worker are lost with it."""
    hang_floor_s: PositiveFloat = 60.0
    """A replica is called hung after five times the longest pause that it made in its work so far, but not before so
    many seconds without progress; an engine that does not answer at all, after just these."""
    hang_ceiling_s: PositiveFloat = 1800.0
    """Maximum seconds without progress in every case; also the limit of work that was not measured yet, such as a first
    step or a first checkpoint."""
