"""Files that commands write where a person says: refused before the work, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hpcrl.cli.main import app, main
from hpcrl.cli.output_file import output_file
from hpcrl.errors import UsageError
from hpcrl.storage.files import written_whole

MAKE_THEIR_DIRECTORY = {("cluster", "init"), ("site", "bundle")}


def options(command: typer._click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from options(each, (*words, name))
    for parameter in command.params:
        if parameter.metavar == "FILE" and "-o" in parameter.opts:
            yield words, parameter.name or ""


FILES = dict(options(typer.main.get_command(app)))


def test_the_commands_that_write_a_file_are_found() -> None:
    assert {("report",), ("trace",), ("bundle",), ("rollouts", "export"), ("eval",)} <= FILES.keys()
    assert FILES.keys() >= MAKE_THEIR_DIRECTORY


@pytest.mark.parametrize("words", sorted(FILES.keys() - MAKE_THEIR_DIRECTORY), ids=" ".join)
def test_a_file_that_cannot_be_is_refused_before_any_work(words: tuple[str, ...], tmp_path: Path) -> None:
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    (option,) = (each for each in command.params if each.name == FILES[words])
    context = typer._click.Context(command)
    with pytest.raises(UsageError, match=f"there is no directory {tmp_path}/none\n    hint: "):
        option.process_value(context, str(tmp_path / "none/x"))
    with pytest.raises(UsageError, match=f"{tmp_path} is a directory"):
        option.process_value(context, str(tmp_path))
    assert str(option.process_value(context, str(tmp_path / "x"))) == str(tmp_path / "x")


def test_a_command_says_it_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["hpcrl", "report", "any", "-o", str(tmp_path / "none/x.html")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"hpcrl: there is no directory {tmp_path}/none\n")


def test_a_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert output_file("~/x.json") == str(tmp_path / "x.json")
    assert output_file(Path("~/x.json")) == tmp_path / "x.json"
    assert output_file(None) is None


def test_an_interrupted_file_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def interrupted() -> None:
        with written_whole(path) as part:
            part.write_text("half of a line")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    with written_whole(path) as part:
        part.write_text("whole\n")
    assert path.read_text() == "whole\n"


def test_a_file_of_another_process_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def overtaken() -> None:
        with written_whole(path) as part:
            part.write_text("mine\n")
            path.write_text("theirs\n")

    with pytest.raises(FileExistsError):
        overtaken()
    assert path.read_text() == "theirs\n"
    assert [each.name for each in tmp_path.iterdir()] == ["rows.jsonl"]
