"""The orchestrator's ledger of rollouts: nothing that finished is lost, asked for again, or trained twice.

A rollout counts when it is on disk. A process that goes on after a restore takes from the ledger what had finished,
also what later steps than the restored one had taken, and what groups in flight had: only the missing members of a
group start again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from hpcrl.dock.ledger.entries import Dropped, Entry, Finished, Kept, PayloadPlace, Taken, TurnSaved, read_entries
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.replay import Held, Replay, State, Unfinished
from hpcrl.dock.warehouse.interface import Warehouse
from hpcrl.errors import CheckpointError
from hpcrl.rollouts.environments.base import Outcome
from hpcrl.rollouts.environments.outcomes import OutcomeError, checked_outcome
from hpcrl.rollouts.lent import LentRollouts
from hpcrl.rollouts.records import (
    Group,
    Rollout,
    SavedGroup,
    StoredRollout,
    decode_rollout,
    encode_rollout,
    finished_entry,
)
from hpcrl.rollouts.sampling.data_order import GroupTask
from hpcrl.rollouts.saved_turns import SavedTurn, decode_turn, encode_turn
from hpcrl.rollouts.unneeded import UnneededColumns

__all__ = ["GroupJournal", "RestoredRollouts", "RolloutLedger"]

_log = logging.getLogger(__name__)

_SAY_S = 30.0


class GroupJournal(Protocol):
    """What the scheduler and the batch server say of groups."""

    @property
    def full(self) -> bool:
        """Whether there is no room in memory for rollouts to come."""

    async def finished(self, task: GroupTask, rollout: Rollout) -> StoredRollout:
        """A rollout has finished; returns when it is durable, with what is still to be kept of it."""

    def turn(self, task: GroupTask, member: int, number: int, turn: SavedTurn) -> None:
        """Turn ``number`` of a rollout in progress has ended; nobody waits for it."""

    def kept(self, group: int) -> None:
        """All members of a group have ended, and it waits for a batch."""

    def dropped(self, group: int, members: Sequence[int], why: str, *, step: int | None = None) -> None:
        """A group is over without being trained; ``step`` as in `hpcrl.dock.ledger.entries.Dropped`."""

    async def taken(self, step: int, groups: Sequence[Group]) -> None:
        """The batch of a step was made of these; returns when that is durable."""

    def trained(self, step: int) -> None:
        """Steps up to this one are trained, on all ranks: nobody reads their rollouts any more."""


@dataclass(frozen=True, slots=True)
class RestoredRollouts:
    """What a restore finds in the ledger.

    Attributes
    ----------
    finished:
        Groups that wait for a batch, by index.
    parts:
        Rollouts of groups whose other members have to start again.
    turns:
        Of rollouts in progress, by group and member, those that they go on from.
    given_up:
        Turns of others, which start again: too old now, or not to be read.
    over:
        Groups that were trained, or dropped for good.
    next_index:
        The first group of which, and above which, nothing is known.
    count:
        Rollouts that have finished in this run, but for those that started again.
    """

    finished: dict[int, Group]
    parts: dict[int, Group]
    over: frozenset[int]
    next_index: int
    count: int
    turns: dict[tuple[int, int], list[SavedTurn]] = field(default_factory=dict)
    given_up: int = 0


class RolloutLedger:
    """The ledger of a run, of which this process is the writer; a `GroupJournal`.

    Attributes
    ----------
    warehouse:
        As given; it ends with the ledger.
    """

    def __init__(
        self,
        rollouts_dir: Path,
        *,
        attempt: int,
        restored: int,
        bound: int,
        limit_s: float,
        checkpoints: Callable[[], Sequence[int]],
        replays: bool = False,
        warehouse: Warehouse | None = None,
    ) -> None:
        """Read what there is, and begin a file of entries.

        Parameters
        ----------
        restored:
            The step that this process goes on after.
        bound:
            ``rollouts.max_off_policy_steps``.
        limit_s:
            How long a filesystem that refuses for a while is tried again, in seconds.
        checkpoints:
            Steps of the joint checkpoints that are there: what one of them may need is kept.
        replays:
            Whether steps that are undone are to be made again as they were: what their weights have sampled is
            sampled again, by weights of the same steps.
        warehouse:
            Where ranks find columns in memory; None: they read them from the payload files.

        Raises
        ------
        CheckpointError
            What is there cannot be read.
        OSError
            The filesystem refused.
        """
        self._restored, self._bound, self._replays = restored, bound, replays
        self._log = RolloutLog(rollouts_dir, attempt=attempt, restored=restored, limit_s=limit_s, warehouse=warehouse)
        self.warehouse, self._lent = warehouse, LentRollouts(warehouse)
        self._asked: set[int] = set()
        self._garbage = UnneededColumns(self._log.payload_dir, checkpoints=checkpoints, choose=self._unneeded)
        try:
            self._replay = Replay.of_long_run(read_entries(self._log.ledger_dir), self._payload_files())
        except ValueError as error:
            self._log.close()
            raise CheckpointError(
                f"the ledger of rollouts cannot be read: {error}\n"
                f"    hint: hpcrl rollouts verify says more; without {self._log.ledger_dir} a resume begins a new one, "
                "and finished rollouts that no step has used are asked for again"
            ) from error
        for problem in self._replay.problems:
            _log.warning("ledger of rollouts: %s", problem)

    def _payload_files(self) -> set[str]:
        return {path.name for path in self._log.payload_dir.iterdir()}

    @property
    def payload_dir(self) -> Path:
        """Where columns are durable."""
        return self._log.payload_dir

    @property
    def not_removed(self) -> int:
        """How often the filesystem did not let columns go that nobody needs."""
        return self._garbage.failures

    @property
    def full(self) -> bool:
        """See `GroupJournal.full`."""
        return self._lent.full

    def find(self, group_size: int) -> RestoredRollouts:
        """Read what waits; rollouts that are too old now, or whose columns are gone, start again."""
        finished: dict[int, Group] = {}
        parts: dict[int, Group] = {}
        over = self._replay.over_groups()
        waiting, oldest = self._replay.waiting(), self._restored - self._bound
        for index, held in waiting.items():
            if index in over:  # members of a group that was dropped while they were being written
                self._drop(index, [each.entry.member for each in held], "its group was over", again=False)
            elif min(each.version for each in held) < oldest:
                self._drop(index, [each.entry.member for each in held], "too old after a restore", again=True)
            elif self._replays and any(each.pivots for each in held):
                why = "sampled by weights of steps that are made again"
                self._drop(index, [each.entry.member for each in held], why, again=True)
            else:
                rollouts = self._load(held)
                name, prompt = held[0].entry.environment, held[0].entry.prompt_index
                group = Group(index=index, environment=name, prompt_index=prompt, rollouts=rollouts)
                whole = len(rollouts) == len(held) and index in self._replay.kept
                if whole or len(rollouts) == group_size:
                    finished[index] = group
                elif rollouts:
                    parts[index] = group
        turns, given_up = self._turns(parts, finished)
        count = len(self._replay.rollouts) - len(self._replay.gone) + self._replay.forgotten
        next_index = self._replay.next_index
        # of a long run nearly all were trained long ago, and their columns are gone
        there = self._payload_files()
        named = {held.entry.payload.file for held in self._replay.rollouts} | self._files_of_turns()
        self._replay.forget(lambda file: file not in there)
        # a writer that was killed before its first entry was durable; nobody can find these columns
        for error in self._garbage.remove(there - named):
            _log.warning("columns that nobody needs are left for now: %s", error)
        return RestoredRollouts(finished, parts, over, next_index, count, turns, given_up)

    def _turns(
        self, parts: dict[int, Group], finished: Collection[int]
    ) -> tuple[dict[tuple[int, int], list[SavedTurn]], int]:
        """What rollouts in progress go on from, and how many turns they cannot use; their groups become ``parts``."""
        found, given_up = {}, 0
        for (index, member), each in self._replay.unfinished.items():
            if index in finished:
                continue
            old = each.version < self._restored - self._bound or (self._replays and each.mirrored)
            turns = [] if old else self._load_turns(each)
            given_up += len(each.turns) - len(turns)
            if turns:
                found[index, member] = turns
            about = each.turns[0]
            parts.setdefault(
                index, Group(index=index, environment=about.environment, prompt_index=about.prompt_index, rollouts=[])
            )
        return found, given_up

    def _load_turns(self, each: Unfinished) -> list[SavedTurn]:
        """Turns up to one that cannot be read."""
        found = []
        for entry in each.turns:
            try:
                turn = decode_turn(read_payload(self._log.payload_dir, entry.payload))
            except (OSError, ValueError) as error:
                what = f"rollout {entry.group}/{entry.member} goes on from turn {entry.turn}"
                _log.warning("%s: %s", what, error)
                break
            found.append(turn.counted_as(each.version) if each.mirrored else turn)
        return found

    def _files_of_turns(self) -> set[str]:
        return {turn.payload.file for each in self._replay.unfinished.values() for turn in each.turns}

    async def adopt(self, group: SavedGroup, task: GroupTask) -> Group:
        """Write a finished group of a checkpoint from before there was a ledger."""
        rollouts = [await self.finished(task, rollout) for rollout in group.rollouts]
        self.kept(group.index)
        return Group(
            index=group.index, environment=group.environment, prompt_index=group.prompt_index, rollouts=rollouts
        )

    def _load(self, held: Sequence[Held]) -> list[StoredRollout]:
        found = []
        for each in held:
            try:
                block = read_payload(self._log.payload_dir, each.entry.payload)
                rollout = decode_rollout(block)
                # an earlier version took any reward, and one that is not finite would end the run at each resume
                outcome = checked_outcome(Outcome(rollout.reward, rollout.parts))
            except (OSError, ValueError) as error:
                _log.warning("rollout %d/%d starts again: %s", *each.id, error)
                unusable = isinstance(error, OutcomeError)
                why = "its reward cannot be used" if unusable else "its columns cannot be read"
                self._drop(each.entry.group, [each.entry.member], why, again=True)
                continue
            rollout = msgspec.structs.replace(rollout, reward=outcome.reward, parts=dict(outcome.parts))
            if self.warehouse is not None:
                self.warehouse.put(each.entry.payload, [block])
            counts_as = each.version if each.pivots else None
            found.append(StoredRollout.of(rollout, each.entry.payload, counts_as=counts_as))
        return found

    async def finished(self, task: GroupTask, rollout: Rollout) -> StoredRollout:
        """See `GroupJournal.finished`."""
        about, arrays = encode_rollout(rollout)

        def entry(place: PayloadPlace) -> Entry:
            return finished_entry(
                rollout,
                place,
                group=task.index,
                member=rollout.member,
                environment=task.environment.name,
                prompt_index=task.prompt_index,
            )

        # a rollout whose group is cancelled now is written all the same, before the entry that drops it
        written = await self._durable(self._noted(self._log.finish(about, arrays, entry)))
        assert isinstance(written, Finished)
        return StoredRollout.of(rollout, written.payload)

    def turn(self, task: GroupTask, member: int, number: int, turn: SavedTurn) -> None:
        """See `GroupJournal.turn`."""
        about, arrays = encode_turn(turn)

        def entry(place: PayloadPlace) -> Entry:
            return TurnSaved(
                group=task.index,
                member=member,
                turn=number,
                environment=task.environment.name,
                prompt_index=task.prompt_index,
                tokens=len(turn.said) + len(turn.token_ids),
                first_version=int(turn.versions[0]),
                last_version=int(turn.versions.max()),
                payload=place,
            )

        self._noted(self._log.finish(about, arrays, entry))

    async def _durable(self, written: asyncio.Future[Entry]) -> Entry:
        """Wait, and say so: how long is the trainer's to decide, whose own wait has a deadline."""
        began = time.monotonic()
        while not (await asyncio.wait([written], timeout=_SAY_S))[0]:
            _log.warning("a finished rollout waits for the filesystem for %.0f s", time.monotonic() - began)
        return written.result()

    def _noted(self, writing: Future[Entry]) -> asyncio.Future[Entry]:
        """The same for the event loop; what is written is counted here in the order in which it was written."""
        written = asyncio.wrap_future(writing)
        written.add_done_callback(self._note)
        return written

    def _note(self, written: asyncio.Future[Entry]) -> None:
        # an entry that could not be written fails what comes next, which somebody waits for
        if not written.cancelled() and written.exception() is None:
            entry = written.result()
            self._replay.add(entry)
            if isinstance(entry, Dropped):
                held = [self._replay.find(entry.group, member) for member in entry.members]
                self._lent.release([each.entry.payload for each in held if each is not None])

    def kept(self, group: int) -> None:
        """See `GroupJournal.kept`."""
        self._noted(self._log.append(Kept(group=group)))

    def dropped(self, group: int, members: Sequence[int], why: str, *, step: int | None = None) -> None:
        """See `GroupJournal.dropped`."""
        self._noted(self._log.append(Dropped(group=group, members=list(members), why=why, step=step)))

    def _drop(self, group: int, members: list[int], why: str, *, again: bool) -> None:
        """While it is read, before anything else is written."""
        entry = Dropped(group=group, members=members, why=why, again=again)
        self._replay.add(entry)
        self._log.append(entry)

    async def taken(self, step: int, groups: Sequence[Group]) -> None:
        """See `GroupJournal.taken`."""
        members = [(group.index, [rollout.member for rollout in group.rollouts]) for group in groups]
        self._lent.lend(step, [rollout.place for group in groups for rollout in group.rollouts])
        await self._durable(self._noted(self._log.append(Taken(step=step, groups=members))))
        # files of a later process are none of ours, and of those from here on entries may be on their way
        self._garbage.look(before=self._log.oldest_unsettled)

    def trained(self, step: int) -> None:
        """See `GroupJournal.trained`."""
        self._lent.trained(step)

    def protect(self, step: int) -> None:
        """A checkpoint of ``step`` is being saved: what it needs stays."""
        self._asked.add(step)

    def _unneeded(self, saved: Sequence[int], there: set[str]) -> list[str]:
        """Files of columns of which no checkpoint needs anything, and no rank."""
        newest = max(saved, default=0)
        self._asked = {step for step in self._asked if step > newest}
        steps = {*saved, *self._asked} or {0}
        # ranks may read what a step was made of, whether a checkpoint needs it or not
        needed = self._files_of_turns() | self._lent.files()
        for held in self._replay.rollouts:
            if any(self._needs(step, held) for step in steps):
                needed.add(held.entry.payload.file)
        unneeded = sorted(there - needed)
        if unneeded:
            self._replay.forget(set(unneeded).__contains__)
        return unneeded

    def _needs(self, step: int, held: Held) -> bool:
        """Whether a restore of ``step`` could train on this rollout."""
        if held.state is State.WAITING:
            return True
        # one that is mirrored so far back is too old at once
        return held.step is not None and held.step > step and held.version <= step + self._bound

    def close(self) -> None:
        """Write what is left, and give the memory back."""
        self._log.close()
        if self.warehouse is not None:
            self.warehouse.close()
