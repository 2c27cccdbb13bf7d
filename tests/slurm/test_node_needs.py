"""How many nodes must be free at once before a run may start."""

from __future__ import annotations

from plans import plan_for

from hpcrl.slurm.admission import NodeNeed, needed_nodes


def needs(*settings: str) -> list[NodeNeed]:
    return needed_nodes(plan_for("quickstart", "devcluster", *settings)[0])


def test_an_elastic_run_needs_the_replicas_that_it_waits_for() -> None:
    elastic = ("job.layout=elastic", "engine.replicas=5")
    (few,), (all_of_them,) = needs(*elastic, "job.min_replicas=2"), needs(*elastic, "job.min_replicas=5")
    assert all_of_them.nodes - few.nodes == 3
    assert few.nodes > 2
