"""Starts the processes of all sandboxes of a node: ``python -m hpcrl.sandboxes.spawner SOCKET LIFELINE``.

It is a process of its own because the kernel's death signal, by which bubblewrap ends with its parent, belongs to a
thread, and because entering namespaces needs a process with one thread. Forks of it carry no secret of the daemon.
It takes requests as JSON datagrams with open files from the daemon, answers each, and reports when a process has ended.
It kills all that it started when the daemon ends. Standard library only: it is forked for every program.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from hpcrl.processes.procfs import adopt_orphans
from hpcrl.sandboxes import inside, joining
from hpcrl.sandboxes.process_trees import children, kill_descendants, stop_and_kill

MAX_MESSAGE_BYTES = 64 << 10
"""Maximum bytes of a datagram; a longer request comes in a file."""
_MAX_FILES = 16
_GRACE_S = 5.0
"""Seconds that the daemon has to end sandboxes in order after its owner has ended."""
_KILL_S = 30.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FIRST_FREE_FD = 64
_MAX_ENTERING = 32
"""Maximum number of processes that enter sandboxes at the same time; further requests wait."""


class Spawner:
    """Loop of the spawner."""

    def __init__(self, connection: socket.socket, lifeline: int) -> None:
        self._connection = connection
        self._lifeline = lifeline
        self._children: set[int] = set()
        self._sandboxes: set[int] = set()
        # processes that enter sandboxes: the request of each and its report, which is None once it has been read
        self._entering: dict[int, tuple[dict[str, Any], int] | None] = {}
        self._wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        # this process, Python or the shell that started the job in the background has changed some; asked once, because
        # each page that a child touches is copied
        resettable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        self._changed_signals = [number for number in resettable if signal.getsignal(number) != signal.SIG_DFL]

    def run(self) -> None:
        """Serve until the daemon or its owner ends; then kill all that was started."""
        owner_ended_at: float | None = None
        watched = [self._wake, self._lifeline]
        try:
            while owner_ended_at is None or time.monotonic() < owner_ended_at + _GRACE_S:
                requests = [self._connection.fileno()] if len(self._entering) < _MAX_ENTERING else []
                ready, _, _ = select.select([*watched, *requests], [], [], None if owner_ended_at is None else 0.1)
                if self._lifeline in ready:
                    owner_ended_at = time.monotonic()
                    watched.remove(self._lifeline)
                if self._wake in ready:
                    os.read(self._wake, 4096)
                    self._reap()
                if self._connection.fileno() in ready and not self._serve():
                    return
        finally:
            self._kill_all()

    def _serve(self) -> bool:
        """Carry out one request; False where the daemon has ended."""
        data, files = _receive(self._connection)
        if not data:
            return False
        request: dict[str, Any] = json.loads(data)
        if request.get("in_file"):
            os.lseek(files[-1], 0, os.SEEK_SET)
            with open(files.pop(), "rb") as stream:
                request = {**json.load(stream), "id": request["id"]}
        try:
            found = self._carry_out(request, files)
        except (OSError, ValueError) as error:
            found = {"error": str(error)}
        finally:
            for fd in files:
                os.close(fd)
        if found is not None:
            self._tell({"re": request["id"], **found})
        return True

    def _carry_out(self, request: dict[str, Any], files: list[int]) -> dict[str, Any] | None:
        """Carry out a request and return its answer; None where the answer follows later."""
        match request["do"]:
            case "start":
                pid = self._fork(lambda: _start(request, files))
                self._sandboxes.add(pid)
                return {"pid": pid}
            case "files":
                return {"pid": self._fork(lambda: _work_on_files(request, files))}
            case "exec" | "kill_all":
                self._fork_inside(request, files)
                return None
            case "kill":
                # only what was not reaped: no other process can have its pid
                if request["pid"] in self._children:
                    stop_and_kill(request["pid"], descendants_too=request["descendants"])
                return {}
        raise ValueError(f"unknown request {request['do']!r}")

    def _fork(self, work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            _run_child(work, self._changed_signals)
        self._children.add(pid)
        return pid

    def _fork_inside(self, request: dict[str, Any], files: list[int]) -> None:
        """Fork a process into the pid namespace of a sandbox. The request is answered when its pid is known.

        Only children of a process that enters a pid namespace are in it: the one between ends at once, and its child
        becomes ours, because we adopt orphans.
        """
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        between = os.fork()
        if between == 0:
            os.close(reading)
            _run_child(lambda: _enter(request, files, writing), self._changed_signals)
        os.close(writing)
        self._entering[between] = request, reading

    def _read_report(self, between: int, *, ended: bool) -> None:
        """Answer a request to enter a sandbox, if the process has reported the pid of its child, or has failed."""
        entering = self._entering[between]
        if entering is None:
            return
        request, reading = entering
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(reading, MAX_MESSAGE_BYTES)
        if not said and not ended:
            return
        os.close(reading)
        self._entering[between] = None
        pid, _, error = said.partition(b" ")
        if not pid:
            failure = error.decode("utf-8", "replace").strip() or "the sandbox has ended"
            self._tell({"re": request["id"], "error": failure})
            return
        self._children.add(int(pid))
        self._tell({"re": request["id"], **({"pid": int(pid)} if request["do"] == "exec" else {})})

    def _read_reports(self) -> None:
        """Read the reports of entering processes: after this, each adopted child of one that has ended is known."""
        for between in self._entering:
            self._read_report(between, ended=False)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._entering:
                self._read_report(pid, ended=True)
                del self._entering[pid]
                continue
            if pid not in self._children:
                self._read_reports()
            if pid in self._children:
                self._children.discard(pid)
                if pid in self._sandboxes:
                    self._sandboxes.discard(pid)
                    self._kill_strays()
                self._tell({"ended": pid, "rc": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the daemon has ended: the next read says so
            self._connection.send(json.dumps(message).encode())

    def _kill_strays(self) -> None:
        """Kill children that we did not start: a half-made sandbox whose bubblewrap was killed."""
        found = children()
        # children of processes that enter sandboxes are adopted after they have been reported
        self._read_reports()
        for pid in found - self._children - self._entering.keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        if not kill_descendants(limit_s=_KILL_S):
            print("hpcrl: processes of sandboxes do not end", file=sys.stderr)


def _start(request: dict[str, Any], files: list[int]) -> None:
    """Become bubblewrap, or another program that makes a sandbox. Its files get the numbers that its arguments name."""
    _enter_cgroups(request)
    joining.become_user(request["uid"])
    _place_files(files, request["numbers"])
    os.setsid()
    os.execve(request["argv"][0], request["argv"], request["env"])


def _work_on_files(request: dict[str, Any], files: list[int]) -> None:
    """Work on a sandbox's files; with its mounts, outside of its pid namespace."""
    pidfd, seccomp, out, *given = files
    _enter_cgroups(request)
    joining.become_user(request["uid"])
    joining.hide_from_programs()
    os.setsid()
    joining.join_files(pidfd, request["remounts"])
    joining.set_limits(request["limits"])
    joining.drop_rights(_content(seccomp), end_with_parent=True)
    with open(out, "wb", closefd=False) as stream, contextlib.ExitStack() as stack:
        source = stack.enter_context(open(given[0], "rb", closefd=False)) if given else None
        work = os.fsencode(request["work"])
        inside.answer(request["operation"], work, source, stream, max_bytes=request["max_bytes"])


