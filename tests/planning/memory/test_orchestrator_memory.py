"""Memory of an orchestrator on a node of its own: counted there, and not on the trainer's first node."""

from __future__ import annotations

import pytest

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.models import load_facts
from hpcrl.planning.ledger import GIB
from hpcrl.planning.memory.fit import HOST_RESERVE, MemoryReport, memory_report
from hpcrl.planning.memory.remedies import change, why_not
from hpcrl.planning.search.memory import trainer_fit
from hpcrl.planning.times.from_recipe import planned_layout

GLM5 = load_facts("GLM-5")
H200 = load_cluster("h200-28").value
OWN = {"orchestrator", "rollouts", "warehouse of rollouts", "routed experts", "environments"}
"""Terms of an orchestrator with its environments."""


def apart(memory_gib: float = 500.0) -> ClusterProfile:
    """Return the site with a partition of small nodes without GPUs, on which orchestrators run."""
    assert isinstance(H200, SlurmCluster)
    small = H200.partitions["gpu"].node.model_copy(update={"memory_gib": memory_gib})
    partitions = {**H200.partitions, "cpu": H200.partitions["gpu"].model_copy(update={"node": small})}
    by_role = {**H200.placement.by_role, Role.ORCHESTRATOR: "cpu"}
    placement = H200.placement.model_copy(update={"by_role": by_role})
    return H200.model_copy(update={"partitions": partitions, "placement": placement})


def glm5(*settings: str) -> Recipe:
    return load_recipe("glm5_swe", settings).value


def terms(report: MemoryReport, role: Role) -> set[str]:
    return {term.name for term in report.place(role, "host").ledger}


def test_the_orchestrator_counts_on_its_own_node() -> None:
    together, separate = memory_report(glm5(), H200, GLM5), memory_report(glm5(), apart(), GLM5)
    assert terms(together, Role.TRAINER) >= OWN
    assert Role.ORCHESTRATOR not in {place.role for place in together.places}
    assert terms(separate, Role.TRAINER) & OWN == set()
    place = separate.place(Role.ORCHESTRATOR, "host")
    assert {term.name for term in place.ledger} >= OWN
    assert place.capacity == round(500 * GIB * (1 - HOST_RESERVE))
    trainers = [report.place(Role.TRAINER, "host").ledger for report in (together, separate)]
    shared = sum(term.value for term in trainers[1] if term.name == "shared rollouts")
    assert trainers[0].total - trainers[1].total == place.needed - shared


def test_workers_on_the_trainers_node_stay_there() -> None:
    """`placement: trainer_node` says where they are, wherever the orchestrator is."""
    workers = "environment_workers={count: 4, placement: trainer_node}"
    found = memory_report(glm5(workers), apart(), GLM5)
    assert {"environment workers", "environments"} <= terms(found, Role.TRAINER)
    assert terms(found, Role.ORCHESTRATOR) & {"environment workers", "environments"} == set()


@pytest.mark.parametrize(("cp", "count"), [(1, 0), (4, 2)])
def test_context_parallel_ranks_share_two_batches(cp: int, count: int) -> None:
    recipe = change(glm5(), (("trainer.parallelism.cp", cp),))
    ledger = memory_report(recipe, apart(), GLM5).place(Role.TRAINER, "host").ledger
    found = [term.inputs["rollouts"] for term in ledger if term.name == "shared rollouts"]
    assert found == [count * recipe.rollouts.rollouts_per_step] * bool(count)


def test_a_small_node_of_the_orchestrator_is_short_and_fewer_rollouts_help() -> None:
    cluster, recipe = apart(160.0), glm5("rollouts.warehouse.limit_gib=8")
    report = memory_report(recipe, cluster, GLM5)
    assert [(place.role, place.kind) for place in report.short] == [(Role.ORCHESTRATOR, "host")]
    (shortage,) = why_not(recipe, cluster, GLM5)
    assert {knob.changes[0][0] for knob in shortage.knobs} >= {"rollouts.routes_in_flight_gib"}


def test_the_search_counts_it_in_the_same_way() -> None:
    assert isinstance(H200, SlurmCluster)
    recipe = glm5()
    needed = [memory_report(recipe, site, GLM5).place(Role.TRAINER, "host").needed / GIB for site in (H200, apart())]
    between = (needed[0] + needed[1]) / 2 / (1 - HOST_RESERVE)
    for site, fits in ((H200, False), (apart(), True)):
        assert isinstance(site, SlurmCluster)
        node = site.partitions["gpu"].node.model_copy(update={"memory_gib": between})
        gpu = site.partitions["gpu"].model_copy(update={"node": node})
        small = site.model_copy(update={"partitions": {**site.partitions, "gpu": gpu}})
        assert trainer_fit(recipe, small, GLM5, planned_layout(recipe, small, GLM5).trainer).ok is fits
