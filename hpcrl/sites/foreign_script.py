"""Run a script in the interpreter of a role, with a deadline, and tell how it ended.

What it prints goes to files and not to pipes: a child that outlives it would keep a pipe open. It has a process group
of its own, which is killed when it has ended or its time is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.compile_caches import COMPILE_CACHES
from hpcrl.processes.interpreter import with_safe_path

_POLL_S = 0.02
_MOST_BYTES = 1 << 20
"""Maximum bytes of answers and of output: the rest is cut."""
_MOST_SHOWN = 600


class ScriptEnd(msgspec.Struct, frozen=True, kw_only=True):
    """End of a script.

    Attributes
    ----------
    answers:
        The objects of its answers, in order.
    problem:
        Reason why it did not end by itself with exit code 0, as a sentence's end; empty where it did.
    kind:
        ``good``, ``missing`` (no such program), ``failed`` (an exit code), ``crash`` (a signal) or ``hang``.
    printed:
        Its output on stdout.
    last_words:
        The last lines of stderr.
    """

    answers: list[dict[str, Any]] = []
    problem: str = ""
    kind: str = "good"
    printed: str = ""
    last_words: list[str] = []


def run_script(
    python: str, script: Path, question: object, *, limit_s: float, environ: Mapping[str, str] | None = None
) -> ScriptEnd:
    """Run ``python script ANSWERS QUESTION``; blocks for ``limit_s`` seconds at most.

    Parameters
    ----------
    question:
        Given to it as JSON.
    environ:
        Variables in addition to those of this process. Compile caches are in a directory that is removed at the end.
    """
    if shutil.which(python) is None:
        return ScriptEnd(problem="there is no such program", kind="missing")
    with tempfile.TemporaryDirectory(prefix="hpcrl-check-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        answers, out, err = (directory / part for part in ("answers", "out", "err"))
        caches = {variable: str(directory / part) for variable, part in COMPILE_CACHES.items()}
        env = with_safe_path({**os.environ, **caches, **(environ or {})})
        command = [python, str(script), str(answers), msgspec.json.encode(question).decode()]
        try:
            with out.open("wb") as stdout, err.open("wb") as stderr:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=env,
                    cwd=directory,
                    start_new_session=True,
                )
        except OSError as error:
            return ScriptEnd(problem=f"it cannot be started: {error}", kind="missing")
        ended = _wait(process, limit_s)
        words = [line.strip() for line in _text(err).splitlines() if line.strip()]
        problem, kind = _judge(process.returncode, words) if ended else (_hang(limit_s, words), "hang")
        return ScriptEnd(
            answers=_answers(answers), problem=problem, kind=kind, printed=_text(out).strip(), last_words=words[-12:]
        )


def one_line(text: str) -> str:
    """Return a foreign text as one line of limited length; its beginning and its end are kept."""
    text = " ".join(text.split())
    half = _MOST_SHOWN // 2
    return text if len(text) <= _MOST_SHOWN else f"{text[:half]} ... {text[-half:]}"


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait, kill the group, and reap; returns whether it ended by itself."""
    deadline = time.monotonic() + limit_s
    ended = False
    while not ended and time.monotonic() < deadline:
        # not reaped yet: until then its number, which is that of the group, cannot be used by another process
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if not ended:
            time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return ended


def _judge(code: int, words: Sequence[str]) -> tuple[str, str]:
    if code == 0:
        return "", "good"
    if code > 0:
        return (words[-1] if words else f"it ended with exit code {code}"), "failed"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    place = _place(words)
    return f"it was ended by {name}" + (f" at {place}" if place else ""), "crash"


def _hang(limit_s: float, words: Sequence[str]) -> str:
    place = _place(words)
    return f"it takes longer than {limit_s:.0f} s" + (f"; it was at {place}" if place else "")


def _place(words: Sequence[str]) -> str:
    """Return the innermost frame that Python's fault handler wrote."""
    return next((word for word in words if word.startswith('File "')), "")


def _answers(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in _text(path).splitlines():
        with contextlib.suppress(ValueError):  # the incomplete last line of a process that was killed
            if isinstance(answer := json.loads(line), dict):
                found.append(answer)
    return found


def _text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, size - _MOST_BYTES))
            return stream.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
