"""Adaptive limit of rollouts in flight: a window per engine, with additive increase and multiplicative decrease.

With too few in flight an engine is idle; with too many it queues requests, or takes the KV cache of running requests
and recomputes it (preemption). The optimum changes with the length of rollouts, so the search continues during the run.
The sum of the windows is the limit of rollouts in flight. The bound of staleness is independent of it: the scheduler
uses the lower of both.

A cut takes effect when rollouts have ended, which may take minutes. Until then nothing is cut or grown again, so that
one congestion causes one cut. A window grows only where it limits the rollouts in flight, and only below ``kv_low``;
between ``kv_low`` and ``kv_high`` it is unchanged.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from hpcrl.config.recipe import AdaptiveConcurrencyConfig

_GROWTH = 1 / 16
"""Growth of a window at each look, as a share of its size after the last cut, which is close to the optimum."""
_QUEUE = 0.25
"""Minimum ratio of waiting to running requests that counts as a queue."""
_QUEUE_LOOKS = 3
"""Number of consecutive looks with a queue that count as congestion: a new group waits for a moment, too."""


class Pressure(NamedTuple):
    """Load of an engine, as its metrics report it.

    Attributes
    ----------
    running, waiting:
        Requests in its batch, and in its queue.
    kv_usage:
        Fraction of the KV cache in use.
    preemptions:
        Requests whose KV cache was taken away (preempted) since the engine started.
    """

    running: int
    waiting: int
    kv_usage: float
    preemptions: int


class Cut(NamedTuple):
    """Reduction of a window.

    Attributes
    ----------
    engine:
        The engine.
    window:
        New size in rollouts.
    why:
        Reason in words.
    """

    engine: Hashable
    window: float
    why: str


class AdaptiveLimit:
    """Windows of all engines that serve.

    Attributes
    ----------
    windows:
        Maximum number of rollouts by engine.
    """

    def __init__(self, config: AdaptiveConcurrencyConfig, *, least: int, most: int) -> None:
        """Begin with ``most``.

        Parameters
        ----------
        least:
            One group: below it nothing could start.
        most:
            Maximum limit by the recipe and the bound of staleness.
        """
        self._config, self._least, self._most = config, least, max(least, most)
        self.windows: dict[Hashable, float] = {}
        self._left: dict[Hashable, float] = {}
        self._preemptions: dict[Hashable, int] = {}
        self._queued: dict[Hashable, int] = {}

    @property
    def limit(self) -> int:
        """Return how many rollouts may be in flight."""
        if not self.windows:
            return self._most
        return min(self._most, max(self._least, int(sum(self.windows.values()))))

    def look(self, engines: Mapping[Hashable, Pressure | None], in_flight: int) -> list[Cut]:
        """Update the windows with the pressure of engines; called about every two seconds.

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
        # rollouts in flight fill the limit up to whole groups
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
        """Add new engines with the window of the others, and remove the windows of engines that left."""
        for known in (self.windows, self._left, self._preemptions, self._queued):
            for gone in known.keys() - engines.keys():
                del known[gone]
        even = self._most / max(1, len(engines))
        usual = sum(self.windows.values()) / len(self.windows) if self.windows else even
        for engine in engines.keys() - self.windows.keys():
            self.windows[engine] = min(even, usual)

    def _congestion(self, engine: Hashable, pressure: Pressure) -> str:
        """Return why the engine is overloaded, as text; empty where it is not."""
        before = self._preemptions.get(engine, pressure.preemptions)
        self._preemptions[engine] = pressure.preemptions
        queues = pressure.waiting > _QUEUE * max(1, pressure.running)
        self._queued[engine] = self._queued.get(engine, 0) + 1 if queues else 0
        # a lower count is that of a restarted process
        if pressure.preemptions > before:
            return f"{pressure.preemptions - before} requests lost their KV to others (preemption)"
        if pressure.kv_usage >= self._config.kv_high:
            return f"KV is {pressure.kv_usage:.0%} full"
        if self._queued[engine] >= _QUEUE_LOOKS:
            return f"{pressure.waiting} requests wait, {pressure.running} run"
        return ""
