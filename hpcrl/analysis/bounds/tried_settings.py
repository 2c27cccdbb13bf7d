"""Settings that would change the time of a step, by the simulator with the durations that the run itself measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.recipe import Recipe
from hpcrl.errors import HpcrlError
from hpcrl.planning.distributions import Distribution, Samples
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.simulation import Durations, make_scenario, simulate
from hpcrl.simulation.inputs.durations import EnvironmentDurations
from hpcrl.simulation.inputs.measure import measure

WARM_STEPS = 3
"""First steps of a run, in which programs warm up."""
MEASURED_STEPS = 100
"""Maximum number of newest steps that durations are measured from."""
_MOST_STEPS = 60
"""Maximum number of simulated steps."""
_VISITS = 60_000
"""Requests of a simulation, about: each takes seconds at most."""
NOTICED = 0.03
"""Smallest relative change of a step that counts as an effect."""
_FAR = 0.25
"""Largest relative difference of a simulated and the measured step without a note."""


class TriedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A change, and the step that the simulator predicts with it.

    Attributes
    ----------
    change:
        ``key=value`` of the recipe, or a supposition in words.
    kind:
        ``setting``: it can be set so. ``supposition``: it says what a faster part would be worth.
    step_s, effect:
        Predicted seconds of a step, and their relative change. They are the measured step times the ratio of both
        simulations; that of the newest steps in a long run.
    """

    change: str
    kind: Literal["setting", "supposition"]
    step_s: float
    effect: float


class TriedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was tried.

    Attributes
    ----------
    tried:
        The change that shortens a step most first. A change is left out where its simulation did not reach a step.
    count:
        Number of changes that were tried.
    simulated_s:
        Seconds of a step as the simulator gives it for the run itself; None where it could not be simulated.
    because:
        Reason why nothing was tried; empty where something was.
    note:
        Doubt about the figures; may be empty.
    """

    tried: list[TriedSetting]
    count: int
    simulated_s: float | None
    because: str = ""
    note: str = ""

    def noticed(self) -> list[TriedSetting]:
        """Return the changes with an effect of at least `NOTICED`, the one that shortens a step most first."""
        return [each for each in self.tried if abs(each.effect) >= NOTICED]


class _Change(NamedTuple):
    words: str
    kind: Literal["setting", "supposition"]
    recipe: Recipe
    durations: Durations


def try_settings(run: RunDir, progress: Callable[[float], None] = lambda share: None) -> TriedSettings:
    """Simulate the run with each of some changes, by durations of its newest `MEASURED_STEPS` steps.

    Parameters
    ----------
    progress:
        Called with the finished share, from 0 to 1.
    """
    recipe, cluster = run.recipe(), run.cluster()
    if recipe.sft is not None:
        return _nothing("a supervised run has no rollouts to simulate")
    if recipe.engine.is_colocated:
        return _nothing("the simulator cannot model a trainer and engines that share devices")
    try:
        durations = measure(run, newest=MEASURED_STEPS)
        base_s = _simulated_s(recipe, cluster, durations)
    except HpcrlError as error:
        return _nothing(str(error).partition("\n")[0])
    if not base_s:
        return _nothing("the simulation of the run did not reach a step")
    records = read_metrics(run)[WARM_STEPS:][-MEASURED_STEPS:]
    step_s = sum(sum(record.phases_s.values()) for record in records) / len(records)
    changes = list(_changes(recipe, durations))
    found = []
    for number, change in enumerate(changes, start=1):
        ratio = _simulated_s(change.recipe, cluster, change.durations) / base_s
        progress(number / len(changes))
        if ratio:
            found.append(TriedSetting(change=change.words, kind=change.kind, step_s=ratio * step_s, effect=ratio - 1.0))
    far = abs(base_s / step_s - 1.0)
    note = f"the simulator gives {base_s:.3g} s for this run, and {step_s:.3g} s were measured: take changes as trends"
    return TriedSettings(
        tried=sorted(found, key=lambda each: each.effect),
        count=len(changes),
        simulated_s=base_s,
        note=note if far > _FAR else "",
    )


def _nothing(because: str) -> TriedSettings:
    return TriedSettings(tried=[], count=0, simulated_s=None, because=because)


def _simulated_s(recipe: Recipe, cluster: ClusterProfile, durations: Durations) -> float:
    """Return the mean seconds of a simulated step without evaluations; 0 where no step ended."""
    turns = sum(len(r.turns) for each in durations.environments.values() for r in each.trace)
    rollouts = sum(len(each.trace) for each in durations.environments.values())
    visits = recipe.rollouts.rollouts_per_step * max(1.0, turns / max(1, rollouts))
    fewest = 2 * (recipe.rollouts.max_off_policy_steps + 1) + 8
    steps = max(fewest, min(_MOST_STEPS, round(_VISITS / visits)))
    longer = _with(_with(recipe, "trainer", steps=steps), "evaluation", every_steps=0)
    return simulate(make_scenario(longer, cluster, durations, days=30.0)).step_s.mean


def _changes(recipe: Recipe, durations: Durations) -> Iterator[_Change]:
    for words, changed in _settings(recipe):
        yield _Change(words, "setting", changed, durations)
    for name, measured in durations.environments.items():
        halved = {**durations.environments, name: _faster(measured)}
        faster = durations.model_copy(update={"environments": halved})
        yield _Change(f"environment {name} twice as fast", "supposition", _less_latency(recipe, name, 0.5), faster)
    trainer, handoff = durations.trainer, durations.handoff
    half = trainer.model_copy(
        update={
            "forward_backward_base_s": trainer.forward_backward_base_s / 2,
            "forward_backward_per_token_s": trainer.forward_backward_per_token_s / 2,
            "optimizer_s": _halved(trainer.optimizer_s),
        }
    )
    yield _Change("trainer twice as fast", "supposition", recipe, durations.model_copy(update={"trainer": half}))
    quick = handoff.model_copy(update={name: _halved(getattr(handoff, name)) for name in type(handoff).model_fields})
    yield _Change("hand-off twice as fast", "supposition", recipe, durations.model_copy(update={"handoff": quick}))
    engine = durations.engine
    fast = engine.model_copy(
        update={
            name: getattr(engine, name) / 2
            for name in ("step_base_s", "step_per_sequence_s", "prefill_per_token_s", "request_overhead_s")
        }
    )
    yield _Change("engines twice as fast", "supposition", recipe, durations.model_copy(update={"engine": fast}))


def _settings(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    rollouts, engine = recipe.rollouts, recipe.engine

    def one(section: str, key: str, value: Any) -> tuple[str, Recipe]:
        return f"{section}.{key}={value}", _with(recipe, section, **{key: value})

    yield one("rollouts", "max_in_flight", 2 * rollouts.max_in_flight)
    yield one("rollouts", "max_off_policy_steps", 2 * rollouts.max_off_policy_steps + 1)
    yield one("engine", "max_num_seqs", 2 * engine.max_num_seqs)
    if engine.prefill is None:
        yield one("engine", "replicas", 2 * engine.replicas)
    if recipe.checkpoint.every_steps:
        yield one("checkpoint", "every_steps", 4 * recipe.checkpoint.every_steps)
    for number, environment in enumerate(recipe.environments):
        if environment.latency.median_s > 0:
            yield f"environments.{number}.latency.median_s=0", _less_latency(recipe, environment.name, 0.0)


def _with(recipe: Recipe, section: str, **values: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def _less_latency(recipe: Recipe, name: str, factor: float) -> Recipe:
    """Return the recipe with the injected latency of an environment times ``factor``."""
    environments = tuple(
        each.model_copy(
            update={"latency": each.latency.model_copy(update={"median_s": factor * each.latency.median_s})}
        )
        if each.name == name
        else each
        for each in recipe.environments
    )
    return recipe.model_copy(update={"environments": environments})


def _faster(measured: EnvironmentDurations) -> EnvironmentDurations:
    """Return an environment whose tools and judge take half of their time."""
    trace = tuple(
        each.model_copy(
            update={
                "turns": tuple(turn._replace(wait_s=turn.wait_s / 2) for turn in each.turns),
                "judge_s": each.judge_s / 2,
            }
        )
        for each in measured.trace
    )
    return measured.model_copy(update={"trace": trace})


def _halved(distribution: Distribution) -> Distribution:
    values = getattr(distribution, "values", None)
    if values is not None:
        return Samples(kind="samples", values=tuple(value / 2 for value in values))
    value = getattr(distribution, "value", 0.0)
    return distribution.model_copy(update={"value": value / 2})
