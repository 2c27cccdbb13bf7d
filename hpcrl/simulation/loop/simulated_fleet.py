"""All engines: the assignment of groups, weight updates at each engine's own pace, and prefill engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from hpcrl.planning.distributions import Draw
from hpcrl.simulation.loop.clock import Clock
from hpcrl.simulation.loop.engine import SimulatedEngine
from hpcrl.simulation.loop.records import Place, Replica, Rollout
from hpcrl.simulation.loop.simulated_host import Host


class PrefillPool:
    """Engines that compute prompts only: one queue, several servers."""

    def __init__(self, clock: Clock, *, servers: int, per_token_s: float, per_request_s: float) -> None:
        self._clock, self._per_token_s, self._per_request_s = clock, per_token_s, per_request_s
        self._free_s = [0.0] * servers
        self.busy_s = 0.0

    def submit(self, rollout: Rollout) -> None:
        """Compute what is new of a context, then hand it to the rollout's engine."""
        tokens = rollout.prefill if rollout.place is Place.CACHED else rollout.context
        if rollout.turn == 0:
            # first come, first served: the first member of a group computes the prompt for its siblings
            tokens = max(1.0, tokens - rollout.group.prefilled)
            rollout.group.prefilled = rollout.context
        seconds = tokens * self._per_token_s + self._per_request_s
        begin = max(self._clock.now, self._free_s[0])
        heapreplace(self._free_s, begin + seconds)
        self.busy_s += seconds
        self._clock.at(begin + seconds, self._done, rollout)

    def stall(self, seconds: float) -> None:
        """Stall all engines for ``seconds``, because their weights change."""
        now = self._clock.now
        self._free_s = [max(free, now) + seconds for free in self._free_s]
        heapify(self._free_s)

    def _done(self, rollout: Rollout) -> None:
        if rollout.alive:
            rollout.prefill = 0.0
            rollout.engine.submit(rollout, computed=True)


class Fleet:
    """The engines of an attempt, as `hpcrl.rollouts.engines.pool` and `hpcrl.rollouts.weights.updates` treat them.

    Attributes
    ----------
    engines:
        The replicas that say tokens.
    version:
        Policy version that all of them serve (the lowest).
    choose:
        Says which version they should serve, given the newest.
    """

    def __init__(
        self,
        clock: Clock,
        engines: list[SimulatedEngine],
        *,
        read_s: Draw,
        load_s: Draw,
        host: Host,
        pause: bool,
        served: Callable[[int], None],
        ungate: Callable[[Rollout], None],
        prefill: PrefillPool | None,
        version: int,
    ) -> None:
        """Take engines that serve ``version``; ``served`` is called with each version that all serve.

        Parameters
        ----------
        read_s, load_s:
            Draw the seconds of fetching a version, and of loading it.
        pause:
            Freeze an engine while it loads.
        ungate:
            Called with each new rollout that has waited for an update.
        """
        self._clock, self.engines, self._pause = clock, engines, pause
        self._read_s, self._load_s = read_s, load_s
        self._host = host
        self._served, self._ungate, self._prefill = served, ungate, prefill
        for engine in engines:
            engine.version = version
        self.version = self._target = version
        self._versions = Counter({version: len(engines)})
        self._loading = self._holds = 0
        self._held: list[Callable[[], None]] = []
        self._by_load = [(0, engine.index) for engine in engines]
        self.choose: Callable[[int], int] = lambda newest: newest

    # -- load

    def assign(self, rollouts: int) -> SimulatedEngine:
        """Return the engine with the least load (the first of equals), and add ``rollouts`` to its load."""
        by_load = self._by_load
        while True:
            load, index = by_load[0]
            engine = self.engines[index]
            if engine.load == load:
                break
            heappop(by_load)
        engine.load += rollouts
        heapreplace(by_load, (engine.load, index))
        return engine

    def leave(self, engine: Replica) -> None:
        """Remove a rollout that has ended from the load of its engine."""
        engine.load -= 1
        heappush(self._by_load, (engine.load, engine.index))
        if len(self._by_load) > 64 + 16 * len(self.engines):
            self._by_load = [(engine.load, engine.index) for engine in self.engines]
            heapify(self._by_load)

    def submit(self, rollout: Rollout) -> None:
        """Send a request to its engine, through a prefill engine where there are some."""
        if not rollout.alive:
            return
        if self._prefill is not None:
            self._prefill.submit(rollout)
        else:
            rollout.engine.submit(rollout)

    def set_speed(self, speed: float) -> None:
        """Set the speed of all engines."""
        for engine in self.engines:
            engine.set_speed(speed)

    # -- versions

    def announce(self, version: int) -> None:
        """Announce that ``version`` is published."""
        if version <= self._target:
            return
        self._target = version
        if self._prefill is not None and self._pause:
            self._prefill.stall(self._load_s())
        self.follow()

    def hold(self, ready: Callable[[], None]) -> None:
        """Begin no update until `unhold`; ``ready`` is called when none runs."""
        self._holds += 1
        if self._loading:
            self._held.append(ready)
        else:
            ready()

    def unhold(self) -> None:
        """Permit updates to begin again."""
        self._holds -= 1
        self.follow()

    def follow(self) -> None:
        """Load what engines may load now."""
        for engine in self.engines:
            self._begin(engine)

    def _begin(self, engine: SimulatedEngine) -> None:
        target = self.choose(self._target)
        if self._holds or engine.loading is not None or engine.version >= target:
            return
        engine.loading = target
        self._loading += 1
        read_s = self._read_s()
        if read_s:
            self._host.run(read_s, self._fetched, engine)
        else:
            self._fetched(engine)

    def _fetched(self, engine: SimulatedEngine) -> None:
        if self._pause:
            engine.freeze()
        self._host.run(self._load_s(), self._loaded, engine)

    def _loaded(self, engine: SimulatedEngine) -> None:
        assert engine.loading is not None
        version, before = engine.loading, engine.version
        engine.version, engine.loading = version, None
        self._loading -= 1
        self._versions[before] -= 1
        if not self._versions[before]:
            del self._versions[before]
        self._versions[version] += 1
        if self._pause:
            engine.thaw()
        gate, engine.gate = engine.gate, []
        for rollout in gate:
            self._ungate(rollout)
        self.version = min(self._versions)
        if self.version == version:
            self._served(version)
        self._begin(engine)
        if not self._loading:
            held, self._held = self._held, []
            for ready in held:
                ready()
