"""What commands print into a pipe: whole lines without escapes, and help within 80 columns."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from hpcrl.cli.main import app, main

USUAL = (
    "recipe ls",
    "recipe show quickstart",
    "recipe check quickstart",
    "cluster ls",
    "cluster show h200-28",
    "cluster check local",
    "plan quickstart",
    "plan qwen3_30b_a3b_lowmem -c h200-28",
    "plan diff qwen3_30b_a3b qwen3_30b_a3b_lowmem -c h200-28",
    "plan nosuch",
    "submit quickstart --set trainer.stepz=3",
    "devcluster ls",
    "ls",
    "status",
)


def commands(group: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All commands, and groups of them."""
    yield path
    if isinstance(group, TyperGroup):
        for name, below in group.commands.items():
            yield from commands(below, (*path, name))


@pytest.fixture
def piped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell of 80 columns whose standard output and error are no terminal."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))


def printed(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Output and errors of a command, which ends as commands do."""
    monkeypatch.setattr(sys, "argv", ["hpcrl", *words])
    with pytest.raises(SystemExit):
        main()
    found = capsys.readouterr()
    return found.out + found.err


def test_a_command_alone_is_what_it_is_among_all(
    piped: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`main` makes no other command than the one that is called, where it knows its name."""
    hpcrl = get_command(app)
    assert isinstance(hpcrl, TyperGroup)
    for name in hpcrl.commands:
        alone = printed([name, "--help"], monkeypatch, capsys)
        hpcrl.main([name, "--help"], prog_name="hpcrl", standalone_mode=False)
        assert alone == capsys.readouterr().out, name
    everything = printed(["--help"], monkeypatch, capsys)
    assert all(f" {name} " in everything for name in hpcrl.commands)
    assert "Did you mean 'submit'?" in printed(["submitt"], monkeypatch, capsys)


def test_help_of_every_command_has_80_columns_and_no_broken_paragraphs(
    piped: None, capsys: pytest.CaptureFixture[str]
) -> None:
    hpcrl = get_command(app)
    paths = list(commands(hpcrl))
    assert len(paths) > 50
    for path in paths:
        hpcrl.main([*path, "--help"], prog_name="hpcrl", standalone_mode=False)
        text = capsys.readouterr().out
        lines = text.splitlines()
        assert f"Usage: {' '.join(('hpcrl', *path))}" in text
        assert "{" not in text.split("Usage:")[1].splitlines()[0], path
        assert "[[" not in text, path
        assert "<bool>" not in text, path
        assert "\x1b" not in text, path
        assert max(map(len, lines)) <= 80, path
        if not path:
            continue  # a list
        # a line of a paragraph ends early only where its next word would not fit
        for line, after in itertools.pairwise(lines):
            if line.startswith(" ") and line.strip() and after.startswith(" ") and after.strip():
                assert len(line.rstrip()) + len(after.split()[0]) >= 79, (path, line, after)


@pytest.mark.parametrize("command", USUAL)
def test_a_pipe_gets_no_escapes_and_no_blanks_at_ends(
    command: str, piped: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(command.split(), monkeypatch, capsys)
    assert text
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line != line.rstrip() and "│" not in line] == []
    assert "Traceback" not in text


def test_rows_of_a_pipe_are_whole(
    piped: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who looks for a path or a key with grep finds it in one piece."""
    text = printed(["recipe", "ls"], monkeypatch, capsys)
    assert all(line.endswith((".yaml", "path")) for line in text.splitlines())
    text = printed(["cluster", "check", "local"], monkeypatch, capsys)
    assert text.rstrip().endswith("rules checked; it has no Slurm to ask")


@pytest.fixture
def terminal(piped: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal of 80 columns, without colours."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)


def test_lists_on_a_narrow_terminal_leave_paths_out_and_keys_in_one_piece(
    terminal: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = printed(["recipe", "ls"], monkeypatch, capsys)
    assert "quickstart_vllm       Two small tasks on one machine, with two vLLM engines" in listed
    assert "quickstart.yaml" not in listed
    assert "--json" in listed.splitlines()[-1]
    shown = printed(["recipe", "show", "quickstart"], monkeypatch, capsys)
    row = next(line for line in shown.splitlines() if line.startswith("rollouts.rollouts_per_step "))
    assert row.split()[2].startswith("quickstart.yaml:")
    assert "supervision.orchestrator.restart_window_s " in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_files_of_one_name_are_distinguished_on_a_narrow_terminal(
    terminal: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "quickstart.yaml"
    own.write_text(f"extends: {Path(__file__).resolve().parents[2] / 'recipes/quickstart.yaml'}\nseed: 7\n")
    shown = printed(["recipe", "show", str(own)], monkeypatch, capsys)
    assert "".join(shown.split()).count("recipes/") > 0
    row = next(line for line in shown.splitlines() if line.startswith("seed "))
    assert not row.split()[2].startswith("quickstart.yaml")


def test_a_plan_that_does_not_fit_hangs_its_hints_on_a_narrow_terminal(
    terminal: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ["--set", "trainer.memory.activation_checkpointing=none"]
    shown = printed(["plan", "qwen3_30b_a3b", "-c", "h200-28", *whole], monkeypatch, capsys)
    verdict = shown.split("\n\n", maxsplit=1)[0].splitlines()
    assert verdict[0].startswith("DOES NOT FIT trainer gpu: ")
    assert verdict[1].startswith("    ")
    assert "largest: " in verdict[1]
    at = next(number for number, line in enumerate(verdict) if "activation_checkpointing=full (" in line)
    assert verdict[at].startswith("    hint: --set ")
    assert verdict[at + 1].startswith(" " * 10)
    assert max(map(len, verdict)) <= 80
    assert [line for line in verdict if line != line.rstrip()] == []


def test_a_search_on_a_narrow_terminal_says_what_it_shortened(
    terminal: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # so many tokens that the optimizer goes to the host
    settings = ["--set", "trainer.micro_batch_tokens=98304", "--set", "trainer.memory.activation_checkpointing=none"]
    shown = printed(
        ["plan", "search", "qwen3_30b_a3b", "-c", "h200-28", "--nodes", "4", *settings], monkeypatch, capsys
    )
    table = shown.split("\n\n", maxsplit=1)[0].splitlines()
    firsts = [line.split("  ")[0] for line in table]
    assert firsts[firsts.index("recipe,") + 1] == "does not fit"
    assert "opt., act.: optimizer states, activations on the host" in table
