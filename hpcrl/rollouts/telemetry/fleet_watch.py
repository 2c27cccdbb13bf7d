"""Looks at the work of engines every two seconds: who samples, how full each is, and how much may be in flight.

Each server of a replica is checked. What they do is added up, where all of them say it; the replica is
silent where one of them is.

An engine that was found silent and has lost its requests is asked for one token: it shows by that whether it has come
to itself, and until then it has a request, by which the supervisor's watchdog counts.

What it sees goes to three places: the pool sends nothing new to an engine that has requests and samples nothing; the
scheduler gets the adaptive limit; ``fleet.json`` tells ``hpcrl status`` and the supervisor's watchdog.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

import aiohttp

from hpcrl.rollouts.engines.client import EngineError, EngineProtocolError, SamplingParams
from hpcrl.rollouts.engines.concurrency import AdaptiveLimit, Pressure
from hpcrl.rollouts.engines.disaggregated_pool import PREFILL
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.sampling.scheduler import Scheduler
from hpcrl.rollouts.telemetry.run_metrics import read_text
from hpcrl.rollouts.weights.updates import WeightUpdater
from hpcrl.runs.engine_metrics import engine_samples
from hpcrl.runs.events import EventWriter
from hpcrl.runs.fleet import EngineView, FleetView, WorkerView

_log = logging.getLogger(__name__)

LOOK_S = 2.0
SUSPECT_S = 30.0
"""Time in seconds without a token until suspicion, without a plan: half of the supervisor's default hang timeout."""
_PROBE_TOKEN = 1
_PROBE_S = 3600.0
"""Timeout in seconds of a probe, longer than the observation of a hang: it ends with its answer, or with the engine."""
#: ended requests are not progress, because aborted ones are among them
_PROGRESS = ("prompt_tokens", "generation_tokens", "iteration_tokens_total_sum")
_NAMES = (
    *_PROGRESS,
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
)


class EngineReading(NamedTuple):
    """Metrics of an engine at one moment.

    Attributes
    ----------
    at_s:
        Seconds of the monotonic clock.
    progress:
        Differs from the last reading where something was computed.
    tokens:
        Tokens sampled since the engine started.
    queries, hits:
        Prompt tokens looked up in the prefix cache, and those found.
    """

    at_s: float
    progress: tuple[float, ...]
    tokens: float
    pressure: Pressure
    queries: float
    hits: float

    @property
    def hit_rate(self) -> float | None:
        """Return the share of prompt tokens found in its cache; None before the first."""
        return self.hits / self.queries if self.queries else None

    @classmethod
    def of(cls, text: str, at_s: float) -> EngineReading | None:
        """Read a Prometheus text, over all ranks; None where it lacks vLLM's metrics."""
        try:
            samples = engine_samples(text, _NAMES)
        except ValueError:
            return None
        if "num_requests_running" not in samples or "kv_cache_usage_perc" not in samples:
            return None
        sums = {name: sum(samples.get(name, ())) for name in _NAMES}
        return cls(
            at_s=at_s,
            progress=tuple(sums[name] for name in _PROGRESS),
            tokens=sums["generation_tokens"],
            pressure=Pressure(
                running=int(sums["num_requests_running"]),
                waiting=int(sums["num_requests_waiting"]),
                # that of the fullest rank
                kv_usage=max(samples["kv_cache_usage_perc"]),
                preemptions=int(sums["num_preemptions"]),
            ),
            queries=sums["prefix_cache_queries"],
            hits=sums["prefix_cache_hits"],
        )

    @classmethod
    def together(cls, readings: Sequence[EngineReading | None]) -> EngineReading | None:
        """Return the sum over all servers of a replica; None where one did not answer and the sum is unknown."""
        known = [reading for reading in readings if reading is not None]
        if len(known) < len(readings):
            return None
        if len(known) == 1:
            return known[0]
        return cls(
            at_s=known[0].at_s,
            progress=tuple(value for reading in known for value in reading.progress),
            tokens=sum(reading.tokens for reading in known),
            pressure=Pressure(
                running=sum(reading.pressure.running for reading in known),
                waiting=sum(reading.pressure.waiting for reading in known),
                # that of the fullest rank
                kv_usage=max(reading.pressure.kv_usage for reading in known),
                preemptions=sum(reading.pressure.preemptions for reading in known),
            ),
            queries=sum(reading.queries for reading in known),
            hits=sum(reading.hits for reading in known),
        )


