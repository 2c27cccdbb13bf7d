"""``python -m hpcrl.rollouts.evaluating``: the orchestrator of a run that only evaluates."""

from __future__ import annotations

import asyncio
import logging
import signal

from hpcrl.daemon_threads import run_process
from hpcrl.log_thread import log_in_thread
from hpcrl.pending_connections import raise_descriptor_limit
from hpcrl.rollouts.evaluating.evaluation_run import EvaluationRun
from hpcrl.rollouts.process import first_error, prefer_event_loop
from hpcrl.runs.role import RoleContext, run_role
from hpcrl.signals import handle_signals

_log = logging.getLogger(__name__)


def main(context: RoleContext) -> None:
    """Evaluate, and end; raises the first error of any part."""
    log_in_thread()
    prefer_event_loop()
    run_process(_main(context))


async def _main(context: RoleContext) -> None:
    raise_descriptor_limit()
    work = asyncio.current_task()
    assert work is not None
    stopping = False

    def stop() -> None:
        nonlocal stopping
        stopping = True
        work.cancel()

    handle_signals({signal.SIGTERM: stop, signal.SIGINT: stop})
    try:
        await EvaluationRun(context).run()
    except asyncio.CancelledError:
        if not stopping:
            raise
        _log.info("stopped by a signal")
        raise SystemExit(1) from None  # a clean end would be that of the run
    except BaseExceptionGroup as group:
        raise first_error(group) from None


if __name__ == "__main__":
    run_role(main)
