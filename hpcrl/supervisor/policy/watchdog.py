"""Finds replicas that live and make no progress.

What counts as progress: an engine's counters of tokens (``/metrics``, by vLLM's names), the step and
phase that a trainer reports, the beat of the orchestrator's event loop. Nothing is asked of a replica that is not
ready, has no work, or waits for another role; so start-up, evaluation and long rollouts raise no alarm. An engine whose
weights are being changed, which the orchestrator says (`hpcrl.runs.fleet`), need not sample. Of a
replica with several servers each must show progress: that of the others does not stand for it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import aiohttp

from hpcrl import reporting
from hpcrl.config.plan import HttpProbe, Role, WatchPolicy
from hpcrl.credentials import Credentials
from hpcrl.http_body import receive_body
from hpcrl.runs.engine_metrics import engine_samples
from hpcrl.runs.fleet import EngineView, FleetView
from hpcrl.runs.progress import RoleProgress, progress_path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.component import Component

__all__ = ["Pulse", "Sign", "Watchdog", "read_engine_metrics"]

_MAX_METRICS_BYTES = 64 << 20
"""Maximum size of an engine's metrics; vLLM's are some hundred kilobytes."""
_FACTOR = 5.0
"""How much longer than the longest pause so far a pause may be."""
_POLL_S = 2.0
_ENGINES = (Role.ENGINE, Role.PREFILL, Role.DECODE)
_BEAT = "running"
"""Phase of a process that says so again and again (`hpcrl.runs.progress.ProgressReporter.beat`)."""
_BEAT_S = 5.0
"""Longest time between two beats (a trainer that waits asks the dock that often)."""
_QUIET_S = 10.0
"""A role that waits for another which was silent for so long is not blamed before that one is judged."""


class Sign(NamedTuple):
    """What a replica shows at one moment.

    Attributes
    ----------
    token:
        Differs from the last one where there was progress.
    waits:
        It has nothing to do, or waits for another role.
    words:
        For people.
    longest_s:
        Longest duration so far of what it does, where it measures that itself.
    pauses:
        Nothing can be expected of it at this moment, and what was expected before still is: the time does not count.
    begun:
        It has done this work before: a first time, which may take longer, is over.
    tokens, work:
        Of an engine: sampled since its start, and requests that it has.
    """

    token: object
    waits: bool
    words: str
    longest_s: float | None = None
    pauses: bool = False
    begun: bool = False
    tokens: float = 0.0
    work: float = 0.0


class Pulse:
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
        """On top of the limit while it answers: work that shows no progress by nature (an engine's weight update)."""
        self._sign: Sign | None = None
        self._measured: float | None = None
        self._stretch = 1.0
        self.since = self.answered = self._looked = now

    def see(self, sign: Sign | None, now: float) -> bool:
        """Take in a look; None where it did not answer. Returns whether there was progress."""
        passed, self._looked = now - self._looked, now
        if sign is None:
            return False
        # a wait of ours is no measure: the process may have been stopped, and we with it
        self.answered = now
        last, self._sign = self._sign, sign
        if last is not None and last.token == sign.token and not sign.waits:
            self.since += passed if sign.pauses else 0.0
            return False
        if last is not None and not last.waits and not sign.waits and sign.longest_s is None:
            self._measured = max(self._measured or 0.0, now - self.since)
        self.since = now
        return last is None or last.token != sign.token

    @property
    def limit_s(self) -> float:
        """Longest time without progress."""
        measured = self._measured
        if self._sign is not None and self._sign.longest_s is not None:
            measured = self._sign.longest_s
        if measured is None and self._sign is not None and self._sign.begun:
            measured = 0.0
        ceiling = self._policy.ceiling_s
        limit = ceiling if measured is None else min(max(_FACTOR * measured, self._floor_s), ceiling)
        return limit + self.extra_s

    @property
    def _floor_s(self) -> float:
        return min(self._stretch * self._policy.floor_s, self._policy.ceiling_s)

    def excuse(self) -> None:
        """It was called hung and went on: wait twice as long from now on."""
        self._stretch *= 2.0

    def problem(self, now: float) -> str:
        """Why it counts as hung, in words; empty where it does not."""
        if self._sign is None:
            return ""  # it never showed anything: it cannot be judged by that
        if now - self.answered > self._floor_s:
            return f"it has not answered for {now - self.answered:.0f} s"
        if not (self._sign.waits or self._sign.pauses) and now - self.since > self.limit_s:
            return f"no progress for {now - self.since:.0f} s ({self._sign.words}); the limit was {self.limit_s:.0f} s"
        return ""


class Pulses:
    """The pulses of all servers of one replica; most have one. It hangs where one of them does."""

    def __init__(self, policy: WatchPolicy, now: float, *, servers: int) -> None:
        self._pulses = [Pulse(policy, now) for _ in range(servers)]

    @property
    def extra_s(self) -> float:
        """See `Pulse`."""
        return self._pulses[0].extra_s

    @extra_s.setter
    def extra_s(self, seconds: float) -> None:
        for pulse in self._pulses:
            pulse.extra_s = seconds

    @property
    def since(self) -> float:
        """When one of them made progress last."""
        return max(pulse.since for pulse in self._pulses)

    def see(self, signs: Sequence[Sign | None], now: float) -> bool:
        """Take in a look at each; returns whether any made progress."""
        progress = [pulse.see(sign, now) for pulse, sign in zip(self._pulses, signs, strict=True)]
        return any(progress)

    def excuse(self) -> None:
        """See `Pulse`."""
        for pulse in self._pulses:
            pulse.excuse()

    def problem(self, now: float) -> str:
        """Why the replica counts as hung, in words; empty where it does not."""
        for rank, pulse in enumerate(self._pulses):
            if problem := pulse.problem(now):
                return f"rank {rank} of {len(self._pulses)}: {problem}" if len(self._pulses) > 1 else problem
        return ""


class Watchdog:
    """Looks at all replicas of an attempt again and again.

    Parameters
    ----------
    components:
        All replicas.
    on_hung:
        Called with a replica and what is wrong, once a life.
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
        """Look at a replica once more, after its stacks were taken: on a machine that is short of processors it may
        only have been slow. One that has gone on is given twice as long from now on."""
        timeout = aiohttp.ClientTimeout(total=self._policy.floor_s / 2)
        await self._read_fleet()
        async with self._session(timeout) as session:
            signs = await self._look(component, session)
        now = time.monotonic()
        pulse = self._pulse(component, now)
        pulse.see(signs, now)
        if pulse.problem(now):
            return True
        pulse.excuse()
        return False

    async def run(self) -> None:
        """Watch, for ever."""
        period_s = min(_POLL_S, self._policy.floor_s / 4)
        timeout = aiohttp.ClientTimeout(total=max(period_s, self._policy.floor_s / 2))
        async with self._session(timeout) as session:
            while True:
                before = time.monotonic()
                await asyncio.sleep(period_s)
                # we were stopped ourselves, or the machine slept: nobody else had time for progress either
                if time.monotonic() - before - period_s > self._policy.floor_s / 2:
                    self._pulses.clear()
                await self._read_fleet()
                ready = [c for c in self._components if c.state is ComponentState.READY]
                seen = await asyncio.gather(*(self._look(component, session) for component in ready))
                self._judge(ready, seen)

    def _session(self, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
        # no proxy from the environment; the token goes to servers of the run alone
        headers = Credentials.of_run(self._run.path, self._attempt).headers
        return aiohttp.ClientSession(timeout=timeout, trust_env=False, headers=headers)

    def _judge(self, ready: Sequence[Component], seen: Sequence[Sequence[Sign | None]]) -> None:
        now = time.monotonic()
        quiet = False
        # the trainer last: it waits for the orchestrator in the middle of its own work
        for component, signs in sorted(zip(ready, seen, strict=True), key=lambda entry: entry[0].role is Role.TRAINER):
            if component.state is not ComponentState.READY:
                continue  # it ended while we asked the others
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
        if known is None or known[0] != component.lives_since_s:
            known = component.lives_since_s, Pulses(self._policy, now, servers=len(component.address.urls))
            self._pulses[component] = known
        pulse = known[1]
        unknown = component.role in _ENGINES and self._view(component) is None
        pulse.extra_s = self._policy.update_timeout_s if unknown else 0.0
        return pulse

    async def _read_fleet(self) -> None:
        self._fleet = await asyncio.to_thread(FleetView.read, self._run, self._attempt)

    def _view(self, component: Component) -> EngineView | None:
        """What the orchestrator says of an engine; None where that is not known."""
        return None if self._fleet is None else self._fleet.engine(component.replica, component.role.value)

    async def _look(self, component: Component, session: aiohttp.ClientSession) -> list[Sign | None]:
        """What each server of a replica shows; None for one that does not answer."""
        if component.role in _ENGINES and isinstance(component.group.ready, HttpProbe):
            view = self._view(component)
            updating = view is not None and view.updating
            looks = (_look_at_server(url, session, updating=updating) for url in component.address.urls)
            return list(await asyncio.gather(*looks))
        return [await self._look_at_one(component, session)]

    async def _look_at_one(self, component: Component, session: aiohttp.ClientSession) -> Sign | None:
        if component.role is Role.ROUTER:
            return await self._look_at_router(component, session)
        path = progress_path(self._run, self._attempt, component.role.value, component.replica)
        progress = await asyncio.to_thread(RoleProgress.read, path)
        if progress is None or progress.time_s < component.lives_since_s:
            return None
        # whoever beats is judged by that; whoever measures its phases, by the longest of this one
        beats = progress.waits or progress.phase == _BEAT
        longest_s = _BEAT_S if beats else progress.longest_s.get(progress.phase, math.inf)
        # where not even we can write there, nobody can show progress that way
        return Sign(progress.time_s, False, progress.words(), longest_s, pauses=bool(reporting.problems()))

    async def _look_at_router(self, component: Component, session: aiohttp.ClientSession) -> Sign | None:
        """Whether it answers; what it forwards is seen in the engines."""
        try:
            async with session.get(f"{component.address.url}/liveness", allow_redirects=False) as response:
                return Sign(None, True, "") if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None


async def _look_at_server(url: str, session: aiohttp.ClientSession, *, updating: bool) -> Sign | None:
    try:
        async with session.get(f"{url}/metrics", allow_redirects=False) as response:
            if response.status != 200:
                return None  # what a refusal says must not look like an idle engine
            sign = read_engine_metrics((await receive_body(response, _MAX_METRICS_BYTES)).decode())
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        return None
    return sign._replace(pauses=sign.pauses or updating)


def _words(signs: Sequence[Sign | None]) -> str:
    """What all servers of a replica show, for people; of several, what they have sampled together."""
    shown = [sign for sign in signs if sign is not None]
    if len(signs) == 1 or not shown:
        return shown[0].words if shown else ""
    silent = len(signs) - len(shown)
    words = f"{sum(sign.tokens for sign in shown):.0f} tokens, {sum(sign.work for sign in shown):.0f} requests"
    return f"{words}, {silent} of {len(signs)} servers do not answer" if silent else words


#: not the requests that ended: a rollout that became too old is aborted, also in an engine that hangs
_PROGRESS = ("prompt_tokens", "generation_tokens", "iteration_tokens_total_sum")
_WORK = ("num_requests_running", "num_requests_waiting")


def read_engine_metrics(text: str) -> Sign:
    """What an engine's Prometheus text says about its work, summed over its ranks."""
    sums = {name: sum(values) for name, values in engine_samples(text, (*_PROGRESS, *_WORK)).items()}
    work = sum(sums.get(name, 0.0) for name in _WORK)
    tokens = sums.get("generation_tokens", 0.0)
    words = f"{tokens:.0f} tokens, {work:.0f} requests" if sums else ""
    return Sign(
        token=tuple(sums.get(name, 0.0) for name in _PROGRESS),
        waits=False,
        words=words,
        pauses=work == 0,
        begun=tokens > 0,
        tokens=tokens,
        work=work,
    )
