"""Gauges of the orchestrator, reported with each batch and by its metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from hpcrl.rollouts.ledger.ledger import RolloutLedger
from hpcrl.rollouts.sampling.scheduler import Scheduler
from hpcrl.rollouts.telemetry.lag import LagMonitor
from hpcrl.rollouts.weights.update_sources import UpdateSources


def gauges(
    scheduler: Scheduler,
    lag_monitor: LagMonitor,
    ledger: RolloutLedger,
    sources: UpdateSources | None = None,
    calls: Callable[[], Mapping[str, float]] = dict,
) -> dict[str, float]:
    """Return the gauges by name.

    They are rollouts in flight and in the queue, with their staleness; groups; the served version; event loop delays;
    CPU time; and the warehouse's size. With ``sources``, also by which way engines have got the bytes of versions; with
    ``calls``, also what that returns about calls of programs.
    """
    warehouse = ledger.warehouse
    account, lag, cpu = scheduler.account, lag_monitor.summary(), os.times()
    held: dict[str, float] = {}
    if warehouse is not None:
        figures = warehouse.figures()
        held = {"warehouse_bytes": figures.held_bytes, "warehouse_refused": figures.refused}
    in_queue = scheduler.staleness_in_queue()
    return {
        **held,
        **({} if sources is None else sources.gauges()),
        **calls(),
        "columns_not_removed": ledger.not_removed,
        "in_flight": scheduler.in_flight,
        "in_flight_limit": scheduler.places,
        "in_queue": len(in_queue),
        **_spread("in_queue_staleness", in_queue),
        **_spread("in_flight_staleness", scheduler.staleness_in_flight()),
        "wait_for_policy_s": scheduler.policy_wait.seconds,
        "groups_running": account.running,
        "groups_waiting": account.waiting,
        "version": account.version,
        "loop_lag_p50_ms": 1e3 * lag.p50_s,
        "loop_lag_p99_ms": 1e3 * lag.p99_s,
        "loop_lag_max_ms": 1e3 * lag.max_s,
        "cpu_s": cpu.user + cpu.system,
        "children_cpu_s": cpu.children_user + cpu.children_system,
    }


def _spread(name: str, values: Sequence[int]) -> dict[str, float]:
    """Return mean and maximum; none without values."""
    return {f"{name}_mean": sum(values) / len(values), f"{name}_max": max(values)} if values else {}
