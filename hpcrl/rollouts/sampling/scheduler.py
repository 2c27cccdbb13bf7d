"""Keeps the engines full with groups of rollouts, within the bounds of staleness and of what may be in flight."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hpcrl.config.recipe import RolloutConfig
from hpcrl.errors import HpcrlError, RunDirError
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Group, Rollout, StoredRollout
from hpcrl.rollouts.core.saved_turns import SavedTurn, TurnKeeper
from hpcrl.rollouts.core.staleness import StalenessAccount
from hpcrl.rollouts.distillation.teacher import Teacher, TeacherError
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.engines.pool import EngineSession
from hpcrl.rollouts.environments import Prompt, prompt_of
from hpcrl.rollouts.environments.data_order import DataOrder, GroupTask
from hpcrl.rollouts.environments.outcomes import CheckedOutcome, checked_outcome
from hpcrl.rollouts.ledger.ledger import GroupJournal
from hpcrl.rollouts.ledger.taken import Pending, TakenStep, TakenSteps
from hpcrl.rollouts.sampling.branches import TooManyBranchesError
from hpcrl.rollouts.sampling.conversation import Conversation, Sampler
from hpcrl.rollouts.sampling.failures import FailureCount, NoRoomError, RunningRollout, describe_failure
from hpcrl.rollouts.sampling.policy import GroupAdmission, GroupOutcome
from hpcrl.rollouts.sampling.policy_wait import PolicyWait
from hpcrl.rollouts.sampling.routed_experts_budget import RoutedExpertsBudget
from hpcrl.runs.rollout_failures import FailureCause

_log = logging.getLogger(__name__)
_TOO_OLD = "too old"


@dataclass(eq=False)
class _Running:
    """Group in flight."""

    task: GroupTask
    session: EngineSession
    opening: asyncio.Task[tuple[Prompt, list[int]]]
    conversations: list[Conversation] = field(default_factory=list)
    keepers: list[TurnKeeper] = field(default_factory=list)
    rollouts: list[StoredRollout] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    """Members whose rollouts the journal has, or is writing."""
    members: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def version(self) -> int | None:
        """Return the version of the oldest first token so far; None before the first request."""
        versions = [conversation.first_version for conversation in self.conversations]
        versions += [rollout.first_version for rollout in self.rollouts]
        return min((version for version in versions if version is not None), default=None)


class Scheduler:
    """Starts, finishes, drops and cancels groups, all in one event loop.

    Attributes
    ----------
    account:
        Account of places, in groups.
    in_flight:
        Number of running rollouts.
    limit:
        Maximum number of running rollouts; those that run when it is lowered continue.
    next_index:
        Index of the first group that has not been started.
    policy_wait:
        Time for which there was room for a group, and none could begin until engines served a newer version.
    """

    def __init__(
        self,
        *,
        config: RolloutConfig,
        order: DataOrder,
        sampler: Sampler,
        account: StalenessAccount,
        counters: Counters,
        journal: GroupJournal,
        next_index: int = 0,
        restart: Iterable[GroupTask] = (),
        finished: Iterable[Group] = (),
        parts: Mapping[int, Sequence[StoredRollout]] | None = None,
        turns: Mapping[tuple[int, int], Sequence[SavedTurn]] | None = None,
        room: RoutedExpertsBudget | None = None,
        failures: FailureCount | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """Take over the restored work; nothing is started before `run`.

        Parameters
        ----------
        account:
            Account whose ``waiting`` equals the number of ``finished``.
        restart:
            Groups below ``next_index`` that must be started again, with their original tasks.
        finished:
            Groups that wait to be consumed.
        journal:
            Records what becomes of rollouts, so that another process can continue.
        parts:
            Rollouts that groups of ``restart`` have already: only their other members start.
        turns:
            Saved turns with which these begin, by group and member.
        room:
            Memory budget for routed experts in flight; None: without bounds.
        failures:
            Counts rollouts that begin, finish and fail; None: only consecutive failures end the run.
        teacher:
            Scores finished rollouts; None: there is none.
        """
        self._room = room or RoutedExpertsBudget()
        self._journal, self._parts, self._turns = journal, dict(parts or {}), dict(turns or {})
        self.account, self.next_index, self.in_flight = account, next_index, 0
        self.limit = config.max_in_flight
        self._config, self._order, self._sampler, self._counters = config, order, sampler, counters
        self._policy = GroupAdmission(
            account,
            group_size=config.group_size,
            groups_per_step=config.rollouts_per_step // config.group_size,
            zero_variance=config.zero_variance,
            order=config.order,
        )
        self._restart = {task.index: task for task in restart}
        self._taken, self.policy_wait = TakenSteps(), PolicyWait()
        self._running: dict[int, _Running] = {}
        self._finished = {group.index: group for group in finished}
        self._draining = False
        self._failures, self._teacher = failures or FailureCount(), teacher
        self._error: HpcrlError | None = None
        self._wake = asyncio.Event()
        self._batch_ready = asyncio.Event()
        # a resume may have lowered the bound of staleness
        self._drop_stale_finished()

    # -- for the rest of the orchestrator

    async def run(self) -> None:
        """Start groups whenever there is capacity; never return.

        Raises
        ------
        HpcrlError
            Rollouts fail one after the other, or an engine's answers are unusable.
        """
        try:
            while True:
                # cleared before groups are admitted: a change during the admission then wakes the next round
                self._wake.clear()
                await self._admit()
                self.policy_wait.note(waits=self._waits_for_policy())
                if self._policy.used_up or self._draining:
                    await self._sampler.pool.notify()  # engines may load other weights now
                if self._error is not None:
                    raise self._error
                await self._wake.wait()
        finally:
            self._leave()

    async def _admit(self) -> None:
        """Start groups until the capacity is used."""
        while self._error is None and self._may_start():
            # groups to be started again come first, in index order: a batch in deterministic order waits for the oldest
            self._start(self._restart.pop(min(self._restart)) if self._restart else self._deal())
            # let the members of this group start and other tasks run before the next group is admitted
            await asyncio.sleep(0)

    def serve(self, version: int) -> None:
        """Record that all engines serve ``version``, which may open new places."""
        if version > self.account.version:
            self.account.serve(version)
            self._wake.set()

    def set_limit(self, limit: int) -> None:
        """Set how many rollouts may be in flight from now on."""
        if limit != self.limit:
            self.limit = limit
            self._wake.set()

    async def wait_batch(self) -> None:
        """Wait until a batch may be taken: as long as that takes, because the trainer's own wait has a deadline."""
        while not self._may_take():
            self._batch_ready.clear()
            await self._batch_ready.wait()

    def _may_take(self) -> bool:
        going = [(index, running.version) for index, running in self._running.items()]
        return self._policy.may_take([*going, *((index, None) for index in self._restart)], self._finished.values())

    def choose_version(self, published: int) -> int:
        """Return the version that engines should serve now, where ``published`` is the newest."""
        return published if self._draining else self._policy.choose(published)

    def take_batch(self) -> list[Group]:
        """Consume the groups of the next step, as `GroupAdmission.take` chooses them, in index order.

        Groups that this step makes too old are dropped or cancelled. Until `settle` marks the step as trained, all of
        this can be undone in a snapshot.
        """
        chosen = self._policy.take(self._finished.values())
        taken = TakenStep(self.account.step, sorted(chosen, key=lambda group: group.index))
        # added before stale groups are dropped: `_note_stale` looks up the step that made them stale
        self._taken.add(taken)
        for group in chosen:
            del self._finished[group.index]
            taken.consumed += len(group.rollouts)
        self._counters.consumed += taken.consumed
        self._drop_stale(taken)
        self._changed()
        return taken.groups

    def settle(self, step: int) -> None:
        """Forget steps up to ``step``: they are trained, and no snapshot from before them will be requested."""
        self._taken.settle(step)
        self.account.settle(step)
        self._changed()

    def pending(self, step: int) -> Pending | None:
        """Return the work of a process that continues after ``step``; None where that state is not available."""
        return self._taken.undo(
            step,
            last=self.account.step,
            restart=[*self._restart.values(), *(running.task for running in self._running.values())],
            finished=self._finished.values(),
            counters=self._counters,
        )

    async def drain(self) -> None:
        """Start nothing more and abort rollouts in flight, which continue after a restore."""
        self._draining = True
        self._wake.set()
        # collected first, because `_leave` removes the groups from the table
        members = [member for running in self._running.values() for member in running.members]
        self._leave()
        await asyncio.gather(*members, return_exceptions=True)

    def _leave(self) -> None:
        """Abort the rollouts in flight, which continue after a restore."""
        for running in list(self._running.values()):
            # turns so far are written now: a restored rollout continues from them
            for keeper in running.keepers:
                keeper.flush()
            # a snapshot that is taken later must still contain the group
            self._restart[running.task.index] = running.task
            self._cancel(running)

    # -- groups

    @property
    def places(self) -> int:
        """Return the maximum number of rollouts in flight, with the memory for routed experts considered."""
        return self._room.bound(self.limit, self._config.group_size)

    def _may_start(self) -> bool:
        size = self._config.group_size
        if self._draining or not self._room.may_start(self._policy, self.in_flight, self.limit, size):
            return False
        # while memory for rollouts is full, waiting groups are trained first. A batch that lacks groups gets them
        # nevertheless, because only training frees memory
        return self._policy.must_wait_for_unfinished(self._restart, self._finished.values()) or not self._journal.full

    def _waits_for_policy(self) -> bool:
        has_room = self.in_flight + self._config.group_size <= self.places
        return not self._draining and has_room and self._policy.needs_newer_version

    def staleness_in_queue(self) -> list[int]:
        """Return the staleness that each finished rollout has if the next step takes it."""
        step = self.account.step
        return [step - rollout.first_version for group in self._finished.values() for rollout in group.rollouts]

    def staleness_in_flight(self) -> list[int]:
        """Return the same of each rollout that runs, from its first request on."""
        running = (conversation for group in self._running.values() for conversation in group.conversations)
        versions = (conversation.first_version for conversation in running)
        return [self.account.step - version for version in versions if version is not None]

    def _deal(self) -> GroupTask:
        self.next_index += 1
        return self._order.task(self.next_index - 1)

    def _start(self, task: GroupTask) -> None:
        index, size = task.index, self._config.group_size
        opening = asyncio.create_task(self._open(task))
        running = _Running(task, self._sampler.pool.session(f"group-{index}", rollouts=size), opening)
        self._running[index] = running
        self.account.start()
        running.rollouts += self._parts.pop(index, ())
        # members that finished before a restart: the entry of a later drop must name them as well
        running.written += [rollout.member for rollout in running.rollouts]
        missing = [member for member in range(size) if member not in running.written]
        self.in_flight += len(missing)
        self._counters.started += len(missing)
        for member in missing:
            work = asyncio.create_task(self._roll_out(running, member))
            running.members.add(work)
            work.add_done_callback(self._ended(running))

    async def _open(self, task: GroupTask) -> tuple[Prompt, list[int]]:
        """Return the prompt of a group and its tokens, computed once for all members."""
        prompt = await prompt_of(task.environment, "train", task.prompt_index)
        return prompt, self._sampler.renderer.opening(prompt.messages, tools=prompt.tools)

    def _ended(self, running: _Running) -> Callable[[asyncio.Task[None]], None]:
        def callback(work: asyncio.Task[None]) -> None:
            running.members.discard(work)
            if not work.cancelled() and (error := work.exception()) is not None:
                # our own code failed behind the reward: the rollout is lost, and nothing has counted it
                self._error = self._error or HpcrlError(f"a rollout was lost: {type(error).__name__}: {error}")
                _log.error("a rollout of group %d was lost", running.task.index, exc_info=error)
            running.session.leave()
            self.in_flight -= 1
            # `_cancel` has removed a cancelled group from the table already, and freed its place
            if not running.members and running.task.index in self._running:
                del self._running[running.task.index]
                self._finish(running)
            self._wake.set()

        return callback

    async def _roll_out(self, running: _Running, member: int) -> None:
        task = running.task
        write = partial(self._journal.turn, task, member)
        keeper = TurnKeeper(write, self._turns.pop((task.index, member), ()))
        running.keepers.append(keeper)
        async with self._room.place():
            await self._roll_out_in(running, member, keeper)

    async def _roll_out_in(self, running: _Running, member: int, keeper: TurnKeeper) -> None:
        started, task = time.monotonic(), running.task
        conversation, counted = None, self._failures.begin(task.environment.name)
        try:
            # shielded, because cancelling one member must not cancel the prompt that all members share
            prompt, opening = await asyncio.shield(running.opening)
            seed = self._order.rollout_seed(task.index, member)
            conversation = Conversation(
                self._sampler, running.session, seed=seed, opening=opening, tools=prompt.tools, keeper=keeper
            )
            running.conversations.append(conversation)
            outcome = checked_outcome(await task.environment.rollout(prompt, conversation))
        except EngineError as error:
            self._counters.dropped_engine += 1
            self._failed(error, counted)
        except TooManyBranchesError as error:
            self._counters.dropped_branches += 1
            self._failed(error, counted)
        except HpcrlError as error:
            # not a failure of this rollout alone: `run` raises it
            self._error = error
        except Exception as error:  # noqa: BLE001 - custom code: its rollout fails, the run continues
            self._counters.dropped_environment += 1
            self._failed(error, counted)
        else:
            rollout = await conversation.rollout(member, outcome, seconds=time.monotonic() - started)
            if rollout is None:
                self._counters.dropped_environment += 1
                self._failed(NoRoomError(), counted)
                return
            if (rollout := await self._scored(rollout, counted)) is None:
                return
            # recorded before the write: if the group is dropped meanwhile, the entry of the drop must name this member
            running.written.append(member)
            keeper.close()
            try:
                stored = await self._journal.finished(task, rollout)
            except OSError as error:
                self._error = RunDirError(f"a finished rollout cannot be kept: {error}")
                return
            self._failures.finished(counted, outcome.refused, tampered=outcome.tampered)
            self._count(conversation, outcome, rollout, stored)
            running.rollouts.append(stored)
        finally:
            keeper.close()
            # the version of the group ignores this conversation from now on: a finished rollout is in `rollouts`, and
            # the tokens of a failed one do not count
            running.keepers.remove(keeper)
            if conversation is not None:
                running.conversations.remove(conversation)
            self._counters.turns_recalled += keeper.recalled
            self._counters.turns_given_up += keeper.given_up

    def _count(
        self, conversation: Conversation, outcome: CheckedOutcome, rollout: Rollout, stored: StoredRollout
    ) -> None:
        """Count a finished rollout, and what it was made of."""
        counters, routes = self._counters, rollout.routed_experts
        counters.declared_branches += conversation.declared_branches
        counters.judge_tampered += outcome.tampered
        counters.malformed_calls += conversation.malformed_calls
        counters.turns_ended_otherwise += conversation.turns_ended_otherwise
        counters.refused_parts += len(outcome.refused)
        counters.finished += 1
        counters.branched += stored.branches > 1
        counters.routes_bytes += 0 if routes is None else routes.data.nbytes
        counters.mixed_versions += stored.first_version != stored.last_version

    async def _scored(self, rollout: Rollout, counted: RunningRollout) -> Rollout | None:
        """Return the rollout with the teacher's scores, if there is a teacher; None where that has failed."""
        if self._teacher is None:
            return rollout
        try:
            return await self._teacher.scored(rollout)
        except TeacherError as error:
            self._counters.dropped_environment += 1
            self._failed(error, counted)
            return None

    def _failed(self, error: Exception, counted: RunningRollout) -> None:
        self._counters.sandboxes_evicted += describe_failure(error)[0] is FailureCause.EVICTED
        self._error = self._failures.failed(error, counted) or self._error

    def _finish(self, running: _Running) -> None:
        """Keep or drop a group whose members have all ended."""
        rollouts = sorted(running.rollouts, key=lambda rollout: rollout.member)
        task = running.task
        group = Group(
            index=task.index, environment=task.environment.name, prompt_index=task.prompt_index, rollouts=rollouts
        )
        version = group.version if rollouts else None
        # for every outcome: it moves the group's place in the account from running to waiting, or frees it
        fate = self._policy.end(members=len(rollouts), version=version, has_variance=group.has_variance)
        if fate is GroupOutcome.TOO_FEW:
            self._counters.dropped_group += len(rollouts)
            self._drop(running, "too few members of its group finished")
            self._changed()
            return
        self._counters.zero_variance_groups += not group.has_variance
        match fate:
            case GroupOutcome.KEPT:
                self._finished[group.index] = group
                self._journal.kept(group.index)
            case GroupOutcome.STALE:
                self._note_stale(group)
            case GroupOutcome.NO_VARIANCE:
                self._counters.dropped_zero_variance += len(rollouts)
                self._drop(running, "no variance in its group")
        self._changed()

    def _note_stale(self, group: Group) -> None:
        """Drop a finished group that a step made too old; a snapshot from before that step may still restore it."""
        self._counters.dropped_stale += len(group.rollouts)
        # dropped by a known step: a checkpoint of an earlier step may still train on the group
        step = self.account.last_usable_step(group.version)
        self._journal.dropped(group.index, [rollout.member for rollout in group.rollouts], _TOO_OLD, step=step)
        taken = self._taken.find(step)
        # None where that step is trained, so that no snapshot can restore the group
        if taken is not None:
            taken.stale.append(group)
            taken.dropped_stale += len(group.rollouts)

    def _drop_stale_finished(self) -> None:
        for group in [group for group in self._finished.values() if self._policy.is_stale(group.version)]:
            del self._finished[group.index]
            self._note_stale(group)
            self.account.drop_waiting()

    def _drop_stale(self, taken: TakenStep) -> None:
        self._drop_stale_finished()
        for running in list(self._running.values()):
            if self._policy.is_stale(running.version):
                # the same increments are kept in `taken`, so that a snapshot of an earlier step can subtract them
                taken.cancelled.append(running.task)
                taken.cancelled_stale += len(running.members)
                taken.dropped_stale += len(running.rollouts)
                self._counters.cancelled_stale += len(running.members)
                self._counters.dropped_stale += len(running.rollouts)
                self._drop(running, _TOO_OLD, step=taken.step)
                self._cancel(running)

    def _drop(self, running: _Running, why: str, *, step: int | None = None) -> None:
        self._journal.dropped(running.task.index, sorted(running.written), why, step=step)

    def _cancel(self, running: _Running) -> None:
        del self._running[running.task.index]
        self.account.drop_running()
        running.opening.cancel()
        for member in running.members:
            member.cancel()

    def _changed(self) -> None:
        """Wake the tasks that wait for a batch or for capacity."""
        self._batch_ready.set()
        self._wake.set()
