"""The ten tasks of a newcomer: the files are there, and the sentences that lead to them are in the pages named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/contributing-tasks.md").read_text(encoding="utf-8")
TASKS = PAGE.split("\n## ")[1:]
PATH = re.compile(r"`((?:hpcrl|tests|docs|templates|bench|recipes|clusters)/[\w./-]+)`")
DOOR = "- From another package:"


def words(text: str) -> str:
    return " ".join(text.split())


def parts(task: str) -> tuple[str, str]:
    """The lines about hpcrl itself, and those about other packages."""
    own, _, other = task.partition(DOOR)
    return own, other


def test_there_are_ten() -> None:
    assert [task.split(".")[0] for task in TASKS] == [str(number) for number in range(1, 11)]
    assert all("- Open: " in task and "- Edit: " in task for task in TASKS)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.split("\n")[0].replace(" ", "-"))
def test_named_files_are_there(task: str) -> None:
    own, other = parts(task)
    named = PATH.findall(own)
    assert named
    if (ROOT / "docs/extending.md").is_file():
        named += PATH.findall(other)
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.split("\n")[0].replace(" ", "-"))
def test_a_sentence_of_the_documentation_leads_there(task: str) -> None:
    quoted = words(" ".join(line[2:] for line in task.splitlines() if line.startswith("> ")))
    found = re.fullmatch(r"(.+) \(\[[\w.]+\]\(([\w./-]+)(?:#([\w-]+))?\)\)", quoted)
    assert found is not None
    sentence, page, section = found.groups()
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert sentence.strip("`") in words(text)
    headings = [re.sub(r"[^\w\s-]", "", line.lstrip("# ")).lower() for line in text.splitlines() if line[:1] == "#"]
    assert section is None or section in [heading.replace(" ", "-") for heading in headings]
