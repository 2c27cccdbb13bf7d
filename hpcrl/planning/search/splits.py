"""The best splits of nodes among trainer and engines, and the best shapes for each, under what memory allows.

Roles are independent but for the loop that joins them. So each role's best shape is found alone, for every number of
nodes it might get; all splits are compared by the slower side; and only the best few of each size are forecast whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding
from hpcrl.models.facts import ModelFacts
from hpcrl.planning.times.forecast import Forecast, Site, forecast
from hpcrl.planning.times.from_recipe import PlannedLayout
from hpcrl.planning.times.serving import ServingFleet
from hpcrl.planning.times.shapes import EngineShape, TrainerShape
from hpcrl.planning.times.trainer import TrainerBatch, trainer_step
from hpcrl.planning.times.workload import Workload, resolve_workload

_CONTEXT_PARALLEL = (1, 2, 4, 8, 16)
_FINALISTS = 12
"""Splits of each number of nodes that are forecast whole."""
_KEPT = 3
"""Number of these that a search returns."""
_MAX_REPLICAS = 32


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of comparing a shape with memory.

    Attributes
    ----------
    ok:
        Whether it fits.
    short:
        The shortage and its size, where it does not fit.
    slots:
        Sequences that the KV cache of one data-parallel rank holds (engines); None: no limit known.
    """

    ok: bool
    short: str = ""
    slots: float | None = None


@dataclass(frozen=True, slots=True)
class Fits:
    """Memory, as the search asks it."""

    trainer: Callable[[TrainerShape], bool]
    engine: Callable[[EngineShape, bool], Fit]
    """Shape, and whether it is for prompts alone."""


