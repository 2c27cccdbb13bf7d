"""The picture of a search: seconds of a step by nodes, as SVG written by hand: no plotting package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from hpcrl.planning.search.splits import Candidate, pareto

_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 56, 52
_INK, _FAINT, _BEST, _OTHER, _OWN = "#333333", "#E4E7EB", "#0072B2", "#9AA5B1", "#D55E00"


def search_svg(candidates: Sequence[Candidate], title: str, own: Candidate | None = None) -> str:
    """Return the candidates drawn as an SVG document.

    Parameters
    ----------
    candidates:
        Result of `hpcrl.planning.search.splits.search`.
    title:
        Text above the picture.
    own:
        The recipe's own layout, marked where it has a forecast.

    Raises
    ------
    ValueError
        There is nothing to draw.
    """
    points = [*candidates, *([own] if own is not None else [])]
    if not points:
        raise ValueError("there is nothing to draw")
    nodes = [candidate.nodes for candidate in points]
    low, high = min(nodes) - 0.5, max(nodes) + 0.5
    top = max(candidate.step_s for candidate in points) * 1.1

    def x(count: float) -> float:
        return _LEFT + (count - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(seconds: float) -> float:
        return _HEIGHT - _BOTTOM - seconds / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{_INK}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="42">step by nodes; blue: no other layout has fewer nodes and a shorter step</text>',
        *_grid(top, y),
        *(f'<text x="{x(n):.1f}" y="{_HEIGHT - 30}" text-anchor="middle">{n}</text>' for n in _ticks(nodes)),
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">nodes</text>',
    ]
    best = pareto(candidates)
    parts += [_dot(x(c.nodes), y(c.step_s), _OTHER, 3, c) for c in candidates if c not in best]
    if best:
        line = " ".join(f"{x(c.nodes):.1f},{y(c.step_s):.1f}" for c in best)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_BEST}" stroke-width="2"/>')
    parts += [_dot(x(c.nodes), y(c.step_s), _BEST, 5, c) for c in best]
    if own is not None:
        parts.append(_dot(x(own.nodes), y(own.step_s), _OWN, 6, own))
        place = f'x="{x(own.nodes):.1f}" y="{y(own.step_s) - 12:.1f}" text-anchor="middle"'
        parts.append(f'<text {place} fill="{_OWN}">recipe</text>')
    return "\n".join([*parts, "</svg>", ""])


def _grid(top: float, y: Callable[[float], float]) -> list[str]:
    step = 10 ** math.floor(math.log10(top)) / 2
    lines, value = [], 0.0
    while value <= top:
        lines.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{_FAINT}"/>'
        )
        lines.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g} s</text>')
        value += step
    return lines


def _ticks(nodes: Sequence[int]) -> list[int]:
    low, high = min(nodes), max(nodes)
    stride = max(1, (high - low) // 20)
    return list(range(low, high + 1, stride))


def _dot(x: float, y: float, colour: str, radius: int, candidate: Candidate) -> str:
    layout = candidate.layout
    prefill = "" if layout.prefill is None else f" + {layout.size(layout.prefill)} prefill"
    text = (
        f"{layout.size(layout.trainer)} trainer{prefill} + {layout.size(layout.decode)} decode: "
        f"{candidate.step_s:.0f} s, {candidate.gpu_hours:.1f} GPU-hours"
    )
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{escape(text)}</title></circle>'
