"""Progress of long commands: on a terminal, after a while, and nowhere else."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from hpcrl.cli.progress import working


def terminal(kind: str = "xterm") -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=True, width=80, _environ={"TERM": kind}), text


def test_what_takes_long_is_reported_with_how_much_is_done() -> None:
    console, text = terminal()
    with working("counting", console=console, quiet_s=0.0) as told:
        told.share(0.5, "counting sheep")
        deadline = time.monotonic() + 120
        while "50%" not in text.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "counting sheep" in text.getvalue()
    assert "50%" in text.getvalue()


def test_what_is_quick_says_nothing() -> None:
    console, text = terminal()
    with working("counting", console=console, quiet_s=60.0) as told:
        told.share(0.5)
    assert text.getvalue() == ""


def test_a_terminal_that_cannot_take_a_line_back_gets_nothing() -> None:
    console, text = terminal("dumb")
    with working("counting", console=console, quiet_s=0.0) as told:
        told.share(0.5)
        time.sleep(0.05)
    assert text.getvalue() == ""


def test_a_file_or_a_pipe_gets_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with working("counting", quiet_s=0.0) as told:
        told.share(0.5)
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_the_line_is_gone_after_an_error() -> None:
    console, text = terminal()

    def fails() -> None:
        with working("counting", console=console, quiet_s=0.0):
            time.sleep(0.05)
            raise ValueError("lost count")

    with pytest.raises(ValueError, match="lost count"):
        fails()
    # the cursor is shown again
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h")
