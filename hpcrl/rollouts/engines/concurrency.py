"""How many rollouts engines can take: a window for each, grown by addition and cut by multiplication.

Too few in flight leave an engine idle; too many make it queue, or take KV from requests that run and compute it again
(preemption). The knee moves with the length of rollouts, so it is looked for while the run goes on. The sum of the
windows is the limit of rollouts in flight. What staleness allows is not touched: the scheduler takes the lower of both.

A cut takes effect when rollouts have ended, which may take minutes. Until then nothing is cut or grown again, so that
one congestion is answered once. A window grows only where the limit is what holds rollouts back, and only below
``kv_low``; between ``kv_low`` and ``kv_high`` it rests.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from hpcrl.config.recipe import AdaptiveConcurrencyConfig

__all__ = ["AdaptiveLimit", "Cut", "Pressure"]

_GROWTH = 1 / 16
"""What is added with each look, as a share of the window that the last cut left: the knee is somewhere there."""
_QUEUE = 0.25
"""Waiting requests for each running one that are a queue ..."""
_QUEUE_LOOKS = 3
"""... where they are seen so often in a row: a group that just came waits for a moment too."""


class Pressure(NamedTuple):
    """What an engine says about its load.

    Attributes
    ----------
    running, waiting:
        Requests in its batch, and in its queue.
    kv_usage:
        Share of KV in use.
    preemptions:
        Requests that had to give their KV back, since its start.
    """

    running: int
    waiting: int
    kv_usage: float
    preemptions: int


class Cut(NamedTuple):
    """A window was cut.

    Attributes
    ----------
    engine:
        Whose.
    window:
        What it is now, in rollouts.
    why:
        In words.
    """

    engine: Hashable
    window: float
    why: str


class AdaptiveLimit:
    """The windows of all engines that serve.

    Attributes
    ----------
    windows:
        Rollouts by engine.
    """

    def __init__(self, config: AdaptiveConcurrencyConfig, *, least: int, most: int) -> None:
        """Begin with ``most``.

        Parameters
        ----------
        least:
            One group: below it nothing could start.
        most:
            What the recipe and the bound of staleness allow.
        """
        self._config, self._least, self._most = config, least, max(least, most)
        self.windows: dict[Hashable, float] = {}
        self._left: dict[Hashable, float] = {}
        self._preemptions: dict[Hashable, int] = {}
        self._queued: dict[Hashable, int] = {}

    @property
    def limit(self) -> int:
        """Rollouts that may be in flight."""
        if not self.windows:
            return self._most
        return min(self._most, max(self._least, int(sum(self.windows.values()))))

    def look(self, engines: Mapping[Hashable, Pressure | None], in_flight: int) -> list[Cut]:
        """Take in what the engines say, every two seconds or so.

        Parameters
        ----------
        engines:
            All that serve; None where one does not say how it is.
        in_flight:
            Rollouts in flight.
        """
        self._admit(engines)
        settled = in_flight <= self.limit
        held_back = in_flight + self._least > self.limit
        # what is in flight fills the limit up to whole groups
        share = (in_flight + self._least - 1) / max(1, len(engines))
        cuts = []
        for engine, pressure in engines.items():
            if pressure is None:
                continue
            why = self._congestion(engine, pressure)
            if why and settled:
                window = self._config.decrease * min(self.windows[engine], share)
                self.windows[engine] = self._left[engine] = max(self._least / len(engines), window)
                self._queued[engine] = 0
                cuts.append(Cut(engine, self.windows[engine], why))
            elif not why and settled and held_back and pressure.kv_usage < self._config.kv_low and not pressure.waiting:
                more = max(1.0, _GROWTH * self._left.get(engine, self.windows[engine]))
                self.windows[engine] = min(self._most / len(engines), self.windows[engine] + more)
        return cuts

    def _admit(self, engines: Mapping[Hashable, Pressure | None]) -> None:
        """Engines come with the window of the others, and leave with theirs."""
        for known in (self.windows, self._left, self._preemptions, self._queued):
            for gone in known.keys() - engines.keys():
                del known[gone]
        even = self._most / max(1, len(engines))
        usual = sum(self.windows.values()) / len(self.windows) if self.windows else even
        for engine in engines.keys() - self.windows.keys():
            self.windows[engine] = min(even, usual)

    def _congestion(self, engine: Hashable, pressure: Pressure) -> str:
        """Why the engine has too much, in words; empty where it has not."""
        before = self._preemptions.get(engine, pressure.preemptions)
        self._preemptions[engine] = pressure.preemptions
        queues = pressure.waiting > _QUEUE * max(1, pressure.running)
        self._queued[engine] = self._queued.get(engine, 0) + 1 if queues else 0
        # a lower count is that of a process that was started anew
        if pressure.preemptions > before:
            return f"{pressure.preemptions - before} requests gave their KV back"
        if pressure.kv_usage >= self._config.kv_high:
            return f"KV is {pressure.kv_usage:.0%} full"
        if self._queued[engine] >= _QUEUE_LOOKS:
            return f"{pressure.waiting} requests wait, {pressure.running} run"
        return ""
