"""Starts the sinks and notifiers of a run, each in a process of its own, and ends them.

Nothing that they do touches the run: what fails is an event, and the end of an attempt waits for them no longer than
they may take, nor than Slurm gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hpcrl.config.outlets import SinkConfig
from hpcrl.config.plan import Plan
from hpcrl.errors import HpcrlError
from hpcrl.processes.interpreter import module_command, with_safe_path
from hpcrl.runs.cause import Cause
from hpcrl.runs.outlets.feed import FeedRequest
from hpcrl.runs.outlets.notices.messenger import AttemptEnd, MessengerRequest
from hpcrl.runs.outlets.run_end import SinkEnd, write_end
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.storage.trusted_paths import read_secret
from hpcrl.supervisor.status.status_writer import StatusWriter

_log = logging.getLogger(__name__)
_MAX_STARTS = 5
"""Maximum starts of the process of the notifiers in an attempt."""
_PAUSE_S = 10.0
"""Pause in seconds before a sink or that process is started again where it ended by itself."""
_MAX_PAUSE_FACTOR = 60.0
"""A sink is started after twice the pause each time, up to this many times the first: a network may be away for hours,
and an attempt may last for weeks."""
_WORKED_S = 600.0
"""Life in seconds after which a sink counts as one that worked: the pauses begin anew."""
_KEPT_S = 12.0
"""Time in seconds until Slurm ends us that is kept for the last words and the request to be requeued."""
_REQUEUED_S = 5.0
"""Maximum time in seconds for sinks and notifiers where the attempt is requeued, or another one begins at once."""
_MESSENGER_S = 10.0
"""Time in seconds for the process of the notifiers in addition to that of their messages."""
_MESSENGER = "messenger"
"""Name of the log of that process; no sink or notifier may hinder it, whatever its name is."""
_KILLED_S = 5.0
"""Maximum wait in seconds for the end of a process that was killed."""
_END_S = 2.0
"""Maximum time in seconds for the file that tells sinks how the run ends."""
_OWN_PREFIX = "HPCRL_"


class Outlets:
    """The sinks and notifiers of one attempt."""

    def __init__(
        self, run: RunDir, *, plan: Plan, attempt: int, board: StatusWriter, pause_s: float = _PAUSE_S
    ) -> None:
        """Keep what is needed; nothing is started yet."""
        self._run, self._plan, self._attempt, self._board, self._pause_s = run, plan, attempt, board, pause_s
        self._site_env: Mapping[str, str] = {}
        self._secrets: Mapping[str, str] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._living: dict[str, asyncio.subprocess.Process] = {}
        self._messenger: asyncio.subprocess.Process | None = None
        self._messenger_keeper: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._ending = asyncio.Event()

    async def start(self) -> None:
        """Start the sinks, and the process of the notifiers."""
        await self._prepare()
        self._keepers = [asyncio.create_task(self._keep(sink), name=f"sink {sink.name}") for sink in self._plan.sinks]
        if self._plan.notify:
            self._messenger_keeper = asyncio.create_task(self._keep_messenger(), name="messenger")

    async def _prepare(self) -> None:
        if self._plan.sinks or self._plan.notify:
            # what is missing for it they say themselves: no sink keeps a run from its start
            with contextlib.suppress(OSError, HpcrlError):
                await asyncio.to_thread(self._run.sinks_dir.mkdir, exist_ok=True)
                site = await asyncio.to_thread(self._run.cluster)
                self._site_env, self._secrets = site.env, await asyncio.to_thread(_read_secrets, site.secrets)

    def pids(self) -> set[int]:
        """Return the pids of processes of outlets that live: they have no guard above them, and are no orphans."""
        living = [*self._living.values(), *([] if self._messenger is None else [self._messenger])]
        return {child.pid for child in living if child.returncode is None}

    async def end_sinks(self, *, left_s: float | None, requeued: bool, end: RunState | None = None) -> None:
        """Give the sinks the last steps, and end them, so that their files are whole when the run has ended.

        Parameters
        ----------
        left_s:
            Seconds until Slurm ends us by force; None: nothing says so.
        requeued:
            The attempt ends for the next one of the same job.
        end:
            State in which the run ends; None: another attempt follows, which is no end for sinks.
        """
        until = _until(left_s, requeued)
        self._ending.set()
        if self._plan.sinks and end is not None:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_END_S):
                    await asyncio.to_thread(write_end, self._run, self._attempt, SinkEnd(state=end))
        await asyncio.gather(*(self._end_sink(sink, until) for sink in self._plan.sinks))
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def notify(self, state: RunState, cause: Cause | None, *, left_s: float | None, again: bool = False) -> None:
        """Let the notifiers say how the attempt ended, and wait for their messages, up to a limit.

        Parameters
        ----------
        again:
            The next attempt begins at once.
        """
        if not self._plan.notify:
            return
        self._ending.set()
        await asyncio.sleep(0)
        async with self._starting:  # a process that is just being started is the one to tell
            child = self._messenger
        if child is None or child.returncode is not None:
            await self._end_messenger_keeper()  # it may be between two starts
            if self._messenger_keeper is None:  # the attempt ended before its sinks began
                await self._prepare()
            with contextlib.suppress(OSError):
                child = await self._start_messenger()
        limit_s = max((each.timeout_s for each in self._plan.notify), default=0.0)
        limit_s = max(min(limit_s, _until(left_s, again or state is RunState.REQUEUED) - time.monotonic()), 0.0)
        if child is not None and child.stdin is not None:
            words = "" if cause is None else cause.message
            end = AttemptEnd(state=state.value, cause=words, limit_s=limit_s, again=again)
            with contextlib.suppress(OSError):
                child.stdin.write(msgspec.json.encode(end) + b"\n")
                await child.stdin.drain()
            # its imports may not have ended; where Slurm ends us nothing is added
            more_s = _MESSENGER_S if left_s is None else 0.0
            if not await _ended(child, limit_s + more_s):
                error = f"the messages took longer than {limit_s:.3g} s"
                self._board.emit("notify.failed", notifier="", error=error, log=f"sinks/{_MESSENGER}.log")
        await self._end_messenger_keeper()

    async def _end_messenger_keeper(self) -> None:
        if self._messenger_keeper is not None:
            self._messenger_keeper.cancel()
            await asyncio.gather(self._messenger_keeper, return_exceptions=True)

    async def _keep_messenger(self) -> None:
        """Start the process of the notifiers, and start it again where it ends by itself."""
        for start in range(1, _MAX_STARTS + 1):
            try:
                how = f"its process ended with {await (await self._start_messenger()).wait()}"
            except OSError as error:
                how = f"it cannot be started: {error}"
            if self._ending.is_set():
                return
            self._messenger = None
            last = start == _MAX_STARTS
            log = f"sinks/{_MESSENGER}.log"
            self._board.emit("notify.failed", notifier="", error=how, log=log, given_up=last)
            if not last:
                await asyncio.sleep(self._pause_s)

    async def _start_messenger(self) -> asyncio.subprocess.Process:
        notifiers = [each.model_dump(mode="json") for each in self._plan.notify]
        request = MessengerRequest(run_dir=str(self._run.path), attempt=self._attempt, notify=notifiers)
        line = msgspec.json.encode(request) + b"\n"
        async with self._starting:
            self._messenger = await self._spawn("hpcrl.runs.outlets.notices.messenger", _MESSENGER, line, more=True)
            return self._messenger

    async def _keep(self, sink: SinkConfig) -> None:
        """Start a sink, and start it again where it ends by itself."""
        request = FeedRequest(run_dir=str(self._run.path), attempt=self._attempt, sink=sink.model_dump(mode="json"))
        factor = 1.0
        while True:
            begin_s = time.monotonic()
            try:
                child = await self._spawn(
                    "hpcrl.runs.outlets.feed", sink.name, msgspec.json.encode(request), python=sink.python
                )
                self._living[sink.name] = child
                how = f"it ended with {await child.wait()}"
            except OSError as error:
                how = f"it cannot be started: {error}"
            if self._ending.is_set():
                return
            if time.monotonic() - begin_s > _WORKED_S:
                factor = 1.0  # it had worked
            pause_s, factor = factor * self._pause_s, min(2.0 * factor, _MAX_PAUSE_FACTOR)
            self._board.emit("sink.failed", sink=sink.name, error=how, log=f"sinks/{sink.name}.log", pause_s=pause_s)
            await asyncio.sleep(pause_s)

    async def _end_sink(self, sink: SinkConfig, until: float) -> None:
        child = self._living.get(sink.name)
        if child is None or child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        if not await _ended(child, min(sink.close_timeout_s, until - time.monotonic())):
            self._board.emit("sink.killed", sink=sink.name, close_timeout_s=sink.close_timeout_s)

    async def _spawn(
        self, module: str, name: str, request: bytes, *, python: str | None = None, more: bool = False
    ) -> asyncio.subprocess.Process:
        """Start a process with a request on its standard input; it has nothing of the run's marks and token.

        It has ``env`` and ``secrets`` of the profile. With ``more`` the pipe stays open for what follows.
        """
        environ = {key: value for key, value in os.environ.items() if not key.startswith(_OWN_PREFIX)}
        log = await asyncio.to_thread(self._open_log, name)
        try:
            child = await asyncio.create_subprocess_exec(
                *module_command(python or sys.executable, module),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=with_safe_path({**environ, **self._site_env, **self._secrets}),
                start_new_session=True,
            )
        finally:
            os.close(log)
        assert child.stdin is not None
        with contextlib.suppress(OSError):
            child.stdin.write(request)
            await child.stdin.drain()
        if not more:
            child.stdin.close()
        return child

    def _open_log(self, name: str) -> int:
        path: Path = self._run.sinks_dir / f"{name}.log"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)


def _read_secrets(files: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``secrets``; without those that cannot be read here: who needs one says so in its log."""
    found = {}
    for name, file in files.items():
        try:
            found[name] = read_secret(Path(file))
        except OSError as error:
            _log.warning("the secret %s is not given to sinks and notifiers: %s", name, error)
    return found


def _until(left_s: float | None, requeued: bool) -> float:
    """Return until when (monotonic) the end of an attempt may wait."""
    limit_s = float("inf") if left_s is None else max(left_s - _KEPT_S, 0.0)
    return time.monotonic() + (min(limit_s, _REQUEUED_S) if requeued else limit_s)


async def _ended(child: asyncio.subprocess.Process, limit_s: float) -> bool:
    """Wait for the end of a process, and kill it where that takes too long; return whether it ended by itself."""
    try:
        async with asyncio.timeout(max(limit_s, 0.0)):
            await child.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # its session: what it has started as well
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILLED_S):  # one that hangs in the kernel is left
                await child.wait()
        return False
    return True
