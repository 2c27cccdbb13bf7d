"""``python -m hpcrl.rollouts.environments.workers``: a worker of the role ``env``."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from hpcrl.errors import EnvironmentFailedError
from hpcrl.network.connection_limits import raise_descriptor_limit
from hpcrl.processes.daemon_threads import run_process
from hpcrl.processes.environment_marks import SANDBOX_MEMORY_VARIABLE
from hpcrl.processes.signals import stopped_by_signal
from hpcrl.reporting.log_thread import log_in_thread
from hpcrl.rollouts.environments.workers.hosted_kinds import hosted_config
from hpcrl.rollouts.environments.workers.hosting import EnvironmentHost
from hpcrl.rollouts.environments.workers.worker_app import serve_worker
from hpcrl.runs.refusals import gate_of
from hpcrl.runs.role import RoleContext, run_role

_log = logging.getLogger(__name__)
_BEAT_S = 2.0
_MAX_FAILURES = 3
"""Number of failed starts of one environment in a row, which end the worker."""


def main(context: RoleContext) -> None:
    """Host the environments of the run until SIGTERM.

    Raises
    ------
    EnvironmentFailedError
        One of them cannot be made, or gives no prompt: at the start, or some times in a row later.
    """
    log_in_thread()
    run_process(_main(context))


async def _main(context: RoleContext) -> None:
    raise_descriptor_limit()
    if await stopped_by_signal(lambda: _serve(context)):
        _log.info("stopped by a signal")


def own_sandbox_memory(environ: Mapping[str, str], replica: int) -> dict[str, str]:
    """Return the variable with the limit of all sandboxes of a worker that does not share its memory with others."""
    shared = environ.get(SANDBOX_MEMORY_VARIABLE)
    return {} if shared is None else {SANDBOX_MEMORY_VARIABLE: f"{shared}-{replica}"}


async def _serve(context: RoleContext) -> None:
    recipe = await asyncio.to_thread(context.run.recipe)
    if recipe.environment_workers is not None and recipe.environment_workers.memory_gib is not None:
        os.environ.update(own_sandbox_memory(os.environ, context.replica))
    endpoints = await asyncio.to_thread(context.endpoints)
    address = urlsplit(endpoints.urls[context.role][context.replica])
    hosts = {config.name: EnvironmentHost(hosted_config(config)) for config in recipe.environments}
    reporter = context.progress()
    gate = gate_of(context, context.role)
    async with serve_worker(hosts, gate, host=str(address.hostname), port=int(address.port or 0)):
        made = await asyncio.gather(*(host.prepare() for host in hosts.values()), return_exceptions=True)
        errors = [each for each in made if isinstance(each, BaseException)]
        if errors and all(isinstance(each, EnvironmentFailedError) for each in errors):
            raise EnvironmentFailedError("\n".join(str(each) for each in errors))
        if errors:
            raise errors[0]
        while True:
            for each in hosts.values():
                if len(each.failures) >= _MAX_FAILURES:
                    # another worker may have what this one lacks, and the supervisor counts how often it ends
                    raise EnvironmentFailedError(each.failures[-1])
                # without one the worker is not there for the orchestrator, which then asks for none
                each.renew()
            reporter.beat("running", messages=sum(host.messages for host in hosts.values()))
            await asyncio.sleep(_BEAT_S)


if __name__ == "__main__":
    run_role(main)