def _enter(request: dict[str, Any], files: list[int], report: int) -> None:
    """Enter a sandbox with all of its namespaces, fork, and tell the pid of the child that is in it."""
    try:
        pidfd, seccomp, *streams = files
        program = _content(seccomp)
        _enter_cgroups(request)
        _write("/proc/self/oom_score_adj", b"500")
        joining.become_user(request["uid"])
        joining.hide_from_programs()
        joining.join_processes(pidfd, request["namespaces"])
        child = os.fork()
    except OSError as error:
        os.write(report, f" {str(error).splitlines()[0]}\n".encode())
        return
    if child:
        os.write(report, f"{child} \n".encode())
        return
    os.close(report)
    os.setsid()
    if request["do"] == "kill_all":
        joining.drop_rights(program)
        os.kill(-1, signal.SIGKILL)
        return
    _become_program(request, program, streams)


def _become_program(request: dict[str, Any], seccomp: bytes, streams: list[int]) -> None:
    stdin, out = streams
    _place_files([stdin, out, out], [0, 1, 2])
    os.umask(0o022)
    name = request["argv"][0]
    try:
        # the working directory is looked up with the rights of programs
        joining.drop_rights(seccomp)
        joining.set_limits(request["limits"])
        os.chdir(request["cwd"])
        os.execvpe(name, request["argv"], request["env"])
    except (OSError, ValueError) as error:
        os.write(2, f"{name}: {getattr(error, 'strerror', None) or error}\n".encode("utf-8", "surrogateescape"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _run_child(work: Callable[[], None], changed_signals: Iterable[int]) -> NoReturn:
    """Run a forked child to its end; it never returns into our loop."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in changed_signals:
            signal.signal(number, signal.SIG_DFL)
        work()
        code = 0
    except BaseException as error:  # noqa: BLE001 - a child must never go on as a second spawner
        with contextlib.suppress(OSError):
            os.write(2, f"hpcrl: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _enter_cgroups(request: dict[str, Any]) -> None:
    for path in request["cgroups"]:
        _write(path, b"0")


def _write(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, content)
    os.close(fd)


def _place_files(files: list[int], numbers: list[int]) -> None:
    """Give files the numbers that a program expects, and close all others."""
    above = max(_FIRST_FREE_FD, *(number + 1 for number in numbers))
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in files]
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
    kept = sorted({0, 1, 2, *numbers})
    for first, last in zip(kept, [*kept[1:], 1 << 20], strict=True):
        os.closerange(first + 1, last)


def _content(fd: int) -> bytes:
    return os.pread(fd, 1 << 20, 0)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    size = array.array("i").itemsize
    try:
        data, ancillary, _, _ = connection.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(_MAX_FILES * size))
    except ConnectionResetError:
        return b"", []
    files = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(content[: len(content) - len(content) % size])
    for fd in files:
        os.set_inheritable(fd, False)
    return data, list(files)


def main(connection: str, lifeline: str) -> None:
    """Serve the daemon on an inherited socket; ``lifeline`` is a pipe that ends with the daemon's owner."""
    adopt_orphans()
    for number in _IGNORED:  # where a whole group gets them, the daemon ends sandboxes in order, and us
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(connection)) as opened:
        opened.set_inheritable(False)
        os.set_inheritable(int(lifeline), False)
        # a collection in a child would write to all objects, and so copy their pages
        gc.freeze()
        Spawner(opened, int(lifeline)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
