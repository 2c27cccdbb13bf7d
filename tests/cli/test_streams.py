"""Commands without standard input, output or error do their work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MAIN = "from hpcrl.cli.main import main; main()"
WAYS = {"stdout": ">&-", "stderr": "2>&-", "stdin": "<&-", "all": "<&- >&- 2>&-", "unwritable": "1</dev/null"}


def shell(command: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOME": str(tmp_path), "HPCRL_RUNS_ROOT": str(tmp_path / "runs"), "PY": sys.executable}
    return subprocess.run(["sh", "-c", command], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("words", ["ls", "recipe show quickstart", "cluster ls"])
def test_commands(words: str, way: str, tmp_path: Path) -> None:
    done = shell(f"$PY -c '{MAIN}' {words} {WAYS[way]}; echo $? > code", tmp_path)
    assert (tmp_path / "code").read_text() == "0\n"
    assert "Traceback" not in done.stderr
    if way in ("stdin", "stderr") and words != "ls":
        assert "quickstart" in done.stdout or "local" in done.stdout


def test_errors_keep_their_code(tmp_path: Path) -> None:
    done = shell(f"$PY -c '{MAIN}' status nothing >&- 2>err; echo $? > code", tmp_path)
    assert (tmp_path / "code").read_text() == "2\n"
    assert "hpcrl: " in (tmp_path / "err").read_text()
    assert "Traceback" not in (tmp_path / "err").read_text() + done.stderr


def test_a_question_without_a_terminal_changes_nothing(tmp_path: Path) -> None:
    code = (
        "from hpcrl.cli.streams import *; from hpcrl.cli.options import confirm; "
        "fill_standard_streams(); confirm('go?')"
    )
    done = shell(f'$PY -c "{code}" <&- >&-', tmp_path)
    assert "there is no terminal to ask on; nothing was changed" in done.stderr


def test_children_do_not_write_into_files_of_hpcrl(tmp_path: Path) -> None:
    """The next file that is opened would have had the number of the missing standard output."""
    code = (
        "import subprocess; from hpcrl.cli.streams import *; fill_standard_streams(); "
        "file = open('ours', 'w'); subprocess.run(['echo', 'of a child']); file.write('ours'); print('gone')"
    )
    shell(f'$PY -c "{code}" <&- >&- 2>err', tmp_path)
    assert (tmp_path / "ours").read_text() == "ours"
    assert (tmp_path / "err").read_text() == ""
