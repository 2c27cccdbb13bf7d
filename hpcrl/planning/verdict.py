"""Verdict over a plan before any figure: it fits, it does not fit, or that is unknown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.plan import Role
from hpcrl.config.rules.job import ENOUGH_NODES
from hpcrl.config.rules.table import RULES
from hpcrl.errors import ExitCode
from hpcrl.jobplan.model_rules import MODEL_RULES
from hpcrl.models.facts import ModelFacts
from hpcrl.planning.hardware import node_hardware
from hpcrl.planning.report import NoFacts, Outlook


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict whether a plan fits.

    Attributes
    ----------
    short:
        Shortages, a sentence each.
    unknown:
        Missing knowledge that is required, a sentence each, with a hint.
    skipped:
        Checks and results that were left out for that reason, or because the model is not made yet.
    later:
        Reason why the omission is not a defect; empty where it is one.
    tightest:
        The memory with the smallest free share, as a text; empty where nothing is compared.
    """

    short: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    later: str = ""
    tightest: str = ""

    @property
    def fits(self) -> bool | None:
        """Return whether the plan fits; None where that is unknown."""
        if self.short:
            return False
        return None if self.unknown or self.skipped else True

    @property
    def exit_code(self) -> ExitCode:
        """Return the exit code of ``hpcrl plan``. A model that a warm-up makes later is not a defect of a plan."""
        if self.short:
            return ExitCode.DOES_NOT_FIT
        return ExitCode.UNKNOWN if self.unknown else ExitCode.OK

    def document(self) -> dict[str, Any]:
        """Give the verdict as a JSON document."""
        return {
            "fits": self.fits,
            "short": list(self.short),
            "unknown": list(self.unknown),
            "skipped": list(self.skipped),
            "later": self.later,
            "exit_code": int(self.exit_code),
        }


def judge(outlook: Outlook, facts: ModelFacts | str) -> Verdict:
    """Return the verdict over an outlook; ``facts`` are its model's facts, or the reason why there are none."""
    return Verdict(
        short=tuple(_short(outlook)),
        unknown=tuple(_unknown(outlook, facts)),
        skipped=tuple(_skipped(outlook, facts)),
        later=_later(outlook, facts),
        tightest=_tightest(outlook),
    )


def _short(outlook: Outlook) -> Iterator[str]:
    # a recipe with too many nodes is refused earlier; a split from a search is not
    rule = next(rule for rule in RULES if rule.name == ENOUGH_NODES)
    yield from (what for _, what in rule.check(outlook.recipe, outlook.cluster))
    if outlook.memory is not None:
        yield from (place.summary() for place in outlook.memory.short)


def _unknown(outlook: Outlook, facts: ModelFacts | str) -> Iterator[str]:
    if isinstance(facts, str):
        if not _is_made_later(facts):
            yield (
                f"the model's sizes are not known: {facts}\n    hint: set model.path to a directory with the "
                "config.json of a known family, or to a known name"
            )
        return
    if outlook.lacking and _forecast_is_due(outlook):
        yield (
            f"profile {outlook.cluster.name} lacks {', '.join(outlook.lacking)}\n    hint: add them to the profile "
            "(docs/configuration.md)"
        )


def _forecast_is_due(outlook: Outlook) -> bool:
    """Return whether a missing forecast is a gap: machines without GPUs have none (a measured run makes one)."""
    if outlook.recipe.sft is not None:
        return False
    return isinstance(outlook.cluster, SlurmCluster) and node_hardware(outlook.cluster, Role.TRAINER).gpus > 0


def _skipped(outlook: Outlook, facts: ModelFacts | str) -> Iterator[str]:
    if outlook.memory is None:
        yield "memory of every GPU and host"
    if isinstance(facts, str):
        yield f"rules about the model's sizes: {', '.join(rule.name for rule in MODEL_RULES)}"
    if outlook.loop is None and (isinstance(facts, str) or _forecast_is_due(outlook)):
        yield "the time of a step"


def _later(outlook: Outlook, facts: ModelFacts | str) -> str:
    return "whether it fits, until the model is made (hpcrl warmup)" if _is_made_later(facts) else ""


def _is_made_later(facts: ModelFacts | str) -> bool:
    """Return whether facts are missing because a warm-up makes the model later."""
    return isinstance(facts, NoFacts) and facts.made_later


def _tightest(outlook: Outlook) -> str:
    place = outlook.tightest
    if place is None or place.headroom is None or not place.capacity:
        return ""
    word = "free" if place.ok else "short"
    return f"{place.role.value} {place.kind}, {abs(place.headroom) / place.capacity:.0%} {word}"
