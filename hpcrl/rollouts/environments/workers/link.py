"""The orchestrator's side of one worker: whether it lives, and the connections to its processes of environments."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import aiohttp

from hpcrl.config.environments import HostedEnv
from hpcrl.rollouts.environments import wire
from hpcrl.rollouts.environments.process_calls import EnvironmentCalls, EnvironmentLostError
from hpcrl.rollouts.environments.workers.hosting import STACKS

_log = logging.getLogger(__name__)

_SILENCE_S = 4.0
"""Seconds without a word of a worker after which it is lost; there are two a second."""
_UNREAD_S = 0.5
"""Seconds for what has arrived and was not read, because this process itself stood still."""
_AGAIN_S = 0.25
"""Seconds between two tries to reach a worker."""
_COMPLAIN_S = 30.0
"""Minimum seconds between two complaints about a worker."""
_CONNECT_S = 10.0
_AVOID_S = 10.0
"""Seconds for which a worker that gives no process of an environment is avoided, where another one is there."""
_CLOSING = aiohttp.ClientWSTimeout(ws_close=2.0)
"""Timeout of the end of a connection."""
_MARGIN_S = 10.0
"""Seconds that a worker may take in addition to the limits of an environment."""


class LinkEvents(NamedTuple):
    """Functions that are called when something happens to a worker.

    Attributes
    ----------
    on_lost:
        With the number of the worker, the reason, and the number of calls that it had.
    on_back:
        With the number of the worker and the seconds for which it was away.
    on_silent:
        With the number of the worker and what is wrong with it: its process may hang.
    on_process_lost:
        With the name of an environment and the reason, where only its process at a worker is gone.
    """

    on_lost: Callable[[int, str, int], None]
    on_back: Callable[[int, float], None]
    on_silent: Callable[[int, str], None]
    on_process_lost: Callable[[str, str], None]


class WorkerLink:
    """One worker.

    Attributes
    ----------
    replica:
        Number of the worker.
    up:
        Whether it lives, and its environments are there.
    chosen:
        Number of the choice by which it was last given a prompt.
    """

    def __init__(self, replica: int, url: str, *, http: aiohttp.ClientSession, events: LinkEvents) -> None:
        """Prepare; nothing is sent before `run`."""
        self.replica, self.up, self.chosen = replica, False, 0
        self.changed = asyncio.Event()
        self._url, self._http, self._events = url, http, events
        self._calls: dict[str, EnvironmentCalls] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._connecting: set[_Socket] = set()
        self._deaths = 0
        self._processes = itertools.count(1)
        self._waiting = 0
        self._failed_s: dict[str, float] = {}
        self._lost_s: float | None = None
        self._complained_s = -_COMPLAIN_S

    @property
    def load(self) -> int:
        """Return the number of calls that wait for an answer of this worker, or for a connection to it."""
        return self._waiting + sum(calls.count for calls in self._calls.values())

    def lost_by(self, error: EnvironmentLostError) -> bool:
        """Return whether an error says that this worker is lost, and not only a process of an environment at it."""
        return error.death[0] == self.death[0]

    @property
    def losses(self) -> int:
        """Return how often this worker was lost."""
        return self._deaths

    @property
    def death(self) -> tuple[str, int]:
        """Return what identifies the next death of this worker."""
        return f"env {self.replica}", self._deaths

    def offers(self, name: str) -> bool:
        """Return whether the worker is there, and has not just failed to give a process of environment ``name``."""
        return self.up and time.monotonic() - self._failed_s.get(name, -_AVOID_S) >= _AVOID_S

    async def run(self) -> None:
        """Watch the worker; never returns."""
        while True:
            why = await self._watch()
            if self.up:
                self._lose(why)
            await asyncio.sleep(_AGAIN_S)

    async def _watch(self) -> str:
        """Follow the worker's signs of life; return why there are no more."""
        try:
            async with asyncio.timeout(_SILENCE_S):
                response = await self._http.get(f"{self._url}/watch", allow_redirects=False)
            async with response:
                if response.status != 200:
                    return f"it answered {response.status}"
                while await self._hear(response.content):
                    if not self.up:
                        self._rise()
            return "its connection was closed"
        except TimeoutError:
            why = f"it was silent for {_SILENCE_S:g} s"
            if time.monotonic() - self._complained_s >= _COMPLAIN_S:
                self._complained_s = time.monotonic()
                self._events.on_silent(self.replica, why)
            return why
        except (aiohttp.ClientError, OSError) as error:
            return str(error) or type(error).__name__

    async def _hear(self, content: aiohttp.StreamReader) -> bytes:
        """Return the next signs of life; empty where the connection was closed (TimeoutError without any)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SILENCE_S):
                return await content.readany()
        async with asyncio.timeout(_UNREAD_S):
            return await content.readany()

    def _rise(self) -> None:
        self.up = True
        self._failed_s.clear()
        self.changed.set()
        if self._lost_s is not None:
            away_s = time.monotonic() - self._lost_s
            _log.warning("worker %d of environments is back after %.1f s", self.replica, away_s)
            self._events.on_back(self.replica, away_s)

    def _lose(self, why: str) -> None:
        death, load = self.death, self.load
        self.up, self._lost_s = False, time.monotonic()
        self._deaths += 1
        _log.warning("worker %d of environments is lost with %d calls: %s", self.replica, load, why)
        calls, self._calls = self._calls, {}
        for each in calls.values():
            each.lose(f"worker {self.replica} is lost: {why}", death=death)
        for socket in self._connecting:
            socket.end()
        self._events.on_lost(self.replica, why, load)

    async def calls(self, config: HostedEnv) -> EnvironmentCalls:
        """Return the calls of an environment's process at this worker, which is connected first where it is not.

        Raises
        ------
        EnvironmentLostError
            The worker gives none.
        """
        # counted before the first await, so that many prompts that are chosen for at once are spread
        self._waiting += 1
        try:
            async with self._locks.setdefault(config.name, asyncio.Lock()):
                found = self._calls.get(config.name)
                if found is None:
                    found = self._calls[config.name] = await self._connect(config)
                return found
        finally:
            self._waiting -= 1

    async def _connect(self, config: HostedEnv) -> EnvironmentCalls:
        deaths, death = self._deaths, self.death
        label = f"environment {config.name!r} at worker {self.replica}"
        try:
            async with asyncio.timeout(_CONNECT_S):
                url = f"{self._url}/environments/{config.name}"
                socket = await self._http.ws_connect(url, max_msg_size=wire.MAX_MESSAGE_BYTES, timeout=_CLOSING)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self._failed_s[config.name] = time.monotonic()
            raise EnvironmentLostError(f"{label} cannot be reached: {error or type(error).__name__}", death) from None
        process = _Socket(socket, on_cut=self._cut)
        self._connecting.add(process)
        number = next(self._processes)
        limit_s = config.start_timeout_s + config.answer_timeout_s + _MARGIN_S
        problem = f"was not ready within {limit_s:g} s"
        try:
            async with asyncio.timeout(limit_s):
                built = await process.receive()
            # a worker that was lost meanwhile has no calls any more
            if isinstance(built, wire.Built) and deaths == self._deaths:
                return EnvironmentCalls(
                    config, process, death=(f"{config.name} at env {self.replica}", number), on_lost=self._process_lost
                )
            problem = "is lost with its worker"
        except TimeoutError:
            pass
        except (OSError, EOFError, ValueError) as error:
            problem = process.exit_description() or str(error) or "closed the connection"
        except BaseException:
            process.end()
            raise
        finally:
            self._connecting.discard(process)
        process.end()
        self._failed_s[config.name] = time.monotonic()
        raise EnvironmentLostError(f"{label} {problem}", (label, number) if deaths == self._deaths else death)

    def _cut(self) -> None:
        """Note that a connection ended without a reason: a worker that lives gives one."""
        if self.up:
            self._lose("its connection was closed")

    def _process_lost(self, calls: EnvironmentCalls, why: str) -> None:
        # not where the worker is lost: then they are no calls of this worker any more
        if self._calls.get(calls.name) is calls:
            del self._calls[calls.name]
            self._events.on_process_lost(calls.name, f"at worker {self.replica}: {why}")

    async def aclose(self) -> None:
        """End all connections; the worker ends the processes."""
        calls, self._calls = self._calls, {}
        await asyncio.gather(*(each.aclose() for each in calls.values()))


class _Socket:
    """WebSocket with a process; an `hpcrl.rollouts.environments.process_calls.EnvironmentProcess`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[Any], *, on_cut: Callable[[], None]) -> None:
        self._socket, self._on_cut, self._why = socket, on_cut, ""
        self._ended = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def closing(self) -> bool:
        return self._socket.closed

    def post(self, message: wire.ToChild) -> None:
        self._begin(self.send(message))

    async def send(self, message: wire.ToChild) -> None:
        data = wire.encode_message(message)
        with contextlib.suppress(OSError, aiohttp.ClientError):
            await self._socket.send_bytes(data)

    async def receive(self) -> wire.FromChild:
        while True:
            message = await self._socket.receive()
            if message.type is aiohttp.WSMsgType.BINARY:
                return wire.decode_from_child(message.data)
            if message.type is not aiohttp.WSMsgType.TEXT:
                if not self._ended and not self._why:
                    self._on_cut()
                raise EOFError
            self._why = str(message.data)

    def exit_description(self) -> str:
        return self._why

    def dump_stacks(self) -> None:
        self._begin(self._ask_stacks())

    async def _ask_stacks(self) -> None:
        with contextlib.suppress(OSError, aiohttp.ClientError):
            await self._socket.send_str(STACKS)

    def end(self) -> None:
        self._ended = True
        self._begin(self._close())

    async def _close(self) -> None:
        with contextlib.suppress(OSError, aiohttp.ClientError):
            await self._socket.close()

    async def wait_closed(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
