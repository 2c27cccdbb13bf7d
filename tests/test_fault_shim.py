"""Faults that are chosen while a process runs: the control file of tests/faults.c."""

from __future__ import annotations

import errno
from pathlib import Path

from fault_shim import build_shim, run_with_fault

SCRIPT = """
import sys
from pathlib import Path
file, control = map(Path, sys.argv[1:])
def outcomes():
    for call in (lambda: file.write_bytes(b"x"), file.read_bytes, lambda: file.rename(file)):
        try:
            call()
            yield 0
        except OSError as error:
            yield error.errno
def say(fault):
    control.with_suffix(".new").write_text(fault)
    control.with_suffix(".new").rename(control)
    print(*outcomes())
print(*outcomes())
say("op=change errno=28 path=/victim")
say("op=any errno=116 path=/victim")
say("op=any errno=116 path=/another")
control.unlink()
print(*outcomes())
"""


def test_a_control_file_says_what_fails(tmp_path: Path) -> None:
    control = tmp_path / "control"
    said = run_with_fault(build_shim(tmp_path), f"control={control}", SCRIPT, tmp_path / "victim", control)
    full, stale = errno.ENOSPC, errno.ESTALE
    assert said == ["0 0 0", f"{full} 0 {full}", f"{stale} {stale} {stale}", "0 0 0", "0 0 0"]
