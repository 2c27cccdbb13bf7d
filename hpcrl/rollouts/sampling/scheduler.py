"""Keeps the engines full with groups of rollouts, within the bounds of staleness and of what may be in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hpcrl.config.recipe import RolloutConfig
from hpcrl.errors import HpcrlError, RunDirError
from hpcrl.rollouts.batches.taken import Pending, TakenStep, TakenSteps
from hpcrl.rollouts.distillation.teacher import Teacher, TeacherError
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.engines.pool import EngineSession
from hpcrl.rollouts.environments import Prompt, prompt_of
from hpcrl.rollouts.environments.outcomes import checked_outcome
from hpcrl.rollouts.ledger import GroupJournal
from hpcrl.rollouts.records import Group, Rollout, StoredRollout
from hpcrl.rollouts.sampling.conversation import Conversation, Sampler
from hpcrl.rollouts.sampling.data_order import DataOrder, GroupTask
from hpcrl.rollouts.sampling.failures import FailureCount, NoRoomError, RunningRollout
from hpcrl.rollouts.sampling.policy import Fate, GroupPolicy
from hpcrl.rollouts.sampling.routes_room import RoutesRoom
from hpcrl.rollouts.sampling.staleness import StalenessAccount
from hpcrl.rollouts.saved_turns import SavedTurn, TurnKeeper
from hpcrl.rollouts.telemetry.counters import Counters

__all__ = ["Scheduler"]

_TOO_OLD = "too old"


@dataclass(eq=False)
class _Running:
    """A group in flight."""

    task: GroupTask
    session: EngineSession
    opening: asyncio.Task[tuple[Prompt, list[int]]]
    conversations: list[Conversation] = field(default_factory=list)
    keepers: list[TurnKeeper] = field(default_factory=list)
    rollouts: list[StoredRollout] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    """Members whose rollouts the journal has, or is getting."""
    members: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def version(self) -> int | None:
        """Version of the oldest first token so far; None while nobody has asked."""
        versions = [conversation.first_version for conversation in self.conversations]
        versions += [rollout.first_version for rollout in self.rollouts]
        return min((version for version in versions if version is not None), default=None)


class Scheduler:
    """Starts, finishes, drops and cancels groups. All of it happens in one event loop.

    Attributes
    ----------
    account:
        Places, in groups.
    in_flight:
        Rollouts that run.
    limit:
        How many may; what runs when it is lowered goes on.
    next_index:
        Group that has not been started yet, with all above it.
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
        room: RoutesRoom | None = None,
        failures: FailureCount | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """Take up the work; nothing is started before `run`.

        Parameters
        ----------
        account:
            With ``waiting`` equal to the number of ``finished``.
        restart:
            Groups below ``next_index`` that must be started again, as they were dealt out.
        finished:
            Groups that wait to be consumed.
        journal:
            Told what becomes of rollouts, so that another process can go on.
        parts:
            Rollouts that groups of ``restart`` have already: only their other members start.
        turns:
            What these begin with, by group and member.
        room:
            For routed experts of what is in flight; None: without bounds.
        failures:
            Told of rollouts that begin, finish and fail; None: only many in a row end the run.
        teacher:
            Scores finished rollouts; None: there is none.
        """
        self._room = room or RoutesRoom()
        self._journal, self._parts, self._turns = journal, dict(parts or {}), dict(turns or {})
        self.account, self.next_index, self.in_flight = account, next_index, 0
        self.limit = config.max_in_flight
        self._config, self._order, self._sampler, self._counters = config, order, sampler, counters
        self._policy = GroupPolicy(
            account,
            group_size=config.group_size,
            groups_per_step=config.rollouts_per_step // config.group_size,
            zero_variance=config.zero_variance,
            order=config.order,
        )
        self._restart = {task.index: task for task in restart}
        self._taken = TakenSteps()
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
        """Admit groups whenever there is room. Runs for ever.

        Raises
        ------
        HpcrlError
            Rollouts fail one after the other, or an engine's answers cannot be used.
        """
        try:
            while True:
                self._wake.clear()
                await self._admit()
                if self._policy.used_up or self._draining:
                    await self._sampler.pool.notify()  # engines may take other weights
                if self._error is not None:
                    raise self._error
                await self._wake.wait()
        finally:
            self._leave()

    async def _admit(self) -> None:
        """Start groups until there is no room."""
        while self._error is None and self._may_start():
            self._start(self._restart.pop(min(self._restart)) if self._restart else self._deal())
            # let the members of this group begin, and others be heard, before the next is admitted
            await asyncio.sleep(0)

    def serve(self, version: int) -> None:
        """All engines serve ``version``: new places may open."""
        if version > self.account.version:
            self.account.serve(version)
            self._wake.set()

    def set_limit(self, limit: int) -> None:
        """So many rollouts may be in flight from now on."""
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
        """The version that engines should serve now, where ``published`` is the newest."""
        return published if self._draining else self._policy.choose(published)

    def take_batch(self) -> list[Group]:
        """Consume the groups of the next step, as `GroupPolicy.take` chooses them, in index order.

        What cannot be used any more after this step is dropped and cancelled. Until `settle` is told that the step was
        trained, all of this can be undone in a snapshot.
        """
        chosen = self._policy.take(self._finished.values())
        taken = TakenStep(self.account.step, sorted(chosen, key=lambda group: group.index))
        self._taken.add(taken)
        for group in chosen:
            del self._finished[group.index]
            taken.consumed += len(group.rollouts)
        self._counters.consumed += taken.consumed
        self._drop_stale(taken)
        self._changed()
        return taken.groups

    def settle(self, step: int) -> None:
        """Steps up to ``step`` are trained; no snapshot from before them will be asked for."""
        self._taken.settle(step)
        self.account.settle(step)
        self._changed()

    def pending(self, step: int) -> Pending | None:
        """What a process must do that goes on after ``step``; None where that state is gone, or in the future."""
        return self._taken.undo(
            step,
            last=self.account.step,
            restart=[*self._restart.values(), *(running.task for running in self._running.values())],
            finished=self._finished.values(),
            counters=self._counters,
        )

    async def drain(self) -> None:
        """Start nothing more and abort what is in flight (it goes on after a restore)."""
        self._draining = True
        self._wake.set()
        members = [member for running in self._running.values() for member in running.members]
        self._leave()
        await asyncio.gather(*members, return_exceptions=True)

    def _leave(self) -> None:
        """Abort what is in flight, to be gone on with after a restore."""
        for running in list(self._running.values()):
            for keeper in running.keepers:
                keeper.flush()
            self._restart[running.task.index] = running.task
            self._cancel(running)

    # -- groups

    @property
    def places(self) -> int:
        """How many rollouts may be in flight, with memory for routed experts looked at."""
        return self._room.bound(self.limit, self._config.group_size)

    def _may_start(self) -> bool:
        size = self._config.group_size
        if self._draining or not self._room.may_start(self._policy, self.in_flight, self.limit, size):
            return False
        # where memory is full, what waits is trained first; a batch that lacks groups gets them all the same
        return self._policy.lacks(self._restart, self._finished.values()) or not self._journal.full

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
        running.written += [rollout.member for rollout in running.rollouts]
        missing = [member for member in range(size) if member not in running.written]
        self.in_flight += len(missing)
        self._counters.started += len(missing)
        for member in missing:
            work = asyncio.create_task(self._roll_out(running, member))
            running.members.add(work)
            work.add_done_callback(self._ended(running))

    async def _open(self, task: GroupTask) -> tuple[Prompt, list[int]]:
        """The prompt of a group and its tokens, once for all members."""
        prompt = await prompt_of(task.environment, "train", task.prompt_index)
        return prompt, self._sampler.renderer.opening(prompt.messages, tools=prompt.tools)

    def _ended(self, running: _Running) -> Callable[[asyncio.Task[None]], None]:
        def callback(work: asyncio.Task[None]) -> None:
            running.members.discard(work)
            running.session.leave()
            self.in_flight -= 1
            # a cancelled group has left the table already
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
            # one member that ends does not take the prompt from the others
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
        except HpcrlError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - foreign code: its rollout fails, the run goes on
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
            running.written.append(member)
            keeper.close()
            try:
                stored = await self._journal.finished(task, rollout)
            except OSError as error:
                self._error = RunDirError(f"a finished rollout cannot be kept: {error}")
                return
            self._failures.finished(counted, outcome.refused)
            self._counters.malformed_calls += conversation.malformed_calls
            self._counters.turns_ended_otherwise += conversation.turns_ended_otherwise
            self._counters.refused_parts += len(outcome.refused)
            self._counters.finished += 1
            routes = rollout.routed_experts
            self._counters.routes_bytes += 0 if routes is None else routes.data.nbytes
            self._counters.mixed_versions += stored.first_version != stored.last_version
            running.rollouts.append(stored)
        finally:
            keeper.close()
            # tokens of a finished rollout lie elsewhere now, and those of a failed one are nobody's
            running.keepers.remove(keeper)
            if conversation is not None:
                running.conversations.remove(conversation)
            self._counters.turns_recalled += keeper.recalled
            self._counters.turns_given_up += keeper.given_up

    async def _scored(self, rollout: Rollout, counted: RunningRollout) -> Rollout | None:
        """Return the rollout with what a teacher says of it, if there is one; None where that has failed."""
        if self._teacher is None:
            return rollout
        try:
            return await self._teacher.scored(rollout)
        except TeacherError as error:
            self._counters.dropped_environment += 1
            self._failed(error, counted)
            return None

    def _failed(self, error: Exception, counted: RunningRollout) -> None:
        self._error = self._failures.failed(error, counted) or self._error

    def _finish(self, running: _Running) -> None:
        """All members have ended: keep the group or drop it."""
        rollouts = sorted(running.rollouts, key=lambda rollout: rollout.member)
        task = running.task
        group = Group(
            index=task.index, environment=task.environment.name, prompt_index=task.prompt_index, rollouts=rollouts
        )
        version = group.version if rollouts else None
        fate = self._policy.end(members=len(rollouts), version=version, has_variance=group.has_variance)
        if fate is Fate.TOO_FEW:
            self._counters.dropped_group += len(rollouts)
            self._drop(running, "too few members of its group finished")
            self._changed()
            return
        self._counters.zero_variance_groups += not group.has_variance
        match fate:
            case Fate.KEPT:
                self._finished[group.index] = group
                self._journal.kept(group.index)
            case Fate.STALE:
                self._note_stale(group)
            case Fate.NO_VARIANCE:
                self._counters.dropped_zero_variance += len(rollouts)
                self._drop(running, "no variance in its group")
        self._changed()

    def _note_stale(self, group: Group) -> None:
        """A finished group is too old since some step; a snapshot from before that step may still give it back."""
        self._counters.dropped_stale += len(group.rollouts)
        step = self.account.overtaken_by(group.version)
        self._journal.dropped(group.index, [rollout.member for rollout in group.rollouts], _TOO_OLD, step=step)
        taken = self._taken.find(step)
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
        """Who waits for a batch, or for room, looks again."""
        self._batch_ready.set()
        self._wake.set()
