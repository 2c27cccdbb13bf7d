"""Starts the trainer's ranks of one node: ``python -m hpcrl.trainer.launcher --ranks 8 …``.

It imports torch and the trainer once and forks the ranks, which share these pages until they write to them; then it
waits for them. Each rank runs ``python -m hpcrl.trainer`` from there, as it would by itself, with the variables that
torch's ``env://`` reads. Rank 0 serves the TCPStore by which ranks find each other.

A fork copies one thread. Where an import has started another, opened a socket or a device, or initialised CUDA, what
the copy would do is not known: then each rank begins as a fresh interpreter that imports for itself, and the log says
why.

If a rank fails, the launcher ends the others of its node and logs which rank died and why;
`hpcrl.runs.cause` reads that line. Ranks on other nodes end with the step (`hpcrl.supervisor.process.guard`). Where the
launcher itself is killed, the kernel kills its ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from hpcrl.processes import procfs
from hpcrl.processes.interpreter import bound_kernel_caches, lasting_imports, module_command
from hpcrl.reporting.log_format import start_logging
from hpcrl.runs.cause import describe_end

RANK_NAME = "hpcrl rank {}"
"""Name of a rank in ``ps`` and ``top``: its command line and ``/proc/PID/environ`` are those of the launcher."""

_log = logging.getLogger("hpcrl.trainer.launcher")
_IMPORTS = ("hpcrl.trainer.loop",)
_WHILE_IMPORTING = {
    # numpy would start threads for products, which no rank makes with it
    "OPENBLAS_NUM_THREADS": "1",
    # an import that asks whether there is a GPU must not initialise CUDA, which no fork survives
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Defaults for the environment until the ranks are forked."""
_LAST_WORD_S = 1.0
"""Seconds for other ranks to write their reports after a rank ended by itself."""
_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL."""
_GIVE_UP_S = 5.0
"""Seconds after SIGKILL after which a rank counts as hanging in the kernel; the guard above reports it."""
_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of this node among all.

    Attributes
    ----------
    ranks:
        Number of ranks on this node, and on each other node.
    node_rank, nodes:
        Number of this node, from 0, and number of nodes.
    host, port:
        Address at which rank 0 serves the TCPStore.
    """

    ranks: int
    node_rank: int
    nodes: int
    host: str
    port: int

    def rank(self, local_rank: int) -> int:
        """Return the global rank of a local rank; ranks are numbered in the order of nodes."""
        return self.node_rank * self.ranks + local_rank

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return the environment variables of a rank that torch and libraries read, as torchrun sets them."""
        return {
            "RANK": str(self.rank(local_rank)),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.node_rank),
            "WORLD_SIZE": str(self.ranks * self.nodes),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the ranks and wait for them. Does not return in the launcher; in a rank, after its program."""
    parser = argparse.ArgumentParser(prog="hpcrl.trainer.launcher", description="Start the ranks of one node.")
    parser.add_argument("--ranks", type=int, required=True, help="ranks on this node")
    parser.add_argument("--nodes", type=int, default=1, help="nodes, with the same number of ranks each")
    parser.add_argument("--node-rank", type=int, default=0, help="index of this node")
    parser.add_argument("--master-addr", default="127.0.0.1", metavar="HOST", help="host of rank 0")
    parser.add_argument("--master-port", type=int, default=0, metavar="PORT", help="port of rank 0; 0 takes a free one")
    parser.add_argument("--grace-s", type=float, default=_GRACE_S, help="time between SIGTERM and SIGKILL")
    parser.add_argument("--imports", default=",".join(_IMPORTS), help="modules that are imported before the fork")
    parser.add_argument("module", nargs="?", default="hpcrl.trainer", help="module that each rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of that module")
    given = parser.parse_args(arguments)
    if not (given.ranks >= 1 and 0 <= given.node_rank < given.nodes):
        parser.error(f"{given.ranks} ranks on node {given.node_rank} of {given.nodes} nodes")
    port = given.master_port or _free_port()
    node = NodeRanks(given.ranks, given.node_rank, given.nodes, given.master_addr, port)
    # as torchrun has it; before torch is imported, which may read them
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if node.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    problem = _import_all([name for name in given.imports.split(",") if name])
    _fork_ranks(node, grace_s=given.grace_s, problem=problem)
    # from here on this is a rank
    program = [given.module, *given.arguments]
    if problem or _knows_cuda_is_lost():
        os.execv(sys.executable, module_command(sys.executable, *program, unbuffered=True))
    sys.argv = program
    runpy.run_module(given.module, run_name="__main__", alter_sys=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _import_all(modules: Sequence[str]) -> str:
    """Import what every rank needs. Why the ranks cannot be forked from here; empty where they can."""
    before = _open_files()
    guarded = _WHILE_IMPORTING.keys() - os.environ.keys()
    os.environ.update({name: _WHILE_IMPORTING[name] for name in guarded})
    bound_kernel_caches()
    try:
        with lasting_imports():
            for module in modules:
                import_module(module)
    except Exception as error:  # noqa: BLE001 - each rank fails alike, and reports it where `hpcrl why` reads it
        return f"{type(error).__name__}: {error}"
    finally:
        for name in guarded:
            os.environ.pop(name, None)
    return _why_not_fork(before)


def _why_not_fork(before: dict[str, str]) -> str:
    """Return what an import has started that a fork would break; empty if nothing."""
    if threads := [name for name in os.listdir("/proc/self/task") if int(name) != os.getpid()]:
        return f"an import has started {len(threads)} thread{'s' * (len(threads) > 1)}"
    opened = [what for fd, what in _open_files().items() if before.get(fd) != what]
    if opened:
        return f"an import has opened {', '.join(opened)}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import has initialised CUDA"
    return ""


def _open_files() -> dict[str, str]:
    """Open descriptors of this process that are no regular files, and what they are."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own is closed by now
            if not stat.S_ISREG(os.fstat(int(fd)).st_mode):
                found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def _knows_cuda_is_lost() -> bool:
    """Return whether CUDA was initialised before the fork, so that torch in this rank cannot use it any more."""
    torch = sys.modules.get("torch")
    lost = torch is not None and torch.cuda._is_in_bad_fork()
    if lost:
        print("CUDA was initialised before this rank was forked: it starts as a new interpreter", file=sys.stderr)
    return lost


def _fork_ranks(node: NodeRanks, *, grace_s: float, problem: str) -> None:
    """Start the ranks. Returns in each of them; the launcher itself waits for them and exits."""
    # blocked signals are not delivered but waited for: no handler runs, and none is missed
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *_HANDED_ON})
    launcher, ranks, failure = os.getpid(), {}, ""
    sys.stdout.flush()
    sys.stderr.flush()
    for local_rank in range(node.ranks):
        try:
            pid = os.fork()
        except OSError as error:
            failure = f"rank {node.rank(local_rank)} could not be started: {error}"
            break
        if pid == 0:
            _become_rank(node, local_rank, launcher)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return
        ranks[pid] = node.rank(local_rank)
    start_logging("%(levelname)s launcher %(name)s: %(message)s")
    if problem:
        _log.warning("ranks import for themselves, which takes longer: %s", problem)
    sys.exit(_Watch(ranks, grace_s=grace_s).wait(failure))


def _become_rank(node: NodeRanks, local_rank: int, launcher: int) -> None:
    procfs.die_with_parent()
    if os.getppid() != launcher:  # it died before the line above
        os._exit(1)
    os.setsid()  # child processes of a rank get the launcher's signals, too
    Path("/proc/self/comm").write_text(RANK_NAME.format(node.rank(local_rank)))
    os.environ.update(node.variables(local_rank))


class _Watch:
    """The ranks of this node that still run, and what the launcher exits with."""

    def __init__(self, ranks: dict[int, int], *, grace_s: float) -> None:
        self._ranks, self._grace_s = ranks, grace_s
        self._exit_code = 0
        self._sent: set[int] = set()
        #: time and signal of the next step towards the end; None as signal: give up
        self._next: tuple[float, int | None] | None = None

    def wait(self, failure: str) -> int:
        """Wait for all ranks; the exit code of the launcher.

        That of the first rank that failed (128 and the signal where it was killed), or of the signal that ended all.
        """
        if failure:
            self._fail(failure, 1, wait_s=0.0)
        while self._ranks:
            at = None if self._next is None else self._next[0]
            signum = _wait_signal(at)
            if signum in _HANDED_ON:
                self._hand_on(signum)
            self._reap()
            due = self._next is not None and time.monotonic() >= self._next[0]
            if self._ranks and due and not self._go_on():
                break
        return self._exit_code

    def _hand_on(self, signum: int) -> None:
        name = signal.Signals(signum).name
        _log.info("%s is forwarded to %s", name, self._names())
        self._exit_code = self._exit_code or 128 + signum
        self._send(signum)
        if self._next is None or self._next[1] == signal.SIGTERM:
            self._next = (time.monotonic() + self._grace_s, signal.SIGKILL)

    def _reap(self) -> None:
        """Collect ranks that have ended; those that were killed first, which the others only follow."""
        found = [os.waitpid(pid, os.WNOHANG) for pid in self._ranks]
        ended = sorted((os.waitstatus_to_exitcode(status), pid, self._ranks.pop(pid)) for pid, status in found if pid)
        for code, pid, rank in ended:
            if code < 0 and -code not in self._sent:
                what = describe_end(None, -code)
                self._fail(f"rank {rank} (pid {pid}) {what}", 128 - code, wait_s=0.0)
            elif code > 0 and not self._sent:
                self._fail(f"rank {rank} (pid {pid}) {describe_end(code, None)}", code, wait_s=_LAST_WORD_S)

    def _fail(self, what: str, exit_code: int, *, wait_s: float) -> None:
        """Handle an unrequested end of a rank: record the exit code and schedule SIGTERM for the other ranks."""
        _log.error("%s", what)
        self._exit_code = self._exit_code or exit_code
        at = time.monotonic() + wait_s
        if self._ranks and (self._next is None or (self._next[1] == signal.SIGTERM and at < self._next[0])):
            self._next = (at, signal.SIGTERM)

    def _go_on(self) -> bool:
        """Take the next step to the end; False where there is none left."""
        assert self._next is not None
        signum = self._next[1]
        if signum is None:
            _log.error("%s hang in the kernel and cannot be ended", self._names())
            return False
        _log.warning("%s to %s", signal.Signals(signum).name, self._names())
        self._send(signum)
        if signum == signal.SIGTERM:
            self._next = (time.monotonic() + self._grace_s, signal.SIGKILL)
        else:
            self._next = (time.monotonic() + _GIVE_UP_S, None)
        return True

    def _send(self, signum: int) -> None:
        self._sent.add(signum)
        for pid in self._ranks:  # unreaped child processes: their pids cannot be reused
            try:
                os.killpg(pid, signum)
            except ProcessLookupError:  # it has no group of its own yet
                os.kill(pid, signum)

    def _names(self) -> str:
        numbers = sorted(self._ranks.values())
        return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def _wait_signal(at: float | None) -> int:
    """Return the next blocked signal; 0 if the time ``at`` has passed."""
    signals = {signal.SIGCHLD, *_HANDED_ON}
    if at is None:
        return signal.sigwaitinfo(signals).si_signo
    info = signal.sigtimedwait(signals, max(0.0, at - time.monotonic()))
    return info.si_signo if info is not None else 0


if __name__ == "__main__":
    main()
