"""A shell beside a role: it takes the environment of the role's own process, and refuses where there is none."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from patience import wait_for
from runs_testing import make_run, write_status

from hpcrl.cli.main import main
from hpcrl.config.joined import load_both
from hpcrl.errors import ExitCode
from hpcrl.jobplan import make_plan
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.status import ComponentState, ComponentStatus, ProcessId, ReplicaJob, RunState, RunStatus
from hpcrl.submit.submission import create_run
from hpcrl.supervisor.launch.role_shell import find_role


class Role(NamedTuple):
    """An engine that runs, in a directory of its own."""

    run_id: str
    cwd: Path


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Role]:
    run_id = uuid.uuid4().hex
    env = {"PATH": os.environ["PATH"], "HPCRL_RUN_ID": run_id, "HPCRL_PROCESS": "role", "HPCRL_ROLE": "engine"}
    env |= {"HPCRL_REPLICA": "1", "MODULES": "cuda nccl"}
    process = subprocess.Popen(["sleep", "600"], env=env, cwd=tmp_path)
    try:
        wait_for(lambda: find_role(run_id, "engine", 1), 10.0, "the role")
        yield Role(run_id, tmp_path)
    finally:
        process.kill()
        process.wait()


def beside(role: Role, replica: int, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hpcrl.supervisor.launch.role_shell", role.run_id, "engine", str(replica), *command]
    own = {**os.environ, "OTHER": "mine", "TERM": "vt100", **env}
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=own)


def test_a_command_has_the_environment_and_the_directory_of_the_role(engine: Role) -> None:
    found = beside(engine, 1, "sh", "-c", "env; pwd; exit 5")
    assert found.returncode == 5, found.stderr
    lines = found.stdout.splitlines()
    assert {"MODULES=cuda nccl", "HPCRL_ROLE=engine", "HPCRL_REPLICA=1", "TERM=vt100"} <= set(lines)
    assert lines[-1] == str(engine.cwd)
    # nothing of the caller's, and no mark by which a resume would end it
    assert "OTHER=mine" not in lines
    assert not [line for line in lines if line.startswith(("HPCRL_RUN_ID=", "HPCRL_PROCESS="))]


def test_a_role_that_is_not_there_is_reported(engine: Role) -> None:
    found = beside(engine, 0, "true")
    assert found.returncode == ExitCode.USAGE
    assert "no process of engine 0 runs on " in found.stderr
    # a process of another node of a virtual cluster is none of this node
    assert beside(engine, 1, "true", SLURMD_NODENAME="dev-007").returncode == ExitCode.USAGE


def test_a_program_that_is_not_there_is_reported(engine: Role) -> None:
    found = beside(engine, 1, "no-such-program")
    assert found.returncode == 127
    assert found.stderr == "hpcrl: no-such-program: No such file or directory\n"


Shell = Callable[..., tuple[int, str]]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """The command; its exit code and what it says."""

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["hpcrl", "shell", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("role", "what", "hint"),
    [
        ("engin", "has no role 'engin'", "it has engine, trainer"),
        ("engine/7", "has no engine 7", "its replicas are 0"),
        ("engine/x", "engine/x: write a role", "engine/0"),
        ("engine", "no terminal for a shell here", "-- env"),
    ],
)
def test_what_cannot_be_entered_is_reported(
    role: str,
    what: str,
    hint: str,
    tmp_path: Path,
    shell: Shell,
) -> None:
    run = make_run(tmp_path)
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_status(run, RunState.RUNNING, supervisor=me)
    code, err = shell(str(run.path), "--role", role)
    assert code == ExitCode.USAGE
    assert what in err
    assert hint in err


@pytest.mark.parametrize(
    ("state", "of_role", "what"),
    [
        (RunState.FAILED, ComponentState.EXITED, "has ended (FAILED): it has no running processes"),
        (RunState.RUNNING, ComponentState.RESTARTING, "does not run now (RESTARTING)"),
    ],
)
def test_what_does_not_run_is_not_entered(
    state: RunState,
    of_role: ComponentState,
    what: str,
    tmp_path: Path,
    shell: Shell,
) -> None:
    run = make_run(tmp_path)
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_status(run, state, supervisor=me, component_state=of_role)
    code, err = shell(str(run.path), "--role", "engine", "--", "true")
    assert code == ExitCode.USAGE
    assert what in err
    assert f"hpcrl {'logs' if state.ended else 'status'} " in err


@pytest.mark.parametrize(
    ("role", "place"), [("engine/0", (71, "n004")), ("engine/1", (72, "n006")), ("trainer", (7, "n001"))]
)
def test_in_an_elastic_run_a_role_is_entered_in_the_job_that_has_its_nodes(
    role: str, place: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    """Engines have jobs of their own; of the others Slurm is asked which nodes the first job has."""
    recipe, site = load_both("quickstart", "devcluster", ["job.layout=elastic", "engine.replicas=2"], environ={})
    run = create_run(recipe.value, site.value, make_plan(recipe.value, site.value, "mine", tmp_path / "runs/mine")).run
    record = RunRecord.read(run)
    submission = Submission(submitted_at_s=time.time(), executor="slurm", job_id="7", folder="/f", after_attempt=0)
    record.with_submission(submission).write(run)
    me = ProcessId.of(os.getpid())
    assert me is not None
    roles = [("engine", 0, 71, ["n004", "n005"]), ("engine", 1, 72, ["n006"]), ("trainer", 0, None, ["n001", "n002"])]
    components = [
        ComponentStatus(
            role=name,
            replica=replica,
            state=ComponentState.READY,
            pid=100 + replica,
            guard_pid=200 + replica,
            host=nodes[0],
            port=20000,
            started_at_s=time.time(),
            ready_at_s=time.time(),
            log="",
            nodes=nodes,
            job=None if own is None else ReplicaJob(job_id=own, state="RUNNING"),
        )
        for name, replica, own, nodes in roles
    ]
    RunStatus(
        run_id=record.run_id,
        attempt=run.start_attempt(),
        state=RunState.RUNNING,
        supervisor=me,
        started_at_s=time.time(),
        heartbeat_s=time.time(),
        components=components,
    ).write(run)
    job = "JobId=7 NodeList=n00[1-2]"
    answers = {
        "scontrol": f'[ "$*" = ping ] && echo "Slurmctld(primary) at n000 is UP" || echo "{job}"',
        "srun": f'echo "$@" > {tmp_path}/entered',
        "squeue": "exit 1",
        "sacct": "exit 1",
    }
    for program, does in answers.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "execvpe", execute)
    assert shell(str(run.path), "--role", role, "--", "nvidia-smi")[0] == 0
    words = (tmp_path / "entered").read_text().split()
    assert {f"--jobid={place[0]}", f"--nodelist={place[1]}", "--overlap"} <= set(words)
    name, _, replica = role.partition("/")
    assert words[-4:] == [record.run_id, name, replica or "0", "nvidia-smi"]


def execute(program: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """In place of the process of the tests, a child of it."""
    raise SystemExit(subprocess.run([program, *argv[1:]], env=dict(env), check=False).returncode)


def test_on_a_terminal_it_is_a_shell(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    # its own: roles are looked for on the whole machine, where the same test may run for another checkout
    msgspec.structs.replace(RunRecord.read(run), run_id=uuid.uuid4().hex).write(run)
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_status(run, RunState.RUNNING, supervisor=me)
    env = {**os.environ, "SHELL": "/bin/sh", "HPCRL_RUN_ID": RunRecord.read(run).run_id, "HPCRL_PROCESS": "role"}
    role = subprocess.Popen(["sleep", "600"], env={**env, "HPCRL_ROLE": "engine", "HPCRL_REPLICA": "0"})
    main_end, terminal = pty.openpty()
    try:
        command = [sys.executable, "-c", "from hpcrl.cli.main import main; main()", "shell", str(run.path)]
        shell = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
        os.write(main_end, b"echo I am $HPCRL_ROLE; exit 3\n")
        os.close(terminal)
        seen = _read_all(main_end)
        assert shell.wait(120) == 3, seen
    finally:
        role.kill()
        role.wait()
    assert "engine 0 of run-1, on this machine; `exit` leaves the shell and does not stop the run" in seen
    assert "I am engine" in seen


def _read_all(descriptor: int) -> str:
    """What a terminal shows until nobody has it open any more."""
    text, end_s = b"", time.monotonic() + 300
    while time.monotonic() < end_s:
        try:
            text += os.read(descriptor, 4096)
        except OSError:
            break
    return text.decode()
