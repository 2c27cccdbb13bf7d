"""The reference run, what moves its figures, and sizes that follow from a model alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.models import Part, load_facts
from hpcrl.planning.calibration.calibration_file import Calibration, WorkloadConfig, load_calibration
from hpcrl.planning.hardware import node_hardware
from hpcrl.planning.times.forecast import Forecast, forecast, site_rates
from hpcrl.planning.times.from_recipe import planned_layout
from hpcrl.planning.times.shapes import SparseKernels
from hpcrl.planning.times.workload import Workload
from planning.published.cases import PUBLISHED, Case, calibration, engineering


def reference_run() -> Iterator[Case]:
    """GLM-5 on 28 nodes of 8 H200, to which nothing is fitted.

    Its trainer has other kernels of sparse attention than ours, so that it is predicted with those of libraries.
    """
    loop = _forecast(calibration(), engineering(), "libraries").loop
    assert loop is not None
    source = "prime-rl announcement, medians of its chart"
    unknown = "lengths of its rollouts are not published; ours are those of public SWE trajectories (docs/planning.md)"
    yield Case("rl step", "GLM-5 on 28 nodes: trainer", "min", 3.7, loop.trainer_s / 60, source, unknown)
    reason = f"{unknown}; time of tools and of test suites, and the share of sampled tokens, are assumed"
    yield Case("rl step", "GLM-5 on 28 nodes: rollouts", "min", 5.0, loop.rollout_s / 60, source, reason)
    yield Case(
        "rl step", "GLM-5 on 28 nodes: step (published: less than)", "min", 5.0, loop.step_s / 60, source, reason
    )


def _forecast(own: Calibration, rollouts: Workload | None, kernels: SparseKernels) -> Forecast:
    """The reference run with kernels of sparse attention; ``rollouts`` None: those of the calibration."""
    recipe, cluster = load_recipe("glm5_swe").value, load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    facts = load_facts("GLM-5")
    assert node_hardware(cluster, Role.TRAINER).gpus == 8
    layout = planned_layout(recipe, cluster, facts)
    layout = replace(layout, trainer=replace(layout.trainer, sparse_kernels=kernels))
    return forecast(recipe, facts, layout, site_rates(cluster, own), workload=rollouts)


def reference_terms() -> dict[str, dict[str, float]]:
    """Seconds of the trainer's terms by kernels of sparse attention."""
    found = {}
    for kernels in get_args(SparseKernels):
        whole = _forecast(load_calibration(), None, kernels)
        assert whole.loop is not None
        terms = {term.name: term.value or 0.0 for term in whole.tables["trainer"]}
        found[kernels] = {**terms, "trainer": whole.loop.trainer_s, "step": whole.loop.step_s}
    return found


def sensitivity() -> dict[str, tuple[float, float, float]]:
    """Minutes of trainer, rollouts and step of the reference run with another value of what nobody published."""
    shipped = load_calibration()
    swe = shipped.workloads["swe"]
    result = {}
    for name, change in PUBLISHED["sensitivity"].items():
        other = WorkloadConfig.model_validate(swe.model_dump() | change)
        own = shipped.model_copy(update={"workloads": {"swe": other}})
        loop = _forecast(own, None, "triton").loop
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
