"""The reference run, what moves its figures, and sizes that follow from a model alone."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.models import Part, load_facts
from hpcrl.planning.calibration.calibration_file import WorkloadConfig, load_calibration
from hpcrl.planning.hardware import node_hardware
from hpcrl.planning.report import make_outlook
from hpcrl.planning.times.forecast import forecast, site_rates
from hpcrl.planning.times.from_recipe import planned_layout
from hpcrl.planning.times.ranges import Range
from planning.published.cases import PUBLISHED, Case, calibration


def reference_run() -> Iterator[Case]:
    """GLM-5 on 28 nodes of 8 H200, to which nothing is fitted."""
    recipe, cluster = load_recipe("glm5_swe").value, load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    facts = load_facts("GLM-5")
    assert node_hardware(cluster, Role.TRAINER).gpus == 8
    result = forecast(recipe, facts, planned_layout(recipe, cluster, facts), site_rates(cluster, calibration()))
    loop = result.loop
    assert loop is not None
    source = "prime-rl announcement, medians of its chart"
    unknown = "lengths of its rollouts are not published; ours are those of public SWE trajectories (docs/planning.md)"
    yield Case("rl step", "GLM-5 on 28 nodes: trainer", "min", 3.7, loop.trainer_s / 60, source, unknown)
    reason = f"{unknown}; time of tools and of test suites, and the share of sampled tokens, are assumed"
    yield Case("rl step", "GLM-5 on 28 nodes: rollouts", "min", 5.0, loop.rollout_s / 60, source, reason)
    yield Case(
        "rl step", "GLM-5 on 28 nodes: step (published: less than)", "min", 5.0, loop.step_s / 60, source, reason
    )


def reference_ranges() -> dict[str, Range]:
    """Ranges of the reference run as `hpcrl plan` prints them, with what describes rollouts; in minutes."""
    recipe, cluster = load_recipe("glm5_swe").value, load_cluster("h200-28").value
    ranges = make_outlook(recipe, cluster, load_calibration(), load_facts("GLM-5")).ranges
    names = {"trainer": "trainer side", "rollouts": "rollouts", "step (published: less than)": "step"}
    return {f"GLM-5 on 28 nodes: {what}": _minutes(ranges[name]) for what, name in names.items()}


def _minutes(found: Range) -> Range:
    return Range(found.low / 60, found.mid / 60, found.high / 60)


def sensitivity() -> dict[str, tuple[float, float, float]]:
    """Minutes of trainer, rollouts and step of the reference run with another value of what nobody published."""
    recipe, cluster = load_recipe("glm5_swe").value, load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    facts, shipped = load_facts("GLM-5"), load_calibration()
    swe = shipped.workloads["swe"]
    result = {}
    for name, change in PUBLISHED["sensitivity"].items():
        other = WorkloadConfig.model_validate(swe.model_dump() | change)
        own = shipped.model_copy(update={"workloads": {"swe": other}})
        loop = forecast(recipe, facts, planned_layout(recipe, cluster, facts), site_rates(cluster, own)).loop
        assert loop is not None
        result[name] = (loop.trainer_s / 60, loop.rollout_s / 60, loop.step_s / 60)
    return result


def sizes() -> Iterator[Case]:
    """Bytes of weights and caches."""
    glm, v3 = load_facts("GLM-5"), load_facts("DeepSeek-V3")
    source = "DeepSeek-V2 paper, table 1; 576 values a layer in BF16, 61 layers"
    yield Case("sizes", "MLA KV cache, DeepSeek-V3", "B a token", 70272.0, float(v3.kv_bytes_per_token()), source)
    source = "prime-rl announcement: (800B x 4) / 78"
    layer = sum(glm.layer_parameters(10).values()) * 4 / 1e9
    reason = "the announcement rounds 744B up to 800B, and spreads embeddings and dense layers over 78 layers"
    yield Case("sizes", "GLM-5 layer gathered in float32", "GB", 40.0, layer, source, reason)
    yield Case("sizes", "the same with the next layer prefetched", "GB", 80.0, 2 * layer, source, reason)
    total = sum(glm.weight_bytes().values())
    yield Case("sizes", "GLM-5 in BF16", "TB", 1.49, total / 1e12, "arithmetic, 744B x 2")
    tokens, rows = 131072, len(glm.moe_layers) * glm.num_experts_per_tok
    yield Case("sizes", "router replay of 131,072 tokens, uint8", "MB", 79.0, tokens * rows / 1e6, "arithmetic")
    assert Part.EXPERT in glm.parameters_by_part()
