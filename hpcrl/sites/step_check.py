"""Check that the beginning and the end of a role are observed: one guard in a real step, in the small job of a
check."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hpcrl.processes.environment_marks import RUN_ID_VARIABLE
from hpcrl.storage.msgspec_types import prepared
from hpcrl.supervisor.process.guarded import ProcessSpec, guard_command, start_guarded

_VARIABLE = "CHECK_STEP"
_STEP_S = 60.0
_GRACE_S = 2.0
STEP = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--mpi=none", "--export=ALL")


class StepReport(msgspec.Struct, frozen=True):
    """Result of the guard of a small role.

    Attributes
    ----------
    problem:
        Reason why its beginning or its end was not observed; empty where both were.
    printed:
        The first lines that programs other than the guard printed into its step.
    """

    problem: str = ""
    printed: list[str] = []

    def to_env(self) -> dict[str, str]:
        """Give the variables by which the step that follows learns of it."""
        return {_VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_env(cls) -> StepReport:
        """Return the report that the batch process has found."""
        return msgspec.json.decode(os.environ[_VARIABLE], type=prepared(cls))


async def check_step(
    directory: Path, env: Mapping[str, str], *, step: Sequence[str] = STEP, timeout_s: float = _STEP_S
) -> StepReport:
    """Start a role that does nothing, as a supervisor would, and see it begin and end.

    Parameters
    ----------
    directory:
        Takes its log; all nodes see it.
    env:
        Environment of the step.
    step:
        The beginning of its command line.
    """
    spec = ProcessSpec(
        role="check",
        replica=0,
        attempt=1,
        command=["true"],
        env={RUN_ID_VARIABLE: directory.name},
        cwd=str(directory),
        logs=[str(directory / "step.log")],
        grace_s=_GRACE_S,
        events_path=str(directory / "step-events.jsonl"),
        events_writer="guard",
        in_step=True,
    )
    process = await start_guarded([*step, *guard_command(sys.executable)], spec, env=env)
    problem = ""
    try:
        async with asyncio.timeout(timeout_s):
            end = await process.ended()
        if not end.clean:
            problem = end.spawn_error or end.problem or "the step ended and its guard did not say how"
    except TimeoutError:
        problem = f"neither its beginning nor its end was seen within {timeout_s:g} s"
        process.cut_off()
    await process.gone()
    return StepReport(problem, process.foreign)
