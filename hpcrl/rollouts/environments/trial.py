"""Tries the environments of a recipe before anything is submitted.

``python -m hpcrl.rollouts.environments.trial WHAT < request.json`` prints one JSON document. ``check`` imports and
makes each environment of one's own. ``try`` also makes a prompt and a demonstration of one environment, and one rollout
with a policy that says nothing. `hpcrl.jobplan.environment_trial` calls it with the interpreter of the orchestrator.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hpcrl.config.environments import CustomEnv
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError
from hpcrl.rollouts.environments.base import Environment, Message, Reply, prompt_of
from hpcrl.rollouts.environments.registry import build_environments, hosted
from hpcrl.rollouts.environments.splits import shared_tasks

__all__ = ["NullPolicy", "check", "try_environment"]

_MAX_TURNS = 64
"""A rollout with a policy that says nothing ends after so many turns at the latest."""


class NullPolicy:
    """Says nothing in each turn, and remembers the conversation."""

    seed = 0

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.turns = 0

    async def reply(self, messages: Sequence[Message]) -> Reply:
        """An empty turn; the last one that is allowed counts as cut off at a limit."""
        self.turns += 1
        self.said += [*messages, {"role": "assistant", "content": ""}]
        return Reply(text="", finished=self.turns < _MAX_TURNS)


def check(recipe: Recipe) -> dict[str, Any]:
    """Make the environments of one's own, all of them also where one fails.

    Returns
    -------
    dict
        ``findings``: ``key``, ``what`` and ``hint`` of each that cannot be made. ``notes``: what is odd about others.
    """
    wanted = [each for each in recipe.environments if isinstance(each, CustomEnv) and each.try_before_submit]
    findings, notes = [], []
    for config in wanted:
        try:
            made = build_environments(recipe.model_copy(update={"environments": (config,)}))
        except ConfigError as error:
            findings += [{"key": f.key, "what": f.what, "hint": f.hint} for f in error.findings]
            continue
        notes += [f"environment {each.name}: {note}" for each in made if (note := shared_tasks(each))]
        for environment in hosted(made):
            environment.close()
    return {"findings": findings, "notes": notes}


def try_environment(recipe: Recipe, name: str, task: int) -> dict[str, Any]:
    """One prompt, one demonstration and one rollout of the environment ``name``.

    Returns
    -------
    dict
        ``prompt`` and ``demonstration`` (messages; null where there is none), ``conversation``, ``reward``, ``parts``;
        ``failed`` and ``error`` where a stage failed: what comes after it is not there.

    Raises
    ------
    ConfigError
        The environment cannot be made.
    """
    (config,) = (each for each in recipe.environments if each.name == name)
    (environment,) = build_environments(recipe.model_copy(update={"environments": (config,)}))
    found: dict[str, Any] = {}

    def stage(what: str, run: Callable[[], None]) -> bool:
        try:
            run()
        except Exception as error:  # noqa: BLE001 - foreign code: whoever tries it is told
            found["failed"] = what
            found["error"] = str(error) if hosted([environment]) else f"{type(error).__name__}: {error}"
            return False
        return True

    def prompt() -> None:
        found["prompt"] = [dict(message) for message in environment.prompt("train", task).messages]

    def demonstration() -> None:
        try:
            said = environment.demonstration(environment.prompt("train", task), correct=True, rng=random.Random(0))
        except NotImplementedError:
            found["demonstration"] = None
            return
        found["demonstration"] = [dict(message) for message in said]

    def rollout() -> None:
        found.update(asyncio.run(_roll_out(environment, task)))

    try:
        # the blocking calls come first: then the event loop has the process
        all(stage(*each) for each in (("prompt", prompt), ("demonstration", demonstration), ("rollout", rollout)))
    finally:
        for process in hosted([environment]):
            process.close()
    return found


async def _roll_out(environment: Environment, task: int) -> dict[str, Any]:
    policy = NullPolicy()
    try:
        outcome = await environment.rollout(await prompt_of(environment, "train", task), policy)
    finally:
        for process in hosted([environment]):
            await process.aclose()
    return {"conversation": policy.said, "reward": outcome.reward, "parts": dict(outcome.parts)}


def main(what: str) -> None:
    """Read a request from the standard input and print the answer."""
    request = msgspec.json.decode(sys.stdin.buffer.read())
    recipe = Recipe.model_validate_json(msgspec.json.encode(request["recipe"]))
    try:
        answer = check(recipe) if what == "check" else try_environment(recipe, request["name"], request["task"])
    except ConfigError as error:
        answer = {"findings": [{"key": f.key, "what": f.what, "hint": f.hint} for f in error.findings]}
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
