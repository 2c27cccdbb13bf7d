"""Search of the best split for a command, compared with the recipe's own layout; reasons where nothing fits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.load import leaves
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, UnknownSizesError, UsageError
from hpcrl.planning.calibration.calibration_file import Calibration
from hpcrl.planning.documents import loop_document
from hpcrl.planning.memory.fit import memory_report
from hpcrl.planning.memory.remedies import why_not
from hpcrl.planning.report import Outlook, find_facts
from hpcrl.planning.search.memory import memory_fits, trainer_fit
from hpcrl.planning.search.splits import Candidate, Problem, marked, pareto, search
from hpcrl.planning.times.forecast import forecast, site_rates
from hpcrl.planning.times.from_recipe import PlannedLayout, planned_layout, with_layout
from hpcrl.planning.times.workload import resolve_workload

MOST_NODES = 1024
"""Nodes that are split among roles: every number of nodes of each role is a question to memory."""
_MOST_SPLITS = 8_000_000


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes
    ----------
    candidates:
        The best candidates of each number of nodes.
    own:
        The recipe's own layout with its forecast; None where a number is missing.
    own_short:
        Shortages of the recipe's own layout; empty where it fits.
    why_not:
        Shortages where nothing fits.
    notes:
        Notes for people.
    nodes:
        Nodes of the recipe's own layout.
    """

    candidates: list[Candidate]
    own: Candidate | None
    own_short: str = ""
    why_not: str = ""
    notes: tuple[str, ...] = ()
    nodes: int = 0

    @property
    def marks(self) -> list[tuple[str, Candidate]]:
        """Return the recommended candidates (`hpcrl.planning.search.splits.marked`)."""
        return marked(self.candidates, self.nodes)


def default_range(recipe: Recipe, cluster: ClusterProfile) -> range:
    """Return the default numbers of nodes: around the recipe's own, as far as the profile has them.

    UsageError where the recipe's own number alone is above the maximum.
    """
    if recipe.engine.shares_node:
        return range(1, 2)
    own = recipe.trainer.nodes + sum(
        side.replicas * side.nodes
        for side in ((recipe.engine.prefill, recipe.engine.decode) if recipe.engine.decode else (recipe.engine,))
        if side is not None
    )
    high = max(own, math.ceil(own * 1.25))
    if isinstance(cluster, SlurmCluster):
        # roles may be in several partitions: the nodes of all of them are added up
        high = max(own, min(high, sum(cluster_nodes(cluster).values())))
    found = range(max(2, math.floor(own * 0.75)), high + 1)
    # where that is above the maximum, only the recipe's own number is used, if it is not above
    return found if high <= MOST_NODES and _splits(found) <= _MOST_SPLITS else node_range(str(own))


def _splits(nodes: range) -> int:
    return sum(count * count for count in nodes)


