"""Times of a trainer's sparse attention and experts, beside one GPU, published runs and sums by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hpcrl
from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.models import load_facts
from hpcrl.models.arch import arch_from_config
from hpcrl.planning.calibration.calibration_file import Calibration, Measured, load_calibration
from hpcrl.planning.fit_calibration import _trainer_busy
from hpcrl.planning.hardware import NodeHardware, node_hardware
from hpcrl.planning.lengths import Quantiles
from hpcrl.planning.times.forecast import site_rates
from hpcrl.planning.times.from_recipe import planned_layout
from hpcrl.planning.times.rates import Rates
from hpcrl.planning.times.shapes import TrainerShape
from hpcrl.planning.times.trainer import TrainerBatch, trainer_step
from hpcrl.planning.times.work import sequence_work
from hpcrl.planning.times.workload import resolve_workload

RESULTS = Path(__file__).parents[3] / "bench" / "results"
GLM5 = load_facts("GLM-5")
LONG = TrainerBatch(16, Quantiles((131072.0,)))
SHAPE = TrainerShape(nodes=2, gpus_per_node=8, expert_parallel=8, compute_dtype="fp8", micro_batch_tokens=131072)
PEAK = 989e12


def site() -> SlurmCluster:
    cluster = load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    return cluster


def rates() -> Rates:
    return Rates(node_hardware(site(), Role.TRAINER), load_calibration())


def terms(shape: TrainerShape) -> dict[str, float]:
    return {term.name: term.value or 0.0 for term in trainer_step(GLM5, shape, LONG, rates())}


def recorded(check: str) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / "gpu-nvidia-h200.json").read_text())["rows"]
    return [row for row in rows if row["check"] == check]


def test_layers_of_the_reference_run_take_what_a_card_took() -> None:
    """Two layers with the experts that a rank has, 32,768 tokens in one sequence: `bench/gpu_checks/stack.py`."""
    config = json.loads((Path(hpcrl.__file__).parent / "models/configs/GLM-5.json").read_text())
    config |= {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 32, "vocab_size": 16384}
    config |= {"num_nextn_predict_layers": 0}
    facts = arch_from_config({key: value for key, value in config.items() if not key.startswith("_")}).facts
    shape = TrainerShape(nodes=1, gpus_per_node=1, micro_batch_tokens=32768)
    batch = TrainerBatch(1, Quantiles((32768.0,)))

    def planned(shape: TrainerShape) -> float:
        table = trainer_step(facts, shape, batch, rates())
        return sum(term.value or 0.0 for term in table if term.name.startswith("compute."))

    measured = [row["pass_s"] for row in recorded("whole.glm5") if "pass_s" in row][-1]
    assert planned(shape) == pytest.approx(measured, rel=0.1)
    # the kernels of others are faster than those that were measured
    assert planned(replace(shape, sparse_kernels="libraries")) < 0.7 * measured


def test_rates_of_sparse_attention_are_those_of_the_card() -> None:
    own = rates()
    blocks = next(row for row in recorded("kernels.blocks") if row["blocks"] == "64 heads")
    assert own.sparse_forward("triton") / 1e12 == pytest.approx(blocks["forward_tflops"], rel=0.05)
    long = {row["kind"]: row for row in recorded("kernels.sparse") if row["tokens"] == 131072}
    both, forward = long["sparse both"], long["sparse forward"]
    operations = both["tflops"] * both["ms"] - forward["tflops"] * forward["ms"]
    slowest = operations / (both["ms"] - forward["ms"])
    backward = own.hardware.gpu_flops("bfloat16") * own.sparse_shares("triton")[1]
    assert slowest < backward / 1e12 < blocks["backward_tflops"]
    rows = [row for row in recorded("kernels.index") if row["candidate"] == "triton" and row["tokens"] > 9e3]
    scores = [row["tflops"] for row in rows]
    assert min(scores[::2]) <= own.index_scores("triton") / 1e12 <= max(scores)


def test_sparse_attention_takes_its_operations_over_the_rate() -> None:
    tokens, work = 131072.0, sequence_work(GLM5, LONG.lengths)
    found = terms(SHAPE)
    # two passes forward, and 2.5 times the operations backward; the kernels fill a GPU, so gaps count nothing
    expected = tokens * work.scores * (2 / (0.27 * PEAK) + 2.5 / (0.066 * PEAK))
    assert found["compute.attention"] == pytest.approx(expected, rel=0.01)
    assert found["compute.indexer"] == pytest.approx(2 * tokens * work.indexer / (0.167 * PEAK), rel=0.01)
    # a rank without context parallelism chooses among all keys, seen or not: twice as many
    assert found["compute.choice"] == pytest.approx(2 * found["compute.indexer"], rel=0.01)
    apart = terms(replace(SHAPE, context_parallel=4))
    assert apart["compute.choice"] == pytest.approx(1.125 * apart["compute.indexer"], rel=0.01)


def test_kernels_of_libraries_replace_parts() -> None:
    kinds = ("triton", "flash_mla", "flash_mla_cudnn", "libraries")
    found = {kind: terms(replace(SHAPE, sparse_kernels=kind)) for kind in kinds}
    attention = [found[kind]["compute.attention"] for kind in kinds]
    assert attention[0] > attention[1] > attention[2] == attention[3]
    assert found["flash_mla_cudnn"]["compute.choice"] == found["triton"]["compute.choice"] > 0.0
    assert "compute.choice" not in found["libraries"]
    assert found["libraries"]["compute.indexer"] < found["triton"]["compute.indexer"]


def test_a_missing_speed_leaves_the_other_times() -> None:
    node = rates().hardware.node
    gpu = node.gpu.model_copy(update={"tflops": {"fp8": node.gpu.tflops["fp8"]}})
    own = Rates(NodeHardware(site(), "gpu", node.model_copy(update={"gpu": gpu})), load_calibration())
    table = trainer_step(GLM5, SHAPE, LONG, own)
    assert table.missing == ("cluster.partitions.gpu.node.gpu.tflops.bfloat16",)
    assert table["compute.attention"].value is None
    assert table["compute.linear"].value == pytest.approx(terms(SHAPE)["compute.linear"])


def test_a_run_with_sparse_attention_has_the_share_that_explains_its_time() -> None:
    """What is planned with half of the shipped share, as a measurement."""
    recipe, shipped = load_recipe("glm5_swe").value, load_calibration()
    slow, layout = shipped.moved("efficiencies.trainer_busy", 0.5), planned_layout(recipe, site(), GLM5)
    workload, rollouts = resolve_workload(recipe, shipped), recipe.rollouts.rollouts_per_step
    batch = TrainerBatch(rollouts, workload.lengths)
    table = trainer_step(GLM5, layout.trainer, batch, site_rates(site(), slow).trainer)
    kinds = ("compute.", "ep.", "cp.", "offload.", "fsdp.")
    seconds = sum(term.value or 0.0 for term in table if term.counts and term.name.startswith(kinds))
    measured = Measured(
        run="one",
        recipe="glm5_swe",
        cluster="h200-28",
        trainer_ranks=64.0,
        engines=1.0,
        steps=9.0,
        train_s_per_token=seconds / 1e6,
        optimizer_s=0.0,
        publish_s=0.0,
        sampled_tokens_per_s=1.0,
        batch_tokens=1e6,
    )
    found = _trainer_busy(recipe, site(), GLM5, Calibration(), measured)
    assert found is not None
    assert found.value == pytest.approx(shipped.share("trainer_busy") / 2, rel=0.01)


@pytest.mark.parametrize(
    ("chosen", "planned"), [("auto", "triton"), ("reference", "triton"), ("flash_mla", "flash_mla")]
)
def test_a_plan_has_the_kernels_of_the_recipe(chosen: str, planned: str) -> None:
    recipe = load_recipe("glm5_swe", (f"trainer.kernels.sparse_attention={chosen}",)).value
    assert planned_layout(recipe, site(), GLM5).trainer.sparse_kernels == planned


def test_ranks_wait_for_the_one_with_most_tokens() -> None:
    found, even = terms(SHAPE), terms(replace(SHAPE, balanced_experts=True))
    for name in ("compute.experts", "ep.all_to_all"):
        assert found[name] == pytest.approx(1.25 * even[name], rel=0.02), name
    assert found["compute.linear"] == even["compute.linear"]
    # each rank has all experts, and none waits
    alone = replace(SHAPE, expert_parallel=1)
    assert terms(alone)["compute.experts"] == terms(replace(alone, balanced_experts=True))["compute.experts"]


def test_a_number_may_be_further_off_downwards(tmp_path: Path) -> None:
    ends = {name: ends for name, ends, _ in load_calibration().uncertain()}
    assert ends["efficiencies.trainer_busy"] == (pytest.approx(1 / 3.9), 1.4)
    assert ends["efficiencies.nic"] == (pytest.approx(1 / 1.15), 1.15)
    path = tmp_path / "own.yaml"
    path.write_text("efficiencies:\n  nic: {value: 0.5, source: ours, spread: 1.2, spread_below: 2}\n")
    assert {name: ends for name, ends, _ in load_calibration(path).uncertain()}["efficiencies.nic"] == (0.5, 1.2)


def test_commands_and_suites_differ_by_more_than_lengths() -> None:
    (load,) = resolve_workload(load_recipe("glm5_swe").value, load_calibration()).environments
    factors = {name: (factor, origin) for name, factor, origin in load.uncertain()}
    assert factors["tool_s"] == factors["judge_s"] == (3.0, "assumed")
    assert factors["sampled_share"] == (2.0, "assumed")
    assert factors["tokens"] == (1.15, "published")


def test_published_runs_of_its_kind_lie_in_the_ranges() -> None:
    """No constant comes from these figures, which `bench/planner.py published` records."""
    cases = json.loads((RESULTS / "planner_published.json").read_text())["cases"]
    alike = [case for case in cases if case["what"].startswith("GLM-5") and "ratio" not in case["unit"]]
    alike = [case for case in alike if case["subject"] in {"rl step", "training"}]
    assert len(alike) == 6
    assert [case["what"] for case in alike if not case["in_range"]] == []
    assert not any(case["fitted"] for case in alike)
