"""What it costs that an environment of one's own has a process: milliseconds a prompt, and a rollout of one turn.

A rollout of one turn is four messages: begin, say, said, ended. The policy answers at once, with texts of some sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from harness import record, scratch

from hpcrl.config.recipe import CustomEnv
from hpcrl.rollouts.environments import Message, Prompt, Reply
from hpcrl.rollouts.environments.hosted import HostedEnvironment

ENVIRONMENT = """
from hpcrl.rollouts.environments import Outcome, Prompt


class Turn:
    name = "turn"

    def prompt(self, split, index):
        return Prompt(split=split, index=index, messages=({"role": "user", "content": "go"},))

    async def rollout(self, prompt, policy):
        return Outcome(reward=float(len((await policy.reply(prompt.messages)).text)))

    def demonstration(self, prompt, *, correct, rng):
        raise NotImplementedError
"""


class Policy:
    """Answers at once."""

    seed = 1

    def __init__(self, text: str) -> None:
        self._text = text

    async def reply(self, messages: Sequence[Message]) -> Reply:
        return Reply(text=self._text, finished=True)


async def one_by_one(call: Callable[[], Awaitable[object]], count: int) -> float:
    """Milliseconds of one call, where the next begins after it."""
    began = time.perf_counter()
    for _ in range(count):
        await call()
    return 1e3 * (time.perf_counter() - began) / count


async def at_once(call: Callable[[], Awaitable[object]], count: int) -> float:
    """Milliseconds of one call, where all begin together."""
    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(count)))
    return 1e3 * (time.perf_counter() - began) / count


async def measure(count: int) -> dict[str, float]:
    """All figures, in milliseconds."""
    environment = HostedEnvironment(CustomEnv(name="turn", kind="custom", factory="bench_turn:Turn"))
    prompt: Prompt = await environment.fetch_prompt("train", 0)
    figures: dict[str, float] = {"prompt": await one_by_one(lambda: environment.fetch_prompt("train", 0), count)}
    for characters in (100, 100_000):
        policy = Policy("x" * characters)
        await at_once(lambda policy=policy: environment.rollout(prompt, policy), 50)  # type: ignore[misc]
        for name, how in (("one by one", one_by_one), ("at once", at_once)):
            key = f"rollout, {characters} characters, {name}"
            figures[key] = await how(lambda policy=policy: environment.rollout(prompt, policy), count)  # type: ignore[misc]
    await environment.aclose()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    arguments = parser.parse_args()
    directory = scratch("hosted")
    (directory / "bench_turn.py").write_text(ENVIRONMENT)
    sys.path.append(str(directory))
    figures = {name: round(value, 3) for name, value in asyncio.run(measure(arguments.calls)).items()}
    for name, value in figures.items():
        print(f"{name:40} {value:8.3f} ms")
    record("hosted_environment", {"calls": arguments.calls, "milliseconds": figures})


if __name__ == "__main__":
    main()
