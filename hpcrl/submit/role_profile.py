"""Profile of a role that runs: steps of a trainer's rank by torch's profiler, or stacks of any role by py-spy.

A rank records its own steps when it is asked to (`hpcrl.runs.profile_request`). py-spy runs on the role's node, as a
shell there would (`hpcrl.submit.shell`), in `hpcrl.supervisor.launch.role_spy`.
"""

from __future__ import annotations

import contextlib
import getpass
import gzip
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpcrl.config.plan import Role, RoleGroup
from hpcrl.errors import DeadlineError, HpcrlError, UsageError
from hpcrl.processes import procfs
from hpcrl.processes.interpreter import module_command
from hpcrl.runs.metrics import read_newest
from hpcrl.runs.observe import observe
from hpcrl.runs.profile_request import ProfileAnswer, ProfileRequest, profile_dir, request_path
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir
from hpcrl.storage import lost_replies
from hpcrl.submit.shell import parse_replica, running_replica, shell_in

TRAINER = Role.TRAINER.value
MOST_STEPS = 20
MOST_SECONDS = 300
_POLL_S = 0.2
_LOOK_S = 10.0
"""Seconds between two looks at the state of the run, for which Slurm may be asked."""
_LEAST_WAIT_S = 120.0
_SLACK_S = 60.0
"""Seconds that py-spy may take beyond those it records."""
_SPY = "hpcrl.supervisor.launch.role_spy"


class RoleProfile(NamedTuple):
    """A profile in the run directory.

    Attributes
    ----------
    files:
        Its files; the first is the one that was asked for.
    words:
        What it has, in one line.
    notes:
        What is missing, a sentence each.
    """

    files: list[Path]
    words: str
    notes: list[str]


class StepProfileOptions(NamedTuple):
    """Options of `profile_steps`.

    Attributes
    ----------
    rank, steps:
        The rank, and the number of whole steps.
    memory:
        Record allocations, and on CUDA a snapshot of the allocator.
    most_bytes:
        Maximum size of the uncompressed trace.
    timeout_s:
        Maximum wait in seconds; None: what four times as many steps take as are needed, and at least two minutes.
    """

    rank: int = 0
    steps: int = 2
    memory: bool = False
    most_bytes: int = 1_000_000_000
    timeout_s: float | None = None


def profile_steps(
    run: RunDir,
    options: StepProfileOptions,
    *,
    role: str = TRAINER,
    on_wait: Callable[[str], None] = lambda words: None,
) -> RoleProfile:
    """Let a rank of the trainer record its next steps, and wait for the result. An interrupt withdraws the request.

    Parameters
    ----------
    role:
        ``trainer``, or ``trainer/0``.
    on_wait:
        Called once with what is waited for.

    Raises
    ------
    UsageError
        There is no such trainer or rank, or it is asked for too much.
    RunDirError
        The run does not train now, or the rank is being profiled already.
    DeadlineError
        No steps ended in time; the request is withdrawn.
    HpcrlError
        The rank could not make the profile, or ended before it had.
    """
    name, replica = parse_replica(run, role)
    view = observe(run)
    running_replica(view, run, name, replica)
    group = run.plan().group(Role.TRAINER)
    _check_rank(run, group, options.rank)
    if not 1 <= options.steps <= MOST_STEPS:
        raise UsageError(f"--steps {options.steps}: a profile has 1 to {MOST_STEPS} steps")
    step_s = _step_seconds(run)
    timeout_s = options.timeout_s
    if timeout_s is None:
        timeout_s = max(_LEAST_WAIT_S, 4.0 * (options.steps + 1) * step_s)
    request = ProfileRequest(
        id=f"rank-{options.rank}-{_stamp()}",
        rank=options.rank,
        steps=options.steps,
        memory=options.memory,
        limit_s=timeout_s,
        most_bytes=options.most_bytes,
        time_s=time.time(),
        wait_s=timeout_s,
        by=f"{getpass.getuser()} on {procfs.hostname()}",
    )
    request.place(run, view.attempt)
    try:
        last = f"; the last one took {step_s:.3g} s" if step_s else ""
        on_wait(f"rank {options.rank} records {options.steps} steps after the current one{last}")
        answer = _wait(run, view.attempt, request, timeout_s)
    finally:
        request.withdraw(run, view.attempt)
    if answer.problem:
        raise HpcrlError(f"rank {options.rank} of {run.name} has made no profile: {answer.problem}")
    directory = profile_dir(run, view.attempt, request.id)
    steps = f"step {answer.first}" if answer.first == answer.last else f"steps {answer.first} to {answer.last}"
    words = f"{steps} of rank {options.rank} on {answer.device}; it was held up for {answer.held_s:.2g} s"
    return RoleProfile([directory / name for name in answer.files], words, answer.notes)


