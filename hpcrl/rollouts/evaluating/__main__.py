"""``python -m hpcrl.rollouts.evaluating``: the orchestrator of a run that only evaluates."""

from __future__ import annotations

import logging

from hpcrl.network.connection_limits import raise_descriptor_limit
from hpcrl.processes.daemon_threads import run_process
from hpcrl.processes.signals import stopped_by_signal
from hpcrl.reporting.log_thread import log_in_thread
from hpcrl.rollouts.evaluating.evaluation_run import EvaluationRun
from hpcrl.rollouts.process import first_error, prefer_event_loop
from hpcrl.runs.role import RoleContext, run_role

_log = logging.getLogger(__name__)


def main(context: RoleContext) -> None:
    """Evaluate, and end; raises the first error of any part."""
    log_in_thread()
    prefer_event_loop()
    run_process(_main(context))


async def _main(context: RoleContext) -> None:
    raise_descriptor_limit()
    try:
        stopped = await stopped_by_signal(lambda: EvaluationRun(context).run())
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    if stopped:
        _log.info("stopped by a signal")
        raise SystemExit(1)  # a clean exit would count as the end of the run


if __name__ == "__main__":
    run_role(main)
