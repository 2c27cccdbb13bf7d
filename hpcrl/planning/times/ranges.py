"""Ranges of predicted times: how far each would move if a rate or constant were as wrong as its source allows.

Every number of the calibration file, and every one that describes rollouts, is moved to both ends of what is known of
it, one at a time. Moves are independent, so their logarithms add up as squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpcrl.planning.calibration.calibration_file import Calibration, Origin
from hpcrl.planning.times.workload import Workload

_NOTICED = 1e-4
"""Relative change of a time under which a number has no part in it."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """Contribution of one number to a range.

    Attributes
    ----------
    name:
        Name as in the calibration file: ``efficiencies.nic``, ``workloads.swe.tool_s``.
    origin:
        Kind of its source: ``assumed``, ``published`` or ``measured``.
    low, high:
        The shortest and longest time, in seconds, with this number alone at its ends.
    """

    name: str
    origin: Origin
    low: float
    high: float

    @property
    def width(self) -> float:
        """Return the ratio of both, as a logarithm."""
        return math.log(self.high / self.low)


@dataclass(frozen=True, slots=True)
class Range:
    """Predicted time in seconds.

    Attributes
    ----------
    low, mid, high:
        The prediction is ``mid``.
    causes:
        Causes of its width, the largest part first.
    """

    low: float
    mid: float
    high: float
    causes: tuple[Contribution, ...] = ()

    @property
    def origin(self) -> Origin:
        """Return the origin of the number that matters most; ``published`` where none does."""
        return self.causes[0].origin if self.causes else "published"


@dataclass(frozen=True, slots=True)
class Variation:
    """A number at both of its ends.

    Attributes
    ----------
    name, origin:
        As in `Contribution`.
    ends:
        Calibration and workload with the number at its lower and at its upper end.
    """

    name: str
    origin: Origin
    ends: tuple[tuple[Calibration, Workload], tuple[Calibration, Workload]]


def calibration_variations(calibration: Calibration, workload: Workload) -> Iterator[Variation]:
    """Yield a variation of every efficiency and constant of a calibration, and of the results of a measured run."""
    for name, ends, origin in calibration.uncertain():
        low, high = (calibration.moved(name, factor) for factor in ends)
        yield Variation(name, origin, ((low, workload), (high, workload)))


def workload_variations(calibration: Calibration, workload: Workload) -> Iterator[Variation]:
    """Yield a variation of every number that describes rollouts, environment by environment."""
    for index, load in enumerate(workload.environments):
        for name, factor, origin in load.uncertain():
            low, high = (workload.moved(index, name, value) for value in (1.0 / factor, factor))
            yield Variation(f"workloads.{load.name}.{name}", origin, ((calibration, low), (calibration, high)))


def ranges_of(
    mids: Mapping[str, float],
    base: tuple[Calibration, Workload],
    variations: Sequence[Variation],
    evaluate: Callable[[Calibration, Workload], Mapping[str, float]],
) -> dict[str, Range]:
    """Return the ranges of predicted times by their names.

    Parameters
    ----------
    mids:
        The predictions, in seconds.
    base:
        Numbers that the times depend on. Only ratios to it are taken from ``evaluate``, which may therefore be coarser
        than the computation of ``mids``.
    evaluate:
        The same times for another calibration and workload.
    """
    plain = evaluate(*base)
    moved = [(variation, [evaluate(*end) for end in variation.ends]) for variation in variations]
    return {
        name: _range(mid, _causes(name, mid, plain[name], moved))
        for name, mid in mids.items()
        if plain.get(name, 0.0) > 0.0 and mid > 0.0
    }


def _causes(
    name: str, mid: float, plain: float, moved: Sequence[tuple[Variation, list[Mapping[str, float]]]]
) -> list[Contribution]:
    found = []
    for variation, ends in moved:
        ratios = [end[name] / plain for end in ends if end.get(name, 0.0) > 0.0]
        low, high = min(1.0, *ratios, 1.0), max(1.0, *ratios, 1.0)
        if high / low > 1.0 + _NOTICED:
            found.append(Contribution(variation.name, variation.origin, mid * low, mid * high))
    return sorted(found, key=lambda cause: -cause.width)


def _range(mid: float, causes: Sequence[Contribution]) -> Range:
    def together(ends: Sequence[float]) -> float:
        return math.sqrt(math.fsum(math.log(end / mid) ** 2 for end in ends))

    low = mid * math.exp(-together([cause.low for cause in causes]))
    high = mid * math.exp(together([cause.high for cause in causes]))
    return Range(low, mid, high, tuple(causes))


def step_range(step: Range, sides: Sequence[Range]) -> Range:
    """Return the range of a step that waits for the slower of its sides.

    A change of one number moves only the side that is the bottleneck now; changes of several may make the other side
    the bottleneck. A step is never shorter than the longest lower end, and may be as long as the longest upper one: the
    causes of that side's length are causes of the range, too.
    """
    low = min(step.low, max(side.low for side in sides))
    longest = max(sides, key=lambda side: side.high)
    if longest.high <= step.high:
        return Range(low, step.mid, step.high, step.causes)
    # a cause of that side counts with its share of the possible excess of the step over its prediction
    squares = math.fsum(math.log(cause.high / longest.mid) ** 2 for cause in longest.causes)
    beyond = math.log(longest.high / step.mid)
    causes = {cause.name: cause for cause in step.causes}
    for cause in longest.causes:
        part = beyond * math.log(cause.high / longest.mid) ** 2 / squares if squares else 0.0
        own = causes.get(cause.name)
        high = max(step.mid * math.exp(part), own.high if own is not None else 0.0)
        causes[cause.name] = Contribution(cause.name, cause.origin, step.mid if own is None else own.low, high)
    noticed = [cause for cause in causes.values() if cause.width > _NOTICED]
    return Range(low, step.mid, longest.high, tuple(sorted(noticed, key=lambda cause: -cause.width)))