def spy_on_role(run: RunDir, role: str, *, seconds: int, rank: int | None = None) -> RoleProfile:
    """Record the stacks of a role's processes by py-spy for some seconds, or take them once (``seconds=0``).

    Parameters
    ----------
    role:
        ``orchestrator``, or ``engine/1`` for another replica than the first.
    rank:
        Rank of a trainer; all of a replica's processes on its first node without.

    Raises
    ------
    UsageError
        There is no such role, replica or rank, or it is asked for too much.
    RunDirError
        The role does not run now.
    HpcrlError
        py-spy could not record it: its words are on standard error.
    """
    if not 0 <= seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds {seconds}: at most {MOST_SECONDS}")
    name, replica = parse_replica(run, role)
    view = observe(run)
    component = running_replica(view, run, name, replica)
    plan = run.plan()
    group = plan.group(Role(name))
    node = None
    if rank is not None:
        if name != TRAINER:
            raise UsageError(f"--rank {rank}: only a trainer has ranks; {name} is taken with all of its processes")
        _check_rank(run, group, rank)
        node = component.nodes[rank // group.ranks_per_node] if component.nodes else None
    directory = profile_dir(run, view.attempt, f"{name}-{replica}-{_stamp()}")
    output = directory / ("trace.json" if seconds else "stacks.txt")
    python = group.python or plan.python
    inside = module_command(
        python or sys.executable,
        _SPY,
        *(view.run_id, name, str(replica), "-" if rank is None or group.ranks == 1 else str(rank)),
        *(str(seconds), str(output)),
    )
    # before the directory is made: it refuses what cannot be reached from here
    wanted = shell_in(run, role, node=node, command=inside, terminal=False)
    directory.mkdir(parents=True)
    try:
        done = subprocess.run(
            wanted.argv, env=dict(wanted.env), stdin=subprocess.DEVNULL, check=False, timeout=seconds + _SLACK_S
        )
        found = output.name in os.listdir(directory)
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"py-spy has not recorded {role} of {run.name} within {seconds + _SLACK_S:g} s\n"
            f"    hint: hpcrl status {reference(run)}"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            directory.rmdir()
    if done.returncode or not found:
        raise HpcrlError(
            f"py-spy did not record {role} of {run.name} (exit code {done.returncode})\n"
            "    hint: the kernel lets it read processes as root, or where kernel.yama.ptrace_scope is 0"
        )
    words = f"{seconds} s of {wanted.where}" if seconds else wanted.where
    return RoleProfile([output], words, [])


def copy_trace(source: Path, target: Path) -> None:
    """Copy a trace, compressed where ``target`` ends in ``.gz`` (OSError where it cannot be written)."""
    reads: Any = gzip.open if source.suffix == ".gz" else open
    writes: Any = gzip.open if target.suffix == ".gz" else open
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with reads(source, "rb") as data, writes(temporary, "wb") as copy:
            shutil.copyfileobj(data, copy, 1 << 20)
        lost_replies.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _check_rank(run: RunDir, group: RoleGroup, rank: int) -> None:
    if not 0 <= rank < group.ranks:
        has = "one rank, 0" if group.ranks == 1 else f"{group.ranks} ranks, 0 to {group.ranks - 1}"
        raise UsageError(f"{run.name} has no rank {rank} of its trainer\n    hint: it has {has}")


def _step_seconds(run: RunDir) -> float:
    """Return the seconds of the newest recorded step; 0 where there is none."""
    record = read_newest(run)
    return 0.0 if record is None else sum(record.phases_s.values())


def _stamp() -> str:
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"


def _wait(run: RunDir, attempt: int, request: ProfileRequest, timeout_s: float) -> ProfileAnswer:
    """Return the answer of the rank.

    Raises
    ------
    DeadlineError
        There is none within ``timeout_s``.
    HpcrlError
        The attempt has ended, or the request was withdrawn by another command.
    """
    directory, requested = profile_dir(run, attempt, request.id), request_path(run, attempt, request.rank)
    deadline = time.monotonic() + timeout_s
    look_at = time.monotonic() + _LOOK_S
    while True:
        try:
            # looked for before the answer: the rank writes that first
            asked = requested.name in os.listdir(requested.parent)
            answer = ProfileAnswer.read(directory)
            if answer is not None:
                return answer
            if not asked:
                raise HpcrlError(
                    f"rank {request.rank} could not answer: its filesystem refused, or the request was removed\n"
                    f"    hint: hpcrl why {reference(run)} --events"
                )
        except FileNotFoundError:
            # the rank removes what it recorded for a request that is gone
            raise HpcrlError(f"the request to rank {request.rank} was withdrawn by another command") from None
        except (OSError, msgspec.DecodeError):
            pass  # it is read again
        now = time.monotonic()
        if now >= deadline:
            named = reference(run)
            raise DeadlineError(
                f"rank {request.rank} has not recorded {request.steps} steps within {timeout_s:g} s; "
                "the request is withdrawn\n"
                f"    hint: what it does now: hpcrl profile {named} --role {TRAINER} --rank {request.rank} --stacks\n"
                f"    hint: wait longer: hpcrl profile {named} --rank {request.rank} --timeout 600"
            )
        if now >= look_at:
            look_at = now + _LOOK_S
            view = observe(run)
            if view.state.ended or view.attempt != attempt:
                state = str(view.state) if view.attempt == attempt else f"attempt {view.attempt} has begun"
                raise HpcrlError(f"attempt {attempt} of {run.name} ended before the profile was made ({state})")
        time.sleep(min(_POLL_S, max(0.0, deadline - now)))
