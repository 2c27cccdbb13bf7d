"""Batch process of a small job that runs one program as a role would: on its node, in its environment.

The program is started below a guard in a step of its own, as a supervisor starts a replica: with the variables, the
files of secrets, the scratch directory and the container of the role.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.plan import Plan
from hpcrl.errors import HpcrlError
from hpcrl.processes.daemon_threads import run_process
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import write_json
from hpcrl.storage.msgspec_types import prepared
from hpcrl.supervisor.launch.commands import role_environment
from hpcrl.supervisor.launch.replica_launcher import Launcher
from hpcrl.supervisor.launch.step_launcher import StepLauncher
from hpcrl.supervisor.process.guarded import End, ProcessSpec

_PROGRAM = "program.json"
_GRACE_S = 10.0


class RoleProgram(msgspec.Struct, frozen=True, kw_only=True):
    """Request to the batch process.

    Attributes
    ----------
    cluster, plan:
        Profile and plan as JSON. The plan has one group of one replica on one node, in the layout ``single``.
    command:
        Command of the program. Its output goes to the job's log.
    timeout_s:
        Maximum time of the program in seconds; it is ended then.
    doing:
        Description of the program for messages: ``try the environments``.
    """

    cluster: str
    plan: str
    command: list[str]
    timeout_s: float
    doing: str

    def write(self, directory: Path) -> None:
        """Write the request into the directory of the job."""
        write_json(directory / _PROGRAM, self)

    @classmethod
    def read(cls, directory: Path) -> RoleProgram:
        """Return the request in the directory of the job."""
        return msgspec.json.decode((directory / _PROGRAM).read_bytes(), type=prepared(cls))


def run_role_program(directory: Path, *, launcher: Launcher | None = None) -> int:
    """Run the program of a job and return the exit code of the batch process; the log has the reason of a failure.

    Parameters
    ----------
    directory:
        Directory of the job, which is the program's working directory as well.
    launcher:
        Starts the program; by default in a step of the job that this process is in.
    """
    program = RoleProgram.read(directory)
    try:
        launcher = launcher or StepLauncher(SlurmCluster.model_validate_json(program.cluster))
        end = run_process(_run(directory, program, launcher))
    except HpcrlError as error:
        print(f"the program did not start: {error}", file=sys.stderr)
        return 1
    if end is None:
        print(f"it took longer than {program.timeout_s:g} s to {program.doing}, and was ended", file=sys.stderr)
        return 1
    if end.clean:
        return 0
    print(f"it failed to {program.doing}: {_description(end)}", file=sys.stderr)
    return 1


async def _run(directory: Path, program: RoleProgram, launcher: Launcher) -> End | None:
    """Return the end of the program; None where its time was over."""
    plan = Plan.model_validate_json(program.plan)
    (group,) = plan.groups
    placed = await asyncio.to_thread(launcher.place, plan)
    address = placed[group.role, 0]
    spec = ProcessSpec(
        role=group.role.value,
        replica=0,
        attempt=1,
        command=program.command,
        env=role_environment(
            group,
            0,
            run=RunDir(directory),
            run_id=directory.name,
            attempt=1,
            # in a step it inherits the environment of its node instead
            inherited={} if launcher.in_step else os.environ,
        ),
        cwd=str(directory),
        logs=[str(directory / "log")],
        grace_s=_GRACE_S,
        events_path=str(directory / "step-events.jsonl"),
        events_writer="guard",
        in_step=launcher.in_step,
        hosts=address.hosts,
        interfaces=address.interfaces,
        scratch=plan.scratch or "",
        secrets=group.secrets,
    )
    process = await launcher.start(spec)
    end: End | None = None
    try:
        async with asyncio.timeout(program.timeout_s):
            end = await process.ended()
    except TimeoutError:
        process.stop(_GRACE_S)
    await process.gone()
    return end


def _description(end: End) -> str:
    """Return how a program ended, in words."""
    if reason := end.spawn_error or end.problem:
        return reason
    if end.signal is not None:
        return f"signal {end.signal} ended it"
    if end.exit_code is not None:
        return f"it ended with exit code {end.exit_code}"
    return "its guard ended before it"


if __name__ == "__main__":
    sys.exit(run_role_program(Path(sys.argv[1])))
