"""Process of a custom environment: ``python -P -m hpcrl.rollouts.environments.child FD``.

It contains what the environment needs, and no state of the run: no ``HPCRL_*`` in its environment, and of open files
only the standard streams and the socket to the orchestrator. All rollouts of the environment run in one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import faulthandler
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, NoReturn, cast

from hpcrl.errors import ConfigError
from hpcrl.extend import ExtensionError, import_object
from hpcrl.extend import frames_of as extension_frames
from hpcrl.processes.daemon_threads import run_process
from hpcrl.processes.procfs import die_with_parent
from hpcrl.rollouts.environments import wire
from hpcrl.rollouts.environments.base import (
    Environment,
    Message,
    PolicyEndpoint,
    Prompt,
    Reply,
    Split,
    UnrecoverableError,
)
from hpcrl.rollouts.environments.messages import plain_messages, plain_tools
from hpcrl.rollouts.environments.outcomes import OutcomeError, checked_outcome, plain_text

_KEPT_PROMPTS = 256
"""Maximum number of cached prompts: the members of a group begin one after the other and share a prompt."""
_OURS = os.path.join(os.path.dirname(__file__), "")
"""Directory of hpcrl's own code. It ends with a separator, so that names which only begin alike do not match."""
_UNRECOVERABLE = 75
"""Exit code of a process whose environment cannot go on."""
_MESSAGE = 4000
"""Maximum number of characters that are sent of an exception's message, and of its frames."""