def node_range(text: str) -> range:
    """Return the range of ``28`` or ``20..40`` (UsageError where it is neither)."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    low = int(match[1]) if match else 0
    high = int(match[2]) if match and match[2] else low
    if not match or low < 2 or high < low:
        raise UsageError(f"--nodes {text}: write a number, or a range such as 20..40, from 2 up to {MOST_NODES:,}")
    found = range(low, high + 1)
    if high > MOST_NODES or _splits(found) > _MOST_SPLITS:
        raise UsageError(
            f"--nodes {text}: every split is compared, up to {MOST_NODES:,} nodes, and of a range up to "
            f"{_MOST_SPLITS:,} (the squares of its numbers added up)\n"
            "    hint: a smaller range or number; `hpcrl simulate --nodes` takes the recipe's own split in any size"
        )
    return found


def run_search(
    recipe: Recipe,
    cluster: ClusterProfile,
    calibration: Calibration,
    nodes: Sequence[int],
    progress: Callable[[float], None] = lambda share: None,
) -> SearchResult:
    """Search, and the recipe's own layout for comparison; ``progress`` is called with the finished share, from 0 to 1.

    Raises
    ------
    UsageError
        The cluster has no nodes to search over, or the run has a trainer alone.
    UnknownSizesError
        The model's sizes are not known.
    ConfigError
        The cluster profile lacks a number.
    """
    if recipe.sft is not None:
        raise UsageError("a supervised run (sft) has a trainer alone: there are no engines to share nodes with")
    if not isinstance(cluster, SlurmCluster):
        raise UsageError(
            f"{cluster.name} is not a Slurm site: there are no nodes to split\n"
            "    hint: name a site with --cluster (`hpcrl cluster ls`)"
        )
    facts = find_facts(recipe)
    if isinstance(facts, str):
        raise UnknownSizesError(f"the model's sizes are needed: {facts}")
    site = site_rates(cluster, calibration)
    base = planned_layout(recipe, cluster, facts)
    mean_tokens = resolve_workload(recipe, calibration).mean("tokens")
    fits = memory_fits(recipe, cluster, facts, base, mean_tokens=mean_tokens)
    if base.shared_gpus:
        raise UsageError(
            "trainer and engines have the same GPUs (engine.placement: shared_gpus): there is nothing to split\n"
            "    hint: --set engine.placement=shared_node splits the GPUs of one node"
        )
    if base.shared_node:
        found = _of_one_node(Problem(recipe, facts, base, site, fits), cluster, nodes, progress)
    else:
        found = search(Problem(recipe, facts, base, site, fits), nodes, progress)
    own_fits = [trainer_fit(recipe, cluster, facts, base.trainer), fits.engine(base.decode, False)]
    if base.prefill is not None:
        own_fits.append(fits.engine(base.prefill, True))
    shorts = [fit.short for fit in own_fits if not fit.ok]
    own = forecast(recipe, facts, base, site, slots=fits.engine(base.decode, False).slots)
    candidate = None if own.loop is None else Candidate(base, own)
    notes = [f"the recipe's own layout does not fit: {short}" for short in shorts]
    reasons = list(shorts)
    if not found:
        smallest = with_layout(recipe, _cut(base, max(nodes)))
        reasons = [
            f"{shortage.place.summary()}" + "".join(f"\n    hint: {knob}" for knob in shortage.knobs[:3])
            for shortage in why_not(smallest, cluster, facts)
        ] or reasons
    if found and len(cluster_nodes(cluster)) == 1:
        most = next(iter(cluster_nodes(cluster).values()))
        if max(nodes) > most:
            notes.append(f"the profile has {most} nodes; layouts with more are for a larger site")
    return SearchResult(found, candidate, "; ".join(shorts), "\n    ".join(reasons), tuple(notes), base.nodes)


def _of_one_node(
    problem: Problem, cluster: SlurmCluster, nodes: Sequence[int], progress: Callable[[float], None]
) -> list[Candidate]:
    """Return splits of the GPUs of the node that trainer and engines share, whose host has room for both."""
    if list(nodes) != [1]:
        raise UsageError(
            "trainer and engines share one node (engine.placement), whose GPUs are split\n"
            "    hint: leave --nodes out, or --set engine.placement=apart"
        )
    recipe, facts = problem.recipe, problem.facts
    found = search(problem, [cluster.partitions[cluster.partition_name(Role.TRAINER)].node.gpus], progress)
    return [c for c in found if memory_report(with_layout(recipe, c.layout), cluster, facts).ok]


_LOOKED_AT = 64
"""Nodes up to which a plan looks for a better split of its own accord: that takes less than a second."""
_WORTH = 0.98


def better_split(outlook: Outlook, calibration: Calibration) -> Candidate | None:
    """Return a split of the same nodes with a shorter step than the plan's own; None where none was found."""
    layout, loop = outlook.layout, outlook.loop
    if layout is None or loop is None or layout.shared_gpus:
        return None
    if not (layout.shared_node or 2 <= layout.nodes <= _LOOKED_AT):
        return None
    if calibration.measured_for(outlook.recipe.name, outlook.cluster.name) is not None:
        return None
    try:
        found = run_search(outlook.recipe, outlook.cluster, calibration, range(layout.nodes, layout.nodes + 1))
    except (ConfigError, UsageError):
        return None
    best = min(found.candidates, key=lambda candidate: candidate.step_s, default=None)
    return best if best is not None and best.step_s < _WORTH * loop.step_s else None


