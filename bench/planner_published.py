"""Published figures beside what the planner's formulas give for the same hardware, and the reason where it is wrong.

No formula or constant is fitted to the figures of the reference run (GLM-5 on 28 nodes of 8 H200). Three constants of
the calibration file come from one published figure each: these rows are marked `calibrates`, the others are
predictions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache

from harness import record

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.models import Part, load_facts
from hpcrl.planning.calibration.file import DistributionConfig, load_calibration
from hpcrl.planning.hardware import NodeHardware, node_hardware
from hpcrl.planning.times.engine import decode_step, prefill_token
from hpcrl.planning.times.forecast import forecast, site_rates
from hpcrl.planning.times.from_recipe import planned_layout
from hpcrl.planning.times.handoff import Handoff, handoff
from hpcrl.planning.times.lengths import Quantiles
from hpcrl.planning.times.rates import Rates, StorageRates
from hpcrl.planning.times.shapes import EngineShape, TrainerShape
from hpcrl.planning.times.trainer import TrainerBatch, trainer_step
from hpcrl.planning.times.work import tensor_counts

#: data sheets: GB/s of memory and (each way) NVLink, dense TFLOP/s
GPUS = {
    "H100": {"memory_gb_s": 3350, "nvlink_gb_s": 450, "tflops": {"float32": 67, "bfloat16": 989, "fp8": 1979}},
    "H200": {"memory_gb_s": 4800, "nvlink_gb_s": 450, "tflops": {"float32": 67, "bfloat16": 989, "fp8": 1979}},
    "H800": {"memory_gb_s": 3350, "nvlink_gb_s": 200, "tflops": {"float32": 67, "bfloat16": 989, "fp8": 1979}},
    "H20": {"memory_gb_s": 4000, "nvlink_gb_s": 450, "tflops": {"float32": 44, "bfloat16": 148, "fp8": 296}},
}


@dataclass(frozen=True)
class Row:
    """One published figure.

    Attributes
    ----------
    calibrates:
        A constant of the calibration file comes from this figure: it is right by construction.
    reason:
        Why the prediction is wrong, where it is.
    """

    what: str
    unit: str
    published: float
    predicted: float
    source: str
    reason: str = ""
    calibrates: bool = False

    @property
    def error(self) -> float:
        """Prediction against publication."""
        return self.predicted / self.published - 1.0


@lru_cache(maxsize=8)
def rates(gpu: str) -> Rates:
    """Nodes of 8 GPUs with eight 400 Gb/s adapters: the shape of the example profile with another GPU."""
    cluster = load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    node = cluster.partitions["gpu"].node
    own = node.model_copy(update={"gpu": node.gpu.model_copy(update=GPUS[gpu])})
    return Rates(NodeHardware(cluster, "gpu", own), load_calibration())


def weights(model: str, *, fp8: bool = False) -> float:
    return float(sum(load_facts(model).weight_bytes(fp8=fp8).values()))


def tensors(model: str, *, fp8: bool = False) -> int:
    return sum(tensor_counts(load_facts(model), fp8=fp8))


def checkpoint_engine() -> Iterator[Row]:
    """The load of a version that lies in the memory of the engines' hosts, by the hand-off that plans use.

    checkpoint-engine has the model spread over the hosts of an update, as a fan-out has it in their node caches: nodes
    pass each other what they lack, and every GPU takes its part of every tensor.
    """
    source = "checkpoint-engine README, update by broadcast"
    #: model, FP8, GPU, GPUs of the update, GPUs of an engine, seconds
    table = [
        ("GLM-4.5-Air", False, "H800", 8, 8, 3.47),
        ("Qwen3-235B-A22B", False, "H800", 8, 8, 6.22),
        ("DeepSeek-V3", True, "H20", 16, 16, 10.19),
        ("Kimi-K2-Instruct", True, "H20", 16, 16, 14.36),
        ("DeepSeek-V3", True, "H20", 256, 16, 11.33),
        ("Kimi-K2-Instruct", True, "H20", 256, 16, 16.04),
    ]
    reason = (
        "checkpoint-engine sends the whole model through every GPU, a plan's engine takes its part alone; "
        "tensor_load_s comes from one of these rows, so they test how it carries over, not the bytes"
    )
    for model, fp8, gpu, ranks, width, published in table:
        own, total = rates(gpu), weights(model, fp8=fp8)
        nodes = ranks // 8
        version = Handoff(
            path="fan_out",
            bytes=total,
            trainer_nodes=nodes,
            engine_nodes=nodes,
            node_bytes=total * 8 / width,
            gpu_bytes=total / width,
            gpu_tensors=tensors(model, fp8=fp8),
        )
        terms = handoff(version, own, own, hosts_as_share(own, nodes))
        predicted = sum(terms.term(f"handoff.{name}").seconds or 0.0 for name in ("read", "load"))
        what = f"weight sync {model} {'FP8' if fp8 else 'BF16'}, {ranks} {gpu}"
        yield Row(what, "s", published, predicted, source, reason)


def hosts_as_share(own: Rates, nodes: int) -> StorageRates:
    """A share that is the memory of the hosts themselves: the version is there already."""
    cluster = load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    gb_s = own.host_memory / 1e9
    memory = cluster.filesystem.model_copy(update={"read_gb_s": nodes * gb_s, "node_read_gb_s": gb_s})
    return StorageRates(cluster.model_copy(update={"filesystem": memory}), own.calibration)


def megatron() -> Row:
    """Kernels of DeepSeek-V3's training step alone, against what a GPU reached: what `trainer_busy` is made of."""
    facts, own = load_facts("DeepSeek-V3"), rates("H100")
    shape = TrainerShape(
        nodes=128, gpus_per_node=8, expert_parallel=64, compute_dtype="fp8", recompute="none", micro_batch_tokens=4096
    )
    table = trainer_step(facts, shape, TrainerBatch(8192, Quantiles((4096.0,))), own)
    seconds = sum(term.seconds or 0.0 for term in table if term.name.startswith("compute."))
    return Row(
        "DeepSeek-V3 training, 1,024 H100, FP8",
        "tokens/s a GPU",
        1412.0,
        8192 * 4096 / 1024 / seconds,
        "Megatron-Core, arXiv 2603.07685, tables 11 and 17",
        "MTP and the recomputation of some modules are left out of the formula, about a tenth",
        calibrates=True,
    )


