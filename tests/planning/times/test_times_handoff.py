"""Hand-offs as the recipe has them: path, dtype, deltas, overlap; and what a checkpoint's mode costs."""

from __future__ import annotations

import pytest

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.models import load_facts
from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.planning.times.forecast import Forecast, forecast, site_rates, trainer_seconds
from hpcrl.planning.times.from_recipe import planned_layout

GLM5 = load_facts("GLM-5")


def glm5(*settings: str) -> Forecast:
    cluster = load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    recipe = load_recipe("glm5_swe", settings).value
    return forecast(recipe, GLM5, planned_layout(recipe, cluster, GLM5), site_rates(cluster, load_calibration()))


def term(plan: Forecast, name: str) -> float:
    seconds = plan.tables["handoff"][f"handoff.{name}"].value
    assert seconds is not None
    return seconds


def test_engines_get_what_is_published_not_what_they_serve() -> None:
    """The engines serve FP8; the hand-off is bfloat16, twice the bytes, unless the recipe says fp8."""
    wide, fp8 = glm5(), glm5("handoff.kind=fp8")
    assert wide.share_bytes["weights written"] == pytest.approx(2 * GLM5.num_parameters(), rel=1e-3)
    assert fp8.share_bytes["weights written"] == pytest.approx(0.5 * wide.share_bytes["weights written"], rel=0.02)
    assert term(fp8, "write") < 0.55 * term(wide, "write")
    assert glm5("handoff.dtype=float32").share_bytes["weights written"] == pytest.approx(4 * GLM5.num_parameters())


def test_the_path_is_that_of_the_recipe() -> None:
    fan_out, alone = glm5(), glm5("handoff.fanout=off")
    assert fan_out.layout.handoff_path == "fan_out"
    assert alone.layout.handoff_path == "filesystem"
    assert glm5("handoff.node_cache=null").layout.handoff_path == "filesystem"
    assert fan_out.share_bytes["weights read"] < 0.5 * alone.share_bytes["weights read"]
    # the other way is there for comparison
    assert "handoff_filesystem" in fan_out.tables
    assert "handoff_fan_out" in alone.tables


def test_the_fabric_takes_reads_off_the_share() -> None:
    plan, files = glm5("handoff.transport=fabric"), glm5()
    assert plan.layout.handoff_path == "fabric"
    assert plan.share_bytes["weights read"] == 0
    assert plan.share_bytes["weights written"] == files.share_bytes["weights written"]
    load = plan.tables["handoff"]["handoff.read"]
    nodes, each = load.inputs["engine nodes"], load.inputs["bytes a node"]
    cluster = load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    rates = site_rates(cluster, load_calibration())
    sent = nodes * each / (plan.layout.trainer.nodes * rates.trainer.node_network)
    assert term(plan, "read") == pytest.approx(max(sent, each / rates.decode.node_network))
    assert term(plan, "read") < 0.5 * term(files, "read")
    # ways by files are there for comparison
    assert {"handoff_filesystem", "handoff_fan_out"} <= set(plan.tables)
    assert "handoff_fabric" not in files.tables


def test_the_fabric_takes_the_write_off_the_way_to_the_engines() -> None:
    plan, files = glm5("handoff.transport=fabric"), glm5()
    table = plan.tables["handoff"]
    assert not table["handoff.write"].counts
    assert term(plan, "write") == term(files, "write")
    rate = load_calibration().constant("serve_rate")
    assert term(plan, "serve") == pytest.approx(table["handoff.copy_out"].inputs["bytes a GPU"] / rate)
    parts = ("copy_out", "serve", "commit", "read", "load")
    assert table.seconds == pytest.approx(sum(term(plan, name) for name in parts))
    assert "handoff.serve" not in [term.name for term in files.tables["handoff"]]
    # a delta is announced when it is durable
    delta = glm5("handoff.transport=fabric", "handoff.delta_chain=4").tables["handoff"]
    assert delta["handoff.write"].counts
    # a trainer that publishes faster than it writes still waits
    recipe = load_recipe("glm5_swe", ["handoff.transport=fabric"]).value
    assert (trainer_seconds(recipe, plan.tables) or 0.0) >= term(plan, "write")


@pytest.mark.parametrize(
    ("every", "saved", "share"), [(1, 0, 1.0), (4, 0, 0.25), (4, 8, 0.25), (4, 6, 4 / 12), (5, 1, 1.0)]
)
def test_a_share_of_the_versions_is_written(every: int, saved: int, share: float) -> None:
    """Those that the number divides, and those of checkpoints: in 12 versions 4, 6, 8 and 12 for 4 and 6."""
    settings = ("handoff.transport=fabric", f"checkpoint.every_steps={saved}")
    whole, some = glm5(*settings), glm5(*settings, f"handoff.durable_every={every}")
    assert some.share_bytes["weights written"] == pytest.approx(share * whole.share_bytes["weights written"])
    assert some.tables["handoff"].seconds == whole.tables["handoff"].seconds


def test_deltas_save_most_of_the_bytes() -> None:
    full, chain = glm5(), glm5("handoff.delta_chain=4")
    share = load_calibration().constant("delta_share")
    assert term(chain, "write") == pytest.approx((1 + 4 * share) / 5 * term(full, "write"))
    # a delta that is larger than allowed is written as a full version
    assert term(glm5("handoff.delta_chain=4", "handoff.delta_max_share=0.01"), "write") == term(full, "write")


def test_what_does_not_overlap_with_the_next_step_stops_the_trainer() -> None:
    def seconds(*settings: str) -> float:
        recipe = load_recipe("glm5_swe", settings).value
        found = trainer_seconds(recipe, glm5(*settings).tables)
        assert found is not None
        return found

    beside, plan = seconds(), glm5()
    written = term(plan, "write") + term(plan, "commit")
    assert seconds("handoff.overlap=false") == pytest.approx(beside + written)
    stored = plan.tables["checkpoint"]["checkpoint.write"].value
    assert stored is not None
    assert seconds("checkpoint.mode=sync") == pytest.approx(beside + stored / 10)


def test_a_step_is_not_shorter_than_the_writing_of_its_version() -> None:
    slow = load_cluster("h200-28").value
    assert isinstance(slow, SlurmCluster)
    crawling = slow.model_copy(update={"filesystem": slow.filesystem.model_copy(update={"write_gb_s": 1.0})})
    recipe = load_recipe("glm5_swe").value
    plan = forecast(recipe, GLM5, planned_layout(recipe, crawling, GLM5), site_rates(crawling, load_calibration()))
    assert plan.loop is not None
    assert plan.loop.step_s >= 2 * GLM5.num_parameters() / 1e9


def test_waves_are_warned_about() -> None:
    assert any(
        "waves" in warning for warning in glm5("rollouts.ready_batches=1", "trainer.precision.fp8=null").warnings
    )
    assert not any("waves" in warning for warning in glm5("trainer.precision.fp8=null").warnings)
    # of a slower trainer than rollouts need, but short ones
    assert not any("waves" in warning for warning in glm5("rollouts.max_off_policy_steps=0").warnings)
