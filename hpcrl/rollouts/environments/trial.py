"""Tries the environments of a recipe before anything is submitted.

``python -m hpcrl.rollouts.environments.trial WHAT < request.json`` prints one JSON document. ``check`` makes each
environment that has a process of its own. ``try`` also makes a prompt and a demonstration of one environment, and two
rollouts: with a policy with empty replies, and with one that says the turns of the demonstration, so that the code
behind a reply runs as well. `hpcrl.jobplan.environment_trial` calls it with the interpreter of the orchestrator.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from hpcrl.config.environments import HostedEnv, TaskFileEnv
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError
from hpcrl.processes.daemon_threads import run_process
from hpcrl.rollouts.environments.base import Environment, Message, PolicyEndpoint, Reply, prompt_of
from hpcrl.rollouts.environments.dataset.partition import trained_elsewhere
from hpcrl.rollouts.environments.messages import plain_tools
from hpcrl.rollouts.environments.outcomes import checked_outcome
from hpcrl.rollouts.environments.registry import build_environments, hosted
from hpcrl.rollouts.environments.scripted_endpoint import scripted_endpoint
from hpcrl.rollouts.environments.splits import shared_tasks

_MAX_TURNS = 64
"""Maximum number of turns of a rollout with an empty policy."""


class NullPolicy:
    """Says nothing in each turn, and remembers the conversation."""

    seed = 0

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.turns = 0

    async def reply(self, messages: Sequence[Message], *, anew: bool = False, within: int | None = None) -> Reply:
        """Return an empty turn; the last permitted one counts as cut at a limit."""
        self.turns += 1
        self.said += [*messages, {"role": "assistant", "content": ""}]
        return Reply(text="", finished=self.turns < _MAX_TURNS)

    def endpoint(self) -> AbstractAsyncContextManager[PolicyEndpoint]:
        """Serve a program, which gets the same turns."""
        return scripted_endpoint(self._reply_to_all)

    async def _reply_to_all(self, messages: list[Message]) -> Reply:
        """Say the next turn to a program, which sends its whole history each time."""
        self.said = []
        return await self.reply(messages)


class ScriptedPolicy(NullPolicy):
    """Policy that gives predefined turns one after the other, and records the conversation.

    Attributes
    ----------
    missing:
        Number of further turns requested after the last one; the policy is cut off then, as at a limit.
    """

    def __init__(self, turns: Sequence[str]) -> None:
        super().__init__()
        self._turns_to_say = list(turns)
        self.missing = 0

    @property
    def unsaid(self) -> int:
        """Return how many turns the environment did not ask for."""
        return len(self._turns_to_say) - min(self.turns, len(self._turns_to_say))

    async def reply(self, messages: Sequence[Message], *, anew: bool = False, within: int | None = None) -> Reply:
        """Return the next turn."""
        known = self.turns < len(self._turns_to_say)
        text = self._turns_to_say[self.turns] if known else ""
        self.turns += 1
        self.missing += not known
        self.said += [*messages, {"role": "assistant", "content": text}]
        return Reply(text=text, finished=known)


def check(recipe: Recipe) -> dict[str, Any]:
    """Build the custom environments of a recipe, all of them even where one fails.

    Returns
    -------
    dict
        ``findings``: ``key``, ``what`` and ``hint`` of each that cannot be made. ``notes``: what is odd about others.
    """
    wanted = [each for each in recipe.environments if isinstance(each, HostedEnv) and each.try_before_submit]
    findings, notes = [], []
    for config in wanted:
        try:
            made = build_environments(recipe.model_copy(update={"environments": (config,)}))
        except ConfigError as error:
            findings += [{"key": f.key, "what": f.what, "hint": f.hint} for f in error.findings]
            continue
        notes += [f"environment {each.name}: {note}" for each in made if (note := shared_tasks(each))]
        for environment in hosted(made):
            notes += [f"environment {config.name}: {note}" for note in environment.notes]
            environment.close()
    files = [each for each in wanted if isinstance(each, TaskFileEnv)]
    if len(files) > 1 and not findings:
        notes += trained_elsewhere(files)
    return {"findings": findings, "notes": notes}


def try_environment(recipe: Recipe, name: str, task: int) -> dict[str, Any]:
    """Return one prompt, one demonstration and two rollouts of the environment ``name``.

    Returns
    -------
    dict
        ``prompt`` and ``demonstration`` (messages; null where there is none); ``tools``: names of tools of the prompt;
        ``conversation``, ``reward`` and ``parts`` of the rollout with a policy whose turns are empty;
        ``demonstrated``: the same with a policy that
        gives the turns of the demonstration, and ``notes``. ``errors``: ``stage`` and ``error`` of each stage that
        failed, whose results are missing; ``failed`` and ``error`` are those of the first. ``refused``: parts of
        rewards that are not finite numbers, by name.

    Raises
    ------
    ConfigError
        The environment cannot be built.
    """
    (config,) = (each for each in recipe.environments if each.name == name)
    (environment,) = build_environments(recipe.model_copy(update={"environments": (config,)}))
    found: dict[str, Any] = {"errors": [], "refused": {}}

    def failed(what: str, error: Exception) -> None:
        text = str(error) if hosted([environment]) else f"{type(error).__name__}: {error}"
        found["errors"].append({"stage": what, "error": text})
        found.setdefault("failed", what)
        found.setdefault("error", text)

    try:
        # the blocking calls come first: then the event loop has the process
        try:
            prompt = environment.prompt("train", task)
            found["prompt"] = [dict(message) for message in prompt.messages]
            found["tools"] = [tool["function"]["name"] for tool in plain_tools(prompt.tools)]
        except Exception as error:  # noqa: BLE001 - custom code: its error is part of the result
            failed("prompt", error)
            return found
        try:
            found["demonstration"] = _demonstration(environment, task)
        except Exception as error:  # noqa: BLE001
            failed("demonstration", error)
        run_process(_roll_out(environment, task, found, failed))
    finally:
        for process in hosted([environment]):
            process.close()
    return found


def _demonstration(environment: Environment, task: int) -> list[dict[str, Any]] | None:
    prompt = environment.prompt("train", task)
    try:
        said = environment.demonstration(prompt, correct=True, rng=random.Random(0))
    except NotImplementedError:
        return None
    return [dict(message) for message in said]


async def _roll_out(
    environment: Environment, task: int, found: dict[str, Any], failed: Callable[[str, Exception], None]
) -> None:
    """Run both rollouts; the failure of one does not prevent the other."""
    scripted = ScriptedPolicy(_turns(found))
    plays: list[tuple[str, NullPolicy]] = [("rollout", NullPolicy())]
    if found.get("demonstration"):
        plays.append(("rollout of the demonstration", scripted))
    try:
        for stage, policy in plays:
            try:
                prompt = await prompt_of(environment, "train", task)
                outcome = checked_outcome(await environment.rollout(prompt, policy))
            except Exception as error:  # noqa: BLE001 - custom code: its error is part of the result
                failed(stage, error)
                continue
            found["refused"] |= outcome.refused
            shown = {"conversation": policy.said, "reward": outcome.reward, "parts": dict(outcome.parts)}
            if policy is scripted:
                found["demonstrated"] = {**shown, "notes": _notes(scripted)}
            else:
                found.update(shown)
    finally:
        for process in hosted([environment]):
            await process.aclose()


def _turns(found: dict[str, Any]) -> list[str]:
    """Return the policy's turns of the demonstration, without those of the prompt."""
    asked, said = (
        [message["content"] for message in messages or () if message.get("role") == "assistant"]
        for messages in (found["prompt"], found.get("demonstration"))
    )
    return said[len(asked) :]


def _notes(policy: ScriptedPolicy) -> list[str]:
    notes = []
    if policy.missing:
        notes.append("the environment asked for more turns than the demonstration has")
    if policy.unsaid:
        notes.append(f"the environment did not ask for the last {policy.unsaid} turns of the demonstration")
    return notes


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
