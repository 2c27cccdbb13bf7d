"""One engine replica: continuous batching as processor sharing, with a KV cache.

Nothing happens token by token. All sequences of a batch advance together, so one *virtual clock* counts the decode
steps of the engine; a sequence that says n tokens ends when that clock has moved by n, whatever others join or leave
meanwhile. Prompt tokens are computed first come, first served, in steps that decode too, up to the budget of a step:
such a step is one event. Between two events all rates are constant: an event costs O(log n).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from hpcrl.simulation.loop.clock import Clock
from hpcrl.simulation.loop.records import Place, Rollout

_EPSILON = 1e-9
_HALF_A_STEP = 0.5
"""Part of a step that a new request waits for the end of the running step, on average."""


class EngineCosts(NamedTuple):
    """Capacities of an engine; see `hpcrl.simulation.inputs.durations.EngineDurations`."""

    base_s: float
    per_sequence_s: float
    per_kv_token_s: float
    prefill_per_token_s: float
    max_num_seqs: int
    batch_tokens: int
    kv_tokens: float


class SimulatedEngine:
    """A replica that serves requests.

    Attributes
    ----------
    index:
        Number of the replica.
    version:
        Policy version that it serves; -1 before the first.
    load:
        Rollouts assigned to it.
    loading:
        The version that it takes in, or None. New rollouts wait in ``gate`` meanwhile.
    busy_s, frozen_s:
        Seconds with sequences in the batch, and seconds frozen by weight updates.
    kv_token_s:
        Integral of the tokens in use over time.
    kv_peak:
        Most tokens in use so far.
    said_tokens, preemptions:
        Tokens sampled, and sequences that gave their KV back before their end.
    """

    def __init__(
        self,
        index: int,
        clock: Clock,
        costs: EngineCosts,
        *,
        replied: Callable[[Rollout], None],
        first_token: Callable[[Rollout], None],
        works: Callable[[int], None] | None = None,
    ) -> None:
        """Begin empty.

        ``replied`` is called with each request that is done, ``works`` with 1 and -1 when the engine begins and stops
        to compute.
        """
        self.index, self._clock, self._costs = index, clock, costs
        self._replied, self._first_token = replied, first_token
        self.version, self.loading, self.load = -1, None, 0
        self.gate: list[Rollout] = []
        self.busy_s = self.frozen_s = self.kv_token_s = self.kv_peak = 0.0
        self.said_tokens = self.preemptions = 0
        self._works, self._working = works, False
        self._speed = 1.0
        self._frozen = False
        self._last_s = clock.now
        self._v = 0.0
        self._decoding = 0
        self._decode: list[tuple[float, int, int, Rollout]] = []
        self._prefill: deque[Rollout] = deque()
        self._prefill_tokens = 0.0
        self._queue: deque[Rollout] = deque()
        self._residents: dict[Rollout, None] = {}
        self._kv_prefill = self._kv_base = 0.0
        self._cached: OrderedDict[Rollout, float] = OrderedDict()
        self._kv_cached = 0.0
        self._decode_rate = self._chunk = self._chunk_end = 0.0
        self._epoch = self._order = 0

    loading: int | None

    # -- requests

    def submit(self, rollout: Rollout, *, computed: bool = False) -> None:
        """Take a request: ``context`` tokens before the answer, ``prefill`` of them new, ``remaining`` to say.

        Parameters
        ----------
        computed:
            The KV of the context comes from a prefill engine.
        """
        self._advance()
        rollout.v_start = _HALF_A_STEP if self._decoding and not self._chunk else 0.0
        if rollout.place is Place.CACHED:
            self._kv_cached -= self._cached.pop(rollout)
        elif not computed:
            rollout.prefill = float(rollout.context)
        rollout.place = Place.QUEUED
        self._queue.append(rollout)
        self._plan()

    def abort(self, rollout: Rollout) -> None:
        """Forget a rollout, wherever it is."""
        if rollout.place is Place.NOWHERE:
            return
        self._advance()
        if rollout.place is Place.CACHED:
            self._kv_cached -= self._cached.pop(rollout)
        elif rollout.place is Place.QUEUED:
            self._queue.remove(rollout)
        else:
            self._leave(rollout)
        rollout.place = Place.NOWHERE
        self._plan()

    def release(self, rollout: Rollout) -> None:
        """Free the cached KV of a rollout that has ended."""
        if rollout.place is Place.CACHED:
            self._advance()
            self._kv_cached -= self._cached.pop(rollout)
            rollout.place = Place.NOWHERE
            if self._queue:
                self._plan()

    # -- weight updates and shared CPUs

    def freeze(self) -> None:
        """Stop: weights change."""
        self._advance()
        self._frozen = True
        self._plan()

    def thaw(self) -> None:
        """Go on."""
        self._advance()
        self._frozen = False
        self._plan()

    def set_speed(self, speed: float) -> None:
        """Run at another speed from now on; 1 is that of an engine alone."""
        if speed != self._speed:
            self._advance()
            self._speed = speed
            self._plan()

    @property
    def busy(self) -> bool:
        """Return whether it computes."""
        return bool(self._residents) and not self._frozen

    @property
    def running(self) -> int:
        """Return the number of sequences in the batch."""
        return len(self._residents)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a place in the batch."""
        return len(self._queue)

    @property
    def kv_in_use(self) -> float:
        """Return the tokens of KV now, cached ones included."""
        self._advance()
        return self._used()

    def settle(self) -> None:
        """Bring the measurements to the clock's time."""
        self._advance()

    # -- inside

    def _used(self) -> float:
        return self._kv_prefill + self._kv_base + self._decoding * self._v + self._kv_cached

    def _advance(self) -> None:
        now = self._clock.now
        seconds = now - self._last_s
        if seconds <= 0.0:
            return
        self._last_s = now
        if self._frozen:
            self.frozen_s += seconds
            self.kv_token_s += self._used() * seconds
            return
        if not self._residents:
            self.kv_token_s += self._kv_cached * seconds
            return
        self.busy_s += seconds
        before = self._used()
        self._v += self._decode_rate * seconds
        after = self._used()
        self.kv_token_s += 0.5 * (before + after) * seconds
        self.kv_peak = max(self.kv_peak, after)

    def _event(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._advance()
        if self._chunk and self._v >= self._chunk_end - 1e-6:
            self._end_chunk()
        ended: list[Rollout] = []
        limit = self._v + 1e-6
        decode = self._decode
        while decode and decode[0][0] <= limit:
            _, _, stamp, rollout = heappop(decode)
            if stamp == rollout.stamp and rollout.place is Place.DECODE:
                ended.append(rollout)
                self._end(rollout)
        self._plan()
        for rollout in ended:
            self._replied(rollout)

    def _end_chunk(self) -> None:
        """End a step with prompt tokens: sequences whose whole prompt is computed get their first token."""
        left, self._chunk = self._chunk, 0.0
        prefill = self._prefill
        while prefill and left > 0.0:
            rollout = prefill[0]
            part = min(left, rollout.prefill)
            left -= part
            rollout.prefill -= part
            self._prefill_tokens -= part
            if rollout.prefill > 1e-6:
                return
            self._begin_decode(prefill.popleft())

    def _begin_decode(self, rollout: Rollout) -> None:
        self._prefill_tokens -= rollout.prefill
        rollout.prefill = 0.0
        self._kv_prefill -= rollout.context
        # the step that computed the last prompt token also sampled the first token of the answer
        rollout.v_end = self._v + max(0.0, rollout.remaining - 1) + rollout.v_start
        rollout.v_start = self._v
        rollout.place = Place.DECODE
        self._kv_base += rollout.context - self._v
        self._decoding += 1
        self._order += 1
        heappush(self._decode, (rollout.v_end, self._order, rollout.stamp, rollout))
        self._first_token(rollout)

    def _end(self, rollout: Rollout) -> None:
        """End the request; its KV stays cached while there is room."""
        self._leave(rollout)
        self.said_tokens += rollout.remaining
        rollout.context += rollout.remaining
        rollout.remaining = 0
        rollout.place = Place.CACHED
        room = self._costs.kv_tokens - self._used()
        tokens = float(rollout.context)
        while tokens > room and self._cached:
            room += self._evict()
        if tokens > room:
            rollout.place = Place.NOWHERE
            return
        self._cached[rollout] = tokens
        self._kv_cached += tokens
        self.kv_peak = max(self.kv_peak, self._used())

    def _leave(self, rollout: Rollout) -> None:
        """Take a rollout out of the batch."""
        del self._residents[rollout]
        rollout.stamp += 1
        if rollout.place is Place.PREFILL:
            self._kv_prefill -= rollout.context
            if rollout in self._prefill:
                self._prefill.remove(rollout)
                self._prefill_tokens -= rollout.prefill
        else:
            self._kv_base -= rollout.context - rollout.v_start
            self._decoding -= 1
        if not self._residents:
            self._kv_base = self._kv_prefill = self._prefill_tokens = self._v = self._chunk = 0.0
            self._decode.clear()

    def _evict(self) -> float:
        """Forget the cache that was not used for longest; returns its tokens."""
        rollout, tokens = self._cached.popitem(last=False)
        self._kv_cached -= tokens
        rollout.place = Place.NOWHERE
        return tokens

    def _preempt(self) -> None:
        """Free the KV of the sequence that came last; its tokens are computed again later."""
        rollout = next(reversed(self._residents))
        said = 0
        if rollout.place is Place.DECODE:
            said = min(rollout.remaining - 1, int(self._v - rollout.v_start))
        self._leave(rollout)
        rollout.context += said
        rollout.remaining -= said
        self.said_tokens += said
        rollout.prefill = float(rollout.context)
        rollout.v_start = 0.0
        rollout.place = Place.QUEUED
        self._queue.appendleft(rollout)
        self.preemptions += 1

    def _make_room(self) -> bool:
        """Free KV where it is full; return whether a sequence was preempted."""
        limit = self._costs.kv_tokens - 1e-6
        preempted = False
        while self._used() >= limit and (self._cached or len(self._residents) > 1):
            if self._cached:
                self._evict()
            else:
                self._preempt()
                preempted = True
        return preempted

    def _admit(self) -> None:
        costs = self._costs
        # as in the engine, a sequence cannot join a step that has no tokens left for a prompt
        while self._queue and len(self._residents) < costs.max_num_seqs and self._prefill_tokens < costs.batch_tokens:
            rollout = self._queue[0]
            room = costs.kv_tokens - self._used()
            if rollout.context + 1 > room + self._kv_cached and self._residents:
                return
            while rollout.context + 1 > room and self._cached:
                room += self._evict()
            self._queue.popleft()
            self._residents[rollout] = None
            rollout.place = Place.PREFILL
            self._kv_prefill += rollout.context
            if rollout.turn == 0 and rollout.prefill > 1:
                # siblings find the prompt in the cache except for its last token; as in vLLM, also in the same step
                rollout.prefill = max(1.0, rollout.prefill - rollout.group.prefilled)
                rollout.group.prefilled = rollout.turns[0].said
            self._prefill.append(rollout)
            self._prefill_tokens += rollout.prefill
        self.kv_peak = max(self.kv_peak, self._used())

    def _plan(self) -> None:
        """Let in who fits, and work out what happens next."""
        if not self._make_room() and self._queue and not self._frozen:
            self._admit()
        if self._works is not None and self.busy != self._working:
            self._working = self.busy
            # the call may change the speed
            self._works(1 if self._working else -1)
        self._schedule()

    def _schedule(self) -> None:
        """Compute the rates, and schedule the next event."""
        self._epoch += 1
        if self._frozen or not self._residents:
            return
        costs, decoding = self._costs, self._decoding
        step_s = costs.base_s + costs.per_sequence_s * decoding
        if costs.per_kv_token_s:
            step_s += costs.per_kv_token_s * (self._kv_base + decoding * self._v)
        soonest = float("inf")
        if self._prefill and not self._chunk:
            self._chunk = max(_EPSILON, min(max(1.0, costs.batch_tokens - decoding), self._prefill_tokens))
            self._chunk_end = self._v + 1.0
        if self._chunk:
            step_s += costs.prefill_per_token_s * self._chunk
        self._decode_rate = rate = self._speed / step_s
        if self._chunk:
            soonest = (self._chunk_end - self._v) / rate
        decode = self._decode
        while decode and (decode[0][2] != decode[0][3].stamp or decode[0][3].place is not Place.DECODE):
            heappop(decode)
        if decode:
            soonest = min(soonest, (decode[0][0] - self._v) / rate)
            room = costs.kv_tokens - self._used()
            if len(self._residents) > 1 or self._cached:
                soonest = min(soonest, room / (decoding * rate))
        self._clock.after(max(0.0, soonest), self._event, self._epoch)
