"""Definitions of the curves of a page: those of the record, and those that only the page has."""

from __future__ import annotations

from typing import Any

from hpcrl.runs.outlets.bends import BENDS
from hpcrl.runs.outlets.curves import CURVES, FAMILIES, Curve

PAGE_CURVES: dict[str, Curve] = {
    "page/steps_s": Curve("page/steps_s", "s", "low", "Seconds of a step: the sum of its phases."),
    "page/sampled_length": Curve(
        "page/sampled_length",
        "tokens",
        "-",
        "Tokens that the policy sampled in a rollout: mean or quantiles of a batch.",
    ),
    "page/drops": Curve(
        "page/drops", "rollouts", "low", "Rollouts that were started and never trained, by cause, in each step."
    ),
    "page/zero_variance": Curve(
        "page/zero_variance", "groups", "low", "Groups whose rewards were all equal, in each step: they teach nothing."
    ),
    "page/repeated_requests": Curve(
        "page/repeated_requests",
        "requests",
        "low",
        "Requests to engines that were made again because one failed, in each step.",
    ),
    "page/update_s": Curve(
        "page/update_s", "s", "low", "Seconds from the request to an engine to load a version until it serves it."
    ),
    "page/pause_s": Curve("page/pause_s", "s", "low", "Seconds in which an engine samples nothing for a version."),
    "page/checkpoint_s": Curve(
        "page/checkpoint_s", "s", "low", "Seconds of a save, and of its part that blocks steps."
    ),
    "page/goodput": Curve(
        "page/goodput", "1", "high", "Seconds of steps that count, as a share of the seconds that attempts held nodes."
    ),
    "page/idle_s": Curve("page/idle_s", "s", "low", "Seconds in which a replica did no work of its role, by cause."),
}
"""Curves and figures that a page computes, by their names."""


def anchor_of(name: str) -> str:
    """Return the id of a definition in the page."""
    return "def-" + "".join(letter if letter.isalnum() else "-" for letter in name)


def definition_name(name: str) -> str:
    """Return the name under which a page and docs/observing.md show a curve; ``NAME`` stands for the rest of one."""
    curve = {**CURVES, **FAMILIES, **PAGE_CURVES}[name]
    return f"{curve.name}NAME" if name.endswith("/") else curve.name


def definition_rows() -> list[dict[str, Any]]:
    """Return the definitions of all curves, with what may have happened when one bends."""
    rows = []
    for record, curve in {**CURVES, **FAMILIES, **PAGE_CURVES}.items():
        name = definition_name(record)
        # the page has no Markdown
        bends = [
            {part: text.replace("`", "") for part, text in bend._asdict().items() if isinstance(text, str)}
            for bend in BENDS
            if name in bend.curves
        ]
        shown = {**curve._asdict(), "meaning": curve.meaning.replace("`", "")}
        rows.append({**shown, "id": anchor_of(record), "name": name, "record": record, "bends": bends})
    return rows
