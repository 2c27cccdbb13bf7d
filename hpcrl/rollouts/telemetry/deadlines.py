"""Time limits of the orchestrator for engines, long enough for the supervisor to restart one."""

from __future__ import annotations

from typing import Unpack

import msgspec

from hpcrl.config.plan import Role
from hpcrl.config.rollouts import RolloutConfig
from hpcrl.reporting.reports import ReportedFile
from hpcrl.rollouts.engines.concurrency import AdaptiveLimit
from hpcrl.rollouts.engines.pool import LOST_AFTER_S
from hpcrl.rollouts.telemetry.fleet_watch import SUSPECT_S, FleetWatch, WatchedParts
from hpcrl.runs.fleet import FleetView
from hpcrl.runs.role import RoleContext
from hpcrl.runs.rundir import RunDir


def engines_lost_after_s(run: RunDir) -> float:
    """Return how many seconds the run may be without any engine.

    This is the longest time in which the supervisor detects the loss and starts an engine.
    """
    if not run.plan_path.is_file():
        return LOST_AFTER_S
    plan = run.plan()
    engines = [group for group in plan.groups if group.role in (Role.ENGINE, Role.PREFILL, Role.DECODE)]
    seconds = [
        group.start_timeout_s + group.policy.stop_timeout_s + plan.watch.ceiling_s + plan.watch.update_timeout_s
        for group in engines
        if group.policy.restart != "never" and group.policy.max_restarts
    ]
    if any(plan.own_jobs(group) for group in engines):
        seconds.append(plan.elastic.wait_s)  # then the supervisor ends the run
    return LOST_AFTER_S + max(seconds, default=0.0)


def _suspect_after_s(run: RunDir) -> float:
    """Return how many seconds an engine may have requests and sample nothing before it is suspected.

    This is half of the supervisor's minimum hang timeout.
    """
    return run.plan().watch.floor_s / 2 if run.plan_path.is_file() else SUSPECT_S


def make_fleet_watch(context: RoleContext, config: RolloutConfig, **parts: Unpack[WatchedParts]) -> FleetWatch:
    """Return the fleet watch of an attempt.

    Parameters
    ----------
    parts:
        Objects that the watch observes, and the writer of its events.
    """
    # the bound of staleness counts groups from their start, so there are never more in flight
    most = min(config.max_in_flight, (config.max_off_policy_steps + 1) * config.rollouts_per_step)
    adaptive = config.adaptive_concurrency
    # not synchronised to disk: it is not needed after a crash of the machine
    report = ReportedFile(FleetView.path(context.run, context.attempt), durable=False)
    return FleetWatch(
        limit=AdaptiveLimit(adaptive, least=config.group_size, most=most) if adaptive.enabled else None,
        suspect_s=_suspect_after_s(context.run),
        publish=lambda view: report.put(msgspec.json.encode(view)),
        **parts,
    )
