"""`hpcrl profile` of a real run: whole steps of a rank, stacks of other roles, and the run continues."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import HPCRL, ROOT, SLOW_RUN, Lab, SharedRun, last_step, wait_step
from patience import patience, wait_for

from hpcrl.errors import ExitCode
from hpcrl.runs.profile_request import profile_dir, request_path
from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def shared(shared_lab: Lab) -> SharedRun:
    return SharedRun(shared_lab, "checkpoint.every_steps=2", "trainer.ranks=2", *SLOW_RUN)


@pytest.fixture
def run(shared: SharedRun, request: pytest.FixtureRequest) -> Iterator[RunDir]:
    """A run with some steps behind it, which the tests of this file share."""
    yield from shared.taken(request)


def trace_events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events: list[dict[str, Any]] = trace if isinstance(trace, list) else trace["traceEvents"]
    return events


def begin(lab: Lab, run: RunDir, *options: str) -> subprocess.Popen[str]:
    """Start the command, and return when its request is there."""
    command = [HPCRL, "profile", run.name, *options]
    child = subprocess.Popen(command, cwd=ROOT, env=lab.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    attempt = run.attempts()[-1]
    wait_for(lambda: request_path(run, attempt, 1).exists(), 60, "the request")
    return child


def test_a_rank_records_whole_steps(run: RunDir, shared_lab: Lab, tmp_path: Path) -> None:
    attempt, copy = run.attempts()[-1], tmp_path / "trace.json"
    found = shared_lab.hpcrl("profile", run.name, "--rank", "1", "--steps", "2", "--memory", "-o", str(copy))
    assert "rank 1 records 2 steps after the current one" in found.stderr
    assert "no snapshot of memory: the device of the rank is cpu" in found.stderr
    match = re.search(r"^(.*trace\.json\.gz): steps (\d+) to (\d+) of rank 1 on cpu", found.stdout, re.MULTILINE)
    assert match is not None, found.stdout
    first, last = int(match[2]), int(match[3])
    assert last == first + 1
    events = trace_events(copy)
    assert events == trace_events(Path(match[1]))
    ours = {e["name"]: e for e in events if e.get("cat") == "user_annotation" and e["ph"] == "X"}
    assert {name for name in ours if name.startswith("step ")} == {f"step {first}", f"step {last}"}
    assert {"wait_batch", "forward_backward", "optimizer", "publish"} <= ours.keys()
    # operators of both steps
    for step in (first, last):
        span = ours[f"step {step}"]
        inside = [e for e in events if e.get("cat") == "cpu_op" and span["ts"] <= e["ts"] < span["ts"] + span["dur"]]
        assert any(e["name"] == "aten::mm" for e in inside)
    wait_step(run, last + 2)
    assert run.attempts()[-1] == attempt
    assert not request_path(run, attempt, 1).exists()


def test_a_second_request_is_refused_and_an_interrupt_withdraws_the_first(run: RunDir, shared_lab: Lab) -> None:
    attempt, child = run.attempts()[-1], begin(shared_lab, run, "--rank", "1", "--steps", "20")
    try:
        second = shared_lab.hpcrl("profile", run.name, "--rank", "1", check=False)
        assert second.returncode == ExitCode.USAGE
        assert "rank 1 of the trainer is being profiled already, since " in second.stderr
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60 * patience())
        assert child.returncode != 0
    finally:
        child.kill()
        child.communicate()
    assert not request_path(run, attempt, 1).exists()
    reached = last_step(run)
    wait_step(run, reached + 3)
    # what the rank had recorded is gone
    assert not [path for path in profile_dir(run, attempt, "x").parent.iterdir() if not (path / "answer.json").exists()]
    assert run.attempts()[-1] == attempt


def test_no_step_in_time_is_reported(run: RunDir, shared_lab: Lab) -> None:
    attempt = run.attempts()[-1]
    found = shared_lab.hpcrl("profile", run.name, "--rank", "1", "--steps", "20", "--timeout", "1", check=False)
    assert found.returncode == ExitCode.FAILED
    assert "rank 1 has not recorded 20 steps within 1 s; the request is withdrawn" in found.stderr
    assert "--rank 1 --stacks" in found.stderr
    assert not request_path(run, attempt, 1).exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rank", "2"), "has no rank 2 of its trainer\n    hint: it has 2 ranks, 0 to 1"),
        (("--role", "judge"), "has no role 'judge'\n    hint: it has engine, orchestrator, trainer"),
        (("--role", "engine/7"), "has no engine 7"),
        (("--role", "trainer/1"), "has no trainer 1"),
        (("--role", "engine", "--rank", "0"), "only a trainer has ranks"),
        (("--role", "engine", "--steps", "2"), "--steps, --memory and --timeout are for the trainer"),
        (("--steps", "21"), "a profile has 1 to 20 steps"),
    ],
)
def test_what_cannot_be_profiled_is_refused(run: RunDir, shared_lab: Lab, options: tuple[str, ...], words: str) -> None:
    found = shared_lab.hpcrl("profile", run.name, *options, check=False)
    assert found.returncode == ExitCode.USAGE
    assert words in found.stderr


def test_py_spy_records_a_role_without_torch(run: RunDir, shared_lab: Lab, tmp_path: Path) -> None:
    copy = tmp_path / "spied.json.gz"
    found = shared_lab.hpcrl("profile", run.name, "--role", "orchestrator", "--seconds", "2", "-o", str(copy))
    assert "2 s of orchestrator 0 of " in found.stdout
    names = {event.get("name", "") for event in trace_events(copy)}
    assert any("asyncio" in str(event.get("args", {})) for event in trace_events(copy)), sorted(names)[:50]
    stacks = shared_lab.hpcrl("profile", run.name, "--rank", "1", "--stacks")
    assert "hpcrl/trainer/loop.py" in stacks.stdout
    reached = last_step(run)
    wait_step(run, reached + 2)


def test_a_run_that_has_ended_is_refused(run: RunDir, shared_lab: Lab, shared: SharedRun) -> None:
    shared_lab.hpcrl("cancel", run.name, "-y")
    shared_lab.wait_end(run, 60.0)
    found = shared_lab.hpcrl("profile", run.name, check=False)
    assert found.returncode == ExitCode.USAGE
    assert "has ended (CANCELLED): it has no running processes" in found.stderr
    shared.end()
