"""Values of a sweep: a grid, random samples, replicate seeds.

Words are those of other tools: a grid is ``KEY=V1,V2`` as in Hydra; distributions are called as in Ray Tune
(``uniform``, ``loguniform``, ``choice``) and W&B (``int_uniform``, which includes both ends).
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcrl.config.yamltree import parse_value
from hpcrl.errors import ConfigError, Finding

MAX_MEMBERS = 256
"""Maximum number of runs of one sweep: each is a directory, and on Slurm a job."""
SEED = "seed"
"""Key of the recipe that replicates differ in."""
_MAX_REPEATS = 10_000
"""Maximum draws in a row that give points which were drawn before."""
_DIGITS = 4
"""Significant digits of sampled numbers, so that a person can read and type them."""
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*", re.DOTALL)

Draw = Callable[[random.Random], Any]
"""Draws one value."""


def sweep_points(
    *,
    grid: Sequence[str] = (),
    samples: Sequence[str] = (),
    count: int | None = None,
    sample_seed: int = 0,
    seeds: int = 1,
    first_seed: int = 0,
    fixed: Sequence[str] = (),
) -> list[dict[str, str]]:
    """Return the swept values of each member, in order; equal parameters give equal values.

    Each sampled point is combined with the whole grid, and each of these with all seeds.

    Parameters
    ----------
    grid:
        ``KEY=V1,V2,...`` each; values are YAML.
    samples:
        ``KEY=loguniform(LOW,HIGH)``, ``uniform``, ``int_uniform`` or ``choice(V1,V2,...)`` each.
    count:
        Number of points that are drawn from ``samples``; they differ.
    sample_seed:
        Another one draws other points.
    seeds:
        Replicates of each setting: seeds ``first_seed``, ``first_seed + 1``, ...
    fixed:
        Settings of ``--set``, for keys that would be set twice.

    Returns
    -------
    list of dict
        Values as JSON, by dotted key. One empty dict where nothing is swept.

    Raises
    ------
    ConfigError
        With all that is wrong: a key twice, a value that is not YAML, an unknown distribution, too many members.
    """
    findings: list[Finding] = []
    axes = _read_all(grid, "--grid", _grid_values, findings)
    draws = _read_all(samples, "--sample", _distribution, findings)
    findings += _misused(axes, draws, [text.partition("=")[0] for text in fixed], seeds)
    findings += _without_its_other(bool(samples), count)
    if findings:
        raise ConfigError(findings)
    _refuse_too_many(math.prod([*map(len, axes.values()), count or 1, seeds]))
    source = random.Random(sample_seed)
    points: list[dict[str, Any]] = [{}]
    if draws:
        points = _drawn_points(draws, source, count or 1)
    cells = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    replicates = [{SEED: first_seed + number} for number in range(seeds)] if seeds > 1 else [{}]
    every = itertools.product(points, cells, replicates)
    return [{key: json.dumps(value) for part in parts for key, value in part.items()} for parts in every]


def _drawn_points(draws: Mapping[str, Draw], source: random.Random, count: int) -> list[dict[str, Any]]:
    """Draw points, each once: a second run of one would be the same run, and no replicate of it."""
    found: dict[str, dict[str, Any]] = {}
    repeats = 0
    while len(found) < count:
        point = {key: draw(source) for key, draw in draws.items()}
        before = found.setdefault(json.dumps({key: _told_apart_by(value) for key, value in point.items()}), point)
        repeats = repeats + 1 if before is not point else 0
        if repeats > _MAX_REPEATS:
            what = f"asks for {count} points, and {len(found)} different ones were found"
            raise ConfigError([Finding("--random", "", what, "ask for fewer; for replicates of a point: --seeds N")])
    return list(found.values())


def overrides_of(values: Mapping[str, str]) -> list[str]:
    """Return swept values as ``--set`` takes them."""
    return [f"{key}={value}" for key, value in values.items()]


def _read_all(texts: Sequence[str], option: str, read: Callable[[str], Any], findings: list[Finding]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        key, separator, rest = text.partition("=")
        try:
            if not separator or not all(key.split(".")):
                raise ValueError("has no key or no '='")
            if key in found:
                raise ValueError("is given twice")
            found[key] = read(rest)
        except ValueError as error:
            what, _, hint = str(error).partition("\n")
            findings.append(Finding(option, key, what, hint or "write it as key.path=..."))
    return found


def _misused(axes: Mapping[str, Any], draws: Mapping[str, Any], fixed: Sequence[str], seeds: int) -> list[Finding]:
    """Return what is wrong with the options together."""
    findings = []
    for key, other in itertools.combinations((*axes, *draws), 2):
        if key != other and (f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}.")):
            what = f"would set again what the sweep sets as {key}"
            findings.append(Finding("--sample" if other in draws else "--grid", other, what, "leave one of them out"))
    for key in (*axes, *draws):
        if key in axes and key in draws:
            findings.append(Finding("--sample", key, "is in --grid as well", "leave one of them out"))
        for other in fixed:
            if f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}."):
                what = f"would set again what the sweep sets as {key}"
                findings.append(Finding("--set", other, what, "leave one of them out"))
    if seeds > 1 and SEED in {*axes, *draws, *fixed}:
        findings.append(Finding("--seeds", SEED, "is set by another option as well", "leave one of them out"))
    return findings


def _without_its_other(sampled: bool, count: int | None) -> list[Finding]:
    """Return that one of ``--sample`` and ``--random`` is missing."""
    if sampled and count is None:
        return [Finding("--sample", "", "the number of samples is missing", "add --random N")]
    if count is not None and not sampled:
        return [Finding("--random", "", "there is nothing to sample", "add --sample KEY=loguniform(LOW,HIGH)")]
    return []


def _refuse_too_many(count: int) -> None:
    if count > MAX_MEMBERS:
        what = f"the sweep would have {count:,} runs; the maximum is {MAX_MEMBERS}"
        hint = "sample some of them: --random N with --sample KEY=choice(V1,V2), or split it into several sweeps"
        raise ConfigError([Finding("--grid", "", what, hint)])


def _grid_values(text: str) -> list[Any]:
    values = _listed(text)
    if len(values) < 2:
        shown = values[0] if values else "none"
        raise ValueError(f"has one value, {shown}\nseparate values by commas: KEY=1,2,3; --set sets a single value")
    return _distinct(values)


def _distinct(values: list[Any]) -> list[Any]:
    texts = [_told_apart_by(value) for value in values]
    if twice := [text for text in texts if texts.count(text) > 1]:
        raise ValueError(f"has the value {twice[0]} twice\nfor replicates of a setting: --seeds N")
    return values


def _told_apart_by(value: Any) -> str:
    """Return a text that equal values have in common: 1 is 1.0."""
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value)


def _listed(text: str) -> list[Any]:
    """Return values that are separated by commas; brackets, braces and quotes keep commas of a value together."""
    values = parse_value(f"[{text}]")
    if not isinstance(values, list):
        raise ValueError(f"{text!r} is not a list of values")
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} has a value that is not a finite number, a text, a list or a mapping") from None
    return values


def _distribution(text: str) -> Draw:
    call = _CALL.fullmatch(text)
    names = ", ".join(f"{name}(...)" for name in _DISTRIBUTIONS)
    if call is None or call[1] not in _DISTRIBUTIONS:
        raise ValueError(f"{text!r} is not a distribution\nknown are {names}")
    try:
        return _DISTRIBUTIONS[call[1]](_listed(call[2]))
    except ValueError as error:
        raise ValueError(f"{text.strip()}: {error}") from None


def _uniform(given: list[Any]) -> Draw:
    low, high = _bounds(given)
    return lambda source: _rounded(source.uniform(low, high), low, high)


def _loguniform(given: list[Any]) -> Draw:
    low, high = _bounds(given)
    if low <= 0:
        raise ValueError(f"the lower bound must be positive, it is {low:g}")
    return lambda source: _rounded(math.exp(source.uniform(math.log(low), math.log(high))), low, high)


def _int_uniform(given: list[Any]) -> Draw:
    low, high = _bounds(given)
    if not (low.is_integer() and high.is_integer()):
        raise ValueError("the bounds must be whole numbers")
    return lambda source: source.randint(int(low), int(high))


def _choice(given: list[Any]) -> Draw:
    if len(given) < 2:
        raise ValueError("two values or more are needed")
    values = _distinct(given)
    return lambda source: source.choice(values)


_DISTRIBUTIONS: dict[str, Callable[[list[Any]], Draw]] = {
    "uniform": _uniform,
    "loguniform": _loguniform,
    "int_uniform": _int_uniform,
    "choice": _choice,
}


def _bounds(given: list[Any]) -> tuple[float, float]:
    if len(given) != 2 or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in given):
        raise ValueError("two numbers are needed, LOW and HIGH")
    low, high = map(float, given)
    if not low < high:
        raise ValueError(f"LOW must be less than HIGH, they are {low:g} and {high:g}")
    return low, high


def _rounded(value: float, low: float, high: float) -> float:
    return min(max(float(f"{value:.{_DIGITS}g}"), low), high)