def engines() -> Iterator[Row]:
    facts = load_facts("DeepSeek-V3")
    wide = EngineShape(replicas=1, nodes=18, gpus_per_node=8, expert_parallel=144, weight_dtype="fp8")
    no_overlap = "both overlap two batches in decode; the formula has none, which is what vLLM does by default"
    step = decode_step(facts, wide, rates("H800"), batch=14800 / 8 / 21, context=4989).seconds
    assert step is not None
    source = "DeepSeek open-infra-index, day 6: 14.8k tokens/s a node of H800 at 20 to 22 tokens/s a user"
    yield Row("DeepSeek-V3 decode, EP 144", "ms a step", 1000 / 21, 1e3 * step, source, no_overlap)
    nine = EngineShape(replicas=1, nodes=9, gpus_per_node=8, expert_parallel=72, weight_dtype="fp8")
    step = decode_step(facts, nine, rates("H100"), batch=256, context=2050).seconds
    assert step is not None
    source = "SGLang, LMSYS 2025-05-05: 22.3k tokens/s a node of H100, 256 sequences a GPU, 2,000 tokens"
    yield Row("DeepSeek-V3 decode, EP 72", "ms a step", 8 * 256 / 22300 * 1e3, 1e3 * step, source, no_overlap)
    four = EngineShape(replicas=1, nodes=4, gpus_per_node=8, expert_parallel=32, weight_dtype="fp8")
    token = prefill_token(facts, four, rates("H100"), context=1000).seconds
    assert token is not None
    source = "SGLang, LMSYS 2025-05-05: 52.3k tokens/s a node of H100 for prompts of 2,000"
    yield Row("DeepSeek-V3 prompts, EP 32, H100", "tokens/s a node", 52300, 8 / token, source, "", calibrates=True)
    token = prefill_token(facts, four, rates("H800"), context=2500).seconds
    assert token is not None
    source = "DeepSeek open-infra-index, day 6: 73.7k tokens/s a node of H800, 56.3 % of them from the cache"
    reason = "the mean of a day's service, not a full load"
    yield Row("DeepSeek-V3 prompts, EP 32, H800", "tokens/s a node", 73700 * 0.437, 8 / token, source, reason)


def sizes() -> Iterator[Row]:
    glm, v3 = load_facts("GLM-5"), load_facts("DeepSeek-V3")
    source = "DeepSeek-V2 paper, table 1; 576 values a layer in BF16, 61 layers"
    yield Row("MLA KV cache, DeepSeek-V3", "B a token", 70272.0, float(v3.kv_bytes_per_token()), source)
    source = "prime-rl announcement: (800B x 4) / 78"
    layer = sum(glm.layer_parameters(10).values()) * 4 / 1e9
    reason = "the announcement rounds 744B up to 800B, and spreads embeddings and dense layers over 78 layers"
    yield Row("GLM-5 layer gathered in float32", "GB", 40.0, layer, source, reason)
    yield Row("the same with the next layer prefetched", "GB", 80.0, 2 * layer, source, reason)
    total = sum(glm.weight_bytes().values())
    yield Row("GLM-5 in BF16", "TB", 1.49, total / 1e12, "arithmetic, 744B x 2")
    tokens, rows = 131072, len(glm.moe_layers) * glm.num_experts_per_tok
    yield Row("router replay of 131,072 tokens, uint8", "MB", 79.0, tokens * rows / 1e6, "arithmetic")
    assert Part.EXPERT in glm.parameters_by_part()


