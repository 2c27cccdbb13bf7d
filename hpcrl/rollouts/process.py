"""Process of the orchestrator: its signals, its limits, its first error."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from hpcrl.network.connection_limits import raise_descriptor_limit
from hpcrl.processes.daemon_threads import run_process
from hpcrl.processes.signals import handle_signals
from hpcrl.reporting.log_thread import log_in_thread
from hpcrl.rollouts.orchestrator import Orchestrator
from hpcrl.runs.role import RoleContext

_log = logging.getLogger(__name__)
_SWITCH_S = 5e-4


def main(context: RoleContext) -> None:
    """Run until SIGTERM; raises the first error of any part."""
    log_in_thread()
    prefer_event_loop()
    run_process(_main(context))


def prefer_event_loop() -> None:
    """Set the thread switch interval: the event loop then waits 0.5 ms for a computing thread, not 5 ms."""
    sys.setswitchinterval(_SWITCH_S)


async def _main(context: RoleContext) -> None:
    raise_descriptor_limit()
    orchestrator = Orchestrator(context)
    work = asyncio.current_task()
    assert work is not None

    signalled = False

    def stop() -> None:
        nonlocal signalled
        orchestrator.stopping = signalled = True
        work.cancel()

    handle_signals({signal.SIGTERM: stop, signal.SIGINT: stop})
    try:
        await orchestrator.run()
    except asyncio.CancelledError:
        if not signalled:
            raise
        _log.info("stopped by a signal")
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def first_error(error: BaseException) -> BaseException:
    """Return the first leaf error of a tree of exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
