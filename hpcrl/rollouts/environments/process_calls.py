"""Calls to the process of an environment over one connection, from an event loop: prompts and rollouts.

The process may be a child of this one, or belong to a worker on another node (`hpcrl.rollouts.environments.workers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from hpcrl.config.environments import HostedEnv
from hpcrl.rollouts.environments import wire
from hpcrl.rollouts.environments.base import Policy, Prompt, Split
from hpcrl.rollouts.environments.outcomes import CheckedOutcome, OutcomeError, checked_outcome
from hpcrl.rollouts.environments.policy_calls import answered

_log = logging.getLogger(__name__)

_STACKS_S = 0.5
"""Maximum time in seconds for a process to write its stacks into the log before it is killed."""
_PINGS = 4
"""Number of liveness checks within the time in which the process must answer."""


class EnvironmentRaisedError(Exception):
    """Raised where the environment's code raised: its type, its message, and its own frames.

    Attributes
    ----------
    cause:
        ``raised``; ``unusable``: it returned an unusable reward; ``timeout``: it did not answer in time.
    what:
        Exception and its message, without the name of the environment and without frames.
    where:
        Innermost of its own frames; empty where there is none.
    """

    def __init__(self, message: str, *, cause: str = "raised", what: str = "", where: str = "") -> None:
        super().__init__(message)
        self.cause, self.what, self.where = cause, what or message.partition("\n")[0], where


class EnvironmentLostError(Exception):
    """Raised where the process of an environment is gone, or was ended because it hung.

    Attributes
    ----------
    death:
        Name of what was lost and number of its process: rollouts that ended by the same death count as one failure.
    """

    def __init__(self, message: str, death: tuple[str, int]) -> None:
        super().__init__(message)
        self.death = death


class EnvironmentProcess(Protocol):
    """Connection to the process of an environment."""

    @property
    def closing(self) -> bool:
        """Return whether nothing can be sent any more."""

    def post(self, message: wire.ToChild) -> None:
        """Send a message, and wait for nothing."""

    async def send(self, message: wire.ToChild) -> None:
        """Send a message; does not raise: `receive` tells that the process is gone."""

    async def receive(self) -> wire.FromChild:
        """Return the next message.

        Raises
        ------
        OSError, EOFError
            The process is gone.
        ValueError, msgspec.DecodeError
            It sent what is not a message.
        """

    def exit_description(self) -> str:
        """Return how the process ended, as the end of a sentence; empty where that is unknown."""

    def dump_stacks(self) -> None:
        """Let the process write the stacks of its threads into its log."""

    def end(self) -> None:
        """End the process and close the connection, without waiting."""

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""


class EnvironmentCalls:
    """All calls over one connection.

    Attributes
    ----------
    death:
        See `EnvironmentLostError`.
    """

    def __init__(
        self,
        config: HostedEnv,
        process: EnvironmentProcess,
        *,
        death: tuple[str, int],
        on_lost: Callable[[EnvironmentCalls, str], None],
        numbers: Iterator[int] | None = None,
    ) -> None:
        """Begin to read from the process and to watch it.

        Parameters
        ----------
        on_lost:
            Called once with the reason when the process is gone.
        numbers:
            Numbers of calls, where some were used before.
        """
        self.name, self.death = config.name, death
        self._config, self._process, self._on_lost = config, process, on_lost
        self._numbers = numbers or itertools.count(1)
        self._queues: dict[int, asyncio.Queue[wire.FromChild | Exception]] = {}
        self._lost = False
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    @property
    def count(self) -> int:
        """Return the number of calls that wait for an answer."""
        return len(self._queues)

    async def fetch_prompt(self, split: Split, index: int) -> Prompt:
        """Return a prompt.

        Raises
        ------
        EnvironmentRaisedError
            Its code raised, or did not answer within ``answer_timeout_s`` seconds.
        EnvironmentLostError
            Its process died or hung.
        """
        call, queue = self._open()
        try:
            await self._process.send(wire.AskPrompt(call, split, index))
            answer = await self._next(queue, "answer_timeout_s", "a prompt")
        finally:
            del self._queues[call]
        assert isinstance(answer, wire.Answer)
        return made_prompt(split, index, *answer.value)

    async def rollout(self, prompt: Prompt, policy: Policy) -> CheckedOutcome:
        """See `hpcrl.rollouts.environments.Environment`.

        Raises
        ------
        EnvironmentRaisedError
            Its code raised.
        EnvironmentLostError
            Its process died or hung.
        Exception
            What the policy raised, but for ValueError, which the environment sees.
        """
        async with contextlib.AsyncExitStack() as opened:
            return await self._roll_out(prompt, policy, opened)

    async def _roll_out(self, prompt: Prompt, policy: Policy, opened: contextlib.AsyncExitStack) -> CheckedOutcome:
        """Answer what a rollout asks, to its end; ``opened`` has its endpoint."""
        call, queue = self._open()
        ended = False
        try:
            await self._process.send(wire.Begin(call, prompt.split, prompt.index, policy.seed))
            while True:
                message = await self._next(queue, "turn_timeout_s", "the next turn of a rollout")
                if isinstance(message, wire.Ended):
                    ended = True
                    try:
                        return checked_outcome(CheckedOutcome(message.reward, message.parts, message.refused))
                    except OutcomeError as error:  # the process is foreign, whatever its own checks say
                        raise unusable_error(self.name, str(error), "") from None
                if (answer := await answered(call, message, policy, opened)) is not None:
                    await self._process.send(answer)
        finally:
            del self._queues[call]
            # nothing to do there for one that has failed
            if not ended and not self._process.closing:
                self._process.post(wire.Cancel(call))

    def _open(self) -> tuple[int, asyncio.Queue[wire.FromChild | Exception]]:
        call = next(self._numbers)
        queue: asyncio.Queue[wire.FromChild | Exception] = asyncio.Queue()
        self._queues[call] = queue
        return call, queue

    async def _next(self, queue: asyncio.Queue[wire.FromChild | Exception], setting: str, what: str) -> wire.FromChild:
        timeout_s: float = getattr(self._config, setting)
        try:
            async with asyncio.timeout(timeout_s):
                message = await queue.get()
        except TimeoutError:
            raise EnvironmentRaisedError(
                f"environment {self.name!r} gave no answer within {timeout_s:g} s, asked for {what}\n"
                f"    hint: a longer environments.{self.name}.{setting}, where it needs that time",
                cause="timeout",
                what=f"no answer within {timeout_s:g} s, asked for {what}",
            ) from None
        if isinstance(message, Exception):
            raise message
        if isinstance(message, wire.Unusable):
            raise unusable_error(self.name, message.message, message.place)
        if isinstance(message, wire.Failed):
            error = raised_error(self.name, message)
            raise error if isinstance(error, EnvironmentRaisedError) else EnvironmentRaisedError(str(error))
        return message

    async def _read(self) -> None:
        """Forward arriving messages until the process ends."""
        why = ""
        try:
            while True:
                message = await self._process.receive()
                assert not isinstance(message, wire.Built | wire.NotBuilt)
                # the caller of an earlier call was cancelled: its answer is dropped
                if (queue := self._queues.get(message.call)) is not None:
                    queue.put_nowait(message)
        except (OSError, EOFError):
            pass
        except (ValueError, AssertionError, msgspec.DecodeError) as error:
            why = f"its process sent an invalid message: {error}"
        self.lose(why)

    async def _watch(self) -> None:
        """End a process whose event loop does not run."""
        timeout_s = self._config.answer_timeout_s
        while True:
            await asyncio.sleep(timeout_s / _PINGS)
            call, queue = self._open()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._process.send(wire.Ping(call))
                    await queue.get()
            except TimeoutError:
                # after a suspension of this process itself, the answer may have arrived and be unread
                await asyncio.sleep(_STACKS_S)
                if queue.empty():
                    break
            finally:
                del self._queues[call]
        why = (
            f"its process did not answer for {timeout_s:g} s: its event loop is blocked (its stacks are in the log)\n"
            f"    hint: await slow calls, and compute in a thread or a process; or a longer "
            f"environments.{self.name}.answer_timeout_s"
        )
        self._process.dump_stacks()
        await asyncio.sleep(_STACKS_S)
        self.lose(why)

    def lose(self, why: str = "", *, death: tuple[str, int] | None = None) -> None:
        """Fail all calls with the reason why the process is gone, and end it; without effect the second time.

        Parameters
        ----------
        why:
            Reason; empty: what the process says of its end.
        death:
            The death that this was a part of, where more was lost than this process.
        """
        if self._lost:
            return
        self._lost = True
        self.death = death or self.death
        why = why or self._process.exit_description() or "its process closed the connection"
        self._process.end()
        _log.warning("environment %r is lost with %d calls: %s", self.name, self.count, why)
        for queue in self._queues.values():
            queue.put_nowait(EnvironmentLostError(f"environment {self.name!r}: {why}", self.death))
        self._on_lost(self, why)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def aclose(self) -> None:
        """End the process; calls that wait are not answered."""
        self._lost = True
        self._process.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._process.wait_closed()


def raised_error(name: str, failed: wire.Failed) -> Exception:
    """Return the exception for what the code of environment ``name`` raised."""
    lines = failed.frames.splitlines()
    frames = "".join(f"\n  {line}" for line in lines)
    what = f"{failed.kind}: {failed.message}"
    text = f"environment {name!r} raised {what}{frames}"
    if failed.kind == "NotImplementedError":
        return NotImplementedError(text)
    return EnvironmentRaisedError(text, what=what, where=lines[-1] if lines else "")


def unusable_error(name: str, message: str, place: str) -> EnvironmentRaisedError:
    """Return the exception for an unusable outcome of environment ``name``; ``place`` is where it is defined."""
    text = f"environment {name!r} returned an unusable rollout: {message}"
    text += f"\n  {place}" if place else ""
    return EnvironmentRaisedError(text, cause="unusable", what=message, where=place)


def made_prompt(split: Split, index: int, messages: wire.Messages, tools: wire.Messages) -> Prompt:
    """Return the prompt of an answer of the process."""
    return Prompt(split=split, index=index, messages=tuple(messages), tools=tuple(tools))
