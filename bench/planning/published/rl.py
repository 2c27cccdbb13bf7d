"""Whole steps of asynchronous RL that others published, with lengths as published; no constant is fitted to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from hpcrl.models import load_facts
from hpcrl.planning.distributions import LogNormal, quantiles_of
from hpcrl.planning.lengths import Quantiles
from hpcrl.planning.times.loop import LoopEstimate, LoopInputs, steady_state
from hpcrl.planning.times.serving import ServingFleet
from hpcrl.planning.times.shapes import EngineShape, TrainerShape
from hpcrl.planning.times.trainer import TrainerBatch, trainer_step
from hpcrl.planning.times.work import pack_rows
from hpcrl.planning.times.workload import EnvironmentLoad, Workload
from planning.case_files import rows_of
from planning.published.cases import PUBLISHED, Case, cannot, engineering, rates, weights

SOURCE: str = PUBLISHED["nemo_rl"]["source"]
SPREAD = 0.5
"""Of the logarithm of lengths: not published. With 0.3 or 0.8 in its place steps move by 3 % at most, because the mean
and the most are published."""
PROMPT = 120.0
"""Tokens of a prompt: tokens per second, GPU and step less the mean answer, 110 to 140 in three of the four rows."""
UPDATE = 14.21 / 1342e9
"""Seconds a byte of their broadcast of weights, for which their trainer stands (NeMo-RL#3186: DeepSeek-V3 in BF16)."""


class NemoRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the table, and of its recipe.

    Attributes
    ----------
    step_s:
        Seconds by release, the last one last: the shapes are the same, the software is not.
    tokens, most:
        Mean and largest tokens of a rollout.
    engine_tp:
        GPUs of an engine; half of the GPUs serve.
    tp, stages, experts:
        Degrees of the trainer.
    passes:
        Passes for log-probabilities beside training: of the reference, and of the policy (not where its ratio is 1).
    reason:
        Why the prediction is wrong, or which datum is missing.
    """

    model: str
    gpus: int
    rollouts: int
    group: int
    tokens: float
    most: int
    engine_tp: int
    stages: int
    step_s: dict[str, float]
    tp: int = 1
    experts: int = 1
    recompute: bool = False
    passes: int = 1
    reason: str = ""


RUNS = rows_of(PUBLISHED["nemo_rl"]["rows"], NemoRun)


def rl_steps() -> Iterator[Case]:
    """All cases: against the last release, which is nearest to the software that the constants come from."""
    for run in RUNS:
        release, seconds = list(run.step_s.items())[-1]
        loop = estimate(run)
        before = ", ".join(f"{name} {value:g}" for name, value in run.step_s.items() if name != release)
        missing = [*cannot("trainer", "pp"), *(cannot("trainer", "tp") if run.tp > 1 else ())]
        yield Case(
            "rl step",
            f"{run.model}, {run.gpus} H100, one-off",
            "s a step",
            seconds,
            loop.step_s,
            SOURCE,
            "; ".join(filter(None, (run.reason, f"earlier releases: {before} s"))),
            cannot=tuple(missing),
        )

    yield swe_step()


SWE_SOURCE = "NeMo-RL docs/about/performance-summary.md, asynchronous GRPO on software engineering, H100"
SWE_UNKNOWN = (
    "turns, seconds of tools and of test suites, and how the 128 GPUs are split are not published: ours are those of "
    "the workload swe, half of the GPUs serving, engines of two"
)


def swe_step() -> Case:
    """Their published step of software engineering: 37.5 tokens a second and GPU are 65 rollouts of the mean length."""
    model, gpus, rollouts, tokens, most = "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 128, 64, 31_600.0, 131_072
    facts, own = load_facts(model), rates("H100")
    lengths = with_mean(tokens, most, 0.6)
    (swe,) = engineering().environments
    load = replace(swe, tokens=lengths, prompt_tokens=min(swe.prompt_tokens, lengths.values[0]))
    nodes = gpus // 16
    shape = TrainerShape(
        nodes=nodes, gpus_per_node=8, context_parallel=8, expert_parallel=8, micro_batch_tokens=most, recompute="full"
    )
    update_s = weights(model) * UPDATE
    loop = steady_state(
        LoopInputs(
            rollouts_per_step=rollouts,
            group_size=8,
            max_in_flight=2 * rollouts,
            max_off_policy_steps=1,
            ready_batches=1,
            trainer_s=trainer_step(facts, shape, TrainerBatch(rollouts, lengths), own).known_seconds + update_s,
            handoff_s=update_s,
            pause_s=update_s,
            serve=ServingFleet(
                facts,
                Workload((load,)),
                EngineShape(replicas=nodes * 4, nodes=1, gpus_per_node=2, tensor_parallel=2, max_num_seqs=256),
                own,
            ),
        )
    )
    what = "Nemotron-3-Nano, 128 H100, software engineering"
    missing = tuple(cannot("trainer", "tp"))
    return Case("rl step", what, "s a step", 430.0, loop.step_s, SWE_SOURCE, SWE_UNKNOWN, cannot=missing)


def estimate(run: NemoRun, spread: float = SPREAD) -> LoopEstimate:
    """The planner's loop with the trainer as a plan would lay it out, and what theirs does beside it."""
    facts, own = load_facts(run.model), rates("H100")
    lengths = with_mean(run.tokens, run.most, spread)
    load = EnvironmentLoad("math", 1.0, lengths, PROMPT, 1.0, 1.0, Quantiles((0.0,)), Quantiles((0.0,)), SOURCE, False)
    shape = EngineShape(
        replicas=run.gpus // 2 // run.engine_tp,
        nodes=max(1, run.engine_tp // 8),
        gpus_per_node=min(8, run.engine_tp),
        tensor_parallel=run.engine_tp,
        max_num_seqs=256,
    )
    update_s = weights(run.model) * UPDATE
    return steady_state(
        LoopInputs(
            rollouts_per_step=run.rollouts,
            group_size=run.group,
            # a rollout of version v may be consumed by the step to v + 1
            max_in_flight=2 * run.rollouts,
            max_off_policy_steps=1,
            ready_batches=1,
            trainer_s=trainer_s(run, lengths) + update_s,
            handoff_s=update_s,
            pause_s=update_s,
            serve=ServingFleet(facts, Workload((load,)), shape, own),
        )
    )


def trainer_s(run: NemoRun, lengths: Quantiles) -> float:
    """Seconds of their trainer: a plan's step and forward passes on the same GPUs, times the bubble of the pipeline.

    A pipeline of p stages with m micro-batches runs ``m + p - 1`` of them one after another.
    """
    facts, own, gpus = load_facts(run.model), rates("H100"), run.gpus // 2
    shape = TrainerShape(
        nodes=gpus // 8,
        gpus_per_node=8,
        expert_parallel=run.experts,
        recompute="full" if run.recompute else "none",
        micro_batch_tokens=run.most,
    )
    batch = TrainerBatch(run.rollouts, lengths)
    step = trainer_step(facts, shape, batch, own)
    forward = 0.0
    for term in trainer_step(facts, replace(shape, recompute="none"), batch, own):
        if term.name.startswith("compute."):
            forward += (term.value or 0.0) / (1.0 + float(term.inputs["backward"]))
        elif term.name == "ep.all_to_all":
            forward += (term.value or 0.0) / 2.0
    rows = pack_rows(lengths, run.rollouts, gpus // (run.tp * run.stages), run.most).micro_batches
    return (step.known_seconds + run.passes * forward) * (rows + run.stages - 1) / rows


def with_mean(mean: float, most: float, spread: float) -> Quantiles:
    """A log-normal that is cut at ``most`` and has this mean."""
    low, high = 1.0, 100.0 * most
    for _ in range(60):
        median = (low * high) ** 0.5
        low, high = (
            (median, high)
            if quantiles_of(LogNormal(kind="lognormal", median=median, sigma=spread, maximum=most)).mean < mean
            else (low, median)
        )
    return quantiles_of(LogNormal(kind="lognormal", median=low, sigma=spread, maximum=most))
