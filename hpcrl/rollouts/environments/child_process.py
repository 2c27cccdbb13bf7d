"""Starts the process of an environment with nothing of the run in it, and speaks to it as long as nobody awaits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec

from hpcrl.config.environments import CustomEnv, HostedEnv
from hpcrl.errors import ConfigError, Finding
from hpcrl.interpreter import module_command, with_safe_path
from hpcrl.rollouts.environments import wire

__all__ = ["ChildProcess", "LostError", "environment_of_child"]

_OWN_PREFIX = "HPCRL_"
_STREAM_BYTES = 1 << 20
_OBITUARY_S = 0.2


class LostError(Exception):
    """The process is gone, or does not answer."""


def environment_of_child() -> dict[str, str]:
    """Our environment without what says where the run is and how to speak to it."""
    return with_safe_path({name: value for name, value in os.environ.items() if not name.startswith(_OWN_PREFIX)})


class ChildProcess:
    """One process. It is ended by its number, and never outlives its parent.

    Attributes
    ----------
    build:
        What it is told first.
    notes:
        What is odd about the environment, a sentence each, once it is made.
    """

    def __init__(self, config: HostedEnv) -> None:
        """Start it; nothing is said yet."""
        self._config = config
        # what can be imported here can be imported there
        factory, args = config.call()
        self.build = wire.Build(factory, args, [path for path in sys.path if path])
        self.notes: list[str] = []
        self._connected = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module_command(sys.executable, "hpcrl.rollouts.environments.child", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                # what it prints belongs into the log of who started it, and not among results
                stdout=2,
                env={**environment_of_child(), **config.variables()},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def build_blocking(self) -> None:
        """Let it make the environment.

        Raises
        ------
        ConfigError
            It cannot be made.
        """
        name, timeout_s = self._config.name, self._config.start_timeout_s
        key = f"environments.{name}.factory" if isinstance(self._config, CustomEnv) else f"environments.{name}"
        try:
            built = self.ask_blocking(self.build, timeout_s=timeout_s)
        except LostError as error:
            self.kill()
            raise ConfigError([Finding("recipe", key, f"its process {error}", "its log says more")]) from None
        if isinstance(built, wire.NotBuilt):
            self.kill()
            settings = built.settings or [(key, built.what, built.hint)]
            raise ConfigError([Finding("recipe", *each) for each in settings])
        assert isinstance(built, wire.Built)
        self.notes = built.notes

    def ask_blocking(self, question: wire.ToChild, *, timeout_s: float) -> wire.FromChild:
        """Ask and wait for the answer (`LostError` where there is none)."""
        deadline = time.monotonic() + timeout_s
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(wire.frame(question))
            length = wire.length_of(self._read(wire.HEADER_BYTES, deadline))
            return wire.decode_from_child(self._read(length, deadline))
        except TimeoutError:
            self.dump_stacks()
            raise LostError(f"gave no answer within {timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            raise LostError(self.obituary() or str(error)) from None
        except (ValueError, msgspec.DecodeError) as error:
            raise LostError(f"sent what is no message: {error}") from error

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            piece = self._socket.recv(min(count - len(data), _STREAM_BYTES))
            if not piece:
                raise EOFError("closed the connection")
            data += piece
        return bytes(data)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The connection, from now on in the hands of the event loop."""
        self._connected = True
        return await asyncio.open_connection(sock=self._socket, limit=_STREAM_BYTES)

    def obituary(self) -> str:
        """How it ended; empty while it lives. Its number stays its own until `kill`."""
        deadline = time.monotonic() + _OBITUARY_S
        while self._process.returncode is None:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None and end.si_code == os.CLD_EXITED:
                return f"ended with exit code {end.si_status}"
            if end is not None:
                return f"was killed by {signal.Signals(end.si_status).name}"
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        return ""

    def dump_stacks(self) -> None:
        """Let it write the stacks of its threads into the log."""
        if self._process.returncode is None:
            os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End it and what it has started; without effect where that has happened."""
        if self._process.returncode is None:
            # it has not been waited for, so its number, dead or alive, is still that of its group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        if not self._connected:
            self._socket.close()
