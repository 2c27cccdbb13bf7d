"""Rules of environments with tasks from a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.environments import HarnessEnv, TaskFileEnv
from hpcrl.config.recipe import Recipe
from hpcrl.config.rewards import FormatReward, LengthReward, ToolCallReward
from hpcrl.config.row_template import template_columns
from hpcrl.config.rules.rule import Conflicts, Rule

_COUNTED = ("unfinished",)
"""Parts that each rollout of such an environment has."""
_OF_PROGRAMS = ("timed_out",)
"""Further ones, of environments with programs."""


def _datasets(recipe: Recipe) -> Iterator[tuple[str, TaskFileEnv]]:
    """Yield each environment of these kinds with its key."""
    for number, environment in enumerate(recipe.environments):
        if isinstance(environment, TaskFileEnv):
            yield f"environments.{number}", environment


def _has_one_source(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for key, config in _datasets(recipe):
        if (config.path is None) == (config.hub is None):
            yield f"{key}.path", "neither path nor hub is given" if config.path is None else "path and hub are given"
        if config.revision is not None and config.hub is None:
            yield f"{key}.revision", "a revision is of a data set of the hub"


def _has_one_split(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for key, config in _datasets(recipe):
        given = [name for name in ("held_out_share", "held_out_path", "split_column") if getattr(config, name)]
        if len(given) > 1:
            yield f"{key}.{given[1]}", f"{' and '.join(given)} are given"
        if both := sorted({*config.train_values} & {*config.held_out_values}):
            yield f"{key}.held_out_values", f"{both[0]!r} is a value of train_values, too"


def _prompts_and_curriculum(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for key, config in _datasets(recipe):
        columns, curriculum = config.columns, config.curriculum
        if config.template is not None and columns.messages is not None:
            yield f"{key}.template", "columns.messages has the whole prompt"
        if config.template is not None and not template_columns(config.template):
            yield f"{key}.template", "it names no column, so all prompts would be equal"
        if columns.tools is not None and isinstance(config, HarnessEnv):
            yield f"{key}.columns.tools", "a program offers its own tools to the policy"
        if curriculum.weights and columns.difficulty is None:
            yield f"{key}.curriculum.weights", "columns.difficulty names no column"
        if (curriculum.min_pass_rate > 0 or curriculum.max_pass_rate < 1) and columns.pass_rate is None:
            yield f"{key}.curriculum.min_pass_rate", "columns.pass_rate names no column"
        if curriculum.min_pass_rate > curriculum.max_pass_rate:
            yield (
                f"{key}.curriculum.min_pass_rate",
                f"{curriculum.min_pass_rate:g} is more than max_pass_rate {curriculum.max_pass_rate:g}",
            )


def _parts_of_the_reward(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for key, config in _datasets(recipe):
        names = Counter(reward.name or reward.kind for reward in config.rewards)
        own = (*_COUNTED, *(_OF_PROGRAMS if isinstance(config, HarnessEnv) else ()))
        for number, reward in enumerate(config.rewards):
            name = reward.name or reward.kind
            if names[name] > 1 or name in own:
                yield f"{key}.rewards.{number}.name", f"another part is called {name!r}"
            if isinstance(reward, LengthReward) and (reward.limit_tokens is None) == (reward.limit_characters is None):
                yield f"{key}.rewards.{number}.limit_tokens", "one of limit_tokens and limit_characters is given"
            if isinstance(reward, ToolCallReward) and config.columns.tools is None:
                yield f"{key}.rewards.{number}.kind", "columns.tools names no column, so no reply calls a tool"
        if not config.rewards:
            continue  # the program says its reward
        judges = [each for each in config.rewards if not isinstance(each, FormatReward | LengthReward)]
        if not any(each.weight > 0 for each in judges):
            yield f"{key}.rewards", "no checker of the answer has a weight above 0"


def _time_of_programs(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for key, config in _datasets(recipe):
        if isinstance(config, HarnessEnv) and config.turn_timeout_s <= config.time_limit_s:
            limits = f"{config.turn_timeout_s:g} s, and its program may take time_limit_s, {config.time_limit_s:g} s"
            yield f"{key}.turn_timeout_s", f"a rollout may take {limits}"


DATASET_RULES: tuple[Rule, ...] = (
    Rule("dataset-source", "Questions come from one source.", "give either path or hub", _has_one_source),
    Rule(
        "dataset-split",
        "At most one setting selects the held-out questions.",
        "keep one of held_out_share, held_out_path and split_column",
        _has_one_split,
    ),
    Rule(
        "dataset-columns",
        "Each setting that reads a column has a column.",
        "name the column in columns, or remove the setting",
        _prompts_and_curriculum,
    ),
    Rule(
        "dataset-rewards",
        "Parts of a reward have different names, and one of them judges the answer.",
        "name each part, and give a checker of the answer a weight",
        _parts_of_the_reward,
    ),
    Rule(
        "harness-time",
        "A rollout lasts longer than its program.",
        "raise turn_timeout_s above time_limit_s",
        _time_of_programs,
    ),
)
