"""The process of an environment of one's own: ``python -P -m hpcrl.rollouts.environments.child FD``.

It has what the environment needs, and nothing of the run: no ``HPCRL_*`` in its environment, and of open files only the
standard streams and the socket to the orchestrator. All rollouts of the environment run in one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import faulthandler
import importlib
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Literal, cast

from hpcrl.daemon_threads import run_process
from hpcrl.errors import ConfigError
from hpcrl.procfs import die_with_parent
from hpcrl.rollouts.environments import wire
from hpcrl.rollouts.environments.base import Environment, Message, Prompt, Reply, Split
from hpcrl.rollouts.environments.messages import plain_messages, plain_tools
from hpcrl.rollouts.environments.outcomes import OutcomeError, checked_outcome, plain_text

__all__ = ["NotBuiltError", "load", "main"]

_KEPT_PROMPTS = 256
"""The members of a group begin one after the other; their prompt is made once."""
_OURS = os.path.join(os.path.dirname(__file__), "")
"""Ends with a separator: a directory whose name begins like ours is somebody else's."""
_MESSAGE = 4000
"""Maximum number of characters of the message of an exception that is told, and of its frames."""
_FRAMES = 20
"""Maximum number of frames of an exception that are told: the innermost ones."""


class NotBuiltError(Exception):
    """What is wrong with a factory, and a hint."""

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
    module_name, _, attribute = factory.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        hint = "install it, or add its directory to PYTHONPATH"
        raise NotBuiltError(f"module {module_name!r} cannot be imported: {error}", hint) from error
    except (Exception, SystemExit) as error:
        what = f"module {module_name!r} cannot be imported: {_described(error)}"
        raise NotBuiltError(f"{what}{_indented(frames_of(error))}", "mend it") from error
    make = getattr(module, attribute, None)
    if not callable(make):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        hint = f"it has {', '.join(own)}" if own else "name what makes the environment: package.module:Name"
        raise NotBuiltError(f"{module_name!r} has no callable {attribute!r}", hint)
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
        raise NotBuiltError(f"{factory} gave no environment: it lacks {', '.join(missing)}", hint)
    return cast("Environment", environment)


def frames_of(error: BaseException) -> str:
    """Where it was raised, one frame a line, without frames of ours and of the import machinery."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith((_OURS, "<frozen", importlib.__file__ or "?"))]
    lines = [f"{each.filename}:{each.lineno} in {each.name}: {each.line or ''}".rstrip(": ") for each in own[-_FRAMES:]]
    return plain_text("\n".join(lines), _MESSAGE)


def failure_of(call: int, error: BaseException) -> wire.Failed:
    """Describe what foreign code raised; this succeeds for every exception, whatever its text or its methods are."""
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
    """The policy of one rollout, on the other side of the socket."""

    def __init__(self, host: _Host, call: int, seed: int) -> None:
        self.seed = seed
        self._host, self._call = host, call
        self.waiting: collections.deque[asyncio.Future[Reply]] = collections.deque()

    async def reply(self, messages: Sequence[Message]) -> Reply:
        said = plain_messages(messages)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.waiting.append(reply)
        await self._host.send(wire.Say(self._call, said))
        return await reply


class _Host:
    """Answers what the orchestrator asks."""

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
        """One message of the orchestrator's."""
        match message:
            case wire.Said():
                self._reply(message.call, message.reply)
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

    def _reply(self, call: int, reply: Reply | Exception) -> None:
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


def _notes_of(environment: Environment) -> list[str]:
    """Return what an environment of hpcrl says about itself; one of the user's own says nothing."""
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
    # the orchestrator ends us; an interrupt of the terminal is its affair
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    # programs that the environment starts have no part in the conversation
    os.set_inheritable(fd, False)
    run_process(_serve(socket.socket(fileno=fd)))
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    # threads that the environment left behind do not keep the process
    os._exit(code)
