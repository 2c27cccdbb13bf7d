"""The search: splits add up, memory is obeyed, and nothing that another beats is called best."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import UsageError
from hpcrl.models import load_facts
from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.planning.memory.fit import memory_report
from hpcrl.planning.search.memory import memory_fits, trainer_fit
from hpcrl.planning.search.picture import search_svg
from hpcrl.planning.search.recipe import default_range, node_range, run_search, settings_of
from hpcrl.planning.search.splits import Fit, Fits, Problem, pareto, search, trainer_shapes
from hpcrl.planning.times.forecast import forecast, site_rates
from hpcrl.planning.times.from_recipe import planned_layout, with_layout

GLM5 = load_facts("GLM-5")


def site() -> SlurmCluster:
    cluster = load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    return cluster


def recipe() -> Recipe:
    return load_recipe("glm5_swe").value


def problem(fits: Fits) -> Problem:
    base = planned_layout(recipe(), site(), GLM5)
    return Problem(recipe(), GLM5, base, site_rates(site(), load_calibration()), fits)


def test_a_better_split_of_28_nodes_is_found_and_fits() -> None:
    found = run_search(recipe(), site(), load_calibration(), [28])
    assert found.own is not None
    assert not found.own_short
    best = found.candidates[0]
    assert best.nodes == 28
    assert best.step_s <= found.own.step_s
    report = memory_report(with_layout(recipe(), best.layout), site(), GLM5)
    assert report.ok, [place.summary() for place in report.short]


def test_memory_is_obeyed_and_splits_add_up() -> None:
    fits = Fits(
        trainer=lambda shape: shape.nodes >= 9 and shape.context_parallel == 4,
        engine=lambda shape, prompts: Fit(shape.nodes == (2 if prompts else 4)),
    )
    for candidate in search(problem(fits), [20, 24]):
        layout = candidate.layout
        assert layout.prefill is not None
        assert layout.trainer.nodes >= 9
        assert layout.trainer.context_parallel == 4
        assert (layout.prefill.nodes, layout.decode.nodes) == (2, 4)
        assert layout.trainer.nodes + layout.prefill.all_nodes + layout.decode.all_nodes == candidate.nodes
        assert candidate.nodes in (20, 24)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("glm5_swe", ()), ("qwen3_30b_a3b", ("trainer.memory.activation_checkpointing=none",))],
)
def test_memory_of_a_shape_is_that_of_the_recipe_with_it(name: str, settings: tuple[str, ...]) -> None:
    """The quick answer of a search is the one that a plan of each layout gives."""
    own = load_recipe(name, settings).value
    facts = load_facts(own.model.path)
    base = planned_layout(own, site(), facts)
    fits, answers = memory_fits(own, site(), facts, base, mean_tokens=48e3), []
    for nodes in (1, 5, 9, 12):
        for shape in list(trainer_shapes(base.trainer, facts, nodes))[::3]:
            planned = memory_report(with_layout(own, replace(base, trainer=shape)), site(), facts)
            places = [place for place in planned.places if place.role is Role.TRAINER]
            answers.append(fits.trainer(shape))
            assert answers[-1] == all(place.ok for place in places), shape
            said = trainer_fit(own, site(), facts, shape)
            assert (said.ok, said.short) == (answers[-1], "; ".join(p.summary() for p in places if not p.ok))
    assert set(answers) == {True, False}


def test_nothing_fits_where_memory_says_so() -> None:
    none = Fits(trainer=lambda shape: False, engine=lambda shape, prompts: Fit(True))
    assert search(problem(none), [20]) == []
    found = run_search(recipe(), site(), load_calibration(), [8])
    assert found.candidates == []
    assert "trainer gpu" in found.why_not
    assert "hint: --set" in found.why_not


def test_the_kv_cache_bounds_the_batch() -> None:
    base = planned_layout(recipe(), site(), GLM5)
    rates = site_rates(site(), load_calibration())
    free = forecast(recipe(), GLM5, base, rates).loop
    tight = forecast(recipe(), GLM5, base, rates, slots=2.0).loop
    assert free is not None
    assert tight is not None
    assert tight.served.batch == pytest.approx(2.0, rel=0.01)
    assert tight.rollout_s > free.rollout_s


def test_pareto_keeps_what_no_other_beats_and_the_picture_shows_all() -> None:
    fits = Fits(trainer=lambda shape: shape.nodes >= 9, engine=lambda shape, prompts: Fit(shape.nodes >= 2))
    found = search(problem(fits), [20, 22, 24])
    best = pareto(found)
    for one in best:
        assert not any(other.nodes <= one.nodes and other.step_s < one.step_s * 0.999 for other in found)
    svg = ElementTree.fromstring(search_svg(found, "a < b & c", found[-1]))
    circles = svg.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == len(found) + 1
    with pytest.raises(ValueError, match="nothing"):
        search_svg([], "empty")


def test_a_layout_written_into_a_recipe_reads_back() -> None:
    base = planned_layout(recipe(), site(), GLM5)
    changed = replace(base, trainer=replace(base.trainer, nodes=10, context_parallel=8, offload_activations=False))
    assert planned_layout(with_layout(recipe(), changed), site(), GLM5) == changed


def test_settings_make_a_recipe_into_a_layout() -> None:
    base = planned_layout(recipe(), site(), GLM5)
    assert base.prefill is not None
    trainer = replace(base.trainer, nodes=10, context_parallel=8, offload_activations=False)
    changed = replace(base, trainer=trainer, prefill=replace(base.prefill, replicas=2))
    settings = settings_of(recipe(), changed)
    assert "trainer.memory.activation_offload=false" in settings
    assert planned_layout(load_recipe("glm5_swe", settings).value, site(), GLM5) == changed
    assert settings_of(recipe(), base) == []


def test_without_a_number_the_recipes_own_is_looked_around() -> None:
    # 28 nodes, and the profile has no more
    assert default_range(recipe(), site()) == range(21, 29)
    small = ("trainer.nodes=2", "trainer.ranks=16", "engine.prefill.replicas=1", "engine.decode.nodes=2")
    assert default_range(load_recipe("glm5_swe", small).value, site()) == range(4, 9)
    # where the numbers around are too many to look at, its own alone
    many = load_recipe("glm5_swe", ("engine.prefill.replicas=200", "trainer.nodes=12")).value
    large = site().model_copy(
        update={"partitions": {"gpu": site().partitions["gpu"].model_copy(update={"nodes": 4000})}}
    )
    assert default_range(many, large) == range(420, 421)


@pytest.mark.parametrize("text", ["", "x", "1", "9..8", "2..9999", "20-40"])
def test_ranges_of_nodes(text: str) -> None:
    assert list(node_range("3..5")) == [3, 4, 5]
    assert list(node_range("28")) == [28]
    with pytest.raises(UsageError, match="--nodes"):
        node_range(text)


@pytest.mark.parametrize("text", ["100000", "900..1024", "1025", "1", "28..27", "many"])
def test_numbers_of_nodes_that_would_not_be_answered_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--nodes"):
        node_range(text)


def test_numbers_of_nodes_that_are_answered() -> None:
    assert node_range("1024") == range(1024, 1025)
    assert len(node_range("2..256")) == 255


def test_the_same_gpus_are_not_split() -> None:
    same = load_recipe("qwen3_30b_a3b_node", ["engine.placement=shared_gpus"]).value
    with pytest.raises(UsageError, match="nothing to split"):
        run_search(same, site(), load_calibration(), default_range(same, site()))


def test_gpus_of_a_shared_node_are_split() -> None:
    shared = load_recipe("qwen3_30b_a3b_node", ["trainer.parallelism.ep=4", "trainer.parallelism.cp=2"]).value
    assert list(default_range(shared, site())) == [1]
    found = run_search(shared, site(), load_calibration(), default_range(shared, site()))
    assert found.own is not None
    assert found.candidates
    assert found.candidates[0].step_s < found.own.step_s
    for candidate in found.candidates:
        layout = candidate.layout
        assert (layout.nodes, layout.gpus, layout.trainer.nodes) == (1, 8, 1)
        assert layout.trainer.ranks + layout.decode.replicas * layout.decode.gpus_per_node == 8
        changed = with_layout(shared, layout)
        check_rules(replace(load_recipe("qwen3_30b_a3b_node"), value=changed), load_cluster("h200-28"))
        assert memory_report(changed, site(), load_facts("Qwen3-30B-A3B")).ok
    with pytest.raises(UsageError, match="share one node"):
        run_search(shared, site(), load_calibration(), [4])
