"""Tries the chat format of a recipe's model before a submit, with the interpreter of the orchestrator."""

from __future__ import annotations

from pathlib import Path

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.load import Loaded
from hpcrl.config.plan import Plan
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding
from hpcrl.jobplan.packages import check_trial_packages
from hpcrl.jobplan.role_python import ask_role_python, hidden_reason, role_python

_MODULE = "hpcrl.rollouts.rendering.trial"
_TIMEOUT_S = 300.0
"""The largest vocabularies load in seconds."""


def check_chat_format(recipe: Loaded[Recipe], plan: Plan, site: ClusterProfile, model_dir: Path) -> list[str]:
    """Render a conversation with the model's chat template, and make the parser of its format.

    Parameters
    ----------
    model_dir:
        The start model, absolute; its tokenizer has been checked.

    Returns
    -------
    list of str
        Why that was not possible from here, or what conversations with this model cannot have.

    Raises
    ------
    ConfigError
        No rollout could begin, or an environment could not go on.
    UsageError
        The interpreter cannot try it.
    """
    if reason := hidden_reason(plan, site, what="conversations"):
        return [f"the chat format of the model was not tried: {reason}"]
    check_trial_packages(plan, role_python(plan))
    answer = ask_role_python(
        _MODULE,
        request={"recipe": recipe.value.model_dump(mode="json"), "model_dir": str(model_dir)},
        plan=plan,
        site=site,
        doing="try the chat format of the model",
        timeout_s=_TIMEOUT_S,
        slow_hint="check whether the model's directory can be read quickly",
    )
    if found := answer["findings"]:
        raise ConfigError([Finding(recipe.where(f["key"]), f["key"], f["what"], f["hint"]) for f in found])
    return [str(note) for note in answer["notes"]]
