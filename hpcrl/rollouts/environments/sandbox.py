"""Running a program that a model wrote, in a process that can do nothing but arithmetic.

Three walls, each enough for most hostile texts:

1. The language: the text is parsed, never executed; integers, ``+ - * / // % **``, names and assignments. No
   calls, attributes, subscripts, strings or loops.
2. The process: an interpreter of its own (isolated mode, no site packages, empty environment, own session and
   empty working directory) that drops its rights before it reads the text: no new file descriptors (hence no
   files and no network), no new processes, no writes, little CPU and memory.
3. The clock: a wall-clock limit, after which the whole session is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading

from hpcrl.processes.daemon_threads import DaemonExecutor

_MAX_PROGRAM_CHARACTERS = 512
_MAX_OUTPUT_CHARACTERS = 64

# The program of the child. It has only standard input and output.
_CHILD = r"""
import _ast, resource, sys
for name, limit in (("CPU", 2), ("AS", 256 << 20), ("FSIZE", 0), ("NPROC", 0), ("CORE", 0), ("NOFILE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))

def power(a, b):
    if not (isinstance(a, int) and isinstance(b, int)) or b < 0 or a.bit_length() * b > 4096:
        raise ValueError("power")
    return a ** b

BINARY = {
    _ast.Add: lambda a, b: a + b, _ast.Sub: lambda a, b: a - b, _ast.Mult: lambda a, b: a * b,
    _ast.Div: lambda a, b: a / b, _ast.FloorDiv: lambda a, b: a // b, _ast.Mod: lambda a, b: a % b, _ast.Pow: power,
}
UNARY = {_ast.UAdd: lambda a: a, _ast.USub: lambda a: -a}

def value(node, names):
    if isinstance(node, _ast.Constant) and type(node.value) is int:
        result = node.value
    elif isinstance(node, _ast.Name):
        result = names[node.id]
    elif isinstance(node, _ast.UnaryOp):
        result = UNARY[type(node.op)](value(node.operand, names))
    elif isinstance(node, _ast.BinOp):
        result = BINARY[type(node.op)](value(node.left, names), value(node.right, names))
    else:
        raise ValueError("syntax")
    if isinstance(result, int) and result.bit_length() > 4096:
        raise ValueError("size")
    return result

def run(text):
    names, last = {}, None
    for statement in compile(text, "program", "exec", 0x400 | 0x1000).body:
        if isinstance(statement, _ast.Expr):
            last = value(statement.value, names)
        elif isinstance(statement, _ast.Assign) and all(isinstance(t, _ast.Name) for t in statement.targets):
            last = value(statement.value, names)
            for target in statement.targets:
                names[target.id] = last
        else:
            raise ValueError("syntax")
    if last is None:
        raise ValueError("empty")
    return str(last)

try:
    output = run(sys.stdin.buffer.read().decode("ascii"))
except Exception:
    sys.exit(3)
sys.stdout.write(output)
"""


class ProgramError(Exception):
    """The program gave no result: it is wrong, too big, or took too long. The sandbox itself did not fail."""


class _Call:
    """One program in one child process. `run` blocks in a thread; `kill` may be called from another at any time."""

    def __init__(self, program: str, timeout_s: float) -> None:
        self._program, self._timeout_s = program, timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._killed = False

    def run(self) -> str:
        with self._lock:
            if self._killed:
                raise ProgramError("cancelled")
            self._child = child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
        with child:
            try:
                output, _ = child.communicate(self._program.encode(), timeout=self._timeout_s)
            except subprocess.TimeoutExpired:
                raise ProgramError(f"no result within {self._timeout_s:g} s") from None
            finally:
                self.kill()
        if child.returncode != 0:
            raise ProgramError(f"the program failed (exit code {child.returncode})")
        return output.decode()[:_MAX_OUTPUT_CHARACTERS]

    def kill(self) -> None:
        """End the child and its session, if there is one; without effect on one that was reaped."""
        with self._lock:
            self._killed = True
            if self._child is not None and self._child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._child.pid, signal.SIGKILL)


class ProgramRunner:
    """Runs programs, a few at a time."""

    def __init__(self, *, timeout_s: float, max_processes: int | None = None) -> None:
        """Remember limits; nothing is started.

        Parameters
        ----------
        timeout_s:
            Wall-clock limit of one program, its start included.
        max_processes:
            Programs that run at once; the others wait, so that a burst of rollouts cannot flood the machine.
            Without it, the number of CPUs this process may use.
        """
        self._timeout_s = timeout_s
        # Threads, not asyncio's subprocesses: creating one of these cannot be cancelled safely (the cancelled
        # creation waits without end for pipes that were never connected; observed with Python 3.11).
        workers = max_processes or len(os.sched_getaffinity(0))
        self._threads = DaemonExecutor(workers, thread_name_prefix="sandbox")

    async def run(self, program: str) -> str:
        """Return the value of the last statement of ``program`` as text of at most 64 characters.

        Raises
        ------
        ProgramError
            There is none.
        """
        if not program.isascii() or len(program) > _MAX_PROGRAM_CHARACTERS:
            raise ProgramError("not a program: too long or not ASCII")
        call = _Call(program, self._timeout_s)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call.run)
        except asyncio.CancelledError:
            call.kill()
            raise
