"""What processes take while a bench looks at them: processors, memory, and how late this machine lets threads run."""

from __future__ import annotations

import threading
import time
from typing import Any

import psutil


class IdleLag(threading.Thread):
    """How late a thread is that only sleeps: what the machine adds to the lag of every event loop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.late_ms: list[float] = []
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            before = time.monotonic()
            time.sleep(0.01)
            self.late_ms.append(max(0.0, 1e3 * (time.monotonic() - before - 0.01)))

    def __enter__(self) -> IdleLag:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


class Alone:
    """A process without its children."""

    def __init__(self, process: psutil.Process) -> None:
        self.process = process

    def is_running(self) -> bool:
        return bool(self.process.is_running())

    def each(self) -> list[psutil.Process]:
        return [self.process]


class Below(Alone):
    """The children of a process, and theirs."""

    def each(self) -> list[psutil.Process]:
        return list(self.process.children(recursive=True))


def cpu(processes: dict[str, Any]) -> dict[str, float]:
    """Return CPU seconds of processes, by name."""
    return {name: sum(sum(each.cpu_times()[:2]) for each in _each(process)) for name, process in processes.items()}


def memory(process: Any) -> int:
    """Return the resident bytes of a process, or of several."""
    total = 0
    for each in _each(process):
        try:
            total += each.memory_info().rss
        except psutil.Error:
            continue
    return total


def _each(process: Any) -> list[psutil.Process]:
    return [process] if isinstance(process, psutil.Process) else process.each()
