"""Worth of spare nodes: what they cost, and what requeues after node failures would cost without them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.plan import Plan

ASSUMED_MTBF_H = 6300.0
"""Hours between failures of one node: 0.0038 failures a node and day, published of the training of Llama 3."""
ASSUMED_WAIT_H = 1.0
"""Hours in the queue after a requeue. Slurm itself takes two minutes; a busy site has no node at hand."""


class SpareWorth(NamedTuple):
    """Spare nodes of a plan at a site's failure rate.

    Attributes
    ----------
    spares, nodes:
        Spare nodes, and nodes that roles use, of the supervisor's job.
    mtbf_h, wait_h:
        Hours between failures of one node, and in the queue after a requeue.
    mtbf_assumed, wait_assumed:
        Whether the profile lacks the number.
    failures_per_day:
        Expected failures among ``nodes``.
    saved_node_hours:
        Node-hours a day that the run does not lose in the queue.
    cost_node_hours:
        Node-hours a day of the spare nodes.
    break_even_wait_h:
        Wait in the queue above which spare nodes save more than they cost.
    more_failures:
        Probability that more nodes fail within one job than it has spare ones.
    """

    spares: int
    nodes: int
    mtbf_h: float
    wait_h: float
    mtbf_assumed: bool
    wait_assumed: bool
    failures_per_day: float
    saved_node_hours: float
    cost_node_hours: float
    break_even_wait_h: float
    more_failures: float

    @property
    def pays(self) -> bool:
        """Return whether the spare nodes save more node-hours than they cost."""
        return self.saved_node_hours > self.cost_node_hours

    def document(self) -> dict[str, Any]:
        """Return the worth as JSON values."""
        return {**self._asdict(), "pays": self.pays}

    def lines(self) -> list[str]:
        """Return the worth in sentences."""
        rate = f"{_source(self.mtbf_assumed)} {self.mtbf_h:,.0f} h between failures of a node"
        wait = f"{_source(self.wait_assumed)} {self.wait_h:g} h in the queue after each"
        lost, saved, cost = self.nodes * self.wait_h, self.saved_node_hours, self.cost_node_hours
        verdict = "they pay" if self.pays else "they do not pay in node-hours, but the run does not stop"
        return [
            f"{self.spares} of {self.spares + self.nodes} nodes: one failure in "
            f"{1.0 / self.failures_per_day:,.3g} days ({rate}), {wait}",
            f"a requeue loses {lost:,.0f} node-hours, {saved:,.3g} a day; spare nodes cost {cost:,.3g} a day: "
            f"{verdict} (break-even: {self.break_even_wait_h:,.3g} h in the queue)",
            f"more than {self.spares} failures in one job: {self.more_failures:.1%}",
        ]


def spare_worth(plan: Plan, cluster: ClusterProfile) -> SpareWorth | None:
    """Return what the spare nodes of a plan are worth; None where it has none.

    With ``n`` nodes in use that fail every ``m`` hours each, a requeue that waits ``w`` hours loses ``n w`` node-hours,
    ``24 n / m`` times a day; ``s`` spare nodes cost ``24 s``. The time of the restart and of repeated steps is the same
    in both cases and not counted. The number of failures within a job is Poisson.
    """
    layout = plan.layout
    spares = layout.spares
    if not spares or not isinstance(cluster, SlurmCluster):
        return None
    nodes = layout.main_nodes - spares
    known = cluster.reliability
    mtbf_h, wait_h = known.node_mtbf_h or ASSUMED_MTBF_H, known.queue_wait_h
    wait = ASSUMED_WAIT_H if wait_h is None else wait_h
    failures = 24.0 * nodes / mtbf_h
    cost = 24.0 * spares
    return SpareWorth(
        spares=spares,
        nodes=nodes,
        mtbf_h=mtbf_h,
        wait_h=wait,
        mtbf_assumed=known.node_mtbf_h is None,
        wait_assumed=wait_h is None,
        failures_per_day=failures,
        saved_node_hours=failures * nodes * wait,
        cost_node_hours=cost,
        break_even_wait_h=cost / (failures * nodes),
        more_failures=_more_than(spares, nodes / mtbf_h * plan.time_limit_s / 3600.0),
    )


def _more_than(count: int, mean: float) -> float:
    """Return the probability that a Poisson number with this mean exceeds ``count``."""
    return max(0.0, 1.0 - sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count + 1)))


def _source(assumed: bool) -> str:
    return "assumed" if assumed else "profile:"