class _Seen:
    """Observations of a server of an engine in its present incarnation.

    Attributes
    ----------
    quiet_s:
        Seconds with requests since it computed something. Time without requests neither counts nor resets it: requests
        of a hung engine may be aborted and followed by others again and again.
    """

    def __init__(self, now: float) -> None:
        self.quiet_s, self._looked_s = 0.0, now
        self.last: EngineReading | None = None
        self._progress: tuple[float, ...] | None = None
        self.tokens_per_s: float | None = None

    @property
    def idle(self) -> bool:
        """Return whether the server reported that it has no requests."""
        return self.last is not None and not self.last.pressure.running + self.last.pressure.waiting

    def see(self, reading: EngineReading | None, *, updating: bool, now: float) -> None:
        """Update with a reading; None where the server did not answer and its state is unknown."""
        last, self.last = self.last, reading
        since, self._looked_s = now - self._looked_s, now
        self.tokens_per_s = None
        if reading is None:
            return  # whether it answers is checked elsewhere
        if reading.progress != self._progress:
            self.quiet_s, self._progress = 0.0, reading.progress
        elif reading.pressure.running + reading.pressure.waiting and not updating:
            self.quiet_s += since
        if last is not None and reading.tokens >= last.tokens and reading.at_s > last.at_s:
            self.tokens_per_s = (reading.tokens - last.tokens) / (reading.at_s - last.at_s)


