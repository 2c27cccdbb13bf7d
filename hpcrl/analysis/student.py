"""Student's distribution, for intervals of means."""

from __future__ import annotations

import math


def student_quantile(freedom: int, level: float = 0.95) -> float:
    """Return ``t`` with ``P(|T| < t) = level`` for Student's distribution with ``freedom`` degrees of freedom.

    Raises
    ------
    ValueError
        ``freedom`` is less than 1, or ``level`` not between 0 and 1.
    """
    if freedom < 1 or not 0.0 < level < 1.0:
        raise ValueError(f"freedom must be at least 1, it is {freedom}; level must be between 0 and 1, it is {level}")
    low, high = 0.0, 1.0
    while _student_inside(high, freedom) < level:
        high *= 2.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _student_inside(middle, freedom) < level else (low, middle)
    return 0.5 * (low + high)


def _student_inside(t: float, freedom: int) -> float:
    """Return ``P(|T| < t)`` as a finite series (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    if freedom == 1:
        return 2.0 * angle / math.pi
    for k in range(3 if odd else 2, freedom, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2.0 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
