"""Times of log lines: what a line says, in the zone that it, its file or its run says."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path

#: ``2026-01-31 12:00:00,123+0100`` of hpcrl; without a zone of logging; with a dot or a T elsewhere
_ISO_TIME = re.compile(r"\[?(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[.,](\d{1,6})\d*(Z|[+-]\d\d:?\d\d)?")
#: ``W0131 12:00:00.123456`` of torch and glog
_GLOG_TIME = re.compile(r"\[?[IWEFD](\d\d)(\d\d) (\d\d:\d\d:\d\d)\.(\d{1,6})")
_LOOK_BYTES = 1 << 16
_LOOK_FILES = 8


class LogClock:
    """Times of the lines of one file: the time in a line, else the time of the previous one.

    Programs of others write times without a zone. Theirs is the one of our lines in the same file, else in other files
    of the attempt, else the reader's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_s = 0.0
        self._zone: tzinfo | None = None
        self._looked = False
        self._known: tuple[str, float] | None = None
        self._year = datetime.fromtimestamp(path.stat().st_mtime).year

    def time_of(self, line: str) -> float:
        """Return seconds since the epoch; 0 where no line so far contained a time."""
        if match := _ISO_TIME.match(line):
            second, fraction, zone = f"{match[1]} {match[2]}", match[3], match[4]
        elif match := _GLOG_TIME.match(line):
            second, fraction, zone = f"{self._year}-{match[1]}-{match[2]} {match[3]}", match[4], None
        else:
            return self._last_s
        with contextlib.suppress(ValueError, OverflowError):  # digits that are no date
            # the lines of a file are in order, even where the clocks of its writers differ
            self._last_s = max(self._last_s, self._second(second, zone) + float(f"0.{fraction}"))
        return self._last_s

    def _second(self, text: str, zone: str | None) -> float:
        """Return a time without its fraction; most lines have the second of the one before."""
        key = f"{text}{zone}"
        if self._known is None or self._known[0] != key:
            own = _read_zone(zone)
            self._zone = own or self._zone
            moment = datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=own or self._usual_zone())
            self._known = key, moment.timestamp()
        return self._known[1]

    def _usual_zone(self) -> tzinfo | None:
        """Return the zone of lines that do not say theirs; None is the reader's."""
        if self._zone is None and not self._looked:
            self._looked = True
            siblings = sorted(self._path.parent.parent.glob("*/*.log")) if self._path.suffix == ".log" else []
            self._zone = _first_zone([self._path, *siblings[:_LOOK_FILES]])
        return self._zone


def _read_zone(text: str | None) -> tzinfo | None:
    if text is None:
        return None
    if text == "Z":
        return UTC
    digits = text[1:].replace(":", "")
    offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    with contextlib.suppress(ValueError):  # more than a day
        return timezone(-offset if text[0] == "-" else offset)
    return None


def _first_zone(paths: Iterable[Path]) -> tzinfo | None:
    """Return the zone of the first line that says one."""
    for path in paths:
        with contextlib.suppress(OSError):
            with path.open("rb") as stream:
                head = stream.read(_LOOK_BYTES).decode(errors="replace")
            for line in head.splitlines():
                match = _ISO_TIME.match(line)
                if match and (zone := _read_zone(match[4])) is not None:
                    return zone
    return None
