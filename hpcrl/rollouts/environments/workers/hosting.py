"""One environment at a worker: its process, made in advance, and the connection that has it.

A connection of the orchestrator is given a process that no other had, and the process ends with the connection. Frames
are passed on as they are: the worker does not read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from aiohttp import WSMsgType, web

from hpcrl.config.environments import HostedEnv
from hpcrl.errors import ConfigError, EnvironmentFailedError
from hpcrl.rollouts.environments import wire
from hpcrl.rollouts.environments.child_process import ChildProcess, LostError

_log = logging.getLogger(__name__)

STACKS = "stacks"
"""Text of the orchestrator that asks for the stacks of the process."""
_RESTART_S = 1.0
"""Minimum time in seconds between two starts."""
_SAY_S = 5.0
"""Maximum time in seconds for the last word to a client, which may be gone."""


class EnvironmentHost:
    """Process of one environment, and who has it.

    Attributes
    ----------
    messages:
        Number of messages that were passed on, both ways.
    failures:
        The errors of the last starts, as long as none of them gave a process.
    """

    def __init__(self, config: HostedEnv) -> None:
        """Prepare; `prepare` starts the process."""
        self.name, self._config = config.name, config
        self.messages, self.failures = 0, list[str]()
        self._making: asyncio.Task[ChildProcess] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._client: web.WebSocketResponse | None = None
        self._started_s = -_RESTART_S

    @property
    def ready(self) -> bool:
        """Return whether a connection has a process, or one that has given a prompt waits for it."""
        if self._serving is not None:
            return True
        making = self._making
        made = making is not None and making.done() and not making.cancelled() and making.exception() is None
        return made and making is not None and making.result().running

    async def prepare(self) -> None:
        """Make the process, and wait until it has given a prompt.

        Raises
        ------
        EnvironmentFailedError
            It cannot be made, or gives no prompt.
        """
        await asyncio.shield(self._make())

    def renew(self) -> None:
        """Make a process where none was made or the last one has ended, also while no client asks for one."""
        if self._serving is None:
            self._make()

    def _make(self) -> asyncio.Task[ChildProcess]:
        """Return the task that makes a process, which is done where there is one."""
        making = self._making
        if making is None or (making.done() and (making.cancelled() or making.exception() or not _lives(making))):
            self._making = making = asyncio.create_task(self._made())
            # its error is logged also without a caller
            making.add_done_callback(self._report)
        return making

    def _report(self, making: asyncio.Task[ChildProcess]) -> None:
        if making.cancelled():
            return
        error = making.exception()
        if error is None:
            self.failures.clear()
            return
        self.failures.append(str(error))
        _log.error("environment %r: %s", self.name, error)

    async def _made(self) -> ChildProcess:
        await asyncio.sleep(max(0.0, self._started_s + _RESTART_S - time.monotonic()))
        self._started_s = time.monotonic()
        # here and not in a thread: the process ends with the thread that has started it
        child = ChildProcess(self._config)
        try:
            await asyncio.to_thread(child.build_blocking)
            await asyncio.to_thread(self._try_prompt, child)
        except ConfigError as error:
            lines = "\n".join(f"{f.key}: {f.what}\n    hint: {f.hint}" for f in error.findings)
            raise EnvironmentFailedError(lines) from error
        except BaseException:
            child.kill()
            raise
        for note in child.notes:
            _log.warning("environment %r: %s", self.name, note)
        _log.info("environment %r is ready, in process %d", self.name, child.pid)
        return child

    def _try_prompt(self, child: ChildProcess) -> None:
        split = "train" if self._config.weight > 0 else "heldout"
        try:
            answer = child.ask_blocking(wire.AskPrompt(0, split, 0), timeout_s=self._config.answer_timeout_s)
        except LostError as error:
            raise EnvironmentFailedError(f"environment {self.name!r}: its process {error}") from None
        if isinstance(answer, wire.Failed):
            text = f"environment {self.name!r} gave no prompt: {answer.kind}: {answer.message}"
            raise EnvironmentFailedError("\n".join([text, *(f"  {line}" for line in answer.frames.splitlines())]))

    async def serve(self, socket: web.WebSocketResponse) -> None:
        """Give a process to the client of ``socket``, until one of them ends; an earlier client loses its own."""
        if self._client is not None:
            await _say(self._client, "its process belongs to another connection now")
        await self._release()
        self._client = socket
        serving = self._serving = asyncio.create_task(self._serve(socket))
        try:
            await serving
        except asyncio.CancelledError:
            serving.cancel()  # the client went away, or another one has come
            await asyncio.wait([serving])
            raise
        finally:
            if self._serving is serving:
                self._serving = self._client = None

    async def _release(self) -> None:
        while (serving := self._serving) is not None:
            serving.cancel()
            await asyncio.wait([serving])
            if self._serving is serving:
                self._serving = None

    async def _serve(self, socket: web.WebSocketResponse) -> None:
        try:
            child = await asyncio.shield(self._make())
        except EnvironmentFailedError as error:
            await _say(socket, f"could not be started: {error}")
            return
        self._making = None
        try:
            await self._pass_both_ways(child, socket)
        except (OSError, ValueError) as error:
            _log.info("environment %r: the connection ended: %s", self.name, error)
        finally:
            child.kill()
            # the next client finds one that is ready
            self._make()

    async def _pass_both_ways(self, child: ChildProcess, socket: web.WebSocketResponse) -> None:
        reader, writer = await child.connect()
        back = asyncio.create_task(self._pass_back(child, reader, socket))
        try:
            await socket.send_bytes(wire.encode_message(wire.Built(child.notes)))
            await self._pass_on(child, writer, socket)
        finally:
            back.cancel()
            # first: what its own end says would be sent to the client
            child.kill()
            writer.close()

    async def _pass_on(self, child: ChildProcess, writer: asyncio.StreamWriter, socket: web.WebSocketResponse) -> None:
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                writer.write(len(message.data).to_bytes(wire.HEADER_BYTES, "big") + message.data)
                self.messages += 1
                await writer.drain()
            elif message.type is WSMsgType.TEXT and message.data == STACKS:
                child.dump_stacks()

    async def _pass_back(
        self, child: ChildProcess, reader: asyncio.StreamReader, socket: web.WebSocketResponse
    ) -> None:
        try:
            while True:
                length = wire.length_of(await reader.readexactly(wire.HEADER_BYTES))
                await socket.send_bytes(await reader.readexactly(length))
                self.messages += 1
        except (OSError, EOFError):
            why = await asyncio.to_thread(child.exit_description)
        except ValueError as error:
            why = f"its process sent an invalid message: {error}"
        await _say(socket, why or "its process closed the connection")

    async def aclose(self) -> None:
        """End the process, and the connection that has it."""
        await self._release()
        making, self._making = self._making, None
        if making is None:
            return
        making.cancel()
        await asyncio.wait([making])
        if not making.cancelled() and making.exception() is None:
            making.result().kill()


def _lives(making: asyncio.Task[ChildProcess]) -> bool:
    return making.result().running


async def _say(socket: web.WebSocketResponse, why: str) -> None:
    """Tell the client why its process is gone, and end the connection."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_SAY_S):
            await socket.send_str(why)
            await socket.close()
