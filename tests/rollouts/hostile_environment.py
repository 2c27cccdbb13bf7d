"""An environment of one's own that says and raises what foreign code may, by what the policy says."""

from __future__ import annotations

import asyncio
import decimal
import fractions
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcrl.rollouts.environments import Outcome, Policy, Prompt, Split
from hpcrl.sandboxes import SandboxEvictedError


class Mute(Exception):
    """Its message cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Loud(BaseException):
    """No `Exception`."""


class Odd:
    """A number that is none, and cannot be shown."""

    def __float__(self) -> float:
        raise ZeroDivisionError

    def __repr__(self) -> str:
        raise KeyError("no name")


class OddParts(dict[str, float]):
    """Parts that cannot be listed."""

    def items(self) -> Any:
        raise LookupError("no parts")


#: rewards that drop the rollout
BAD_REWARDS: dict[str, Any] = {
    "nan": math.nan,
    "inf": -math.inf,
    "numpy nan": np.float32("nan"),
    "decimal nan": decimal.Decimal("NaN"),
    "large": 1e300,
    "huge": 10**5000,
    "text": "0.5",
    "nothing": None,
    "complex": 1 + 0j,
    "numpy complex": np.complex64(1.0),
    "bytes": b"1",
    "list": [1.0],
    "array": np.zeros(3),
    "odd": Odd(),
    "class": float,
}
#: rewards that count, and what they are
GOOD_REWARDS: dict[str, tuple[Any, float]] = {
    "int": (1, 1.0),
    "bool": (True, 1.0),
    "numpy bool": (np.bool_(True), 1.0),
    "numpy float": (np.float32(0.5), 0.5),
    "numpy int": (np.int64(-3), -3.0),
    "fraction": (fractions.Fraction(1, 4), 0.25),
    "decimal": (decimal.Decimal("0.125"), 0.125),
    "largest": (-1e9, -1e9),
}
BAD_PARTS: dict[str, Any] = {**BAD_REWARDS, "large": 1e300}
BAD_OUTCOMES: dict[str, Any] = {"no outcome": None, "a number": 0.5, "a dict": {"reward": 1.0}}


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


RAISED: dict[str, Callable[[], BaseException]] = {
    "evicted": lambda: SandboxEvictedError("sandbox s-1 was ended: all sandboxes of the node together used too much"),
    "mute": Mute,
    "loud": Loud,
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "generator": GeneratorExit,
    "cancelled": asyncio.CancelledError,
    "stop": StopAsyncIteration,
    "timeout": lambda: TimeoutError("the tests did not end"),
    "memory": MemoryError,
    "recursion": RecursionError,
    "long": lambda: ValueError("x" * (1 << 20)),
    "surrogate": lambda: ValueError("half a pair: \ud800"),
    "group": lambda: ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    "not implemented": NotImplementedError,
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
}
#: what is said to the policy and is not a message
BAD_MESSAGES: dict[str, Any] = {
    "no list": 7,
    "no dict": ["text"],
    "no text": [{"role": "user", "content": 7}],
    "no role": [{"role": None, "content": "x"}],
    "surrogate": [{"role": "tool", "content": "\ud800"}],
    "deep": [{"role": "tool", "content": nested(5000)}],
    "nothing": None,
}


class Hostile:
    """``KIND: NAME`` in the policy's reply chooses an entry of the tables above; anything else is well."""

    name = "hostile"

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(split=split, index=index, messages=({"role": "user", "content": f"{split} {index}"},), data=index)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Any:
        reply = await policy.reply(prompt.messages)
        kind, _, name = reply.text.partition(": ")
        match kind:
            case "reward":
                return Outcome(reward=BAD_REWARDS[name])
            case "good":
                return Outcome(reward=GOOD_REWARDS[name][0])
            case "part":
                return Outcome(reward=0.5, parts={"good": 1.0, "bad": BAD_PARTS[name]})
            case "parts":
                odd = {"odd": OddParts(), "list": [1], "many": {f"p{i}": 1.0 for i in range(1000)}, "none": None}
                keys = {"keys": {1: 1.0, "\ud800": 2.0, "x" * 10_000: 3.0, (): 4.0}}
                return Outcome(reward=0.5, parts=(odd | keys)[name])  # type: ignore[arg-type]
            case "outcome":
                return BAD_OUTCOMES[name]
            case "raise":
                raise RAISED[name]()
            case "message":
                await policy.reply(BAD_MESSAGES[name])
            case "hang":
                await asyncio.sleep(600)
            case "much":
                await policy.reply([{"role": "tool", "content": "x" * int(name)}])
        return Outcome(reward=1.0, parts={"well": 1.0})

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> list[dict[str, str]]:
        raise NotImplementedError
