"""Result of each rollout of the tiny run, also from a login node, whose environment cannot read tokens."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec

from hpcrl.bringup.stage import StageStoppedError, quoted
from hpcrl.config.plan import Role
from hpcrl.processes.interpreter import module_command
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.msgspec_types import prepared

_PROOF_S = 300.0
_LAST_LINES = 8


class RolloutProof(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``hpcrl rollouts verify --json``, as far as the first run needs it.

    Attributes
    ----------
    finished, trained, waiting:
        Numbers of rollouts.
    notes:
        Missing records, which prove nothing.
    problems:
        Contradictions to the claim that each finished rollout was trained once, was dropped for a reason, or waits.
    """

    finished: int
    trained: int
    waiting: int
    notes: list[str] = []
    problems: list[str] = []


def prove_rollouts(run: RunDir) -> RolloutProof:
    """Verify the rollouts of a run as ``hpcrl rollouts verify`` does.

    An environment of login nodes has no arrays: there the interpreter of the orchestrator does it.

    Raises
    ------
    StageStoppedError
        No interpreter here can do it.
    """
    if importlib.util.find_spec("numpy") is not None:
        from hpcrl.runs.views.rollouts import verify_rollouts  # noqa: PLC0415 - imports numpy

        return msgspec.convert(msgspec.to_builtins(verify_rollouts(run)), RolloutProof)
    plan = run.plan()
    python = next((group.python for group in plan.groups if group.role is Role.ORCHESTRATOR), None) or plan.python
    by_hand = f"hpcrl rollouts verify {quoted(run.path)}    # in an environment of the orchestrator"
    if python is None or plan.container is not None or not Path(python).is_file():
        raise StageStoppedError(
            f"{run.name} completed. Its rollouts cannot be verified here: {sys.executable} has no numpy, and the "
            "interpreter of the orchestrator is not on this machine\n    hint: verify them where it is",
            commands=[by_hand],
        )
    command = module_command(python, "hpcrl", "rollouts", "verify", str(run.path), "--json")
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=_PROOF_S)
        return msgspec.json.decode(done.stdout, type=prepared(RolloutProof))
    except subprocess.TimeoutExpired:
        words = f"it did not end within {_PROOF_S:g} s"
    except (ValueError, msgspec.DecodeError, msgspec.ValidationError):
        words = "\n    ".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
    raise StageStoppedError(
        f"{run.name} completed. {python} could not verify its rollouts:\n    {words}", commands=[by_hand]
    )