class _SeenEngine:
    """Observations of an engine in its present incarnation: per server, and of all servers together."""

    def __init__(self, incarnation: int, servers: int, now: float) -> None:
        self.incarnation = incarnation
        self.servers = [_Seen(now) for _ in range(servers)]
        self.last: EngineReading | None = None

    def see(self, readings: Sequence[EngineReading | None], *, updating: bool, now: float) -> None:
        """Update with a reading of each server."""
        for seen, reading in zip(self.servers, readings, strict=True):
            seen.see(reading, updating=updating, now=now)
        self.last = EngineReading.together(readings)

    @property
    def quietest(self) -> int:
        """Return the index of the server that has sampled nothing for longest."""
        return max(range(len(self.servers)), key=lambda server: self.servers[server].quiet_s)

    @property
    def quiet_s(self) -> float:
        """Return the ``quiet_s`` of the quietest server."""
        return self.servers[self.quietest].quiet_s

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens per second of all servers; None where that of one is unknown."""
        rates = [seen.tokens_per_s for seen in self.servers if seen.tokens_per_s is not None]
        return sum(rates) if len(rates) == len(self.servers) else None


class WatchedParts(TypedDict):
    """Objects that a `FleetWatch` observes and to which it reports."""

    http: aiohttp.ClientSession
    pool: EnginePool
    updater: WeightUpdater
    scheduler: Scheduler
    events: EventWriter
    workers: Callable[[], list[WorkerView]]


class FleetWatch:
    """Looks at all engines of the pool, for as long as it runs."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        pool: EnginePool,
        updater: WeightUpdater,
        scheduler: Scheduler,
        events: EventWriter,
        workers: Callable[[], list[WorkerView]] = list,
        limit: AdaptiveLimit | None,
        suspect_s: float,
        publish: Callable[[FleetView], None],
    ) -> None:
        """Remember the parts; nothing is asked before `run`.

        Parameters
        ----------
        workers:
            Returns what is known of each worker of environments.
        limit:
            None: the recipe's own limit holds.
        suspect_s:
            Time in seconds for which an engine may have requests and sample nothing.
        publish:
            Called with each view; it does not wait.
        """
        self._http, self._pool, self._updater, self._scheduler = http, pool, updater, scheduler
        self._events, self._limit, self._suspect_s, self._publish = events, limit, suspect_s, publish
        self._workers = workers
        self._seen: dict[Engine, _SeenEngine] = {}
        self._probes: dict[tuple[Engine, int], asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Observe the engines at intervals; never return."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            for probe in self._probes.values():
                probe.cancel()

    async def look(self) -> None:
        """Observe the engines once."""
        engines = list(self._pool.engines)
        seen = await asyncio.gather(*(self._read(engine) for engine in engines))
        now = time.monotonic()
        self._seen = {engine: self._seen_of(engine, now) for engine in engines}
        changed = False
        for engine, readings in zip(engines, seen, strict=True):
            self._seen[engine].see(readings, updating=self._updating(engine), now=now)
            stuck = self._seen[engine].quiet_s > self._suspect_s
            changed |= stuck != engine.stuck
            if stuck and not engine.stuck:
                _log.warning("%s has sampled nothing for %.0f s", self._silent(engine), self._seen[engine].quiet_s)
            engine.note_stuck(stuck)
            self._probe_idle(engine)
        if changed:
            await self._pool.notify()
        self._adapt(engines)
        self._publish(self._view(engines))

    async def _read(self, engine: Engine) -> list[EngineReading | None]:
        """Return a reading of each server of an engine; None for a server that does not answer."""

        async def read(url: str) -> EngineReading | None:
            text = await read_text(self._http, f"{url}/metrics")
            return None if text is None else EngineReading.of(text, time.monotonic())

        return list(await asyncio.gather(*(read(server.url) for server in engine.client.servers)))

    def _silent(self, engine: Engine) -> str:
        """Return the name of the server that has sampled nothing for longest."""
        return engine.client.servers[self._seen[engine].quietest].name

    def _probe_idle(self, engine: Engine) -> None:
        for server, seen in enumerate(self._seen[engine].servers):
            if seen.quiet_s > self._suspect_s and seen.idle and (engine, server) not in self._probes:
                self._probes[engine, server] = asyncio.create_task(self._probe(engine, server))

    async def _probe(self, engine: Engine, server: int) -> None:
        """Request one token; its arrival shows in the engine's metrics."""
        params = SamplingParams(temperature=0.0, max_tokens=1, seed=0, stop_token_ids=[])
        work = engine.client.servers[server].generate(
            [_PROBE_TOKEN], params, cache_salt="probe", session_id="probe", timeout_s=_PROBE_S
        )
        try:
            with contextlib.suppress(EngineError, EngineProtocolError):
                await engine.call(work)
        finally:
            del self._probes[engine, server]

    def _seen_of(self, engine: Engine, now: float) -> _SeenEngine:
        seen = self._seen.get(engine)
        if seen is None or seen.incarnation != engine.incarnation:
            return _SeenEngine(engine.incarnation, len(engine.client.servers), now)
        return seen

    def _updating(self, engine: Engine) -> bool:
        """Return whether the engine changes or lacks weights, so that no tokens can be expected."""
        return engine.version < 0 or self._updater.exchanging(engine)

    def _adapt(self, engines: list[Engine]) -> None:
        """Adapt the limit of rollouts in flight to the engines."""
        if self._limit is None:
            return
        pressures: dict[object, Pressure | None] = {}
        for engine in engines:
            # prompts pass quickly through the prefill side: requests in flight are at the decode engines
            if engine.serving and not engine.name.startswith(PREFILL):
                reading = self._seen[engine].last
                # while weights change, all requests wait
                pressures[engine] = None if reading is None or self._updating(engine) else reading.pressure
        for cut in self._limit.look(pressures, self._scheduler.in_flight):
            assert isinstance(cut.engine, Engine)
            self._events.emit(
                "rollouts.limit_cut", engine=cut.engine.name, window=cut.window, limit=self._limit.limit, why=cut.why
            )
        self._scheduler.set_limit(self._limit.limit)

    def _view(self, engines: list[Engine]) -> FleetView:
        return FleetView(
            time_s=time.time(),
            newest=self._updater.announced,
            in_flight=self._scheduler.in_flight,
            limit=self._scheduler.limit,
            router=self._pool.router_answers,
            weights=None if (sources := self._updater.sources) is None else dict(sources.totals),
            engines=[self._engine_view(engine) for engine in engines],
            workers=self._workers(),
            durable=None if sources is None else self._updater.undurable.durable,
        )

    def _engine_view(self, engine: Engine) -> EngineView:
        seen = self._seen[engine]
        reading = seen.last
        pressure = None if reading is None else reading.pressure
        role, _, replica = engine.name.rpartition("-")
        return EngineView(
            role=role,
            replica=int(replica),
            version=engine.version,
            loading=self._updater.loading(engine),
            answers=engine.answers,
            updating=self._updating(engine),
            quiet_s=round(seen.quiet_s, 1),
            stuck=engine.stuck,
            servers=len(seen.servers),
            silent_rank=seen.quietest if engine.stuck and len(seen.servers) > 1 else None,
            why=engine.why,
            in_flight=engine.load,
            routed=self._pool.routed(engine),
            running=None if pressure is None else pressure.running,
            waiting=None if pressure is None else pressure.waiting,
            kv_usage=None if pressure is None else pressure.kv_usage,
            prefix_hit_rate=None if reading is None else reading.hit_rate,
            tokens_per_s=seen.tokens_per_s,
            preemptions=None if pressure is None else pressure.preemptions,
            window=None if self._limit is None else self._limit.windows.get(engine),
        )
