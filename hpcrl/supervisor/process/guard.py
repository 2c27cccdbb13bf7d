"""The guard: a small process above each role that leaves nothing of it behind.

::

    supervisor ──pipe──> guard ──> role ──> whatever the role starts

The guard is in a session of its own and adopts every orphan below it, so that no process escapes by forking twice
or by ``setsid``. It ends all of them when

- the supervisor orders it (``stop``: SIGTERM to the role, SIGKILL to the rest after the grace; ``kill``: at once),
- the role ends, for any reason,
- the pipe from the supervisor closes: the supervisor is gone, even by SIGKILL.

It also does what can only be done on the role's node: it takes stacks of a role that hangs (``dump``), gives the role a
temporary directory of its own, and removes what the role leaves there, in shared memory and of control groups.

If the guard itself is killed, the kernel kills the role (``PR_SET_PDEATHSIG``) and the supervisor adopts and ends
the rest. If both are killed at once, the guards of the other roles find the orphans by the run's mark in their
environment.

The protocol is JSON lines: first a `hpcrl.supervisor.process.guarded.ProcessSpec` on stdin, then orders; reports on
stdout, where others may write, too (`hpcrl.supervisor.process.report_lines`). Standard library only, because this runs
once for each replica of each role.

Under Slurm ``srun`` is between supervisor and guards: it forwards orders to the guards of all its tasks, and joins
their reports. A signal to the step reaches the guard first, which gives the role time to end in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcrl.processes import procfs
from hpcrl.processes.environment_marks import KIND_VARIABLE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE
from hpcrl.processes.left_groups import remove_left_groups
from hpcrl.storage.trusted_paths import read_secret, umask_of
from hpcrl.supervisor.process.leftovers import Scratch
from hpcrl.supervisor.process.node_values import fill_node, fill_node_rank, own_caches
from hpcrl.supervisor.process.report_lines import encode_line

_OURS = ("SUBMITIT_", "HPCRL_")
"""Prefixes of variables of submitit and of the guard itself, which roles must not inherit."""
_STEP_LINE = 1000
"""Maximum size of a report in a step, in bytes: Slurm splits longer lines."""
_POLL_S = 0.02
_LOOK_S = (2.0, 8.0, 20.0, 60.0)
"""Seconds between checks of the role's shared memory; the last pause repeats."""
_AFTERMATH_S = 2.0
"""Maximum seconds between SIGTERM and SIGKILL for processes that remain after the role's own has ended."""
_GIVE_UP_S = 5.0
"""Seconds after SIGKILL after which a process counts as hanging in the kernel; the guard reports it and ends."""


def main() -> None:
    """Run the guard."""
    # only the supervisor decides when the guard ends: a stray signal must not leave the role without a guard
    # signals wake `select` through a pipe: handlers do nothing, and no signal is lost between check and wait
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    procfs.adopt_orphans()
    Guard(wake_read).run()


def _own_node() -> str:
    """See `hpcrl.runs.clocks.own_node`, which is not in the standard library."""
    return os.environ.get("SLURMD_NODENAME", "")


