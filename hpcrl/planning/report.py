"""Outlook of a plan for people and for programs: its requirements and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.engine_shape import step_limits
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, UsageError
from hpcrl.models.facts import ModelFacts
from hpcrl.models.hub import published_id
from hpcrl.models.known import load_facts
from hpcrl.planning.calibration.calibration_file import Calibration
from hpcrl.planning.memory.fit import MemoryReport, RoleMemory, memory_report
from hpcrl.planning.memory.margin import ExpertMargin, expert_margin
from hpcrl.planning.memory.remedies import Shortage, why_not
from hpcrl.planning.memory.settings import RealPass
from hpcrl.planning.times.forecast import Forecast, forecast, site_rates
from hpcrl.planning.times.from_recipe import PlannedLayout, planned_layout
from hpcrl.planning.times.loop import LoopEstimate
from hpcrl.planning.times.measured import measured_loop, measured_trainer
from hpcrl.planning.times.ranges import Range, calibration_variations, ranges_of, step_range, workload_variations
from hpcrl.planning.times.terms import TimeTable
from hpcrl.planning.times.workload import Workload, resolve_workload


@dataclass(frozen=True)
class Outlook:
    """Knowledge about a recipe on a cluster before it runs.

    Attributes
    ----------
    recipe, cluster:
        Subject of the outlook.
    forecast:
        Forecast from hardware; None on a machine whose profile describes none.
    loop, tables, workload:
        Values of the forecast, or of a measured run; ``loop`` is None where neither is complete enough.
    memory:
        Memory of every role; None where the model or a number is not known.
    shortages:
        Places that do not fit, and the settings that would help.
    lacking:
        Numbers that the profile lacks for memory or times.
    expert_margin:
        Maximum imbalance of experts before the trainer's GPUs overflow; None where experts are not distributed.
    because:
        Reason why there is not a loop; empty where there is one.
    find_ranges:
        Computes `ranges`, which takes as long as everything else: it is called only where they are shown.
    """

    recipe: Recipe
    cluster: ClusterProfile
    forecast: Forecast | None
    loop: LoopEstimate | None
    tables: Mapping[str, TimeTable]
    workload: Workload
    memory: MemoryReport | None = None
    shortages: tuple[Shortage, ...] = ()
    lacking: tuple[str, ...] = ()
    expert_margin: ExpertMargin | None = None
    because: str = ""
    find_ranges: Callable[[], Mapping[str, Range]] = dict

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Return the settings of the recipe that change memory or times and are in no formula."""
        if not self.recipe.trainer.memory.compile:
            return ()
        return ("trainer.memory.compile: memory and times are those of layers that are not compiled",)

    @cached_property
    def ranges(self) -> Mapping[str, Range]:
        """Return the ranges of times.

        Keys are ``step``, ``trainer side``, ``rollouts``, ``rollout``, ``sampled_token``, each table by its name
        (``handoff``) and each term by that of its table (``handoff/handoff.read``).
        """
        return self.find_ranges()

    @property
    def step(self) -> Range | None:
        """Return the seconds of a step, and the causes of the range; None without a loop."""
        return self.ranges.get("step")

    @property
    def tightest(self) -> RoleMemory | None:
        """Return the memory with the smallest share free."""
        places = [] if self.memory is None else [p for p in self.memory.places if p.capacity and p.headroom is not None]
        return min(places, key=lambda place: (place.headroom or 0) / (place.capacity or 1), default=None)

    @property
    def sandbox_programs(self) -> float | None:
        """Return the expected number of rollouts on a node whose programs run in sandboxes; None where it is unknown.

        Little's law: rollouts that start in a second times their seconds of tools and rewards.
        """
        sandboxes = None if self.memory is None else self.memory.sandboxes
        if sandboxes is None or self.loop is None:
            return None
        waits = self.workload.waits_of({kind.use.environment for kind in sandboxes.kinds})
        return self.loop.started_per_s * waits * sandboxes.node.processes / sandboxes.node.of

    @property
    def layout(self) -> PlannedLayout | None:
        """Return the shapes, where there are GPUs."""
        return None if self.forecast is None else self.forecast.layout


class NoFacts(str):
    """Reason why there are no facts of a model, in a sentence.

    Attributes
    ----------
    made_later:
        Whether the model is made by the recipe's warm-up: then missing facts are not a defect.
    """

    __slots__ = ("made_later",)

    def __new__(cls, why: str, *, made_later: bool = False) -> Self:
        """Make the sentence."""
        made = super().__new__(cls, why)
        made.made_later = made_later
        return made

    made_later: bool


def find_facts(recipe: Recipe) -> ModelFacts | NoFacts:
    """Return the facts of a recipe's model, or why there are none.

    Raises
    ------
    UsageError
        The planner has no terms for what the recipe asks for.
    """
    if recipe.engine.is_colocated:
        raise UsageError(
            "engine.placement: colocated: the planner computes engines and trainer on devices of their own, and has no "
            "terms yet for turns on the same ones\n"
            "    hint: plan with --set engine.placement=apart, or measure a short run (hpcrl report)"
        )
    try:
        return load_facts(recipe.model.path)
    except FileNotFoundError as error:
        if recipe.model.warmup is not None and published_id(recipe.model.path) is None:
            return NoFacts(f"{Path(recipe.model.path).name} is not made yet (hpcrl warmup)", made_later=True)
        return NoFacts(str(error))
    except ValueError as error:
        return NoFacts(str(error))