@dataclass(frozen=True)
class Problem:
    """Inputs of a search: recipe, cluster, nodes, and known times.

    Attributes
    ----------
    base:
        Values that stay as they are: dtypes, recomputation, hand-off path, whether prompts have their own engines.
    fits:
        Comparison with memory.
    """

    recipe: Recipe
    facts: ModelFacts
    base: PlannedLayout
    site: Site
    fits: Fits

    @cached_property
    def workload(self) -> Workload:
        """Return the workload of the rollouts."""
        return resolve_workload(self.recipe, self.site.calibration)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout and what it does."""

    layout: PlannedLayout
    forecast: Forecast

    @property
    def nodes(self) -> int:
        """Return the number of nodes of all roles."""
        return self.layout.nodes

    @property
    def step_s(self) -> float:
        """Return the seconds of a step."""
        assert self.forecast.loop is not None
        return self.forecast.loop.step_s

    @property
    def gpu_hours(self) -> float:
        """Return the GPU-hours of a step."""
        return self.layout.gpus * self.step_s / 3600.0


@dataclass(frozen=True, slots=True)
class _Side:
    """Engines of one kind with a number of nodes, and rollouts a second that they can serve."""

    shape: EngineShape
    rate: float
    slots: float | None


def search(
    problem: Problem, nodes: Sequence[int], progress: Callable[[float], None] = lambda share: None
) -> list[Candidate]:
    """Return the best layouts of each number of nodes, the fastest first.

    Parameters
    ----------
    nodes:
        Numbers of nodes. Where trainer and engines share a node: its GPUs, which are split as nodes are otherwise.
    progress:
        Called with the finished share, from 0 to 1.

    Raises
    ------
    ConfigError
        The cluster profile lacks a number.
    """
    most = max(nodes)
    trainers = dict(_trainers(problem, most))
    progress(0.2)
    decodes = dict(_sides(problem, most, prompts=False))
    progress(0.3)
    prefills = dict(_sides(problem, most, prompts=True)) if problem.base.prefill is not None else {}
    found: list[Candidate] = []
    for done, count in enumerate(nodes):
        progress(0.4 + 0.6 * done / len(nodes))
        splits = sorted(_splits(problem, count, trainers, decodes, prefills), key=lambda split: split[0])
        best = [_candidate(problem, split) for split in splits[:_FINALISTS]]
        found += sorted(best, key=lambda candidate: candidate.step_s)[:_KEPT]
    return found


_Split = tuple[float, TrainerShape, _Side, _Side | None]


def _splits(
    problem: Problem,
    count: int,
    trainers: dict[int, tuple[TrainerShape, float]],
    decodes: dict[int, _Side],
    prefills: dict[int, _Side],
) -> Iterator[_Split]:
    """Yield all splits of ``count`` nodes with the seconds of their slower side."""
    rollouts = problem.recipe.rollouts.rollouts_per_step
    for trainer_nodes, (shape, seconds) in trainers.items():
        left = count - trainer_nodes
        if left < 1:
            continue
        for decode_nodes, decode in decodes.items():
            prefill_nodes = left - decode_nodes
            if not prefills:
                if prefill_nodes == 0:
                    yield max(seconds, rollouts / decode.rate), shape, decode, None
            elif prefill_nodes in prefills:
                prefill = prefills[prefill_nodes]
                # the slower side decides; a small part of the faster one breaks ties
                slow, fast = sorted((seconds, rollouts / min(decode.rate, prefill.rate)), reverse=True)
                yield slow + 1e-3 * fast, shape, decode, prefill


def _candidate(problem: Problem, split: _Split) -> Candidate:
    _, trainer, decode, prefill = split
    site = problem.site
    layout = replace(
        problem.base, trainer=trainer, decode=decode.shape, prefill=None if prefill is None else prefill.shape
    )
    result = forecast(problem.recipe, problem.facts, layout, site, workload=problem.workload, slots=decode.slots)
    if result.loop is None:
        what = "is not in the profile, and a search needs it"
        raise ConfigError([Finding(f"cluster profile {site.cluster.name}", key, what) for key in result.missing])
    return Candidate(layout, result)


def _trainers(problem: Problem, most: int) -> Iterator[tuple[int, tuple[TrainerShape, float]]]:
    """Yield the fastest shape that fits, for each number of nodes."""
    base = problem.base
    batch = TrainerBatch(problem.recipe.rollouts.rollouts_per_step, problem.workload.lengths, base.router_replay)
    for nodes in range(1, most):
        timed = [
            (trainer_step(problem.facts, shape, batch, problem.site.trainer).seconds, shape)
            for shape in (
                _trainers_of_node(base.trainer, problem.facts, nodes)
                if base.shared_node
                else trainer_shapes(base.trainer, problem.facts, nodes)
            )
        ]
        # memory is the more expensive check: only the fastest are checked
        ordered = sorted(((s, shape) for s, shape in timed if s is not None), key=lambda pair: pair[0])
        for seconds, shape in ordered:
            if problem.fits.trainer(shape):
                yield nodes, (shape, seconds)
                break


def _trainers_of_node(base: TrainerShape, facts: ModelFacts, gpus: int) -> Iterator[TrainerShape]:
    """Yield the shapes of a trainer that has ``gpus`` GPUs of one node."""
    copies = 1 if gpus % base.copies else base.copies
    smallest = replace(base, gpus_per_node=gpus, copies=copies, context_parallel=1, expert_parallel=1)
    return trainer_shapes(smallest, facts, 1)


def trainer_shapes(base: TrainerShape, facts: ModelFacts, nodes: int) -> Iterator[TrainerShape]:
    """Yield the shapes that a trainer of ``nodes`` nodes could have."""
    ranks = nodes * base.gpus_per_node
    copies = 1 if ranks % base.copies else base.copies
    experts = _expert_degrees(facts, ranks // copies, base.gpus_per_node)
    for context in _CONTEXT_PARALLEL:
        if ranks // copies % context:
            continue
        for expert in experts:
            for offload in (False, True):
                for activations in (False, True):
                    yield replace(
                        base,
                        nodes=nodes,
                        copies=copies,
                        context_parallel=context,
                        expert_parallel=expert,
                        offload_optimizer=offload,
                        offload_activations=activations,
                    )


def _expert_degrees(facts: ModelFacts, ranks: int, gpus_per_node: int) -> list[int]:
    if not facts.num_experts:
        return [1]
    degrees = [1, gpus_per_node, 2 * gpus_per_node, 4 * gpus_per_node, 8 * gpus_per_node]
    return [n for n in dict.fromkeys(degrees) if ranks % n == 0 and facts.num_experts % n == 0]


def _sides(problem: Problem, most: int, *, prompts: bool) -> Iterator[tuple[int, _Side]]:
    """Yield the fastest engines that fit, for each number of nodes."""
    base = problem.base
    own = base.prefill if prompts and base.prefill is not None else base.decode
    memory: dict[EngineShape, Fit] = {}
    for nodes in range(1, most):
        best: _Side | None = None
        shapes = _parts_of_node if base.shared_node else engine_shapes
        for shape in shapes(own, problem.facts, nodes):
            one = replace(shape, replicas=1)
            if one not in memory:
                memory[one] = problem.fits.engine(one, prompts)
            if not memory[one].ok:
                continue
            slots = memory[one].slots
            rate = _rate(problem, shape, slots, prompts=prompts)
            if best is None or rate > best.rate * 1.001:
                best = _Side(shape, rate, slots)
        if best is not None:
            yield nodes, best


def engine_shapes(base: EngineShape, facts: ModelFacts, nodes: int) -> Iterator[EngineShape]:
    """Yield the ways to cut ``nodes`` nodes into replicas."""
    for each in range(1, nodes + 1):
        replicas = nodes // each
        ranks = each * base.gpus_per_node
        if nodes % each or replicas > _MAX_REPLICAS:
            continue
        if facts.num_experts:
            if facts.num_experts % ranks == 0:
                yield replace(base, replicas=replicas, nodes=each, expert_parallel=ranks)
        elif each == 1:
            yield replace(base, replicas=replicas, nodes=each)


def _parts_of_node(base: EngineShape, facts: ModelFacts, gpus: int) -> Iterator[EngineShape]:
    """Yield the ways to cut GPUs of one node into replicas."""
    for ranks in range(base.tensor_parallel, gpus + 1, base.tensor_parallel):
        one = replace(base, replicas=gpus // ranks, nodes=1, gpus_per_node=ranks)
        if gpus % ranks == 0 and not (facts.num_experts and facts.num_experts % ranks):
            yield replace(one, expert_parallel=ranks) if facts.num_experts else one


def _rate(problem: Problem, shape: EngineShape, slots: float | None, *, prompts: bool) -> float:
    """Return the rollouts a second that these engines end."""
    facts, site, base, workload = problem.facts, problem.site, problem.base, problem.workload
    if prompts:
        serving = ServingFleet(facts, workload, base.decode, site.decode, shape, site.prefill)
        return serving.prompt_rate / max(1.0, serving.prompt_tokens)
    prefill = None if base.prefill is None else _endless(base.prefill)
    serving = ServingFleet(facts, workload, shape, site.decode, prefill, site.prefill if prefill else None, slots)
    # with the maximum in flight: short steps count as much as many sequences
    return serving.rate(float(problem.recipe.rollouts.max_in_flight))[0]


def _endless(shape: EngineShape) -> EngineShape:
    """Return engines for prompts that never limit decoding: each side is measured alone."""
    return replace(shape, replicas=10**6)


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Give the layouts that no other one beats in nodes and in seconds of a step, by nodes."""
    best = float("inf")
    kept = []
    for candidate in sorted(candidates, key=lambda c: (c.nodes, c.step_s)):
        if candidate.step_s < best * 0.999:
            best = candidate.step_s
            kept.append(candidate)
    return kept


