"""An environment of one's own, in a process of its own.

Foreign code is kept out of the orchestrator: what it blocks, breaks or leaks is its own process, which knows neither
the run's directory nor its token. To the rest of the orchestrator it is an `Environment` like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from hpcrl.config.environments import HostedEnv
from hpcrl.rollouts.environments import wire
from hpcrl.rollouts.environments.base import Message, Outcome, Policy, Prompt, Split
from hpcrl.rollouts.environments.child_process import ChildProcess, LostError
from hpcrl.rollouts.environments.outcomes import CheckedOutcome, OutcomeError, checked_outcome

__all__ = ["EnvironmentLostError", "EnvironmentRaisedError", "HostedEnvironment"]

_log = logging.getLogger(__name__)

_RESTART_S = 1.0
"""Starts are at least so far apart."""
_STACKS_S = 0.5
"""How long a process that is about to be killed may take to write its stacks into the log."""
_PINGS = 4
"""Questions whether it lives, in the time in which it must answer."""


class EnvironmentRaisedError(Exception):
    """The environment's code raised: its type, its message, and its own frames.

    Attributes
    ----------
    cause:
        ``raised``; ``unusable``: it gave a reward that cannot be used; ``timeout``: it gave no answer in time.
    what:
        The exception and its message, without the name of the environment and without frames.
    where:
        The innermost of its own frames; empty where there is none.
    """

    def __init__(self, message: str, *, cause: str = "raised", what: str = "", where: str = "") -> None:
        super().__init__(message)
        self.cause, self.what, self.where = cause, what or message.partition("\n")[0], where


class EnvironmentLostError(Exception):
    """The process of an environment is gone, or was ended because it hung.

    Attributes
    ----------
    death:
        Name of the environment and number of the process: rollouts that one death ended are one failure.
    """

    def __init__(self, message: str, death: tuple[str, int]) -> None:
        super().__init__(message)
        self.death = death


class _Taken(NamedTuple):
    """A living process with the tasks that read from it and watch it."""

    number: int
    child: ChildProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    calls: dict[int, asyncio.Queue[wire.FromChild | Exception]]
    tasks: list[asyncio.Task[None]]


class HostedEnvironment:
    """The orchestrator's side of one process.

    Before the first ``await`` it is asked by blocking calls (the warm-up has no event loop), afterwards by messages
    that wait for nobody.

    Attributes
    ----------
    notes:
        What is odd about it, a sentence each.
    """

    def __init__(self, config: HostedEnv, *, on_lost: Callable[[str, str], None] = lambda name, why: None) -> None:
        """Start the process and let it make the environment.

        Parameters
        ----------
        on_lost:
            Told the environment's name and why its process is gone; the next call starts it again.

        Raises
        ------
        ConfigError
            It cannot be made.
        """
        self.name, self._config, self._on_lost = config.name, config, on_lost
        self._numbers = itertools.count(1)
        self._starts = itertools.count(1)
        self._child = self._spawn()
        self._child.build_blocking()
        self.notes = self._child.notes
        for note in self.notes:
            _log.warning("environment %r: %s", self.name, note)
        self._taken: _Taken | None = None
        self._starting: asyncio.Lock | None = None
        self._started_s = time.monotonic()

    def _spawn(self) -> ChildProcess:
        child = ChildProcess(self._config)
        # also where nobody closes it: the process does not outlive this object
        weakref.finalize(self, child.kill)
        return child

    # -- without an event loop

    def prompt(self, split: Split, index: int) -> Prompt:
        """See `hpcrl.rollouts.environments.Environment`; ``data`` stays in the process.

        Raises
        ------
        EnvironmentRaisedError
            Its code raised (also of `demonstration`; NotImplementedError where that is what it raised).
        EnvironmentLostError
            Its process died or hung (also of `demonstration`).
        """
        answer = self._ask_blocking(wire.AskPrompt(next(self._numbers), split, index))
        return _prompt(split, index, *answer.value)

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """See `hpcrl.rollouts.environments.Environment`; ``rng`` is as far as there."""
        question = wire.AskDemonstration(next(self._numbers), prompt.split, prompt.index, correct, rng.getstate())
        said, (version, state, gauss) = self._ask_blocking(question).value
        rng.setstate((version, tuple(state), gauss))
        return tuple(said)

    def _ask_blocking(self, question: wire.AskPrompt | wire.AskDemonstration) -> wire.Answer:
        assert self._taken is None, "an event loop talks to this process: await prompt_of(...)"
        try:
            answer = self._child.ask_blocking(question, timeout_s=self._config.answer_timeout_s)
        except LostError as error:
            self._child.kill()
            raise EnvironmentLostError(f"environment {self.name!r}: {error}", (self.name, 1)) from None
        if isinstance(answer, wire.Failed):
            raise self._raised(answer)
        assert isinstance(answer, wire.Answer)
        return answer

    def _raised(self, failed: wire.Failed) -> Exception:
        lines = failed.frames.splitlines()
        frames = "".join(f"\n  {line}" for line in lines)
        what = f"{failed.kind}: {failed.message}"
        text = f"environment {self.name!r} raised {what}{frames}"
        if failed.kind == "NotImplementedError":
            return NotImplementedError(text)
        return EnvironmentRaisedError(text, what=what, where=lines[-1] if lines else "")

    def _unusable(self, message: str, place: str) -> EnvironmentRaisedError:
        text = f"environment {self.name!r} ended a rollout that cannot be used: {message}"
        text += f"\n  {place}" if place else ""
        return EnvironmentRaisedError(text, cause="unusable", what=message, where=place)

    # -- with one

    async def fetch_prompt(self, split: Split, index: int) -> Prompt:
        """As `prompt`, while others go on.

        Raises
        ------
        EnvironmentRaisedError
            Its code raised, or gave no answer within ``answer_timeout_s``.
        EnvironmentLostError
            Its process died or hung.
        """
        taken = await self._living()
        call, queue = self._open(taken)
        try:
            await _send(taken, wire.AskPrompt(call, split, index))
            answer = await self._next(queue, "answer_timeout_s", "a prompt")
        finally:
            del taken.calls[call]
        assert isinstance(answer, wire.Answer)
        return _prompt(split, index, *answer.value)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
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
        taken = await self._living()
        call, queue = self._open(taken)
        ended = False
        try:
            await _send(taken, wire.Begin(call, prompt.split, prompt.index, policy.seed))
            while True:
                message = await self._next(queue, "turn_timeout_s", "the next turn of a rollout")
                if isinstance(message, wire.Ended):
                    ended = True
                    try:
                        return checked_outcome(CheckedOutcome(message.reward, message.parts, message.refused))
                    except OutcomeError as error:  # the process is foreign, whatever its own checks say
                        raise self._unusable(str(error), "") from None
                assert isinstance(message, wire.Say)
                try:
                    reply = await policy.reply(message.messages)
                except ValueError as error:
                    await _send(taken, wire.Refused(call, str(error)))
                else:
                    await _send(taken, wire.Said.of(call, reply))
        finally:
            del taken.calls[call]
            # nothing to do there for one that has failed
            if not ended and not taken.writer.is_closing():
                taken.writer.write(wire.frame(wire.Cancel(call)))

    def _open(self, taken: _Taken) -> tuple[int, asyncio.Queue[wire.FromChild | Exception]]:
        call = next(self._numbers)
        queue: asyncio.Queue[wire.FromChild | Exception] = asyncio.Queue()
        taken.calls[call] = queue
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
            raise self._unusable(message.message, message.place)
        if isinstance(message, wire.Failed):
            error = self._raised(message)
            raise error if isinstance(error, EnvironmentRaisedError) else EnvironmentRaisedError(str(error))
        return message

    async def _living(self) -> _Taken:
        """The process, started again where the one before is gone."""
        if self._taken is not None:
            return self._taken
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._taken is None:
                self._taken = await self._take()
            return self._taken

    async def _take(self) -> _Taken:
        number = next(self._starts)
        if number > 1:
            await asyncio.sleep(max(0.0, self._started_s + _RESTART_S - time.monotonic()))
            self._started_s = time.monotonic()
            self._child = self._spawn()
        reader, writer = await self._child.connect()
        taken = _Taken(number, self._child, reader, writer, {}, [])
        if number > 1:
            await self._build_again(taken)
        taken.tasks.append(asyncio.create_task(self._read(taken)))
        taken.tasks.append(asyncio.create_task(self._watch(taken)))
        return taken

    async def _build_again(self, taken: _Taken) -> None:
        problem = f"it was not ready within {self._config.start_timeout_s:g} s"
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await _send(taken, taken.child.build)
                built = await _receive(taken)
            if isinstance(built, wire.Built):
                _log.warning("environment %r has a new process, %d", self.name, taken.child.pid)
                return
            problem = built.what if isinstance(built, wire.NotBuilt) else f"it answered {type(built).__name__}"
        except TimeoutError:
            pass
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
            problem = taken.child.obituary() or str(error)
        taken.child.kill()
        message = f"environment {self.name!r} could not be started again: {problem}"
        raise EnvironmentLostError(message, (self.name, taken.number))

    async def _read(self, taken: _Taken) -> None:
        """Hand on what arrives, to the end of the process."""
        why = ""
        try:
            while True:
                message = await _receive(taken)
                assert not isinstance(message, wire.Built | wire.NotBuilt)
                # a call that nobody waits for any more is forgotten
                if (queue := taken.calls.get(message.call)) is not None:
                    queue.put_nowait(message)
        except (OSError, EOFError):
            pass
        except (ValueError, AssertionError, msgspec.DecodeError) as error:
            why = f"its process sent what is no message: {error}"
        self._lose(taken, why)

    async def _watch(self, taken: _Taken) -> None:
        """End a process whose event loop does not turn."""
        timeout_s = self._config.answer_timeout_s
        while True:
            await asyncio.sleep(timeout_s / _PINGS)
            call, queue = self._open(taken)
            try:
                async with asyncio.timeout(timeout_s):
                    await _send(taken, wire.Ping(call))
                    await queue.get()
            except TimeoutError:
                # where we were stopped ourselves (a suspended job), the answer is there and was not read yet
                await asyncio.sleep(_STACKS_S)
                if queue.empty():
                    break
            finally:
                del taken.calls[call]
        why = (
            f"its process did not answer for {timeout_s:g} s: its event loop is blocked (its stacks are in the log)\n"
            f"    hint: await what waits, and compute in a thread or a process; or a longer "
            f"environments.{self.name}.answer_timeout_s"
        )
        taken.child.dump_stacks()
        await asyncio.sleep(_STACKS_S)
        self._lose(taken, why)

    def _lose(self, taken: _Taken, why: str) -> None:
        """All calls of a process fail with why it is gone."""
        if self._taken is not taken:
            return
        self._taken = None
        why = why or taken.child.obituary() or "its process closed the connection"
        taken.child.kill()
        taken.writer.close()
        _log.warning("environment %r is lost with %d calls: %s", self.name, len(taken.calls), why)
        for queue in taken.calls.values():
            queue.put_nowait(EnvironmentLostError(f"environment {self.name!r}: {why}", (self.name, taken.number)))
        self._on_lost(self.name, why)
        for task in taken.tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def aclose(self) -> None:
        """End the process."""
        taken, self._taken = self._taken, None
        self._child.kill()
        if taken is not None:
            for task in taken.tasks:
                task.cancel()
            await asyncio.gather(*taken.tasks, return_exceptions=True)
            taken.writer.close()
            with contextlib.suppress(OSError):
                await taken.writer.wait_closed()

    def close(self) -> None:
        """End the process, where no event loop talks to it."""
        self._child.kill()


def _prompt(split: Split, index: int, messages: wire.Messages, tools: wire.Messages) -> Prompt:
    return Prompt(split=split, index=index, messages=tuple(messages), tools=tuple(tools))


async def _send(taken: _Taken, message: wire.ToChild) -> None:
    taken.writer.write(wire.frame(message))
    with contextlib.suppress(OSError):  # who reads sees the end, and says why
        await taken.writer.drain()


async def _receive(taken: _Taken) -> wire.FromChild:
    length = wire.length_of(await taken.reader.readexactly(wire.HEADER_BYTES))
    return wire.decode_from_child(await taken.reader.readexactly(length))
