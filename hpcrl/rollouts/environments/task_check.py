"""Plays policies whose rewards are known on tasks of an environment, and says what is wrong.

``python -m hpcrl.rollouts.environments.task_check tasks < request.json`` prints one JSON document, as `trial` does;
with a directory as a further argument it reads ``request.json`` there, and writes ``answer.json``. The policies are:
one that says nothing, which must not be rewarded; one that gives the right answer, where the environment knows it,
which must earn at least 1, twice, because tests may be flaky; and those that tamper with the judge, where the
environment has such ones, which must earn nothing. The environment runs in this process.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.environment_sandboxes import needs_bubblewrap
from hpcrl.config.environments import HostedEnv
from hpcrl.config.recipe import EnvironmentConfig, Recipe
from hpcrl.errors import ConfigError, HpcrlError
from hpcrl.processes.daemon_threads import run_process
from hpcrl.rollouts.environments.base import Environment, Message, Prompt, Reply
from hpcrl.rollouts.environments.child import NotBuiltError, load
from hpcrl.rollouts.environments.outcomes import checked_outcome
from hpcrl.rollouts.environments.registry import build_environments
from hpcrl.rollouts.environments.trial import NullPolicy
from hpcrl.sandboxes.limits_report import limits_report
from hpcrl.storage.files import atomic_write

_AT_ONCE = 4
"""Rollouts that are played at once."""
_RIGHT = 1.0


class KnownPolicy(NullPolicy):
    """Says given replies, tool calls included, and then that it is done."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        super().__init__()
        self._replies = list(replies)

    def again(self) -> KnownPolicy:
        """Return a policy that says the same."""
        return KnownPolicy(self._replies)

    async def reply(self, messages: Sequence[Message], *, anew: bool = False, within: int | None = None) -> Reply:
        """Say the next reply."""
        self.turns += 1
        self.said += messages
        return self._replies[self.turns - 1] if self.turns <= len(self._replies) else Reply("", finished=False)


def check_tasks(recipe: Recipe, names: Sequence[str], tasks: int) -> dict[str, Any]:
    """Check environments of a recipe on their first training tasks.

    Returns
    -------
    dict
        By name: ``problems``, a sentence each; ``played``, rewards by policy; ``made``, False where the environment
        cannot be created.
    """
    found = {}
    for config in recipe.environments:
        if config.name in names:
            found[config.name] = _check_environment(recipe, config, tasks)
    return found


def _check_environment(recipe: Recipe, config: EnvironmentConfig, tasks: int) -> dict[str, Any]:
    found: dict[str, Any] = {"problems": [], "notes": [], "played": {}, "made": False}
    try:
        environment: Environment
        if isinstance(config, HostedEnv):
            factory, args = config.call()
            environment = load(factory, args)
        else:
            [environment] = build_environments(recipe.model_copy(update={"environments": (config,)}))
    except NotBuiltError as error:
        found["problems"].append(f"it cannot be made: {error.what}" + (f" ({error.hint})" if error.hint else ""))
        return found
    except ConfigError as error:
        found["problems"] += [f"it cannot be made: {each.what}" for each in error.findings]
        return found
    found["made"] = True
    run_process(_check_all(environment, tasks, found))
    return found


async def _check_all(environment: Environment, tasks: int, found: dict[str, Any]) -> None:
    slots = asyncio.Semaphore(_AT_ONCE)
    try:
        await asyncio.gather(*(_check_task(environment, number, found, slots) for number in range(tasks)))
    finally:
        if close := getattr(environment, "aclose", None):
            await close()
        elif close := getattr(environment, "close", None):
            close()
    if "right" not in found["played"]:
        found["notes"].append("no right answers are known: what they earn was not tried")


async def _check_task(environment: Environment, number: int, found: dict[str, Any], slots: asyncio.Semaphore) -> None:
    problems: list[str] = found["problems"]
    try:
        prompt = environment.prompt("train", number)
        policies = _policies(environment, prompt)
    except Exception as error:  # noqa: BLE001 - foreign code: its errors are reported
        problems.append(f"task {number}: {type(error).__name__}: {_first_line(error)}")
        return
    right: list[float] = []
    for name, policy in policies:
        async with slots:
            try:
                reward = checked_outcome(await environment.rollout(prompt, policy)).reward
            except Exception as error:  # noqa: BLE001
                problems.append(f"task {number}, {name}: {type(error).__name__}: {_first_line(error)}")
                continue
        found["played"].setdefault(name, []).append(reward)
        if name == "right":
            right.append(reward)
        if name != "right" and reward > 0:
            what = "an empty reply" if name == "nothing" else f"tampering ({name})"
            problems.append(f"task {number}: {what} earns {reward:g}")
    if right and min(right) < _RIGHT <= max(right):
        listed = " and ".join(f"{reward:g}" for reward in right)
        problems.append(f"task {number}: the right answer earns {listed}: it has a flaky test")
    elif right and min(right) < _RIGHT:
        problems.append(f"task {number}: the right answer earns {min(right):g}")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] if not isinstance(error, HpcrlError) else str(error).replace("\n", " ")


def _policies(environment: Environment, prompt: Prompt) -> list[tuple[str, NullPolicy]]:
    """Return the policies of a task by name."""
    found: list[tuple[str, NullPolicy]] = [("nothing", NullPolicy())]
    solution = getattr(environment, "solution", None)
    if solution is not None:
        if (replies := solution(prompt)) is not None:
            found.append(("right", KnownPolicy(replies)))
    else:
        try:
            said = environment.demonstration(prompt, correct=True, rng=random.Random(0))
        except NotImplementedError:
            said = ()
        turns = [str(each["content"]) for each in said[len(prompt.messages) :] if each.get("role") == "assistant"]
        if turns:
            found.append(("right", KnownPolicy([Reply(turn, finished=True) for turn in turns])))
    # a second time, because one play finds no flaky test
    again = [(name, policy.again()) for name, policy in found if isinstance(policy, KnownPolicy)]
    if (tampering := getattr(environment, "tampering", None)) is not None:
        found += [(what, KnownPolicy(replies)) for what, replies in tampering(prompt).items()]
    return found + again


def answer_request(request: bytes) -> bytes:
    """Return the answer to a request, both as JSON.

    ``environments`` are those of `check_tasks`. ``limits`` is the report on the limits of sandboxes on this node
    (`hpcrl.sandboxes.limits_report.LimitsReport`), or null where none of the environments has sandboxes by bubblewrap.
    """
    asked = msgspec.json.decode(request)
    recipe = Recipe.model_validate_json(msgspec.json.encode(asked["recipe"]))
    found = check_tasks(recipe, asked["names"], asked["tasks"])
    sandboxed = any(needs_bubblewrap(each) for each in recipe.environments if each.name in asked["names"])
    limits = run_process(limits_report()) if sandboxed else None
    return msgspec.json.encode({"environments": found, "limits": limits}) + b"\n"


def main(what: str, directory: str | None = None) -> None:
    """Answer a request: from the standard input to the standard output, or in a directory."""
    assert what == "tasks"
    if directory is None:
        sys.stdout.buffer.write(answer_request(sys.stdin.buffer.read()))
    else:
        place = Path(directory)
        atomic_write(place / "answer.json", answer_request((place / "request.json").read_bytes()))


if __name__ == "__main__":
    main(*sys.argv[1:])