class Guard:
    """State of one guard; see the module."""

    def __init__(self, wake_fd: int) -> None:
        self._wake_fd = wake_fd
        self._orders = b""
        self._supervised = True
        self._role_pid = 0
        self._role_ended = False
        self._called_off = False
        self._kill_at: float | None = None
        self._spec: dict[str, Any] = {}
        self._task = 0
        self._scratch: Scratch | None = None
        self._looks = 0
        self._look_at = time.monotonic()

    def run(self) -> None:
        """Start the role, wait for its end or an order, end everything, report.

        If the stop order precedes the start, the role is not started: both may wait in the pipe of a guard that is
        slow to begin.
        """
        while not self._spec:
            self._wait(None)
            if not self._supervised:
                return
        if self._called_off:
            self._report(report="ended", exit_code=None, signal=signal.SIGTERM)
            self._report(report="gone", left=[])
            return
        # logs and the temporary directory are as open as the run directory, whatever umask the node's daemon has
        os.umask(umask_of(self._spec["env"].get("HPCRL_RUN_DIR", "")))
        self._make_scratch()
        self._start_role()
        self._plan_look()
        while not self._role_ended:
            until = self._look_at if self._kill_at is None else min(self._kill_at, self._look_at)
            self._wait(max(0.0, until - time.monotonic()))
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                break
            if time.monotonic() >= self._look_at:
                self._look()
        self._end_all()

    # -- orders and reports ------------------------------------------------------------------------------------

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for an order, a signal, or the time; then act on all that is there."""
        # after the end of its input stdin would always be readable, and `select` return at once
        sources = [self._wake_fd, 0] if self._supervised else [self._wake_fd]
        readable, _, _ = select.select(sources, [], [], timeout_s)
        if self._wake_fd in readable:
            with contextlib.suppress(BlockingIOError):
                for signum in os.read(self._wake_fd, 4096):
                    if signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                        if self._role_pid and not self._role_ended and self._kill_at is None:
                            self._report(report="signalled", signal=signum)
                        self._stop(self._grace_s)
        # before orders: an order must find the current state of the role
        self._reap()
        if 0 in readable:
            data = os.read(0, 1 << 16)
            if not data:
                self._lost_supervisor()
            self._orders += data
            *lines, self._orders = self._orders.split(b"\n")
            for line in lines:
                self._obey(json.loads(line))

    def _obey(self, order: dict[str, Any]) -> None:
        if not self._spec:
            self._spec = order
            self._task = int(os.environ["SLURM_PROCID"]) if order["in_step"] else 0
        elif order["order"] == "stop":
            self._stop(order["grace_s"])
        elif order["order"] == "dump":
            self._dump(order["path"])
        elif not self._role_pid:
            self._called_off = True
        else:
            self._kill_at = time.monotonic()

    @property
    def _grace_s(self) -> float:
        return float(self._spec.get("grace_s", 0.0))

    def _stop(self, grace_s: float) -> None:
        if not self._role_pid:
            self._called_off = True
        elif self._kill_at is None and not self._role_ended:
            self._look()  # while the role's processes still exist
            self._kill_at = time.monotonic() + grace_s
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._role_pid, signal.SIGTERM)  # an unreaped child: its pid cannot be reused

    def _lost_supervisor(self) -> None:
        self._supervised = False
        if self._role_pid:
            self._record("guard.supervisor_lost", role=self._spec["role"], replica=self._spec["replica"])
            self._stop(self._grace_s)

    def _report(self, **report: Any) -> None:
        with contextlib.suppress(OSError):  # the reader of the pipe may be gone
            said = {"task": self._task, "node": _own_node(), "time_s": time.time(), **report}
            os.write(1, encode_line(said, limit=_STEP_LINE if self._spec.get("in_step") else None))

    def _record(self, kind: str, **data: Any) -> None:
        """Append to the events of the run, in the format of `hpcrl.runs.events`."""
        event = {
            "time_s": time.time(),
            "attempt": self._spec["attempt"],
            "writer": self._spec["events_writer"] + (f"-{self._task}" if self._task else ""),
            "kind": kind,
            "data": data,
            "node": _own_node(),
        }
        with contextlib.suppress(OSError):
            path = self._spec["events_path"]
            if self._task:
                path = f"{path.removesuffix('.jsonl')}-{self._task}.jsonl"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(fd, json.dumps(event).encode() + b"\n")
            os.close(fd)

    # -- what only this node knows -----------------------------------------------------------------------------

    def _dump(self, path: str) -> None:
        path = f"{path}-{self._task}.txt" if self._task else f"{path}.txt"
        from hpcrl.supervisor.process.stacks import dump_stacks  # noqa: PLC0415 - only roles that hang need it

        try:
            report = dump_stacks(self._role_pid, path)
        except OSError as error:
            report = {"path": path, "frames": [], "stopped": [], "problem": f"the stacks could not be written: {error}"}
        self._report(report="dumped", **report)

    def _make_scratch(self) -> None:
        spec = self._spec
        who = {name: spec[name] for name in ("attempt", "role", "replica")}
        base = spec["scratch"] or spec["env"].get("TMPDIR", "")
        scratch = Scratch(base, run_id=spec["env"][RUN_ID_VARIABLE], task=self._task, **who)
        try:
            removed = scratch.prepare()
        except OSError as error:
            # the role can run without it, in the node's own TMPDIR
            self._record("guard.no_scratch", path=str(scratch.path), problem=str(error))
            return
        self._scratch = scratch
        if scratch.problem:
            self._record("guard.no_scratch", path=str(scratch.path), problem=scratch.problem)
        if removed:
            self._record("guard.cleaned", role=spec["role"], replica=spec["replica"], removed=removed[:20])

    def _plan_look(self) -> None:
        self._look_at = time.monotonic() + _LOOK_S[min(self._looks, len(_LOOK_S) - 1)]
        self._looks += 1

    def _look(self) -> None:
        """Note the shared memory of the role now: once it was killed, its files can no longer be attributed."""
        if self._scratch is not None:
            self._scratch.note(procfs.descendants(os.getpid()))
        self._plan_look()

    # -- the role ----------------------------------------------------------------------------------------------

    def _start_role(self) -> None:
        guard = os.getpid()
        # a successful exec closes the write end: no error then means that the command runs
        error_read, error_write = os.pipe()
        self._role_pid = os.fork()
        if self._role_pid == 0:
            try:
                self._become_role(guard)
            except OSError as error:
                os.write(error_write, str(error).encode())
            finally:
                os._exit(127)
        os.close(error_write)
        with os.fdopen(error_read, "rb") as stream:
            error_text = stream.read().decode()
        process = procfs.read_process(self._role_pid)
        if error_text:
            self._report(report="spawn_failed", error=error_text)
        else:
            self._report(report="started", pid=self._role_pid, start_ticks=process.start_ticks if process else 0)

    def _become_role(self, guard: int) -> None:
        procfs.die_with_parent()
        if os.getppid() != guard:  # the guard died before the line above took effect
            os._exit(127)
        os.setsid()
        # the guard's handlers must not outlive the fork; ignored signals would even survive the exec
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        spec = self._spec
        log = os.open(spec["logs"][self._task], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        if spec["restart"]:
            clock = time.strftime("%Y-%m-%d %H:%M:%S")
            os.write(2, f"==== restart {spec['restart']} of {spec['role']} {spec['replica']}, {clock} ====\n".encode())
        if spec["cwd"]:
            os.chdir(spec["cwd"])
        command, env = spec["command"], spec["env"]
        if self._scratch is not None:
            env = {**env, "TMPDIR": str(self._scratch.path)}
        node_rank = int(os.environ["SLURM_NODEID"]) if spec["in_step"] else 0
        env = fill_node(env, node_rank, hosts=spec["hosts"], interfaces=spec["interfaces"])
        if spec["in_step"]:
            command = [fill_node_rank(part, node_rank, spec["hosts"]) for part in command]
            env = {**{name: value for name, value in os.environ.items() if not name.startswith(_OURS)}, **env}
        own_caches(env, spec.get("scratch", ""))
        env |= {name: read_secret(Path(file)) for name, file in spec.get("secrets", {}).items()}
        os.execvpe(command[0], command, env)

    def _reap(self) -> None:
        """Reap all dead children: the role, and adopted orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._role_pid:
                self._role_ended = True
                code = os.waitstatus_to_exitcode(status)
                self._report(report="ended", exit_code=code if code >= 0 else None, signal=-code if code < 0 else None)

    # -- the end -----------------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """End all descendants of the guard, after the role itself had its grace."""
        self._look()
        # remaining processes may be about to end by themselves: they get a moment, but not the whole grace
        kill_at = time.monotonic() + min(self._grace_s, _AFTERMATH_S)
        if self._kill_at is not None:
            kill_at = min(kill_at, self._kill_at)
        remaining = end_processes(lambda: procfs.descendants(os.getpid()), kill_at=kill_at, between=self._reap)
        if remaining:
            self._record("guard.left_behind", pids=[process.pid for process in remaining])
        self._reap()
        # without a supervisor no other process ends roles of this run whose guards were killed
        if not self._supervised:
            end_processes(self._unguarded, kill_at=time.monotonic(), between=self._reap)
        # a daemon of sandboxes that was ended here has had no time to remove its own
        remove_left_groups()
        # a process that hangs in the kernel may still use its files
        if self._scratch is not None and not remaining:
            self._scratch.remove()
        self._report(report="gone", left=[process.pid for process in remaining])

    def _unguarded(self) -> list[procfs.Process]:
        """Return the role processes of this run on this machine that have no running guard as ancestor."""
        run_id, run_dir = (self._spec["env"].get(name) for name in (RUN_ID_VARIABLE, RUN_DIR_VARIABLE))
        return [
            process
            for process in procfs.with_environ(RUN_ID_VARIABLE, run_id)
            if procfs.read_environ(process.pid).get(KIND_VARIABLE) == "role"
            # a copied run directory has the same run id
            and procfs.read_environ(process.pid).get(RUN_DIR_VARIABLE) == run_dir
            and not any(procfs.read_environ(pid).get(KIND_VARIABLE) == "guard" for pid in procfs.ancestors(process.pid))
        ]


def end_processes(
    find: Callable[[], list[procfs.Process]],
    *,
    kill_at: float,
    between: Callable[[], None] = lambda: None,
) -> list[procfs.Process]:
    """Send SIGTERM to what ``find`` returns, and SIGKILL after ``kill_at`` (monotonic), until it returns nothing.

    ``find`` is called repeatedly, because dying processes may have started others meanwhile. Return the processes
    that hang in the kernel 5 s after SIGKILL.
    """
    asked: set[tuple[int, int]] = set()
    while processes := find():
        now = time.monotonic()
        if now >= kill_at + _GIVE_UP_S:
            return processes
        if now >= kill_at:
            procfs.send_signal(processes, signal.SIGKILL)
        else:
            # one SIGTERM per process: many programs take a second one as an order to end at once, uncleanly
            fresh = [process for process in processes if (process.pid, process.start_ticks) not in asked]
            procfs.send_signal(fresh, signal.SIGTERM)
            asked.update((process.pid, process.start_ticks) for process in fresh)
        time.sleep(_POLL_S)
        between()
    return []


if __name__ == "__main__":
    main()