def slime_ratio() -> Row:
    """The batch of this run is not published, so only the ratio of its two passes can be predicted."""
    facts, own = load_facts("GLM-5.2"), rates("H200")
    shape = TrainerShape(
        nodes=16, gpus_per_node=8, context_parallel=8, expert_parallel=32, recompute="full", micro_batch_tokens=65536
    )
    table = trainer_step(facts, shape, TrainerBatch(128, Quantiles((40000.0,))), own)
    whole = sum(term.seconds or 0.0 for term in table if term.name.startswith(("compute.", "ep.", "cp.")))
    none = TrainerShape(
        nodes=16, gpus_per_node=8, context_parallel=8, expert_parallel=32, recompute="none", micro_batch_tokens=65536
    )
    forward = 0.0
    for term in trainer_step(facts, none, TrainerBatch(128, Quantiles((40000.0,))), own):
        if term.name.startswith("compute."):
            forward += (term.seconds or 0.0) / (1.0 + float(term.inputs["backward"]))
        elif term.name.startswith(("ep.", "cp.")):
            forward += (term.seconds or 0.0) / 2.0
    return Row(
        "GLM-5.2 step on 128 GPUs: train over log-probabilities",
        "ratio",
        623.1 / 219.5,
        whole / forward,
        "modal-projects/stitch#129 (1,020.5 s: 219.5 log-probabilities, 623.1 training)",
        "tokens of the batch are not published, so no seconds can be predicted; the run has pipeline stages, whose "
        "bubble weighs more on the shorter pass, and the log-probability pass has micro-batches of its own",
    )


def reference_run() -> Iterator[Row]:
    recipe, cluster = load_recipe("glm5_swe").value, load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    facts = load_facts("GLM-5")
    assert node_hardware(cluster, Role.TRAINER).gpus == 8
    result = forecast(recipe, facts, planned_layout(recipe, cluster, facts), site_rates(cluster, load_calibration()))
    loop = result.loop
    assert loop is not None
    source = "prime-rl announcement, medians of its chart"
    unknown = "lengths of its rollouts are not published; ours are those of public SWE trajectories (docs/planning.md)"
    yield Row("GLM-5 on 28 nodes: trainer", "min", 3.7, loop.trainer_s / 60, source, unknown)
    reason = f"{unknown}; time of tools and of test suites, and the share of sampled tokens, are assumed"
    yield Row("GLM-5 on 28 nodes: rollouts", "min", 5.0, loop.rollout_s / 60, source, reason)
    yield Row("GLM-5 on 28 nodes: step (published: less than)", "min", 5.0, loop.step_s / 60, source, reason)


def sensitivity() -> dict[str, tuple[float, float, float]]:
    """Minutes of trainer, rollouts and step of the reference run with another value of what nobody published."""
    recipe, cluster = load_recipe("glm5_swe").value, load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    facts, shipped = load_facts("GLM-5"), load_calibration()
    swe = shipped.workloads["swe"]
    changes: dict[str, dict[str, object]] = {
        "as shipped": {},
        "sampled_share 0.15": {"sampled_share": 0.15},
        "sampled_share 0.6": {"sampled_share": 0.6},
        "tool_s median 5": {"tool_s": DistributionConfig(median=5.0, sigma=1.0, maximum=300.0)},
        "tool_s median 10": {"tool_s": DistributionConfig(median=10.0, sigma=1.0, maximum=300.0)},
        "judge_s median 300": {"judge_s": DistributionConfig(median=300.0, sigma=0.8, maximum=3600.0)},
        "tokens median 35000": {"tokens": DistributionConfig(median=35000.0, sigma=0.45)},
        "tokens median 65000": {"tokens": DistributionConfig(median=65000.0, sigma=0.45)},
    }
    result = {}
    for name, change in changes.items():
        own = shipped.model_copy(update={"workloads": {"swe": swe.model_copy(update=change)}})
        loop = forecast(recipe, facts, planned_layout(recipe, cluster, facts), site_rates(cluster, own)).loop
        assert loop is not None
        result[name] = (loop.trainer_s / 60, loop.rollout_s / 60, loop.step_s / 60)
    return result


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| figure | published | predicted | error | remark |", "| --- | ---: | ---: | ---: | --- |"]
    for row in rows:
        remark = "calibrates" if row.calibrates else (row.reason if abs(row.error) > 0.1 else "")
        lines.append(
            f"| {row.what} ({row.unit}) | {row.published:,.4g} | {row.predicted:,.4g} | {row.error:+.0%} | {remark} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Predict, print and record."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [
        *reference_run(),
        *checkpoint_engine(),
        megatron(),
        *engines(),
        slime_ratio(),
        *sizes(),
    ]
    print(table(rows))
    changes = sensitivity()
    for name, (trainer, rollouts, step) in changes.items():
        print(f"{name:<24} trainer {trainer:5.2f}  rollouts {rollouts:5.2f}  step {step:5.2f} min")
    figures = [{**asdict(row), "error": row.error} for row in rows]
    predictions = [abs(row.error) for row in rows if not row.calibrates]
    record(
        "planner_published",
        {
            "rows": figures,
            "predictions_within_25_percent": sum(error <= 0.25 for error in predictions),
            "predictions": len(predictions),
            "reference_run_minutes_trainer_rollouts_step": changes,
        },
    )


if __name__ == "__main__":
    main()
