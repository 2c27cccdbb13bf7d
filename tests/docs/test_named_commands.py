"""Commands that hints, docstrings and documents name exist, with these options and all that they require."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hpcrl.cli.main import app

ROOT = Path(__file__).parents[2]
#: the reference is made from the commands themselves
DOCUMENTS = sorted(
    {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")} - {ROOT / "docs/cli.md"}
)
COMMAND = typer.main.get_command(app)
#: a mention ends where a sentence, a code span or a shell command does
MENTION = re.compile(r"(?<![\w/.\-])hpcrl ((?:[a-z-]+)(?:(?! then | {3})[^`\n;()|&<>#])*)")
OPTION = re.compile(r"-{1,2}[a-zA-Z][\w-]*(=.*)?[.,:\]]?")
#: stands for what is filled in
FILLED = "X1"


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words begin with, and the words behind it; None where there is none."""
    command: Any = COMMAND
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            if command.name == "plan" or (words and "plan" in command.commands and words[0] == "plan"):
                return command.commands["show"], words
            return (command if command is not COMMAND else None), words
        command, words = command.commands[words[0]], words[1:]
    return command, words


def strings(path: Path) -> Iterator[str]:
    """Every text of a module, with a stand-in for what is computed."""
    inside = set[int]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(value) for value in node.values}
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else FILLED for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def problems_of_mention(text: str) -> str:
    """What is wrong with a command in a sentence; empty where nothing is."""
    words = text.replace("'", " ").replace('"', " ").split()
    command, rest = find(words)
    if command is None:
        return ""
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
    given = [
        word.split("=")[0].rstrip(".,:]") for word in rest if re.fullmatch(r"-{1,2}[a-zA-Z][\w-]*(=.*)?[.,:\]]?", word)
    ]
    if strange := [word for word in given if word not in options]:
        return f"has no {', '.join(strange)}"
    # a command with an argument is one to type; without, it is only named
    if not rest or not re.match(r"[A-Z]{2,}|X1|\S*(?:\.yaml|/)", rest[0]):
        return ""
    required = [param.opts for param in command.params if param.param_type_name == "option" and param.required]
    missing = [opts[0] for opts in required if not set(opts) & set(given)]
    return f"lacks {', '.join(missing)}" if missing else ""


def test_the_search_finds_what_is_wrong() -> None:
    assert "lacks --output" in problems_of_mention("checkpoint export RUN")
    assert "has no --nowhere" in problems_of_mention("submit RECIPE --nowhere")
    assert problems_of_mention("checkpoint export RUN -o DIR") == ""
    assert problems_of_mention("plan RECIPE --env") == ""
    assert problems_of_mention("submit starts all of it") == ""


@pytest.mark.parametrize("room", sorted(p.name for p in (ROOT / "hpcrl").iterdir() if p.suffix == ".py" or p.is_dir()))
def test_commands_in_texts_of_the_code(room: str) -> None:
    path = ROOT / "hpcrl" / room
    wrong = []
    for module in [path] if path.suffix else sorted(path.rglob("*.py")):
        for text in strings(module):
            for match in MENTION.finditer(text):
                if problem := problems_of_mention(match[1]):
                    wrong.append(f"{module.relative_to(ROOT)}: hpcrl {match[1].strip()}: {problem}")
    assert not wrong, "\n".join(wrong)


def typed_lines(text: str) -> Iterator[str]:
    """Command lines of code blocks, indented or fenced, in one line each."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if not re.match(r"(?: {4,}|\$ )\s*(?:\.venv/bin/)?hpcrl ", line) or "──" in line:
            continue
        # what follows behind a gap explains the command
        for part in re.split(r"&&|\|\||\s\|\s|;", re.split(r" #|(?<=\S) {3,}", line)[0]):
            words = part.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if words.startswith("hpcrl "):
                yield words.removeprefix("hpcrl ").split(" >")[0].strip()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents(path: Path) -> None:
    text, wrong = path.read_text(), []
    for match in MENTION.finditer(text):
        if problem := problems_of_mention(match[1]):
            wrong.append(f"hpcrl {match[1].strip()}: {problem}")
    for line in typed_lines(text):
        try:
            words = shlex.split(line.replace("…", "x").replace("...", "x"))
        except ValueError:
            continue
        command, rest = find(words)
        if command is None or hasattr(command, "commands"):
            if words and not words[0].startswith(("-", "(")) and (command is None or rest):
                wrong.append(f"hpcrl {line}: no such command")
            continue
        if "--help" in rest or "-h" in rest:
            continue
        # what is typed in place of capital letters is not here
        rest = [word for word in rest if not re.fullmatch(r"\[.*\]|\[.*|.*\]", word)]
        try:
            command.make_context(command.name, list(rest))
        except Exception as error:  # noqa: BLE001 - of click, in either of two versions of it
            kind = type(error).__name__
            if kind != "BadParameter":
                wrong.append(f"hpcrl {line}: {kind}: {error}")
    assert not wrong, "\n".join(wrong)
