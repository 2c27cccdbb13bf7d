"""Finds replicas that are alive but make no progress.

Progress is: for an engine its counters of tokens (``/metrics``, by vLLM's names), for a trainer the step and phase that
it reports, for the orchestrator the heartbeat of its event loop. A replica that is not ready, has no work, or waits for
another role need not progress; so start-up, evaluation and long rollouts raise no alarm. An engine in a weight update,
which the orchestrator reports (`hpcrl.runs.fleet`), need not sample. Each server of a replica must make progress of its
own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import aiohttp

from hpcrl.config.plan import HttpProbe, Role, WatchPolicy
from hpcrl.network.credentials import Credentials
from hpcrl.network.http_body import receive_body
from hpcrl.reporting import reports
from hpcrl.runs.engine_metrics import engine_samples
from hpcrl.runs.fleet import EngineView, FleetView
from hpcrl.runs.progress import RoleProgress, progress_path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.replicas.component import Component

_MAX_METRICS_BYTES = 64 << 20
"""Maximum size of an engine's metrics; vLLM's are some hundred kilobytes."""
_FACTOR = 5.0
"""Factor by which a pause may exceed the longest pause so far."""
_POLL_S = 2.0
_ENGINES = (Role.ENGINE, Role.PREFILL, Role.DECODE)
_BEAT = "running"
"""Phase of a process that sends heartbeats (`hpcrl.runs.progress.ProgressReporter.beat`)."""
_BEAT_S = 5.0
"""Maximum seconds between two heartbeats (a waiting trainer asks the dock that often)."""
_QUIET_S = 10.0
"""Seconds of silence after which a role is judged before another role that waits for it."""


class ProgressSample(NamedTuple):
    """Sample of a replica's progress at one moment.

    Attributes
    ----------
    token:
        Differs from the last sample's if there was progress.
    waits:
        Whether it is idle, or waits for another role.
    words:
        Description for people.
    longest_s:
        Longest duration in seconds of its current activity so far, if it measures that itself.
    pauses:
        Whether no progress can be expected at this moment; the time then does not count towards the limit.
    begun:
        Whether it has done this work before: only the first time may take longer.
    tokens, work:
        For an engine: tokens sampled since its start, and current requests.
    """

    token: object
    waits: bool
    words: str
    longest_s: float | None = None
    pauses: bool = False
    begun: bool = False
    tokens: float = 0.0
    work: float = 0.0


class ProgressTracker:
    """RoleProgress of one replica, and when its lack is too long.

    Parameters
    ----------
    policy:
        Floor and ceiling.
    now:
        Monotonic time.
    """

    def __init__(self, policy: WatchPolicy, now: float) -> None:
        self._policy = policy
        self.extra_s = 0.0
        """Seconds added to the limit while it answers, for work without visible progress (weight updates)."""
        self._sign: ProgressSample | None = None
        self._measured: float | None = None
        self._stretch = 1.0
        self.since = self.answered = self._looked = now

    def see(self, sign: ProgressSample | None, now: float) -> bool:
        """Add a sample, None if it did not answer; return whether there was progress."""
        passed, self._looked = now - self._looked, now
        if sign is None:
            return False
        # silence counts from the last answer, not from the last check: this process may itself have been paused
        self.answered = now
        last, self._sign = self._sign, sign
        if last is not None and last.token == sign.token and not sign.waits:
            # a pause stops the clock and does not reset it: a replica that alternates must still be found hanging
            self.since += passed if sign.pauses else 0.0
            return False
        # only time between two working samples is a duration of work; idle time would raise the limit
        if last is not None and not last.waits and not sign.waits and sign.longest_s is None:
            self._measured = max(self._measured or 0.0, now - self.since)
        self.since = now
        return last is None or last.token != sign.token

    @property
    def limit_s(self) -> float:
        """Return the maximum time in seconds without progress."""
        measured = self._measured
        if self._sign is not None and self._sign.longest_s is not None:
            measured = self._sign.longest_s
        # its first work, which may take longer, is over: the floor applies, not the ceiling
        if measured is None and self._sign is not None and self._sign.begun:
            measured = 0.0
        ceiling = self._policy.ceiling_s
        limit = ceiling if measured is None else min(max(_FACTOR * measured, self._floor_s), ceiling)
        return limit + self.extra_s

    @property
    def _floor_s(self) -> float:
        return min(self._stretch * self._policy.floor_s, self._policy.ceiling_s)

    def extend_deadline(self) -> None:
        """Double the stall timeout: the replica was called hung but then made progress."""
        self._stretch *= 2.0

    def problem(self, now: float) -> str:
        """Return why the server counts as hung, in words; empty if it does not."""
        if self._sign is None:
            return ""  # it never showed anything: it cannot be judged by that
        if now - self.answered > self._floor_s:
            return f"it has not answered for {now - self.answered:.0f} s"
        if not (self._sign.waits or self._sign.pauses) and now - self.since > self.limit_s:
            return f"no progress for {now - self.since:.0f} s ({self._sign.words}); the limit was {self.limit_s:.0f} s"
        return ""


class Pulses:
    """Progress of all servers of one replica; most have one. The replica hangs if one server does."""

    def __init__(self, policy: WatchPolicy, now: float, *, servers: int) -> None:
        self._pulses = [ProgressTracker(policy, now) for _ in range(servers)]

    @property
    def extra_s(self) -> float:
        """See `ProgressTracker`."""
        return self._pulses[0].extra_s

    @extra_s.setter
    def extra_s(self, seconds: float) -> None:
        for pulse in self._pulses:
            pulse.extra_s = seconds

    @property
    def since(self) -> float:
        """Return the time of the last progress of any server."""
        return max(pulse.since for pulse in self._pulses)

    def see(self, signs: Sequence[ProgressSample | None], now: float) -> bool:
        """Add a sample of each server; return whether any made progress."""
        progress = [pulse.see(sign, now) for pulse, sign in zip(self._pulses, signs, strict=True)]
        return any(progress)

    def extend_deadline(self) -> None:
        """See `ProgressTracker`."""
        for pulse in self._pulses:
            pulse.extend_deadline()

    def problem(self, now: float) -> str:
        """Return why the replica counts as hung, in words; empty if it does not."""
        for rank, pulse in enumerate(self._pulses):
            if problem := pulse.problem(now):
                return f"rank {rank} of {len(self._pulses)}: {problem}" if len(self._pulses) > 1 else problem
        return ""


class Watchdog:
    """Checks all replicas of an attempt periodically.

    Parameters
    ----------
    components:
        All replicas.
    on_hung:
        Called with a replica and its problem, once per start of the replica.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        attempt: int,
        policy: WatchPolicy,
        components: Sequence[Component],
        on_hung: Callable[[Component, str], None],
    ) -> None:
        self._run, self._attempt, self._policy = run, attempt, policy
        self._components, self._on_hung = components, on_hung
        self._pulses: dict[Component, tuple[float, Pulses]] = {}
        self._fleet: FleetView | None = None

    async def still_hangs(self, component: Component) -> bool:
        """Check a replica once more, after its stacks were taken; return whether it still hangs.

        On a machine that is short of CPUs it may only have been slow. If it has made progress, its stall timeout is
        doubled.
        """
        timeout = aiohttp.ClientTimeout(total=self._policy.floor_s / 2)
        await self._read_fleet()
        async with self._session(timeout) as session:
            signs = await self._look(component, session)
        now = time.monotonic()
        pulse = self._pulse(component, now)
        pulse.see(signs, now)
        if pulse.problem(now):
            return True
        pulse.extend_deadline()
        return False

    async def run(self) -> None:
        """Watch replicas; never returns."""
        period_s = min(_POLL_S, self._policy.floor_s / 4)
        timeout = aiohttp.ClientTimeout(total=max(period_s, self._policy.floor_s / 2))
        async with self._session(timeout) as session:
            while True:
                before = time.monotonic()
                await asyncio.sleep(period_s)
                # this process was paused, or the machine slept: then no replica had time for progress either
                if time.monotonic() - before - period_s > self._policy.floor_s / 2:
                    self._pulses.clear()
                await self._read_fleet()
                ready = [c for c in self._components if c.state is ComponentState.READY]
                seen = await asyncio.gather(*(self._look(component, session) for component in ready))
                self._judge(ready, seen)

    def _session(self, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
        # no proxy from the environment: the token must only reach servers of the run
        headers = Credentials.of_run(self._run.path, self._attempt).headers
        return aiohttp.ClientSession(timeout=timeout, trust_env=False, headers=headers)

    def _judge(self, ready: Sequence[Component], seen: Sequence[Sequence[ProgressSample | None]]) -> None:
        now = time.monotonic()
        quiet = False
        # the trainer last: it waits for the orchestrator during its own work, and that one must be judged first
        for component, signs in sorted(zip(ready, seen, strict=True), key=lambda entry: entry[0].role is Role.TRAINER):
            if component.state is not ComponentState.READY:
                continue  # it ended while other replicas were checked
            pulse = self._pulse(component, now)
            if pulse.see(signs, now):
                component.progress_at_s = time.time()
            if words := _words(signs):
                component.progress = words
            quiet |= component.role is Role.ORCHESTRATOR and now - pulse.since > _QUIET_S
            problem = pulse.problem(now)
            if problem and component.verdict is None and not (quiet and component.role is Role.TRAINER):
                self._on_hung(component, problem)

    def _pulse(self, component: Component, now: float) -> Pulses:
        known = self._pulses.get(component)
        # a restarted process has its own pulse: the earlier one's silence must not count against it
        if known is None or known[0] != component.lives_since_s:
            known = component.lives_since_s, Pulses(self._policy, now, servers=len(component.address.urls))
            self._pulses[component] = known
        pulse = known[1]
        # without the orchestrator's view an engine may be in a weight update, which shows no progress
        unknown = component.role in _ENGINES and self._view(component) is None
        pulse.extra_s = self._policy.update_timeout_s if unknown else 0.0
        return pulse

    async def _read_fleet(self) -> None:
        self._fleet = await asyncio.to_thread(FleetView.read, self._run, self._attempt)

    def _view(self, component: Component) -> EngineView | None:
        """Return the orchestrator's view of an engine; None if it is unknown."""
        return None if self._fleet is None else self._fleet.engine(component.replica, component.role.value)

    async def _look(self, component: Component, session: aiohttp.ClientSession) -> list[ProgressSample | None]:
        """Return the progress sample of each server of a replica; None for a server that does not answer."""
        if component.role in _ENGINES and isinstance(component.group.ready, HttpProbe):
            view = self._view(component)
            updating = view is not None and view.updating
            looks = (_look_at_server(url, session, updating=updating) for url in component.address.urls)
            return list(await asyncio.gather(*looks))
        return [await self._look_at_one(component, session)]

    async def _look_at_one(self, component: Component, session: aiohttp.ClientSession) -> ProgressSample | None:
        if component.role is Role.ROUTER:
            return await self._look_at_router(component, session)
        path = progress_path(self._run, self._attempt, component.role.value, component.replica)
        progress = await asyncio.to_thread(RoleProgress.read, path)
        if progress is None or progress.time_s < component.lives_since_s:
            return None
        # a role with a heartbeat is judged by it; one that measures its phases, by the longest of the current one
        beats = progress.waits or progress.phase == _BEAT
        longest_s = _BEAT_S if beats else progress.longest_s.get(progress.phase, math.inf)
        # if even the supervisor cannot write there, no role can show progress through that directory
        return ProgressSample(progress.time_s, False, progress.words(), longest_s, pauses=bool(reports.problems()))

    async def _look_at_router(self, component: Component, session: aiohttp.ClientSession) -> ProgressSample | None:
        """Return a sample if the router answers, else None; its requests are measured at the engines."""
        try:
            async with session.get(f"{component.address.url}/liveness", allow_redirects=False) as response:
                return ProgressSample(None, True, "") if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None


async def _look_at_server(url: str, session: aiohttp.ClientSession, *, updating: bool) -> ProgressSample | None:
    try:
        async with session.get(f"{url}/metrics", allow_redirects=False) as response:
            if response.status != 200:
                return None  # the text of a refusal must not be read as metrics of an idle engine
            sign = read_engine_metrics((await receive_body(response, _MAX_METRICS_BYTES)).decode())
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        return None
    return sign._replace(pauses=sign.pauses or updating)


def _words(signs: Sequence[ProgressSample | None]) -> str:
    """Return a description of all servers of a replica for people; the tokens of several servers are added up."""
    shown = [sign for sign in signs if sign is not None]
    if len(signs) == 1 or not shown:
        return shown[0].words if shown else ""
    silent = len(signs) - len(shown)
    words = f"{sum(sign.tokens for sign in shown):.0f} tokens, {sum(sign.work for sign in shown):.0f} requests"
    return f"{words}, {silent} of {len(signs)} servers do not answer" if silent else words


#: not the requests that ended: a rollout that became too old is aborted, also in an engine that hangs
_PROGRESS = ("prompt_tokens", "generation_tokens", "iteration_tokens_total_sum")
_WORK = ("num_requests_running", "num_requests_waiting")


def read_engine_metrics(text: str) -> ProgressSample:
    """Return the progress sample of an engine from its Prometheus text, summed over its ranks."""
    sums = {name: sum(values) for name, values in engine_samples(text, (*_PROGRESS, *_WORK)).items()}
    work = sum(sums.get(name, 0.0) for name in _WORK)
    tokens = sums.get("generation_tokens", 0.0)
    words = f"{tokens:.0f} tokens, {work:.0f} requests" if sums else ""
    return ProgressSample(
        token=tuple(sums.get(name, 0.0) for name in _PROGRESS),
        waits=False,
        words=words,
        pauses=work == 0,
        begun=tokens > 0,
        tokens=tokens,
        work=work,
    )
