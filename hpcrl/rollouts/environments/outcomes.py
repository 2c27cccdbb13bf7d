"""Check the outcome that an environment returns, because numbers of custom code are validated where they enter.

A rollout whose reward is not a finite number is dropped. A part that is not finite is left out, and its rollout counts:
parts are only for people.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcrl.rollouts.environments.base import Outcome

TAMPERED = "judge_tampered"
"""Part that is above 0 where the policy interfered with its judge: such rollouts are counted and shown."""
MAX_REWARD = 1e9
"""Maximum absolute value of a reward. Squares of gradients, which grow with advantages, stay finite in float32."""
_MAX_PART = 1e100
"""Maximum absolute value of a part, with which the sum over a batch is finite."""
MAX_PARTS = 64
"""Maximum number of parts of a rollout; the others are left out."""
MAX_PART_NAME = 200
"""Maximum number of characters of the name of a part; longer names are cut."""
_SHOWN = 60
"""Maximum number of characters of a value that a message shows."""
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = _SHOWN


class OutcomeError(ValueError):
    """Raised where a rollout ended with an unusable reward; the message shows it."""


@dataclass(frozen=True, slots=True)
class CheckedOutcome(Outcome):
    """Outcome of finite numbers.

    Attributes
    ----------
    refused:
        Parts that were left out, by name, with their original values.
    """

    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def tampered(self) -> bool:
        """Return whether the environment says that the policy interfered with its judge."""
        return self.parts.get(TAMPERED, 0.0) > 0


def checked_outcome(outcome: Any) -> CheckedOutcome:
    """Convert what an environment returned to plain finite numbers.

    Integers, floats, booleans, fractions, decimals, scalars of NumPy and tensors of one number are numbers here.

    Raises
    ------
    OutcomeError
        It is not an outcome, or its reward is not finite, or exceeds ``MAX_REWARD``.
    """
    try:
        reward, parts = outcome.reward, outcome.parts
    except Exception:  # noqa: BLE001 - foreign code: any object may have been returned
        raise OutcomeError(f"rollout() returned {_shown(outcome)}, which is not an Outcome") from None
    checked = _number(reward, MAX_REWARD)
    if isinstance(checked, str):
        raise OutcomeError(f"its reward is {checked}")
    known = dict(outcome.refused) if isinstance(outcome, CheckedOutcome) else {}
    kept, refused = _checked_parts(parts)
    return CheckedOutcome(checked, kept, known | refused)


def _checked_parts(parts: Any) -> tuple[dict[str, float], dict[str, str]]:
    """Split parts into finite numbers, and the original values of the others."""
    kept: dict[str, float] = {}
    refused: dict[str, str] = {}
    try:
        items = [(name, value) for name, value in parts.items()]
    except Exception:  # noqa: BLE001 - foreign code: any object may stand there
        return {}, {} if parts is None else {"parts": f"{_shown(parts)}, which is not a mapping"}
    for name, value in items:
        key = plain_text(_text_of(name), MAX_PART_NAME)
        number = _number(value, _MAX_PART)
        if isinstance(number, str):
            refused[key] = number
        elif len(kept) == MAX_PARTS and key not in kept:
            refused[f"more than {MAX_PARTS} parts"] = f"{len(items)} parts"
        else:
            kept[key] = number
        if len(refused) > MAX_PARTS:
            break
    return kept, refused


def _number(value: Any, largest: float) -> float | str:
    """Return a finite float, or the problem of the value as the end of a sentence."""
    try:
        if not _is_number(value):
            return f"{_shown(value)}, which is not a number"
        number = float(value)
    except OverflowError:
        return f"{_shown(value)}, which is too large"
    except Exception:  # noqa: BLE001 - foreign code: __float__ may raise anything
        return f"{_shown(value)}, which is not a number"
    if not math.isfinite(number):
        return f"{number}, which is not finite"
    if abs(number) > largest:
        return f"{number:g}, which is too large: {largest:g} at most"
    return number


def _is_number(value: Any) -> bool:
    """Return whether a value is a real number. A string is none, whatever it spells, and a complex number has more."""
    kind = type(value)
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        return False
    return hasattr(kind, "__float__") or hasattr(kind, "__index__")


def _shown(value: Any) -> str:
    """Show a value of foreign code in a few characters, with its type."""
    kind = type(value).__name__
    try:
        # the decimal digits of a large integer take long, or are refused
        large = isinstance(value, int) and value.bit_length() > _SHOWN
        text = f"an integer of {value.bit_length()} bits" if large else f"{_repr.repr(value)} ({kind})"
    except Exception:  # noqa: BLE001 - foreign code: __repr__ may raise anything
        text = f"a {kind}"
    return plain_text(" ".join(text.split()), 2 * _SHOWN)


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - foreign code: __str__ may raise anything
        return f"a {type(value).__name__}"


def plain_text(text: str, longest: int) -> str:
    """Return text that can be encoded, of a limited length: half a surrogate pair is written as an escape."""
    cut = text[:longest] + ("…" if len(text) > longest else "")
    return cut.encode("utf-8", "backslashreplace").decode()
