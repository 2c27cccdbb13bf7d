"""Orders that come early, and guards that do not obey."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.processes import procfs
from hpcrl.processes.environment_marks import RUN_ID_VARIABLE
from hpcrl.runs.clocks import Clocks, NodeClock
from hpcrl.storage.shm_directories import SHARED_MEMORY, make_owned
from hpcrl.supervisor.process import guarded
from hpcrl.supervisor.process.guarded import ProcessSpec, guard_command, start_guarded

_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
#: a guard that starts nothing, reads nothing, says nothing, and lives on when its pipe closes
_HANGING_GUARD = [sys.executable, "-c", _DEAF]


def spec(tmp_path: Path, program: str) -> ProcessSpec:
    return ProcessSpec(
        role="engine",
        replica=0,
        attempt=1,
        command=[sys.executable, "-c", program],
        env={**os.environ, RUN_ID_VARIABLE: "guarded"},
        cwd=str(tmp_path),
        logs=[str(tmp_path / "log")],
        grace_s=5.0,
        events_path=str(tmp_path / "events.jsonl"),
        events_writer="guard",
    )


@pytest.mark.parametrize("order", ["stop", "kill"])
async def test_a_role_whose_end_is_ordered_first_does_not_start(order: str, tmp_path: Path) -> None:
    # both lines are in the pipe before the guard reads the first: an interpreter takes longer to start than this
    process = await start_guarded(guard_command(sys.executable), spec(tmp_path, _DEAF), env=os.environ)
    if order == "stop":
        process.stop(5.0)
    else:
        process.kill()
    assert await asyncio.wait_for(process.gone(), 60.0) == []
    end = await process.ended()
    assert end.signal == signal.SIGTERM
    assert not end.guard_lost
    assert await process.started() is None
    assert not (tmp_path / "log").exists()


async def test_a_step_that_never_was_is_not_a_command_that_could_not_start(tmp_path: Path) -> None:
    """``srun`` that ends before a guard has spoken; under nobody's Slurm the same is a guard that was lost."""
    for in_step in (True, False):
        asked = msgspec.structs.replace(spec(tmp_path, "pass"), in_step=in_step)
        process = await start_guarded(["sh", "-c", "exit 3"], asked, env=os.environ)
        end = await asyncio.wait_for(process.ended(), 60.0)
        assert await process.started() is None
        assert (end.no_step, end.guard_lost) == (in_step, not in_step)
        assert ("srun ended with 3 before all of its tasks ran" in end.spawn_error) == in_step


async def test_guards_that_do_not_obey_are_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guarded, "_ANSWER_S", 0.3)
    process = await start_guarded(_HANGING_GUARD, spec(tmp_path, "pass"), env=os.environ)
    assert procfs.read_process(process.guard_pid) is not None
    process.stop(0.1)
    assert await asyncio.wait_for(process.gone(), 60.0) == []
    assert (await process.ended()).guard_lost
    assert await process.started() is None
    assert [record.message.split(" ", 2)[1] for record in caplog.records] == ["0:", "0:"]
    assert "sending the kill order" in caplog.text
    assert "their connections are closed" in caplog.text


async def test_a_guard_that_obeys_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = await start_guarded(guard_command(sys.executable), spec(tmp_path, _DEAF), env=os.environ)
    await process.started()
    process.stop(0.2)
    assert await process.gone() == []
    assert (await process.ended()).signal is not None
    assert not caplog.records


async def test_the_time_of_an_end_is_by_our_clock_and_the_node_is_named(tmp_path: Path) -> None:
    """The guard's own clock is that of its node, which here counts as 3.1 s behind."""
    clocks = Clocks({"n7": NodeClock(-3.1, 0.01)})
    before_s = time.time()
    process = await start_guarded(
        guard_command(sys.executable),
        spec(tmp_path, "raise SystemExit(3)"),
        env={**os.environ, "SLURMD_NODENAME": "n7"},
        clocks=clocks,
    )
    end = await process.ended()
    await process.gone()
    assert (end.exit_code, end.node) == (3, "n7")
    assert before_s + 3.1 <= end.time_s <= time.time() + 3.1


async def test_variables_that_differ_by_node_are_filled_there(tmp_path: Path) -> None:
    program = "import os; print([os.environ.get(name) for name in ('A', 'B', 'C', 'D')])"
    base = spec(tmp_path, program)
    own = {"A": "{node_host}", "B": "{node_interface}", "C": "at {node_host}"}
    for interfaces, shown in ((["net0"], "net0"), ([], None)):
        given = msgspec.structs.replace(
            base, env={**base.env, **own}, hosts=["127.9.9.9"], interfaces=interfaces, logs=[str(tmp_path / str(shown))]
        )
        process = await start_guarded(guard_command(sys.executable), given, env=os.environ)
        await process.gone()
        # only whole values are ours: braces elsewhere may be anybody's
        assert (tmp_path / str(shown)).read_text().strip() == str(["127.9.9.9", shown, "at {node_host}", None])


async def test_what_dead_processes_left_in_shared_memory_goes_with_their_role(tmp_path: Path) -> None:
    """The role's own, which the guard notes after two seconds, and that of a run that is gone; none of the living."""
    kill = (
        "import os; from hpcrl.storage.shm_directories import *; print(make_owned(SHARED_MEMORY)[0], flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    other = subprocess.run([sys.executable, "-c", kill], capture_output=True, text=True, check=False).stdout.strip()
    living, lock = make_owned(SHARED_MEMORY)
    try:
        program = kill.replace("; os.kill", "; import time; time.sleep(4.0); os.kill")
        process = await start_guarded(guard_command(sys.executable), spec(tmp_path, program), env=os.environ)
        assert (await process.ended()).signal == signal.SIGKILL
        await process.gone()
        own = Path((tmp_path / "log").read_text().strip())
        assert own.parent == SHARED_MEMORY
        assert not own.exists()
        assert not Path(other).exists()
        assert (living / "alive").exists()
    finally:
        shutil.rmtree(living)
        os.close(lock)


@pytest.mark.parametrize("mode", [0o600, 0o644])
async def test_the_guard_reads_secrets_from_closed_files_alone(mode: int, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    secret.chmod(mode)
    program = "import os, sys; sys.exit(0 if os.environ['API_KEY'] == 's3cret' else 7)"
    told = msgspec.structs.replace(spec(tmp_path, program), secrets={"API_KEY": str(secret)})
    process = await start_guarded(guard_command(sys.executable), told, env=os.environ)
    end = await process.ended()
    assert await process.gone() == []
    if mode == 0o600:
        assert end.clean
        # what was left behind anywhere
        others = [path for path in tmp_path.iterdir() if path != secret]
        assert not [path for path in others if b"s3cret" in path.read_bytes()]
    else:
        assert end.spawn_error == f"others may read or write {secret} (mode 644, not 600)"
