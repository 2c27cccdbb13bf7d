"""Reads the data of a supervised run before it is submitted: in a process with the trainer's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.load import Loaded
from hpcrl.config.plan import Plan, Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding
from hpcrl.jobplan.plan import absolute_paths
from hpcrl.jobplan.role_python import ask_role_python, hidden_reason

_MODULE = "hpcrl.trainer.supervised.trial"
_SLOW_HINT = "raise sft.check_timeout_s, or set sft.check_before_submit: false: the trainer reads them in any case"


@dataclass(frozen=True)
class ConversationReport:
    """Findings about the data.

    Attributes
    ----------
    notes:
        Facts that the user should know, a sentence each.
    steps:
        Steps of the run; None where the data was not read.
    """

    notes: tuple[str, ...] = ()
    steps: int | None = None


def check_conversations(recipe: Loaded[Recipe], plan: Plan, site: ClusterProfile) -> ConversationReport:
    """Read the data of a supervised run, all rows, and render some of them.

    Raises
    ------
    ConfigError
        With rows that cannot be used.
    UsageError
        The interpreter cannot read the data, or not in time.
    """
    config = recipe.value.sft
    if config is None or recipe.value.job.payload != "roles":
        return ConversationReport()
    hidden = hidden_reason(plan, site, what="conversations", role=Role.TRAINER)
    if why := "sft.check_before_submit" if not config.check_before_submit else hidden:
        return ConversationReport((f"conversations were not read: {why}",))
    answer = ask_role_python(
        _MODULE,
        "check",
        request={"recipe": absolute_paths(recipe.value, Path.cwd()).model_dump(mode="json")},
        plan=plan,
        site=site,
        doing="read the conversations",
        timeout_s=config.check_timeout_s,
        slow_hint=_SLOW_HINT,
        role=Role.TRAINER,
    )
    if found := answer["findings"]:
        raise ConfigError([_finding(recipe, each) for each in found])
    return ConversationReport(tuple(map(str, answer["notes"])), int(answer["steps"]))


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """Return a recipe with the steps that its epochs take in place of them, which a resume may change."""
    assert recipe.sft is not None
    trainer = recipe.trainer.model_copy(update={"steps": steps})
    return recipe.model_copy(update={"trainer": trainer, "sft": recipe.sft.model_copy(update={"epochs": None})})


def _finding(recipe: Loaded[Recipe], found: dict[str, Any]) -> Finding:
    return Finding(recipe.where(found["key"]), found["key"], found["what"], found["hint"])
