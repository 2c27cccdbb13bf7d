"""Rules of supervised runs, and which rules do not concern them."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.recipe import (
    AlgorithmConfig,
    EngineConfig,
    EvaluationConfig,
    OrchestratorConfig,
    Recipe,
    RolloutConfig,
)
from hpcrl.config.rules.rule import Conflicts, Rule

_WITHOUT_EFFECT = {
    "rollouts": RolloutConfig,
    "algorithm": AlgorithmConfig,
    "engine": EngineConfig,
    "orchestrator": OrchestratorConfig,
    "evaluation": EvaluationConfig,
}
"""Sections of a recipe that say nothing of a run without rollouts, and their settings."""


def concerns(recipe: Recipe, key: str) -> bool:
    """Return whether a conflict of ``key`` concerns a recipe: sections without effect have none in supervised runs."""
    return recipe.sft is None or key.partition(".")[0] not in _WITHOUT_EFFECT


def _no_rollouts(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.sft is None:
        return
    # keys of the section itself, and not the settings without effect, so that `concerns` keeps them
    if recipe.environments:
        yield "sft", "there are environments, and a supervised run has no rollouts"
    for name, kind in _WITHOUT_EFFECT.items():
        if getattr(recipe, name) != kind():
            yield "sft", f"the section {name} has no effect in a supervised run"
    for name in ("router_replay", "replay_probe_steps"):
        if getattr(recipe.trainer, name):
            yield f"trainer.{name}", "has no effect in a supervised run, whose tokens no engine has sampled"


def _one_source(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    config = recipe.sft
    if config is None:
        return
    if (config.data is None) == (config.hub is None):
        yield "sft.data", "neither data nor hub is given" if config.data is None else "data and hub are given"
    if config.revision is not None and config.hub is None:
        yield "sft.revision", "a revision is of a data set of the hub"


def _one_split(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    config = recipe.sft
    if config is None:
        return
    given = [name for name in ("held_out_share", "held_out_data", "split_column") if getattr(config, name)]
    if len(given) > 1:
        yield f"sft.{given[1]}", f"{' and '.join(given)} are given"
    if both := sorted({*config.train_values} & {*config.held_out_values}):
        yield "sft.held_out_values", f"{both[0]!r} is a value of train_values, too"


def _micro_batch_holds_conversation(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    config, tokens = recipe.sft, recipe.trainer.micro_batch_tokens
    if config is not None and tokens < config.max_len:
        yield "trainer.micro_batch_tokens", f"{tokens} cannot hold one conversation of sft.max_len {config.max_len}"


def _shapes(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.sft is not None and recipe.job.layout in ("hetjob", "elastic"):
        yield "job.layout", f"{recipe.job.layout} is for several roles, and a supervised run has a trainer alone"


SFT_RULES: tuple[Rule, ...] = (
    Rule(
        "sft-alone",
        "A supervised run has no rollouts.",
        "remove what is for rollouts, or the section sft",
        _no_rollouts,
    ),
    Rule("sft-source", "Conversations come from one source.", "give either data or hub", _one_source),
    Rule(
        "sft-split",
        "At most one setting selects the held-out conversations.",
        "keep one of held_out_share, held_out_data and split_column",
        _one_split,
    ),
    Rule(
        "sft-micro-batch",
        "A micro-batch holds the longest conversation.",
        "raise trainer.micro_batch_tokens or lower sft.max_len",
        _micro_batch_holds_conversation,
    ),
    Rule("sft-layout", "A supervised run is one job.", "leave job.layout out", _shapes),
)