def marked(candidates: Sequence[Candidate], nodes: int | None = None) -> list[tuple[str, Candidate]]:
    """Return the recommended candidates, by nodes.

    These are ``cheapest`` in GPU-hours a step, ``knee``, ``fastest``, and ``same nodes``, which is the fastest of those
    with ``nodes`` nodes.

    The knee is the Pareto-optimal candidate farthest below the straight line from the smallest to the fastest, both
    axes as logarithms: from there on, more nodes shorten a step by a smaller share than before.
    """
    best = pareto(candidates)
    if not best:
        return []
    first, last = best[0], best[-1]
    cheapest = min(best, key=lambda candidate: candidate.gpu_hours)
    knee = max(best, key=lambda candidate: _below_line(candidate, first, last))
    names: dict[int, list[str]] = {}
    chosen = [("cheapest", cheapest), ("knee", knee), ("fastest", last)]
    same = min((c for c in candidates if c.nodes == nodes), key=lambda candidate: candidate.step_s, default=None)
    if same is not None:
        chosen.append(("same nodes", same))
    for name, candidate in chosen:
        names.setdefault(id(candidate), []).append(name)
    rows = {id(candidate): candidate for _, candidate in chosen}.values()
    ordered = sorted(rows, key=lambda candidate: (candidate.nodes, candidate.step_s))
    return [(", ".join(names[id(candidate)]), candidate) for candidate in ordered]


def _below_line(candidate: Candidate, first: Candidate, last: Candidate) -> float:
    if first.nodes == last.nodes:
        return 0.0
    part = math.log(candidate.nodes / first.nodes) / math.log(last.nodes / first.nodes)
    line = math.log(first.step_s) + part * math.log(last.step_s / first.step_s)
    return line - math.log(candidate.step_s)
