"""Custom environment in its own process.

Custom code is kept out of the orchestrator: it can block, crash or leak only its own process, which knows neither the
run's directory nor its token. For the rest of the orchestrator it is an `Environment` like any other.
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

import msgspec

from hpcrl.config.environments import HostedEnv
from hpcrl.rollouts.environments import wire
from hpcrl.rollouts.environments.base import Message, Outcome, Policy, Prompt, Split
from hpcrl.rollouts.environments.child_process import ChildProcess, LostError
from hpcrl.rollouts.environments.process_calls import EnvironmentCalls, EnvironmentLostError, made_prompt, raised_error

_log = logging.getLogger(__name__)

_RESTART_S = 1.0
"""Minimum time in seconds between two starts."""


class _Connection:
    """Connection to a child process; an `hpcrl.rollouts.environments.process_calls.EnvironmentProcess`."""

    def __init__(self, child: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._child, self._reader, self._writer = child, reader, writer
        self.exit_description, self.dump_stacks = child.exit_description, child.dump_stacks

    @property
    def closing(self) -> bool:
        return self._writer.is_closing()

    def post(self, message: wire.ToChild) -> None:
        self._writer.write(wire.frame(message))

    async def send(self, message: wire.ToChild) -> None:
        self._writer.write(wire.frame(message))
        with contextlib.suppress(OSError):  # the reading task sees the end of the stream and reports why
            await self._writer.drain()

    async def receive(self) -> wire.FromChild:
        length = wire.length_of(await self._reader.readexactly(wire.HEADER_BYTES))
        return wire.decode_from_child(await self._reader.readexactly(length))

    def end(self) -> None:
        self._child.kill()
        self._writer.close()

    async def wait_closed(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class HostedEnvironment:
    """Orchestrator's side of one environment process.

    Before the first ``await`` it uses blocking calls (the warm-up has no event loop), afterwards asynchronous messages.

    Attributes
    ----------
    notes:
        Warnings about the environment, a sentence each.
    """

    def __init__(self, config: HostedEnv, *, on_lost: Callable[[str, str], None] = lambda name, why: None) -> None:
        """Start the process and let it build the environment.

        Parameters
        ----------
        on_lost:
            Called with the environment's name and the reason when its process is gone; the next call restarts it.

        Raises
        ------
        ConfigError
            The environment cannot be built.
        """
        self.name, self._config, self._on_lost = config.name, config, on_lost
        self._numbers = itertools.count(1)
        self._starts = itertools.count(1)
        self._child = self._spawn()
        self._child.build_blocking()
        self.notes = self._child.notes
        for note in self.notes:
            _log.warning("environment %r: %s", self.name, note)
        self._calls: EnvironmentCalls | None = None
        self._starting: asyncio.Lock | None = None
        self._started_s = time.monotonic()

    def _spawn(self) -> ChildProcess:
        child = ChildProcess(self._config)
        # also without a call of `close`, the process does not outlive this object
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
        return made_prompt(split, index, *answer.value)

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """See `hpcrl.rollouts.environments.Environment`; ``rng`` is as far as there."""
        question = wire.AskDemonstration(next(self._numbers), prompt.split, prompt.index, correct, rng.getstate())
        said, (version, state, gauss) = self._ask_blocking(question).value
        rng.setstate((version, tuple(state), gauss))
        return tuple(said)

    def _ask_blocking(self, question: wire.AskPrompt | wire.AskDemonstration) -> wire.Answer:
        assert self._calls is None, "an event loop owns this process: use await prompt_of(...)"
        try:
            answer = self._child.ask_blocking(question, timeout_s=self._config.answer_timeout_s)
        except LostError as error:
            self._child.kill()
            raise EnvironmentLostError(f"environment {self.name!r}: {error}", (self.name, 1)) from None
        if isinstance(answer, wire.Failed):
            raise raised_error(self.name, answer)
        assert isinstance(answer, wire.Answer)
        return answer

    # -- with one

    async def fetch_prompt(self, split: Split, index: int) -> Prompt:
        """Return a prompt, as `prompt` does, without blocking the event loop.

        Raises
        ------
        EnvironmentRaisedError
            Its code raised, or did not answer within ``answer_timeout_s`` seconds.
        EnvironmentLostError
            Its process died or hung.
        """
        return await (await self._living()).fetch_prompt(split, index)

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
        return await (await self._living()).rollout(prompt, policy)

    async def _living(self) -> EnvironmentCalls:
        """Return the calls of the process, restarted where the previous one has ended."""
        if self._calls is not None:
            return self._calls
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._calls is None:
                self._calls = await self._take()
            return self._calls

    async def _take(self) -> EnvironmentCalls:
        number = next(self._starts)
        if number > 1:
            await asyncio.sleep(max(0.0, self._started_s + _RESTART_S - time.monotonic()))
            self._started_s = time.monotonic()
            self._child = self._spawn()
        connection = _Connection(self._child, *await self._child.connect())
        if number > 1:
            await self._build_again(connection, number)
        death = (self.name, number)
        return EnvironmentCalls(self._config, connection, death=death, on_lost=self._lost, numbers=self._numbers)

    async def _build_again(self, connection: _Connection, number: int) -> None:
        problem = f"it was not ready within {self._config.start_timeout_s:g} s"
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await connection.send(self._child.build)
                built = await connection.receive()
            if isinstance(built, wire.Built):
                _log.warning("environment %r has a new process, %d", self.name, self._child.pid)
                return
            problem = built.what if isinstance(built, wire.NotBuilt) else f"it answered {type(built).__name__}"
        except TimeoutError:
            pass
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
            problem = self._child.exit_description() or str(error)
        self._child.kill()
        message = f"environment {self.name!r} could not be restarted: {problem}"
        raise EnvironmentLostError(message, (self.name, number))

    def _lost(self, calls: EnvironmentCalls, why: str) -> None:
        if self._calls is calls:
            self._calls = None
            self._on_lost(self.name, why)

    async def aclose(self) -> None:
        """End the process."""
        calls, self._calls = self._calls, None
        self._child.kill()
        if calls is not None:
            await calls.aclose()

    def close(self) -> None:
        """End the process, where no event loop talks to it."""
        self._child.kill()