class NotBuiltError(Exception):
    """Raised where a factory of an environment is wrong; has a problem and a hint."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what, self.hint = what, hint


def load(factory: str, args: dict[str, Any]) -> Environment:
    """Import and call ``package.module:Name``.

    Raises
    ------
    NotBuiltError
        It gives no environment.
    ConfigError
        An environment of hpcrl refuses its settings.
    """
    try:
        make = import_object(factory, called="callable")
    except ExtensionError as error:
        raise NotBuiltError(error.what, error.hint) from error
    try:
        environment = make(**args)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{factory}(**args) raised {_described(error)}"
        raise NotBuiltError(f"{what}{_indented(frames_of(error))}", "check args") from error
    wanted = ("prompt", "rollout", "demonstration")
    missing = [name for name in wanted if not callable(getattr(environment, name, None))]
    if missing:
        hint = "see hpcrl.rollouts.environments.Environment"
        raise NotBuiltError(f"{factory} returned no environment: it lacks {', '.join(missing)}", hint)
    return cast("Environment", environment)


def frames_of(error: BaseException) -> str:
    """Return the traceback of ``error``, one frame a line, without frames of hpcrl and of the import machinery."""
    return plain_text(extension_frames(error, (_OURS,)), _MESSAGE)


def failure_of(call: int, error: BaseException) -> wire.Failed:
    """Return a description of an exception of custom code; succeeds for every text and method of the exception."""
    kind, _, message = _described(error).partition(": ")
    return wire.Failed(call, kind, message, frames_of(error))


def _described(error: BaseException) -> str:
    """Return the type and the message of an exception, as text that can be encoded and is not too long."""
    try:
        message = str(error)
    except BaseException as other:  # noqa: BLE001 - foreign code: __str__ may raise anything
        message = f"(its message cannot be shown: {type(other).__name__})"
    return f"{plain_text(type(error).__name__, 200)}: {plain_text(message, _MESSAGE)}"


def _place_of(environment: Environment) -> str:
    """Return where the method ``rollout`` of an environment is defined, as a frame; empty where that is not known."""
    method: Any = getattr(environment.rollout, "__func__", environment.rollout)
    code = getattr(method, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _indented(frames: str) -> str:
    return "".join(f"\n      {line}" for line in frames.splitlines())


class _Policy:
    """Policy of one rollout, on the other side of the socket."""

    def __init__(self, host: _Host, call: int, seed: int) -> None:
        self.seed = seed
        self._host, self._call = host, call
        self.waiting: collections.deque[asyncio.Future[Any]] = collections.deque()

    async def reply(self, messages: Sequence[Message], *, anew: bool = False, within: int | None = None) -> Reply:
        said = plain_messages(messages)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.waiting.append(reply)
        await self._host.send(wire.Say(self._call, said, anew, within))
        return await reply

    @contextlib.asynccontextmanager
    async def endpoint(self) -> AsyncIterator[PolicyEndpoint]:
        opened: asyncio.Future[PolicyEndpoint] = asyncio.get_running_loop().create_future()
        self.waiting.append(opened)
        await self._host.send(wire.Open(self._call))
        yield await opened
        # not sent after an error inside the context: the failure of the rollout is reported instead
        await self._host.send(wire.Close(self._call))


class _Host:
    """Answers the requests of the orchestrator."""

    def __init__(self, environment: Environment, writer: asyncio.StreamWriter) -> None:
        self._environment, self._writer = environment, writer
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()
        self._policies: dict[int, _Policy] = {}
        self._prompts: collections.OrderedDict[tuple[str, int], Prompt] = collections.OrderedDict()

    async def send(self, message: wire.FromChild) -> None:
        self._writer.write(wire.frame(message))
        await self._writer.drain()

    def take(self, message: wire.ToChild) -> None:
        """Handle one message of the orchestrator."""
        match message:
            case wire.Said():
                self._reply(message.call, message.reply)
            case wire.Opened():
                self._reply(message.call, PolicyEndpoint(message.url, message.key, message.model))
            case wire.Refused():
                self._reply(message.call, ValueError(message.message))
            case wire.Cancel():
                if (task := self._calls.get(message.call)) is not None:
                    self._cancelled.add(message.call)
                    task.cancel()
            case wire.AskPrompt() | wire.AskDemonstration() | wire.Begin() | wire.Ping():
                task = asyncio.create_task(self._run(message))
                self._calls[message.call] = task
                task.add_done_callback(lambda _: self._forget(message.call))

    def _forget(self, call: int) -> None:
        self._calls.pop(call, None)
        self._cancelled.discard(call)

    def _reply(self, call: int, reply: Reply | PolicyEndpoint | Exception) -> None:
        policy = self._policies.get(call)
        future = policy.waiting.popleft() if policy is not None and policy.waiting else None
        if future is None or future.done():
            return
        if isinstance(reply, Exception):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    async def _run(self, message: wire.AskPrompt | wire.AskDemonstration | wire.Begin | wire.Ping) -> None:
        try:
            answer = wire.frame(await self._answer(message))
        except OutcomeError as error:
            answer = wire.frame(wire.Unusable(message.call, str(error), _place_of(self._environment)))
        except BaseException as error:
            # sys.exit() and the like, too: they would end the process, and with it the rollouts of all others
            if message.call in self._cancelled:
                raise
            if isinstance(error, UnrecoverableError):
                _give_up(error)
            answer = wire.frame(failure_of(message.call, error))
        self._writer.write(answer)
        await self._writer.drain()

    async def _answer(self, message: wire.AskPrompt | wire.AskDemonstration | wire.Begin | wire.Ping) -> wire.FromChild:
        if isinstance(message, wire.Ping):
            return wire.Answer(message.call, None)
        prompt = self._prompt(message.split, message.index)
        if isinstance(message, wire.AskPrompt):
            return wire.Answer(message.call, (plain_messages(prompt.messages), plain_tools(prompt.tools)))
        if isinstance(message, wire.AskDemonstration):
            rng = random.Random()
            version, state, gauss = message.rng_state
            rng.setstate((version, tuple(state), gauss))
            said = self._environment.demonstration(prompt, correct=message.correct, rng=rng)
            return wire.Answer(message.call, (plain_messages(said), rng.getstate()))
        policy = self._policies[message.call] = _Policy(self, message.call, message.seed)
        try:
            outcome = await self._environment.rollout(prompt, policy)
        finally:
            del self._policies[message.call]
        checked = checked_outcome(outcome)
        return wire.Ended(message.call, checked.reward, dict(checked.parts), dict(checked.refused))

    def _prompt(self, split: str, index: int) -> Prompt:
        key = (split, index)
        if key not in self._prompts:
            self._prompts[key] = self._environment.prompt(cast("Split", split), index)
        self._prompts.move_to_end(key)
        if len(self._prompts) > _KEPT_PROMPTS:
            self._prompts.popitem(last=False)
        return self._prompts[key]


def _give_up(error: UnrecoverableError) -> NoReturn:
    """End this process, so that a new one is started."""
    print(f"the environment cannot go on: {error}", file=sys.stderr, flush=True)
    os._exit(_UNRECOVERABLE)


def _notes_of(environment: Environment) -> list[str]:
    """Return the notes of an environment of hpcrl; a custom environment has none."""
    notes = getattr(environment, "notes", ())
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)

    async def receive() -> wire.ToChild:
        length = wire.length_of(await reader.readexactly(wire.HEADER_BYTES))
        return wire.decode_to_child(await reader.readexactly(length))

    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        build = await receive()
        assert isinstance(build, wire.Build)
        sys.path[:] = build.path
        try:
            environment = load(build.factory, build.args)
        except NotBuiltError as error:
            writer.write(wire.frame(wire.NotBuilt(error.what, error.hint)))
            await writer.drain()
            return
        except ConfigError as error:
            settings = [(each.key, each.what, each.hint) for each in error.findings]
            writer.write(wire.frame(wire.NotBuilt(str(error), "", settings)))
            await writer.drain()
            return
        host = _Host(environment, writer)
        await host.send(wire.Built(_notes_of(environment)))
        # to the end of the orchestrator, which closes the socket
        while True:
            host.take(await receive())


def main(fd: int) -> Literal[0]:
    """Serve one environment until the socket is closed."""
    die_with_parent()
    # the orchestrator ends this process and handles an interrupt of the terminal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    # programs that the environment starts must not inherit the socket
    os.set_inheritable(fd, False)
    run_process(_serve(socket.socket(fileno=fd)))
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    # threads that the environment left behind do not keep the process
    os._exit(code)
