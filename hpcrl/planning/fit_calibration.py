"""A calibration file from a run: what it measured, and the efficiencies that explain it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.recipe import Recipe
from hpcrl.errors import UsageError
from hpcrl.models.facts import ModelFacts
from hpcrl.planning.calibration.calibration_file import Calibration, Measured, Sourced, WorkloadConfig
from hpcrl.planning.distributions import Samples
from hpcrl.planning.lengths import Quantiles
from hpcrl.planning.times.forecast import site_rates
from hpcrl.planning.times.from_recipe import planned_layout
from hpcrl.planning.times.trainer import TrainerBatch, trainer_step
from hpcrl.runs.consumed import ConsumedRollouts
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.rundir import RunDir

_SKIPPED_STEPS = 3
"""First steps are slower: programs warm up."""
_MIN_STEPS = 5
_KEPT_VALUES = 64


def calibrate(run: RunDir, facts: ModelFacts | None) -> Calibration:
    """Return the calibration that follows from the times of a run.

    Parameters
    ----------
    run:
        Run with at least a few steps.
    facts:
        Facts of its model; None where the model was removed: then no efficiency can be fitted.

    Raises
    ------
    UsageError
        The run has too few steps, or no rollouts.
    """
    if run.recipe().sft is not None:
        raise UsageError(f"{run.name} is a supervised run (sft): it has no rollouts and no engines")
    steps = read_metrics(run)[_SKIPPED_STEPS:]
    if len(steps) < _MIN_STEPS:
        raise UsageError(
            f"{run.name} has {len(steps)} steps after the first {_SKIPPED_STEPS}; {_MIN_STEPS} are needed\n"
            "    hint: let it run longer"
        )
    recipe, cluster = run.recipe(), run.cluster()
    measured = _measured(run, recipe, cluster.name, steps)
    workloads = _workloads(run, recipe)
    efficiencies = {}
    if isinstance(cluster, SlurmCluster) and facts is not None:
        own = Calibration(workloads=workloads)
        busy = _trainer_busy(recipe, cluster, facts, own, measured)
        if busy is not None:
            efficiencies["trainer_busy"] = busy
    return Calibration(
        description=f"measured by run {run.name}: recipe {recipe.name} on {cluster.name}, {len(steps)} steps",
        efficiencies=efficiencies,  # type: ignore[arg-type]
        workloads=workloads,
        measured=(measured,),
    )


def calibration_yaml(calibration: Calibration) -> str:
    """Return the text of a file that `hpcrl.planning.calibration.calibration_file.load_calibration` reads."""
    value = calibration.model_dump(mode="json", exclude_defaults=True)
    body = yaml.safe_dump(
        {"format_version": 1, **value}, sort_keys=False, allow_unicode=True, width=118, default_flow_style=None
    )
    head = "# Written by `hpcrl plan calibrate`. What is not in here is taken from the file that comes with hpcrl.\n"
    return head + body


def _measured(run: RunDir, recipe: Recipe, cluster: str, steps: Sequence[StepRecord]) -> Measured:
    def phase(name: str) -> float:
        return median(step.phases_s.get(name, 0.0) for step in steps)

    tokens = sum(step.tokens for step in steps)
    seconds = sum(sum(step.phases_s.values()) for step in steps)
    checkpoints = [step.phases_s["checkpoint"] for step in steps if step.phases_s.get("checkpoint", 0.0) > 0.0]
    updates = [float(event.data["seconds"]) for event in read_events(run, kind="engine.weights_updated")]
    engine = recipe.engine
    sides = [side for side in (engine.prefill, engine.decode) if side is not None]
    return Measured(
        run=run.name,
        recipe=recipe.name,
        cluster=cluster,
        trainer_ranks=float(recipe.trainer.ranks),
        engines=float(sum(side.replicas for side in sides) or engine.replicas),
        steps=float(len(steps)),
        train_s_per_token=sum(step.phases_s.get("forward_backward", 0.0) for step in steps) / tokens,
        optimizer_s=phase("optimizer"),
        publish_s=phase("publish"),
        other_s=phase("other"),
        checkpoint_s=median(checkpoints) if checkpoints else 0.0,
        update_s=median(updates) if updates else 0.0,
        # consumed tokens, plus a proportional share for rollouts that were started and discarded
        sampled_tokens_per_s=sum(step.sampled_tokens for step in steps) / seconds * _started_share(steps),
        batch_tokens=tokens / len(steps),
    )


def _started_share(steps: Sequence[StepRecord]) -> float:
    """Return the ratio of started to consumed rollouts."""
    first, last = steps[0].rollouts, steps[-1].rollouts
    started, consumed = (last.get(name, 0.0) - first.get(name, 0.0) for name in ("started", "consumed"))
    return max(1.0, started / consumed) if consumed > 0 else 1.0


def _trainer_busy(
    recipe: Recipe, cluster: SlurmCluster, facts: ModelFacts, own: Calibration, measured: Measured
) -> Sourced | None:
    """Return the share that makes the predicted forward and backward as long as the measured one."""
    from hpcrl.planning.calibration.calibration_file import load_calibration  # noqa: PLC0415 - the shipped file, merged below
    from hpcrl.planning.times.workload import resolve_workload  # noqa: PLC0415

    shipped = load_calibration()
    merged = shipped.model_copy(update={"workloads": {**shipped.workloads, **own.workloads}})
    layout = planned_layout(recipe, cluster, facts)
    batch = TrainerBatch(recipe.rollouts.rollouts_per_step, resolve_workload(recipe, merged).lengths)
    table = trainer_step(facts, layout.trainer, batch, site_rates(cluster, merged).trainer)
    # kernels of sparse attention fill a GPU by themselves, whatever the share is
    full = [term for term in table if term.name.startswith("compute.") and "kernels" in term.inputs]
    compute = [term.value for term in table if term.name.startswith("compute.") and term not in full]
    rest = [term.value for term in table if term.counts and term.name.startswith(("ep.", "cp.", "offload.", "fsdp."))]
    rest += [term.value for term in full]
    if any(value is None for value in (*compute, *rest)):
        return None
    kernels = sum(value or 0.0 for value in compute) * shipped.share("trainer_busy")
    left = measured.train_s_per_token * measured.batch_tokens - sum(value or 0.0 for value in rest)
    if left <= 0:
        return None
    return Sourced(
        value=min(1.0, kernels / left),
        source=f"run {measured.run}, {measured.steps:g} steps, {measured.trainer_ranks:g} ranks",
    )


def _workloads(run: RunDir, recipe: Recipe) -> dict[str, WorkloadConfig]:
    """Return the workloads by environment, from the files of consumed rollouts."""
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in _rollout_lines(run.rollouts_dir):
        lines[str(line["environment"])].append(line)
    known = {env.name: env for env in recipe.environments}
    return {
        name: _workload(run.name, rows, injected=known[name].latency.median_s > 0)
        for name, rows in sorted(lines.items())
        if name in known
    }


def _rollout_lines(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in ConsumedRollouts(directory):
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue  # the incomplete last line of a process that was killed
    return found


def _workload(run: str, rows: Sequence[dict[str, Any]], *, injected: bool) -> WorkloadConfig:
    """Return the workload of one environment.

    ``turns`` of a row are its requests: tokens before it, sampled tokens, seconds waited, seconds to the reply.
    ``injected``: the recipe adds ``latency`` of its own, which the planner counts again: no waiting is taken from here.
    """
    tokens = [float(row["tokens"]) for row in rows]
    said = [float(row["tokens"] - row["sampled_tokens"]) for row in rows]
    turns = [row["turns"] for row in rows if row.get("turns")]
    prompts = [float(requests[0][0]) for requests in turns] or [Quantiles.of(said).quantile(0.1)]
    prompt = min(mean(prompts), *tokens)
    after = sum(max(0.0, total - prompt) for total in tokens)
    sampled = sum(float(row["sampled_tokens"]) for row in rows)
    tools = [float(request[2]) for requests in turns for request in requests[1:]]
    judge = [] if injected else [_judge_s(row) for row in rows if row.get("turns")]
    return WorkloadConfig(
        source=f"run {run}, {len(rows)} rollouts",
        tokens=_distribution(tokens),
        prompt_tokens=max(1.0, prompt),
        turns=max(1.0, median(len(requests) for requests in turns)) if turns else 1.0,
        sampled_share=min(1.0, sampled / after) if after else 1.0,
        tool_s=_distribution(tools) if tools else None,
        judge_s=_distribution(judge) if judge else None,
    )


def _judge_s(row: dict[str, Any]) -> float:
    """Return the seconds of a rollout that its requests do not explain."""
    return max(0.0, float(row["seconds"]) - sum(float(turn[2]) + float(turn[3]) for turn in row["turns"]))


def _distribution(values: Sequence[float]) -> Samples:
    quantiles = Quantiles.of(values)
    kept = quantiles.sample(min(_KEPT_VALUES, len(quantiles.values)))
    return Samples(kind="samples", values=tuple(round(value, 4) for value in kept))
