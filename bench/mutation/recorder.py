"""Which functions each test executes, in its own process and in those that it starts.

Loaded as ``sitecustomize`` by interpreters that tests start (`install_in`), and called by the process that runs pytest.
A line of the record names a test, a file and the first line of a function. It is written when the function is first
called in a test, so that a process that is killed has written it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

OUTPUT = "HPCRL_MUTANTS_RECORD"
"""The file that processes of a test append to."""
ROOT = "HPCRL_MUTANTS_ROOT"
"""The package whose functions are written down."""

_seen: set[CodeType] = set()
_test = ""


def install_in(directory: Path) -> Path:
    """Make the directory that, in ``PYTHONPATH``, has interpreters record what they execute."""
    directory.mkdir(parents=True)
    text = Path(__file__).read_text(encoding="utf-8")
    (directory / "sitecustomize.py").write_text(f"{text}\n\nif OUTPUT in os.environ:\n    start()\n", encoding="utf-8")
    return directory


def begin(test: str) -> None:
    """Say which test what follows belongs to."""
    global _test  # noqa: PLW0603
    _test = test
    _seen.clear()


def start() -> None:
    """Write down from now on what this process executes."""
    root, output = os.environ[ROOT] + os.sep, os.environ[OUTPUT]
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code not in _seen:
            _seen.add(code)
            if code.co_filename.startswith(root):
                test = _test or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
                line = f"{test}\t{code.co_filename[len(root) :]}\t{code.co_firstlineno}\n"
                with contextlib.suppress(OSError):  # a test may close all that is open
                    os.write(descriptor, line.encode())

    threading.settrace(trace)
    sys.settrace(trace)
