"""Give the sinks of a run that has ended what they lack, by the same process as in an attempt."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from hpcrl.config.outlets import SinkConfig
from hpcrl.errors import UsageError
from hpcrl.processes.interpreter import module_command
from hpcrl.runs.metrics import read_newest
from hpcrl.runs.observe import observe
from hpcrl.runs.outlets.feed import FeedRequest
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sink_position import read_position
from hpcrl.runs.status import RunState


class SentRest(NamedTuple):
    """Result of one sink.

    Attributes
    ----------
    last_step, steps:
        The last step that the sink has, and that of the run.
    error:
        Why it does not have all; empty where it has.
    """

    sink: str
    last_step: int
    steps: int
    error: str


def send_what_lacks(run: RunDir, environ: Mapping[str, str], *, only: Collection[str] = ()) -> list[SentRest]:
    """Start each sink of a run, one after the other, and wait until it has what it lacks.

    Parameters
    ----------
    environ:
        Variables of its process.
    only:
        Names of sinks; empty: all.

    Raises
    ------
    UsageError
        The run has not ended, or has no such sinks.
    """
    plan, view = run.plan(), observe(run)
    if not view.state.ended:
        raise UsageError(
            f"{run.name} has not ended ({view.state}): its sinks are fed by its supervisor\n"
            "    hint: hpcrl status says which of them lack steps"
        )
    names = [sink.name for sink in plan.sinks]
    if unknown := sorted(set(only) - set(names)):
        raise UsageError(f"{run.name} has no sink {unknown[0]}\n    hint: there are {', '.join(names) or 'none'}")
    if not names:
        raise UsageError(f"{run.name} has no sinks\n    hint: docs/observing.md says how to have some")
    run.sinks_dir.mkdir(exist_ok=True)
    newest = read_newest(run)
    steps, attempt = 0 if newest is None else newest.step, (run.attempts() or [0])[-1]
    found = []
    for sink in plan.sinks:
        if not only or sink.name in only:
            error = _send(run, sink, attempt, view.state, environ)
            given = read_position(run, sink.name)
            found.append(SentRest(sink.name, 0 if given is None else given.last_step, steps, error))
    return found


def _send(run: RunDir, sink: SinkConfig, attempt: int, end: RunState, environ: Mapping[str, str]) -> str:
    """Run the process of a sink once; return what went wrong."""
    request = FeedRequest(run_dir=str(run.path), attempt=attempt, sink=sink.model_dump(mode="json"), end=end)
    log = run.sinks_dir / f"{sink.name}.log"
    try:
        with log.open("ab") as stream:
            done = subprocess.run(
                module_command(sink.python or sys.executable, "hpcrl.runs.outlets.feed"),
                input=msgspec.json.encode(request),
                stdout=stream,
                stderr=stream,
                env=dict(environ),
                check=False,
            )
    except OSError as error:
        return f"it cannot be started: {error}"
    return "" if done.returncode == 0 else f"it ended with {done.returncode}, and {log} has the reason"
