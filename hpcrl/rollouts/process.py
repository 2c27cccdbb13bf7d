"""The orchestrator as a process: its signals, its limits, its first error."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from hpcrl.daemon_threads import run_process
from hpcrl.log_thread import log_in_thread
from hpcrl.pending_connections import raise_descriptor_limit
from hpcrl.rollouts.orchestrator import Orchestrator
from hpcrl.runs.role import RoleContext
from hpcrl.signals import handle_signals

__all__ = ["first_error", "main", "prefer_event_loop"]

_log = logging.getLogger(__name__)
_SWITCH_S = 5e-4


def main(context: RoleContext) -> None:
    """Run until SIGTERM; raises the first error of any part."""
    log_in_thread()
    prefer_event_loop()
    run_process(_main(context))


def prefer_event_loop() -> None:
    """Let the event loop wait for a thread that computes for half a millisecond, not for the interpreter's five."""
    sys.setswitchinterval(_SWITCH_S)


async def _main(context: RoleContext) -> None:
    raise_descriptor_limit()
    orchestrator = Orchestrator(context)
    work = asyncio.current_task()
    assert work is not None

    def stop() -> None:
        orchestrator.stopping = True
        work.cancel()

    handle_signals({signal.SIGTERM: stop, signal.SIGINT: stop})
    try:
        await orchestrator.run()
    except asyncio.CancelledError:
        if not orchestrator.stopping:
            raise
        _log.info("stopped by a signal")
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def first_error(error: BaseException) -> BaseException:
    """The error that a tree of task groups failed with."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
