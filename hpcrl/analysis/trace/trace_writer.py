"""Events of Chrome's trace event format, and their file.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are
microseconds. Slices of one thread must be nested: one begins and ends within another, or they do not overlap.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.runs.lenient import finite
from hpcrl.storage.files import atomic_write

Row = dict[str, Any]


class TraceWriter:
    """Collects events of processes and threads by their names.

    Attributes
    ----------
    events:
        All events, those of names included.
    """

    def __init__(self, zero_s: float) -> None:
        """Begin; ``zero_s`` is the time, in seconds since the epoch, that the trace begins with."""
        self.zero_s = zero_s
        self.events: list[Row] = []
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[int, str], int] = {}

    def slice(self, process: str, thread: str, name: str, begin_s: float, end_s: float, **about: Any) -> None:
        """Add a slice; its times are seconds since the epoch, and one without a duration is left out."""
        begin, end = self._us(begin_s), self._us(end_s)
        if end > begin:
            # the difference of rounded ends: neighbours touch, and children end within their parents
            self._add(process, thread, name, "X", begin, dur=round(end - begin, 3), args=finite(about))

    def instant(self, process: str, thread: str, name: str, time_s: float, **about: Any) -> None:
        """Add an instant that is drawn across the process."""
        self._add(process, thread, name, "i", self._us(time_s), s="p", args=finite(about))

    def counter(self, process: str, name: str, time_s: float, **values: float) -> None:
        """Add a sample of a counter; values that are not finite are left out."""
        known = {key: value for key, value in finite(values).items() if value is not None}
        if known:
            self._add(process, "", name, "C", self._us(time_s), args=known)

    def process(self, name: str) -> int:
        """Return the number of a process, which gets its name and its place in the order of first use."""
        if name not in self._processes:
            number = self._processes[name] = len(self._processes) + 1
            self._name("process_name", number, 0, {"name": name})
            self._name("process_sort_index", number, 0, {"sort_index": number})
        return self._processes[name]

    def _thread(self, process: int, name: str) -> int:
        if not name:
            return 0
        key = process, name
        if key not in self._threads:
            number = self._threads[key] = sum(other == process for other, _ in self._threads) + 1
            self._name("thread_name", process, number, {"name": name})
            self._name("thread_sort_index", process, number, {"sort_index": number})
        return self._threads[key]

    def _name(self, kind: str, process: int, thread: int, about: Row) -> None:
        self.events.append({"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": about})

    def _add(self, process: str, thread: str, name: str, phase: str, time: float, **more: Any) -> None:
        pid = self.process(process)
        tid = self._thread(pid, thread)
        self.events.append({"name": name, "cat": process, "ph": phase, "ts": time, "pid": pid, "tid": tid, **more})

    def _us(self, time_s: float) -> float:
        return max(0.0, round(1e6 * (time_s - self.zero_s), 3))


def write_trace(path: Path, events: Iterable[Row], about: Row) -> int:
    """Write a trace, compressed where the name ends in ``.gz``; return the bytes of the file.

    Parameters
    ----------
    about:
        ``otherData`` of the file.
    """
    data = b"".join(_encoded(events, about))
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    atomic_write(path, data)
    return len(data)


def _encoded(events: Iterable[Row], about: Row) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder()
    yield b'{"displayTimeUnit":"ms","otherData":' + encoder.encode(about) + b',"traceEvents":[\n'
    between = b""
    for event in events:
        yield between + encoder.encode(event)
        between = b",\n"
    yield b"\n]}\n"
