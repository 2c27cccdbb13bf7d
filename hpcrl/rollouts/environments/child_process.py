"""Start the process of an environment without access to the run, and call it with blocking calls until a task awaits
it.
"""

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
from hpcrl.processes.environment_marks import SANDBOX_MEMORY_VARIABLE
from hpcrl.processes.interpreter import module_command, with_safe_path
from hpcrl.rollouts.environments import wire

_OWN_PREFIX = "HPCRL_"
_STREAM_BYTES = 1 << 20
_OBITUARY_S = 0.2


class LostError(Exception):
    """Raised where the process is gone, or does not answer."""


def environment_of_child() -> dict[str, str]:
    """Return this process's environment without the variables of the run, but with the limit of its sandboxes."""
    dropped = [name for name in os.environ if name.startswith(_OWN_PREFIX) and name != SANDBOX_MEMORY_VARIABLE]
    return with_safe_path({name: value for name, value in os.environ.items() if name not in dropped})


class ChildProcess:
    """Process of an environment. It is ended by its PID, and never outlives its parent.

    Attributes
    ----------
    build:
        First message to the process.
    notes:
        Warnings about the environment, a sentence each, once it is built.
    """

    def __init__(self, config: HostedEnv) -> None:
        """Start the process; no message is sent yet."""
        self._config = config
        # the child has the same import path
        factory, args = config.call()
        self.build = wire.Build(factory, args, [path for path in sys.path if path])
        self.notes: list[str] = []
        self._connected = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module_command(sys.executable, "hpcrl.rollouts.environments.child", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                # its standard output goes into the log of the parent, and not among results
                stdout=2,
                env={**environment_of_child(), **config.variables()},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        """Return whether the process has not ended."""
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def build_blocking(self) -> None:
        """Let the process build the environment; blocks.

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
            raise ConfigError([Finding("recipe", key, f"its process {error}", "its log has details")]) from None
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
            raise LostError(self.exit_description() or str(error)) from None
        except (ValueError, msgspec.DecodeError) as error:
            raise LostError(f"sent an invalid message: {error}") from error

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
        """Return the connection as asyncio streams; from now on it belongs to the event loop."""
        self._connected = True
        return await asyncio.open_connection(sock=self._socket, limit=_STREAM_BYTES)

    def exit_description(self) -> str:
        """Return how the process ended; empty while it runs. Its PID is not reused until `kill`."""
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
        """Let the process write the stacks of its threads into the log."""
        if self._process.returncode is None:
            os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End the process and all that it started; without effect where it has ended."""
        if self._process.returncode is None:
            # it has not been waited for, so its number, dead or alive, is still that of its group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        if not self._connected:
            self._socket.close()
