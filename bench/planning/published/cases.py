"""A published figure beside the planner's, and what the cases share: data sheets, models, shares of right ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hpcrl.config.absent import ABSENT
from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.models import load_facts
from hpcrl.planning.calibration.calibration_file import Calibration, load_calibration
from hpcrl.planning.hardware import NodeHardware
from hpcrl.planning.times.ranges import calibration_variations, ranges_of, step_range, workload_variations
from hpcrl.planning.times.rates import Rates
from hpcrl.planning.times.workload import Workload, resolve_workload
from planning.case_files import read_cases

PUBLISHED = read_cases("published")
GPUS: dict[str, dict[str, Any]] = PUBLISHED["gpus"]
WITHIN = (0.10, 0.25, 0.50)
STEPS = {
    "GLM-5 on 28 nodes: step (published: less than)": (
        "GLM-5 on 28 nodes: trainer",
        "GLM-5 on 28 nodes: rollouts",
    )
}
"""Figures that are a step, with those that are its sides."""


@dataclass(frozen=True)
class Case:
    """One published figure.

    Attributes
    ----------
    subject:
        What is predicted: ``training``, ``serving``, ``weights``, ``rl step``, ``sizes``.
    predicted:
        None: refused, because a plan cannot express what was measured; ``cannot`` says what.
    fitted:
        A constant of the calibration file comes from this figure: it is right by construction.
    cannot:
        What of the setup no recipe can say. Where there is a prediction all the same, it is of the plan's own layout on
        the same GPUs, and of what the case says is added.
    reason:
        Why the prediction is wrong where it is, or which datum is missing.
    range:
        Lowest and highest that a plan would say; None where a figure rests on no rate (sizes), or is refused.
    """

    subject: str
    what: str
    unit: str
    published: float
    predicted: float | None
    source: str
    reason: str = ""
    fitted: bool = False
    cannot: tuple[str, ...] = ()
    range: tuple[float, float] | None = None

    @property
    def in_range(self) -> bool | None:
        """Whether the published figure is within the predicted range; None where there is none."""
        return None if self.range is None else self.range[0] <= self.published <= self.range[1]

    @property
    def error(self) -> float | None:
        """Prediction against publication."""
        return None if self.predicted is None else self.predicted / self.published - 1.0


def cannot(section: str, *keys: str) -> tuple[str, ...]:
    """What a recipe refuses, in its own words (KeyError where it would take the key)."""
    return tuple(f"{section}.{key}: {ABSENT[section][key].split(',')[0].split(';')[0]}" for key in keys)


@contextmanager
def _resting_on(other: Calibration, rollouts: Workload) -> Iterator[None]:
    """Cases that are made within rest on another calibration, and on another workload of software engineering."""
    before, _resting[0] = _resting[0], (other, rollouts)
    rates.cache_clear()
    try:
        yield
    finally:
        _resting[0] = before
        rates.cache_clear()


_resting = [(load_calibration(), resolve_workload(load_recipe("glm5_swe").value, load_calibration()))]


def calibration() -> Calibration:
    """What cases rest on: the shipped one, or one with a number moved."""
    return _resting[0][0]


def engineering() -> Workload:
    """The shipped workload of software engineering, or one with a number moved."""
    return _resting[0][1]


def with_ranges(make: Callable[[], Sequence[Case]]) -> list[Case]:
    """Cases with their ranges, each number of the calibration and of rollouts moved to its ends as for a plan's ranges.

    A step waits for the slower side, as in a plan.
    """

    def predictions(moved: Calibration, rollouts: Workload) -> dict[str, float]:
        with _resting_on(moved, rollouts):
            return {case.what: case.predicted for case in make() if case.predicted is not None}

    cases, base = make(), (calibration(), engineering())
    mids = {case.what: case.predicted for case in cases if case.predicted is not None}
    variations = [*calibration_variations(*base), *workload_variations(*base)]
    found = ranges_of(mids, base, variations, predictions)
    for step, sides in STEPS.items():
        found[step] = step_range(found[step], [found[side] for side in sides])
    ranges = {name: (each.low, each.high) for name, each in found.items() if each.low < each.high}
    return [replace(case, range=ranges.get(case.what)) for case in cases]


@lru_cache(maxsize=8)
def rates(gpu: str) -> Rates:
    """Nodes of 8 GPUs with eight 400 Gb/s adapters: the shape of the example profile with another GPU."""
    cluster = load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    node = cluster.partitions["gpu"].node
    own = node.model_copy(update={"gpu": node.gpu.model_copy(update=GPUS[gpu])})
    return Rates(NodeHardware(cluster, "gpu", own), calibration())


def weights(model: str, *, fp8: bool = False) -> float:
    """Bytes of a checkpoint."""
    return float(sum(load_facts(model).weight_bytes(fp8=fp8).values()))


def shares(cases: Sequence[Case]) -> dict[str, dict[str, float]]:
    """Of the predictions that nothing was fitted to, by subject and of all: how many, and the share within a margin.

    ``in range`` is the share of published figures within the predicted range, of those that have one.
    """
    open_cases = [case for case in cases if case.error is not None and not case.fitted]
    found = {}
    for name in ("all", *dict.fromkeys(case.subject for case in open_cases)):
        errors = [abs(case.error or 0.0) for case in open_cases if name in ("all", case.subject)]
        within = {f"within {margin:.0%}": sum(error <= margin for error in errors) / len(errors) for margin in WITHIN}
        found[name] = {"cases": len(errors), **within}
        inside = [case.in_range for case in open_cases if name in ("all", case.subject) and case.in_range is not None]
        if inside:
            found[name]["in range"] = sum(inside) / len(inside)
    return found


def table(cases: Sequence[Case]) -> str:
    """Markdown."""
    lines = ["| figure | published | predicted | error | remark |", "| --- | ---: | ---: | ---: | --- |"]
    for case in cases:
        lines.append(f"| {case.what} ({case.unit}) | {case.published:,.4g} | {_prediction(case)} | {_remark(case)} |")
    return "\n".join(lines)


def _prediction(case: Case) -> str:
    if case.predicted is None or case.error is None:
        return "refused | "
    return f"{case.predicted:,.4g} | {case.error:+.0%}"


def _remark(case: Case) -> str:
    if case.predicted is None:
        return "; ".join((*case.cannot, case.reason) if case.reason else case.cannot)
    said = ["fitted"] if case.fitted else []
    if not case.fitted and abs(case.error or 0.0) > WITHIN[0] and case.reason:
        said.append(case.reason)
    return "; ".join([*said, *(f"not of a recipe: {what}" for what in case.cannot)])
