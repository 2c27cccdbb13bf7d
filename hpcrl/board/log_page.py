"""Logs of the roles of a run: the newest lines, by role, replica and attempt, with a search."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpcrl.board.board_state import Board, BoardAnswer, view_stamp
from hpcrl.board.file_stamps import files_stamp
from hpcrl.board.run_page import run_head
from hpcrl.errors import UsageError
from hpcrl.reporting.screen_text import visible, without_colours
from hpcrl.runs.observe import observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.logs import SUPERVISOR, LogFile, LogFilter, LogLine, find_log_files, iterate_logs

MOST_BYTES = 32 << 20
"""Maximum bytes of logs that one look reads, of all files together."""
_LINES = (200, 1000, 5000)
_LONGEST = 4000
"""Maximum characters of a line that is shown."""
_MOST_CHOICES = 300


def log_page(board: Board, key: str, run: RunDir, query: Mapping[str, str], seen: str) -> BoardAnswer:
    """Return the newest lines that match.

    Raises
    ------
    UsageError
        The role, replica or attempt does not exist.
    """
    view = observe(run)
    role, words = query.get("role", ""), query.get("q", "")[:200]
    lines = next((count for count in _LINES if str(count) == query.get("lines")), _LINES[0])
    attempt = _whole(query.get("attempt", ""), "attempt")
    # a search for words: expressions of a person could take minutes, and would block all pages
    pattern = re.compile(re.escape(words), re.IGNORECASE) if words else None
    wanted = LogFilter.make(run, role=role or None, attempt=attempt)._replace(grep=pattern)
    files = find_log_files(run, wanted)
    tag = board.tag("logs", key, view_stamp(view), str(sorted(query.items())), files_stamp(file.path for file in files))
    if tag == seen:
        return BoardAnswer(None, tag)
    size = sum(_size(file) for file in files)
    found = list(iterate_logs(run, wanted, lines=lines, most_bytes=MOST_BYTES)) if files else []
    # before what was searched is marked: marks divide a text
    texts = board.scan([run]).cleaned([visible(without_colours(line.line)) for line in found])
    values: dict[str, Any] = {
        "key": key,
        "run": run_head(view),
        "place": "logs",
        "title": f"{view.name} · logs",
        "lines": [_line(line, text, pattern) for line, text in zip(found, texts, strict=True)],
        "role": role,
        "roles": _roles(run, wanted.attempt),
        "attempt": wanted.attempt,
        "attempts": run.attempts(),
        "given_attempt": attempt,
        "q": words,
        "count": lines,
        "counts": _LINES,
        "files": len(files),
        "left_out": max(0, size - MOST_BYTES) if words else 0,
        "most": MOST_BYTES,
    }
    return board.render("logs.html.j2", tag, of=[run], **values)


def _line(line: LogLine, text: str, pattern: re.Pattern[str] | None) -> dict[str, Any]:
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} … {len(text) - _LONGEST:,} more characters"
    parts = [(False, text)] if pattern is None else _marked(text, pattern)
    return {"label": _label(line), "parts": parts}


def _label(line: LogLine) -> str:
    return f"{line.role} {line.replica}" + (f".{line.rank}" if line.rank else "")


def _marked(text: str, pattern: re.Pattern[str]) -> list[tuple[bool, str]]:
    """Return a text in parts, and of each whether it is what was searched."""
    parts, at = list[tuple[bool, str]](), 0
    for match in pattern.finditer(text):
        parts += [(False, text[at : match.start()]), (True, match[0])]
        at = match.end()
    return [part for part in [*parts, (False, text[at:])] if part[1]]


def _roles(run: RunDir, attempt: int) -> list[str]:
    """Return the choices: roles and their replicas that have logs, and the supervisor."""
    found: dict[str, None] = {}
    for file in find_log_files(run, LogFilter(attempt)):
        found[file.role] = None
        found[f"{file.role}/{file.replica}"] = None
    return [*sorted(found)[:_MOST_CHOICES], SUPERVISOR]


def _whole(text: str, name: str) -> int | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"{text[:40]!r} is not the number of an {name}")
    return int(text)


def _size(file: LogFile) -> int:
    try:
        return file.path.stat().st_size
    except OSError:
        return 0
