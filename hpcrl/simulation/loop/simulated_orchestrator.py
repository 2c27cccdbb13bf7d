"""The orchestrator of a simulation: admission, groups, staleness, evaluations.

Its rules are those of `hpcrl.rollouts.sampling.scheduler`, and the account of places is that very class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

from hpcrl.rollouts.core.staleness import StalenessAccount
from hpcrl.rollouts.sampling.policy import GroupAdmission, GroupOutcome
from hpcrl.simulation.inputs.scenario import Scenario
from hpcrl.simulation.inputs.workload import TrajectoryDraws
from hpcrl.simulation.loop.clock import Clock
from hpcrl.simulation.loop.records import Group, Outcome, Rollout
from hpcrl.simulation.loop.simulated_fleet import Fleet
from hpcrl.simulation.loop.simulated_host import Host, SerialProcess
from hpcrl.simulation.loop.tally import Tally


class _Tools:
    """The tool calls of one environment: some at once, the others in a queue."""

    def __init__(self, clock: Clock, host: Host, slots: int | None) -> None:
        self._clock, self._host, self._free = clock, host, slots
        self._queue: deque[tuple[Rollout, float, Callable[[Rollout], None]]] = deque()

    def call(self, rollout: Rollout, seconds: float, then: Callable[[Rollout], None]) -> None:
        """Call ``then`` when the tool has worked for ``seconds``."""
        if self._free is None and not self._host.shared:
            self._clock.after(seconds, then, rollout)
        elif self._free != 0:
            if self._free is not None:
                self._free -= 1
            self._begin(rollout, seconds, then)
        else:
            self._queue.append((rollout, seconds, then))

    def _begin(self, rollout: Rollout, seconds: float, then: Callable[[Rollout], None]) -> None:
        self._host.run(seconds, self._done, (rollout, then))

    def _done(self, call: tuple[Rollout, Callable[[Rollout], None]]) -> None:
        while self._queue:
            waiting, seconds, after = self._queue.popleft()
            if waiting.alive:
                self._begin(waiting, seconds, after)
                break
        else:
            if self._free is not None:
                self._free += 1
        rollout, then = call
        then(rollout)


_OUTCOMES = {
    GroupOutcome.TOO_FEW: Outcome.DROPPED_GROUP,
    GroupOutcome.STALE: Outcome.DROPPED_STALE,
    GroupOutcome.NO_VARIANCE: Outcome.DROPPED_ZERO_VARIANCE,
}


class SimulatedOrchestrator:
    """Keeps the engines of one attempt full.

    Attributes
    ----------
    account:
        Places, in groups.
    in_flight:
        Rollouts that run.
    next_index:
        Number of the next group.
    """

    def __init__(
        self,
        clock: Clock,
        scenario: Scenario,
        workload: TrajectoryDraws,
        tally: Tally,
        rng: Random,
        *,
        step: int,
        finished: list[Group],
        next_index: int,
        host: Host,
        batch_ready: Callable[[], None],
    ) -> None:
        """Take up the work at ``step``; nothing is started before `start`."""
        recipe = scenario.recipe
        self._clock, self._workload, self._tally, self._uniform = clock, workload, tally, rng.random
        self._config = recipe.rollouts
        self._max_in_flight = scenario.max_in_flight
        self._max_model_len, self._evaluation = recipe.engine.max_model_len, recipe.evaluation
        self._max_new_tokens = recipe.rollouts.sampling.max_new_tokens * scenario.merged_turns
        engine = scenario.durations.engine
        self._work_s = min(engine.request_cpu_s, engine.request_overhead_s) if host.shared else 0.0
        self._overhead_s = engine.request_overhead_s - self._work_s
        self._failed_share = scenario.durations.failed_share
        self._zero_variance_share = scenario.durations.zero_variance_share
        self._batch_ready = batch_ready
        self._loop = SerialProcess(host)
        self.account = StalenessAccount(
            groups_per_step=scenario.groups_per_step,
            max_off_policy_steps=recipe.rollouts.max_off_policy_steps,
            ready_batches=recipe.rollouts.ready_batches,
            step=step,
            waiting=len(finished),
        )
        self._policy = GroupAdmission(
            self.account,
            group_size=self._config.group_size,
            groups_per_step=scenario.groups_per_step,
            zero_variance=self._config.zero_variance,
            order=self._config.order,
        )
        self.in_flight, self.next_index = 0, next_index
        self._running: dict[Group, None] = {}
        self._finished: dict[Group, None] = dict.fromkeys(finished)
        self._evaluating: set[Rollout] = set()
        self._evaluation_ends: Callable[[], None] | None = None
        slots = [
            None if count is None else max(1, round(count * scenario.size.scale / scenario.thinning))
            for count in workload.tool_slots
        ]
        self._tools = [_Tools(clock, host, count) for count in slots]

    def attach(self, fleet: Fleet) -> None:
        """Use these engines."""
        self._fleet = fleet
        fleet.choose = self._policy.choose

    def serve(self, version: int) -> None:
        """Record that all engines serve ``version``."""
        if version > self.account.version:
            self.account.serve(version)
            self.admit()

    def settle(self, step: int) -> None:
        """Record that steps up to ``step`` are trained, and start rollouts in new places."""
        self.account.settle(step)
        self.admit()

    def may_take(self) -> bool:
        """Return whether the next step may take its batch now."""
        return self._policy.may_take(((group.index, group.version) for group in self._running), self._finished)

    def take_batch(self) -> list[Group]:
        """Consume the groups of the next step: the oldest versions first, in index order."""
        chosen = self._policy.take(self._finished)
        for group in chosen:
            del self._finished[group]
            self._tally.end_group(group, Outcome.CONSUMED)
        self._drop_stale()
        self.admit()
        return chosen

    def snapshot(self) -> list[Group]:
        """Return the finished groups that wait."""
        return list(self._finished)

    def lose(self) -> None:
        """End the attempt: running and waiting rollouts are lost."""
        for group in self._running:
            for rollout in group.members:
                rollout.alive = False
            self._tally.end_group(group, Outcome.LOST_FAILURE)
        for group in self._finished:
            self._tally.end_group(group, Outcome.LOST_FAILURE)

    @property
    def unfinished(self) -> int:
        """Return the number of rollouts that have not ended: running, or waiting to be consumed."""
        return sum(len(group.members) for groups in (self._running, self._finished) for group in groups)

    # -- groups

    def admit(self) -> None:
        """Start groups until all places are taken."""
        while self._policy.may_start(self.in_flight, self._max_in_flight):
            self._start()

    def _start(self) -> None:
        size, workload = self._config.group_size, self._workload
        group = Group(self.next_index, workload.environment())
        self.next_index += 1
        engine = self._fleet.assign(size)
        self._running[group] = None
        self.account.start()
        self.in_flight += size
        self._tally.started += size
        draw = workload.group(group.environment)
        group.members = [Rollout(group, *draw(), engine) for _ in range(size)]
        group.running = size
        group.without_variance = self._uniform() < self._zero_variance_share
        for rollout in group.members:
            rollout.started_s = self._clock.now
            self._wait(rollout)

    def _wait(self, rollout: Rollout) -> None:
        """Wait for the environment's time before a request."""
        wait_s = rollout.turns[rollout.turn].wait_s
        if rollout.turn and wait_s:
            self._tools[rollout.group.environment].call(rollout, wait_s, self._ask)
        elif wait_s:
            self._clock.after(wait_s, self._ask, rollout)
        else:
            self._ask(rollout)

    def _ask(self, rollout: Rollout) -> None:
        if rollout.alive:
            if self._work_s:
                self._loop.run(self._work_s, self._asked, rollout)
            else:
                self._asked(rollout)

    def _asked(self, rollout: Rollout) -> None:
        if self._overhead_s:
            self._clock.after(self._overhead_s, self._send, rollout)
        else:
            self._send(rollout)

    def _send(self, rollout: Rollout) -> None:
        if not rollout.alive:
            return
        engine, turn = rollout.engine, rollout.turns[rollout.turn]
        if rollout.turn == 0 and engine.loading is not None:
            engine.gate.append(rollout)  # otherwise the version of its prompt would be undefined
            return
        context = rollout.context if turn.kept < 0 else turn.kept
        room = self._max_model_len - context - turn.said
        if room <= 0:
            self._replies_end(rollout)
            return
        rollout.left += 0 if turn.kept < 0 else rollout.context
        rollout.context = context + turn.said
        rollout.prefill = float(turn.said)
        rollout.remaining = min(turn.sampled, room, self._max_new_tokens)
        rollout.sampled_tokens += rollout.remaining
        if rollout.turn == 0:
            rollout.first_version = engine.version
        self._tally.requests += 1
        self._fleet.submit(rollout)

    def ungate(self, rollout: Rollout) -> None:
        """Send a new rollout after the update that it waited for."""
        self._send(rollout)

    def first_token(self, rollout: Rollout) -> None:
        """Record the version of a rollout's first token when an engine has sampled it."""
        if rollout.turn == 0:
            rollout.first_version = rollout.engine.version

    def replied(self, rollout: Rollout) -> None:
        """Continue a rollout when an engine has answered."""
        rollout.turn += 1
        if rollout.turn < len(rollout.turns):
            self._wait(rollout)
        else:
            self._replies_end(rollout)

    def _replies_end(self, rollout: Rollout) -> None:
        rollout.engine.release(rollout)
        if rollout.heldout:
            self._clock.after(rollout.judge_s, self._heldout_ended, rollout)
            return
        wait_s = rollout.judge_s + self._workload.latency_s(rollout.group.environment)
        if wait_s:
            self._clock.after(wait_s, self._ended, rollout)
        else:
            self._ended(rollout)

    def _ended(self, rollout: Rollout) -> None:
        if not rollout.alive:
            return
        rollout.alive = False
        self._fleet.leave(rollout.engine)
        self.in_flight -= 1
        group = rollout.group
        group.running -= 1
        if rollout.turn == 0 or (self._failed_share and self._uniform() < self._failed_share):
            group.members.remove(rollout)
            self._tally.end(Outcome.DROPPED_ENVIRONMENT)
        else:
            rollout.ended_s = self._clock.now
        if not group.running:
            del self._running[group]
            self._finish(group)
            self._batch_ready()
        self.admit()
        if self._policy.used_up:
            self._fleet.follow()

    def _finish(self, group: Group) -> None:
        """Keep or drop a group whose members have all ended."""
        fate = self._policy.end(
            members=len(group.members), version=group.version, has_variance=not group.without_variance
        )
        if fate is not GroupOutcome.KEPT:
            self._tally.end_group(group, _OUTCOMES[fate])
            return
        self._finished[group] = None

    def _drop_stale(self) -> None:
        for group in [group for group in self._finished if self._policy.is_stale(group.version)]:
            del self._finished[group]
            self._tally.end_group(group, Outcome.DROPPED_STALE)
            self.account.drop_waiting()
        for group in list(self._running):
            if self._policy.is_stale(group.version):
                self._cancel(group)

    def _cancel(self, group: Group) -> None:
        del self._running[group]
        self.account.drop_running()
        finished = []
        for rollout in group.members:
            if rollout.alive:
                rollout.alive = False
                rollout.engine.abort(rollout)
                self._fleet.leave(rollout.engine)
                self.in_flight -= 1
                self._tally.end(Outcome.CANCELLED_STALE)
            else:
                finished.append(rollout)
        group.members = finished
        self._tally.end_group(group, Outcome.DROPPED_STALE)

    # -- evaluation

    @property
    def evaluating(self) -> bool:
        """Return whether an evaluation is running."""
        return bool(self._evaluating)

    def evaluate(self, ended: Callable[[], None]) -> None:
        """Roll held-out prompts out during training."""
        self._tally.evaluations += 1
        self._evaluation_ends = ended
        for number in range(max(1, round(self._evaluation.prompts))):
            environment = number % len(self._tools)
            group = Group(-1, environment)
            rollout = Rollout(group, *self._workload.group(environment)(), self._fleet.assign(1))
            rollout.heldout = True
            self._evaluating.add(rollout)
            self._wait(rollout)

    def _heldout_ended(self, rollout: Rollout) -> None:
        rollout.alive = False
        self._fleet.leave(rollout.engine)
        self._evaluating.discard(rollout)
        if not self._evaluating and self._evaluation_ends is not None:
            self._evaluation_ends()
