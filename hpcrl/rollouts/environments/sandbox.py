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
import sys

__all__ = ["Sandbox", "SandboxError"]

_MAX_PROGRAM_CHARACTERS = 512
_MAX_OUTPUT_CHARACTERS = 64

# The program of the child. It sees nothing of us but standard input and output.
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


class SandboxError(Exception):
    """The program gave no result: it is wrong, too big, or took too long. Not a failure of ours."""


class Sandbox:
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
        self._slots = asyncio.Semaphore(max_processes or len(os.sched_getaffinity(0)))

    async def run(self, program: str) -> str:
        """The value of the last statement of ``program`` as text, at most 64 characters.

        Raises
        ------
        SandboxError
            There is none.
        """
        if not program.isascii() or len(program) > _MAX_PROGRAM_CHARACTERS:
            raise SandboxError("not a program: too long or not ASCII")
        async with self._slots:
            return await self._run_child(program)

    async def _run_child(self, program: str) -> str:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", "-c", _CHILD),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                output, _ = await child.communicate(program.encode())
        except TimeoutError:
            raise SandboxError(f"no result within {self._timeout_s:g} s") from None
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                await child.wait()
        if child.returncode != 0:
            raise SandboxError(f"the program failed (exit code {child.returncode})")
        return output.decode()[:_MAX_OUTPUT_CHARACTERS]
