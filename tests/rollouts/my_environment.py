"""An environment of one's own, for the tests of ``custom``."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time

from hpcrl.rollouts.environments import Outcome, Policy, Prompt, Split


class Echo:
    """Says ``word`` and wants it back."""

    name = "whatever it calls itself"

    def __init__(self, word: str) -> None:
        self.word = word

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(split=split, index=index, messages=({"role": "user", "content": self.word},))

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        reply = await policy.reply(prompt.messages)
        return Outcome(reward=float(reply.text == self.word))

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: object) -> list[dict[str, str]]:
        raise NotImplementedError


class NotOne:
    """Lacks everything."""


NUMBER = 7


class Obedient:
    """Does what the policy says, and remembers what became of its rollouts."""

    name = "obedient"

    def __init__(self) -> None:
        self.cancelled = self.hanging = 0
        self.refused = ""

    def prompt(self, split: Split, index: int) -> Prompt:
        if index == 666:
            raise LookupError("no such prompt")
        if index == 777:
            time.sleep(600)
        return Prompt(split=split, index=index, messages=({"role": "user", "content": f"{split} {index}"},), data=index)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        reply = await policy.reply(prompt.messages)
        try:
            return await self._obey(reply.text, prompt, policy)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _obey(self, order: str, prompt: Prompt, policy: Policy) -> Outcome:
        parts: dict[str, float] = {"index": prompt.data, "seed": policy.seed, "pid": os.getpid()}
        match order:
            case "raise":
                self._fail({"a": 1})
            case "die" | "leave":
                self._end(order)
            case "tool":
                child = await asyncio.create_subprocess_exec("sleep", "600")
                parts["tool"] = child.pid
            case "block":
                time.sleep(60)
            case "hang":
                self.hanging += 1
                await asyncio.sleep(60)
            case "print":
                print("hello from the environment")
            case "bad outcome":
                return Outcome(reward="much")  # type: ignore[arg-type]
            case "bad message":
                await policy.reply([{"role": "user", "content": 7}])  # type: ignore[dict-item]
            case "again":
                try:
                    await policy.reply([{"role": "user", "content": "more"}])
                except ValueError as error:
                    self.refused = str(error)
            case "look around":
                await policy.reply([{"role": "tool", "content": self._found()}])
            case "count":
                parts |= {"cancelled": self.cancelled, "hanging": self.hanging}
                parts["refused"] = float(self.refused == "that cannot be")
        return Outcome(reward=1.0, parts=parts)

    def _end(self, how: str) -> None:
        if how == "leave":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)

    def _found(self) -> str:
        """What there is of the run: variables, open files; and whether modules come from safe places."""
        names = [name for name in os.environ if "HPCRL" in name or "secret" in os.environ[name]]
        numbers = [number for number in os.listdir("/proc/self/fd") if int(number) > 2]
        links = [os.readlink(f"/proc/self/fd/{n}") for n in numbers if os.path.lexists(f"/proc/self/fd/{n}")]
        kept = [link for link in links if not link.startswith(("anon_inode:", "socket:", "/proc/"))]
        return repr((names, kept, sys.flags.safe_path))

    def _fail(self, table: dict[str, int]) -> None:
        table["missing"]

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> list[dict[str, str]]:
        said = f"{correct} {rng.random()} {rng.gauss(0.0, 1.0)} {prompt.data}"
        return [*map(dict, prompt.messages), {"role": "assistant", "content": said}]


class Broken(Obedient):
    """Fails in every rollout of a split, in code of its own."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        self.split = split

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        await policy.reply(prompt.messages)
        return judge(prompt) if prompt.split == self.split else Outcome(reward=0.0)


def judge(prompt: Prompt) -> Outcome:
    raise ZeroDivisionError("a test suite without tests")
