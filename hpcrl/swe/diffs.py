"""Unified diffs of text files, as rows of tasks have them: read strictly, applied exactly, made anew."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcrl.errors import UsageError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NOTHING = "/dev/null"
_NO_NEWLINE = "\\"


class DiffError(UsageError):
    """A diff cannot be read, or does not fit the files that it is applied to."""


@dataclass(frozen=True, slots=True)
class _Hunk:
    """Lines that are replaced by others, from a line of the old file on (0 is the first)."""

    begin: int
    old: list[str]
    new: list[str]


@dataclass(frozen=True, slots=True)
class FileDiff:
    """Changes of one file.

    Attributes
    ----------
    old, new:
        Paths before and after; None where there is no file.
    hunks:
        Changed places in order.
    """

    old: str | None
    new: str | None
    hunks: list[_Hunk] = field(default_factory=list)


def parse_diff(text: str) -> list[FileDiff]:
    """Read a unified diff, with or without the lines that git adds.

    Raises
    ------
    DiffError
        A line is not as it should be, or the diff has binary files.
    """
    files: list[FileDiff] = []
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    number = 0
    while number < len(lines):
        line = lines[number].rstrip("\n")
        if line.startswith(("Binary files ", "GIT binary patch")):
            raise DiffError(f"line {number + 1} of the diff: binary files are not read")
        if line.startswith(("rename to ", "copy to ")):
            raise DiffError(f"line {number + 1} of the diff: renamed and copied files are not read")
        if line.startswith("--- ") and number + 1 < len(lines) and lines[number + 1].startswith("+++ "):
            files.append(FileDiff(_path(line[4:]), _path(lines[number + 1].rstrip("\n")[4:])))
            number += 2
            while number < len(lines) and lines[number].startswith("@@"):
                number, hunk = _read_hunk(lines, number)
                files[-1].hunks.append(hunk)
            continue
        number += 1
    if text.strip() and not files:
        raise DiffError("the text is not a unified diff: it has no lines '--- a/FILE' and '+++ b/FILE'")
    return files


def _path(name: str) -> str | None:
    name = name.partition("\t")[0].strip()
    if name == _NOTHING:
        return None
    path = name[2:] if name.startswith(("a/", "b/")) else name
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise DiffError(f"the diff names the file {name!r}, which is outside of the repository")
    return path


def _read_hunk(lines: list[str], number: int) -> tuple[int, _Hunk]:
    head = _HUNK.match(lines[number])
    if head is None:
        raise DiffError(f"line {number + 1} of the diff: the hunk has no line numbers")
    first, count = int(head[1]), int(head[2] or 1)
    wanted = int(head[4] or 1)
    old: list[str] = []
    new: list[str] = []
    number += 1
    while number < len(lines) and (len(old) < count or len(new) < wanted):
        line = lines[number]
        mark, rest = line[:1], line[1:]
        if mark == "\n":
            mark, rest = " ", "\n"  # editors cut the blank of an empty line
        if mark in (" ", "-"):
            old.append(rest)
        if mark in (" ", "+"):
            new.append(rest)
        if mark == _NO_NEWLINE:
            _cut_newline(lines[number - 1][:1], old, new)
        elif mark not in (" ", "-", "+"):
            raise DiffError(f"line {number + 1} of the diff: it begins with {mark!r}")
        number += 1
    if number < len(lines) and lines[number].startswith(_NO_NEWLINE):
        _cut_newline(lines[number - 1][:1], old, new)
        number += 1
    if len(old) != count or len(new) != wanted:
        raise DiffError(f"line {number} of the diff: the hunk has another number of lines than it says")
    return number, _Hunk(first - 1 if count else first, old, new)


def _cut_newline(mark: str, old: list[str], new: list[str]) -> None:
    """Take the newline from the line before the note that there is none."""
    for side, marks in ((old, " -"), (new, " +")):
        if mark in marks and side:
            side[-1] = side[-1].removesuffix("\n")


def apply_diff(diff: list[FileDiff], files: Mapping[str, str], *, reverse: bool = False) -> dict[str, str | None]:
    """Return the text of each changed file after a diff; None for a file that is removed.

    Parameters
    ----------
    files:
        Text of the files before, by path.
    reverse:
        Undo the diff: ``files`` are those after it.

    Raises
    ------
    DiffError
        A file does not have the lines that the diff takes from it.
    """
    changed: dict[str, str | None] = {}
    for each in diff:
        before, after = (each.new, each.old) if reverse else (each.old, each.new)
        text = ""
        if before is not None:
            if before not in files:
                raise DiffError(f"the diff changes {before}, which does not exist")
            text = files[before]
        changed_text = _changed(before or after or "", text, each.hunks, reverse=reverse)
        if before is not None and before != after:
            changed[before] = None
        if after is not None:
            changed[after] = changed_text
    return changed


def _changed(path: str, text: str, hunks: list[_Hunk], *, reverse: bool) -> str:
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    shift = 0
    for hunk in hunks:
        old, new = (hunk.new, hunk.old) if reverse else (hunk.old, hunk.new)
        # the numbers are those of the old file; a reversed diff has removed or added lines before this hunk already
        begin = hunk.begin + shift
        found = _find(lines, old, begin)
        if found is None:
            raise DiffError(f"the diff does not fit {path}: line {begin + 1} is not as it says")
        lines[found : found + len(old)] = new
        shift = found - hunk.begin + len(new) - len(old) if not reverse else found - hunk.begin
    return "".join(lines)


def invert_diff(text: str) -> str:
    """Return the diff that undoes a diff (DiffError where it cannot be read)."""
    parts = []
    for each in parse_diff(text):
        old, new = (f"{side}/{path}" if path else _NOTHING for side, path in (("a", each.new), ("b", each.old)))
        parts.append(f"--- {old}\n+++ {new}\n")
        shift = 0
        for hunk in each.hunks:
            parts.append(_inverted(hunk, shift))
            shift += len(hunk.new) - len(hunk.old)
    return "".join(parts)


def _inverted(hunk: _Hunk, shift: int) -> str:
    """Return a hunk with its sides exchanged; ``shift`` lines were added before it."""
    lines = [f"-{line}" for line in hunk.new] + [f"+{line}" for line in hunk.old]
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    old, new = (begin + bool(side) for begin, side in ((hunk.begin, hunk.old), (hunk.begin + shift, hunk.new)))
    return f"@@ -{new},{len(hunk.new)} +{old},{len(hunk.old)} @@\n{text}"


def _find(lines: list[str], wanted: list[str], begin: int) -> int | None:
    """Return where lines stand: at the place that is named, or at the only other place where they do."""
    size = len(wanted)
    if lines[begin : begin + size] == wanted and 0 <= begin <= len(lines):
        return begin
    places = [at for at in range(len(lines) - size + 1) if lines[at : at + size] == wanted] if size else []
    return places[0] if len(places) == 1 else None


def make_diff(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> str:
    """Return the unified diff between two sets of files; None stands for a file that is not there."""
    parts = []
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        names = (f"a/{path}" if old is not None else _NOTHING, f"b/{path}" if new is not None else _NOTHING)
        before_lines, after_lines = (re.findall(r"[^\n]*\n|[^\n]+", side or "") for side in (old, new))
        for line in difflib.unified_diff(before_lines, after_lines, *names):
            parts.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)