def better_document(better: Candidate | None) -> dict[str, Any] | None:
    """Return a better split as JSON values."""
    return None if better is None else _candidate_document(better)


def _cut(base: PlannedLayout, nodes: int) -> PlannedLayout:
    """Return the layout scaled down to ``nodes`` nodes in its own proportions, to explain why nothing fits."""
    share = nodes / base.nodes
    trainer = max(1, int(base.trainer.nodes * share))
    shape = replace(base.trainer, nodes=trainer, context_parallel=1, expert_parallel=1, copies=1)
    whole = next(
        (
            replace(shape, context_parallel=cp, expert_parallel=ep)
            for cp in range(base.trainer.context_parallel, 0, -1)
            for ep in range(base.trainer.expert_parallel, 0, -1)
            if shape.ranks % cp == 0 and shape.ranks % ep == 0
        ),
        shape,
    )
    decode = replace(
        base.decode, nodes=1, replicas=1, expert_parallel=min(base.decode.expert_parallel, base.decode.gpus_per_node)
    )
    prefill = None
    if base.prefill is not None:
        prefill = replace(
            base.prefill,
            nodes=1,
            replicas=1,
            expert_parallel=min(base.prefill.expert_parallel, base.prefill.gpus_per_node),
        )
    return replace(base, trainer=whole, decode=decode, prefill=prefill)


def cluster_nodes(cluster: SlurmCluster) -> dict[str, int]:
    """Return the nodes of each partition that roles run on."""
    names = {cluster.partition_name(role) for role in (Role.TRAINER, Role.PREFILL, Role.DECODE)}
    return {name: cluster.partitions[name].nodes for name in sorted(names)}


def settings_of(recipe: Recipe, layout: PlannedLayout) -> list[str]:
    """Return the ``key=value`` settings for ``--set`` that give a recipe this layout; empty for its own."""
    before, after = dict(leaves(recipe)), dict(leaves(with_layout(recipe, layout)))
    return [
        f"{'.'.join(map(str, path))}={str(value).lower() if isinstance(value, bool) else value}"
        for path, value in after.items()
        if path in before and before[path] != value
    ]


def search_document(found: SearchResult, recipe: Recipe) -> dict[str, Any]:
    """Return a search over ``recipe`` as JSON values."""
    best = pareto(found.candidates)
    marks = {id(candidate): mark for mark, candidate in found.marks}
    return {
        "schema_version": 1,
        "candidates": [
            {
                **_candidate_document(c),
                "best": c in best,
                "mark": marks.get(id(c)),
                "settings": settings_of(recipe, c.layout),
            }
            for c in found.candidates
        ],
        "recipe": None if found.own is None else {**_candidate_document(found.own), "short": found.own_short or None},
        "notes": list(found.notes),
    }


def _candidate_document(candidate: Candidate) -> dict[str, Any]:
    layout, loop = candidate.layout, candidate.forecast.loop
    assert loop is not None
    shapes = {"trainer": layout.trainer, "prefill": layout.prefill, "decode": layout.decode}
    return {
        "nodes": candidate.nodes,
        "gpus": layout.gpus,
        "gpu_hours_per_step": candidate.gpu_hours,
        "loop": loop_document(loop),
        **{
            name: None if shape is None else {field.name: getattr(shape, field.name) for field in fields(shape)}
            for name, shape in shapes.items()
        },
    }
