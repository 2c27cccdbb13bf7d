"""Requests and durations of rollouts, from the workloads of a calibration file."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from hpcrl.config.environments import trained_on
from hpcrl.config.recipe import CalculatorEnv, EnvironmentConfig, Recipe
from hpcrl.planning.calibration.calibration_file import FACTORS, Calibration, Origin, WorkloadConfig, origin_of
from hpcrl.planning.distributions import Constant, quantiles_of, tail_of
from hpcrl.planning.lengths import Quantiles

_GRID, _COARSE = 32, 8
"""Points along lengths and along waiting times; a rollout's duration is a sum of both. Few are enough for how a time
changes with a number."""
_NO_TIME = Constant(kind="constant", value=0.0)


@dataclass(frozen=True, slots=True)
class RolloutPace:
    """Speed at which a rollout is served.

    Attributes
    ----------
    token_s:
        Seconds of a sampled token.
    prompt_token_s:
        Seconds of a prompt token, including the wait for other requests.
    request_s:
        Seconds of a request in addition to its tokens.
    """

    token_s: float
    prompt_token_s: float
    request_s: float


@dataclass(frozen=True)
class EnvironmentLoad:
    """The rollouts of one environment.

    Attributes
    ----------
    name, weight:
        Environment, and its share of the rollouts.
    tokens:
        Tokens of a rollout.
    prompt_tokens, turns, sampled_share:
        As in `WorkloadConfig`.
    waits:
        Seconds of one tool call; seconds from the last token to the reward, the recipe's ``latency`` included.
    source:
        Source of the figures.
    assumed:
        They are upper limits of the recipe, because nothing is known.
    unsure:
        Fields that the source does not say.
    limit:
        Most tokens of a rollout.
    grid:
        Points along lengths and along waiting times.
    """

    name: str
    weight: float
    tokens: Quantiles
    prompt_tokens: float
    turns: float
    sampled_share: float
    tool: Quantiles
    judge: Quantiles
    source: str
    assumed: bool
    unsure: tuple[str, ...] = ()
    limit: float = math.inf
    grid: int = _GRID

    __hash__ = object.__hash__

    def sampled(self, length: float) -> float:
        """Return the tokens that the model samples in a rollout of ``length`` tokens."""
        return max(1.0, (length - self.prompt_tokens) * self.sampled_share)

    def turns_of(self, length: float) -> float:
        """Return the requests of a rollout of ``length`` tokens: longer ones have more."""
        return max(1.0, self.turns * length / self._median)

    @cached_property
    def _median(self) -> float:
        return self.tokens.quantile(0.5)

    def uncertain(self) -> Iterator[tuple[str, float, Origin]]:
        """Yield the names of the numbers of rollouts, the factor by which each may be wrong, and its origin."""
        for name in _MOVABLE:
            if name not in _DISTRIBUTIONS or getattr(self, _DISTRIBUTIONS[name]).values[-1] > 0.0:
                unsure = name in self.unsure
                origin = "assumed" if self.assumed or unsure else origin_of(self.source)
                yield name, _UNSURE.get(name, FACTORS[origin]) if unsure else FACTORS[origin], origin

    def moved(self, name: str, factor: float) -> EnvironmentLoad:
        """Return the load with one of `uncertain` times ``factor``, within the possible range."""
        if name in _DISTRIBUTIONS:
            field, limit = _DISTRIBUTIONS[name], self.limit if name == "tokens" else math.inf
            values = getattr(self, field).mapped(lambda value: min(limit, value * factor))
            if name != "tokens":
                return replace(self, **{field: values})
            return replace(self, tokens=values, prompt_tokens=min(self.prompt_tokens, values.values[0]))
        value = getattr(self, name) * factor
        most = {"sampled_share": 1.0, "prompt_tokens": self.tokens.values[0]}.get(name, math.inf)
        return replace(self, **{name: min(most, max(1.0, value) if name == "turns" else value)})

    def durations(self, pace: RolloutPace) -> list[float]:
        """Return the seconds of rollouts; every value is as likely as the others."""
        token_s, prompt_token_s, request_s = pace.token_s, pace.prompt_token_s, pace.request_s
        result: list[float] = []
        for sampled, prompt, turns, waits in self._unserved:
            served = sampled * token_s + prompt * prompt_token_s + turns * request_s
            result += [served + tools + judged for tools, judged in waits]
        return result

    @cached_property
    def _unserved(self) -> list[tuple[float, float, float, list[tuple[float, float]]]]:
        """Return the parts of durations that do not depend on the pace.

        For some lengths these are their sampled and other tokens, their turns, and pairs of seconds of tools and
        seconds until the reward.
        """
        tool_mean = self.tool.mean
        tool_spread = [value - tool_mean for value in self.tool.sample(self.grid)]
        judge = self.judge.sample(self.grid)
        found = []
        for length in self.tokens.sample(min(self.grid, len(self.tokens.values))):
            turns, sampled = self.turns_of(length), self.sampled(length)
            calls = turns - 1.0
            # the deviation of a sum of n tool calls grows with the root of n
            spread = math.sqrt(calls) if calls > 0 else 0.0
            tools = [max(0.0, calls * tool_mean + spread * deviation) for deviation in tool_spread]
            found.append((sampled, length - sampled, turns, list(zip(tools, judge, strict=True))))
        return found


_DISTRIBUTIONS = {"tokens": "tokens", "tool_s": "tool", "judge_s": "judge"}
_UNSURE = {"tool_s": 3.0, "judge_s": 3.0, "sampled_share": 2.0}
"""Factors of what a source of lengths does not say: commands, test suites and models of tasks differ by far more than
kernels do."""
_MOVABLE = ("tokens", "prompt_tokens", "turns", "sampled_share", "tool_s", "judge_s")


@dataclass(frozen=True)
class Workload:
    """All environments of a recipe."""

    environments: tuple[EnvironmentLoad, ...]

    __hash__ = object.__hash__

    @cached_property
    def lengths(self) -> Quantiles:
        """Return the tokens of a rollout, over all environments."""
        return _mixture([(load.weight, list(load.tokens.values)) for load in self.environments])

    def moved(self, index: int, name: str, factor: float) -> Workload:
        """Return the workload with one number of one environment times ``factor``."""
        loads = list(self.environments)
        loads[index] = loads[index].moved(name, factor)
        return Workload(tuple(loads))

    def coarse(self) -> Workload:
        """Return the workload with fewer points: enough for differences of times, not for their values."""
        return Workload(tuple(replace(load, grid=_COARSE) for load in self.environments))

    def mean(self, what: str) -> float:
        """Return the mean over rollouts of a quantity.

        It is one of ``tokens``, ``sampled``, ``turns``, ``waits`` (seconds of tools and rewards), or ``context``
        (tokens in sight of a sampled one).
        """
        return self._means[what]

    def waits_of(self, names: Collection[str]) -> float:
        """Return the mean seconds of tools and rewards of a rollout, of those of some environments; 0 for others."""
        return sum(load.weight * _mean(load, "waits") for load in self.environments if load.name in names)

    @cached_property
    def _means(self) -> dict[str, float]:
        names = ("tokens", "sampled", "turns", "waits", "context")
        return {name: sum(load.weight * _mean(load, name) for load in self.environments) for name in names}

    def durations(self, pace: RolloutPace) -> Quantiles:
        """Return the seconds of a rollout."""
        return _mixture([(load.weight, load.durations(pace)) for load in self.environments])

    @property
    def assumed(self) -> tuple[str, ...]:
        """Return the environments about which nothing is known."""
        return tuple(load.name for load in self.environments if load.assumed)


def _mean(load: EnvironmentLoad, what: str) -> float:
    match what:
        case "sampled":
            return load.tokens.average(load.sampled)
        case "tokens":
            return load.tokens.mean
        case "turns":
            return load.tokens.average(load.turns_of)
        case "waits":
            calls = max(0.0, load.tokens.average(load.turns_of) - 1.0)
            return calls * load.tool.mean + load.judge.mean
        case "context":
            # sampled tokens lie evenly between prompt and end: longer rollouts have more of them
            weight = load.tokens.average(load.sampled)
            return load.tokens.average(lambda n: load.sampled(n) * (load.prompt_tokens + n) / 2) / weight
        case _:
            raise KeyError(what)


def _mixture(parts: list[tuple[float, list[float]]]) -> Quantiles:
    if len(parts) == 1:
        return Quantiles.of(parts[0][1])
    values: list[float] = []
    for weight, own in parts:
        ordered = Quantiles.of(own)
        values += ordered.sample(max(1, round(512 * weight)))
    return Quantiles.of(values)


def resolve_workload(recipe: Recipe, calibration: Calibration) -> Workload:
    """Return the workload of the rollouts of a recipe.

    An environment that the calibration file lacks is assumed at its limits: every turn has ``max_new_tokens``, and an
    unknown single-turn environment fills ``max_model_len``.
    """
    trained = trained_on(recipe.environments)
    total = sum(env.weight for env in trained)
    loads = [
        _known(recipe, env, env.weight / total, calibration.workloads[env.name])
        if env.name in calibration.workloads
        else _limits(recipe, env, env.weight / total)
        for env in trained
    ]
    return Workload(tuple(loads))


def _known(recipe: Recipe, env: EnvironmentConfig, weight: float, config: WorkloadConfig) -> EnvironmentLoad:
    limit = float(recipe.engine.max_model_len)
    tokens = quantiles_of(config.tokens, limit)
    return EnvironmentLoad(
        name=env.name,
        weight=weight,
        tokens=tokens,
        prompt_tokens=min(config.prompt_tokens, tokens.values[0]),
        turns=config.turns,
        sampled_share=config.sampled_share,
        tool=quantiles_of(config.tool_s or _NO_TIME),
        judge=_sum(
            Quantiles((0.0,)) if config.judge_s is None else quantiles_of(config.judge_s),
            quantiles_of(tail_of(env.latency)),
        ),
        source=config.source,
        assumed=False,
        unsure=config.assumed,
        limit=limit,
    )


def _limits(recipe: Recipe, env: EnvironmentConfig, weight: float) -> EnvironmentLoad:
    turns = float(env.max_turns) if isinstance(env, CalculatorEnv) else 1.0
    length = float(recipe.engine.max_model_len)
    sampled = min(turns * recipe.rollouts.sampling.max_new_tokens, length - 1.0)
    return EnvironmentLoad(
        name=env.name,
        weight=weight,
        tokens=Quantiles((length,)),
        prompt_tokens=length - sampled,
        turns=turns,
        sampled_share=1.0,
        tool=Quantiles((0.0,)),
        judge=quantiles_of(tail_of(env.latency)),
        source="no measurement: every rollout fills engine.max_model_len, with sampling.max_new_tokens a turn",
        assumed=True,
        limit=length,
    )


def _sum(a: Quantiles, b: Quantiles) -> Quantiles:
    """Return the sum of two independent values."""
    if len(a.values) == 1 or len(b.values) == 1:
        return Quantiles.of([x + y for x in a.values for y in b.values])
    return Quantiles.of([x + y for x in a.sample(_GRID) for y in b.sample(_GRID)])
