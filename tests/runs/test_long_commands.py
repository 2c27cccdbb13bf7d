"""Commands that take long say what they do: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from runs_testing import make_run, write_status, write_steps

from hpcrl.cli.main import main
from hpcrl.cli.progress import working
from hpcrl.runs.status import RunState

COMMANDS = {
    "report": (["report", "run-1"], "reading and plotting the steps of run-1"),
    "plan profile": (
        ["plan", "profile", "--device", "cpu", "--ranks", "1", "--minutes", "0.05", "-o", "table.yaml"],
        "measuring kernels on cpu, for 0.05 min at most",
    ),
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run to draw; and progress does not wait until two seconds are over."""
    run = make_run(tmp_path / "runs")
    write_status(run, RunState.COMPLETED)
    write_steps(run, 40)
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(working.__wrapped__.__kwdefaults__, "quiet_s", 0.0)  # type: ignore[attr-defined]


def said_on(stream: io.StringIO, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command that ends well writes to its standard error."""
    monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0, stream.getvalue()
    return stream.getvalue()


@pytest.mark.parametrize("command", [pytest.param(n, marks=[pytest.mark.slow] * (n != "report")) for n in COMMANDS])
def test_a_terminal_shows_the_reason_of_a_delay(
    command: str, at_once: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = COMMANDS[command]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    said = said_on(Terminal(), arguments, monkeypatch)
    assert words in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
    assert "\x1b" not in capsys.readouterr().out


def test_no_progress_is_written_to_a_pipe(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_on(io.StringIO(), COMMANDS["report"][0], monkeypatch) == ""
