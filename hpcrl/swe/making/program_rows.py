"""Tasks of small repositories as rows for programs of ``kind: harness``: what a program may know of a task."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from hpcrl.storage.files import atomic_write
from hpcrl.swe.judging.prepared import TOOLS, PreparedTask, TaskPreparer
from hpcrl.swe.task import SweTask


class ProgramRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task without its solution.

    Attributes
    ----------
    prompt:
        The instruction.
    id:
        Id of the task, by which its tests are found.
    split:
        ``train`` or ``heldout``.
    files:
        Text of all files of the repository as the program finds it, by path.
    """

    prompt: str
    id: str
    split: str
    files: dict[str, str]


def write_program_rows(path: Path, tasks: Iterable[SweTask], preparer: TaskPreparer) -> None:
    """Write a row for each task.

    Raises
    ------
    UnicodeDecodeError
        A file of a repository is not UTF-8 text.
    """
    rows = (
        ProgramRow(prompt=task.instruction, id=task.id, split=task.split, files=_files(preparer.prepare(task)))
        for task in tasks
    )
    atomic_write(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _files(prepared: PreparedTask) -> dict[str, str]:
    found = {name: file.content.decode() for name, file in prepared.tree.items() if name != TOOLS}
    changed = {name: text for name, text in prepared.start.items() if text is not None}
    return {name: text for name, text in {**found, **changed}.items() if prepared.start.get(name, text) is not None}