def make_outlook(
    recipe: Recipe,
    cluster: ClusterProfile,
    calibration: Calibration,
    facts: ModelFacts | str,
    real: RealPass | None = None,
) -> Outlook:
    """Return the memory and times of a recipe; ``real`` is the memory of the trainer's model, where measured.

    Where the calibration file has a measured run of this recipe on this cluster, that decides; otherwise the profile's
    hardware does.
    """
    workload = resolve_workload(recipe, calibration)
    memory, lacking = _memory(recipe, cluster, facts, real)
    short: tuple[Shortage, ...] = ()
    if memory is not None and not memory.ok and not isinstance(facts, str):
        short = why_not(recipe, cluster, facts)
    margin = expert_margin(recipe, cluster, facts) if memory is not None and not isinstance(facts, str) else None
    because = ""
    layout: PlannedLayout | None = None
    if not isinstance(cluster, SlurmCluster):
        because = (
            f"cluster profile {cluster.name} describes no hardware; measure a run: "
            "hpcrl plan calibrate RUN -o FILE, then --calibration FILE"
        )
    elif isinstance(facts, str):
        because = facts
    elif recipe.sft is not None:
        because = "times are not forecast of a supervised run (sft)"
    else:
        layout = planned_layout(recipe, cluster, facts)
    slots = _slots(recipe, memory, workload)

    def predict(own: Calibration, rollouts: Workload) -> _Prediction:
        whole: Forecast | None = None
        if layout is not None and isinstance(cluster, SlurmCluster) and not isinstance(facts, str):
            whole = forecast(recipe, facts, layout, site_rates(cluster, own), workload=rollouts, slots=slots)
        loop, tables = (None, {}) if whole is None else (whole.loop, dict(whole.tables))
        measured = own.measured_for(recipe.name, cluster.name) if recipe.sft is None else None
        if measured is not None:
            tables["trainer"] = measured_trainer(recipe, measured, rollouts)
            loop = measured_loop(recipe, measured, rollouts)
        return _Prediction(whole, loop, tables)

    found = predict(calibration, workload)
    if found.whole is not None:
        lacking = tuple(dict.fromkeys((*found.whole.missing, *lacking)))
        because = f"the cluster profile lacks {', '.join(lacking)}" if found.whole.missing else ""
    if recipe.sft is None and calibration.measured_for(recipe.name, cluster.name) is not None:
        because = ""
    return Outlook(
        recipe,
        cluster,
        forecast=found.whole,
        loop=found.loop,
        tables=found.tables,
        workload=workload,
        memory=memory,
        shortages=short,
        lacking=lacking,
        expert_margin=margin,
        because=because,
        find_ranges=lambda: _ranges(found, calibration, workload, predict),
    )


@dataclass(frozen=True, slots=True)
class _Prediction:
    whole: Forecast | None
    loop: LoopEstimate | None
    tables: Mapping[str, TimeTable]

    def seconds(self) -> dict[str, float]:
        """Return every predicted time by its name."""
        found: dict[str, float] = {}
        for name, table in self.tables.items():
            found |= {f"{name}/{term.name}": term.value for term in table if term.value is not None}
            if table.seconds is not None:
                found[name] = table.seconds
        if self.loop is not None:
            # the work of a step on each side alone; `trainer` has more than the table of that name
            found |= {
                "step": self.loop.step_s,
                "trainer side": self.loop.trainer_s,
                "rollouts": self.loop.rollout_s,
                "rollout": self.loop.served.durations.mean,
                "sampled_token": self.loop.served.token_s,
            }
        return found


def _ranges(
    found: _Prediction,
    calibration: Calibration,
    workload: Workload,
    predict: Callable[[Calibration, Workload], _Prediction],
) -> dict[str, Range]:
    if not found.tables:
        return {}
    coarse = workload.coarse()
    variations = [*calibration_variations(calibration, coarse), *workload_variations(calibration, coarse)]
    ranges = ranges_of(
        found.seconds(), (calibration, coarse), variations, lambda own, load: predict(own, load).seconds()
    )
    if "step" in ranges:
        sides = [ranges[name] for name in ("trainer side", "rollouts") if name in ranges]
        ranges["step"] = step_range(ranges["step"], sides)
    return ranges


def _memory(
    recipe: Recipe, cluster: ClusterProfile, facts: ModelFacts | str, real: RealPass | None
) -> tuple[MemoryReport | None, tuple[str, ...]]:
    """Return the memory, or the numbers that the profile lacks for it."""
    if isinstance(facts, str):
        return None, ()
    try:
        return memory_report(recipe, cluster, facts, real), ()
    except ConfigError as error:
        return None, tuple(finding.key for finding in error.findings)


def _slots(recipe: Recipe, memory: MemoryReport | None, workload: Workload) -> float | None:
    """Return the sequences that a data-parallel rank holds: ``max_num_seqs``, or the capacity of its KV cache."""
    decoding = (Role.DECODE, Role.ENGINE)
    places = [] if memory is None else [p for p in memory.places if p.role in decoding and p.kv is not None]
    if not places or places[0].kv is None:
        return None
    most = float(step_limits(recipe.engine, Role.DECODE).max_num_seqs)
    return max(1.0, min(most, places[0].kv.tokens / workload.mean("tokens")))
