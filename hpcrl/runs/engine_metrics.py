"""Reading single numbers out of an engine's Prometheus text, by vLLM's names.

vLLM's text is some hundred kilobytes and is read of every engine every two seconds: it is searched for the few lines
that are wanted, not parsed.
"""

from __future__ import annotations

from collections.abc import Iterable

_MAX_COUNT = 2.0**63
"""Maximum value of a counter; engines do not reach it."""


def engine_samples(text: str, names: Iterable[str]) -> dict[str, list[float]]:
    """Return the values of each name, one for each rank (or other label); names without a sample are missing.

    Parameters
    ----------
    names:
        Without ``vllm:`` and the ``_total`` of counters.

    Raises
    ------
    ValueError
        A value is not a number, is not finite, or is below 0.
    """
    text = f"\n{text}"
    found: dict[str, list[float]] = {}
    for name in names:
        start = f"\nvllm:{name}"
        at = text.find(start)
        while at >= 0:
            end = text.find("\n", at + 1)
            rest = text[at + len(start) : end if end >= 0 else len(text)].removeprefix("_total")
            if rest[:1] in ("{", " "):  # else a longer name
                value = float(rest.rpartition(" ")[2])
                if not 0.0 <= value <= _MAX_COUNT:
                    raise ValueError(f"{name} is {value:g}")
                found.setdefault(name, []).append(value)
            at = text.find(start, at + 1)
    return found
