"""Ledger of rollouts of the orchestrator: no finished rollout is lost, sampled again, or trained twice.

A rollout counts when it is on disk. A process that continues after a restore takes finished rollouts from the ledger:
those that were waiting, those that later steps than the restored one had taken, and those of groups in flight, of which
only the missing members start again.
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
from hpcrl.rollouts.core.records import (
    Group,
    Rollout,
    SavedGroup,
    StoredRollout,
    decode_rollout,
    encode_rollout,
    finished_entry,
)
from hpcrl.rollouts.core.saved_turns import SavedTurn, decode_turn, encode_turn
from hpcrl.rollouts.environments.base import Outcome
from hpcrl.rollouts.environments.data_order import GroupTask
from hpcrl.rollouts.environments.outcomes import OutcomeError, checked_outcome
from hpcrl.rollouts.ledger.payload_gc import PayloadGarbageCollector
from hpcrl.rollouts.ledger.unacknowledged import UnacknowledgedRollouts

_log = logging.getLogger(__name__)

_SAY_S = 30.0


class GroupJournal(Protocol):
    """Journal of the events of groups, which the scheduler and the batch server write."""

    @property
    def full(self) -> bool:
        """Return whether memory has no space for further rollouts."""

    async def finished(self, task: GroupTask, rollout: Rollout) -> StoredRollout:
        """Record a finished rollout; return when it is durable, with the part that stays in memory."""

    def turn(self, task: GroupTask, member: int, number: int, turn: SavedTurn) -> None:
        """Record turn ``number`` of a rollout in progress; the caller does not wait for the write."""

    def kept(self, group: int) -> None:
        """Record that all members of a group have ended, and that it waits for a batch."""

    def dropped(self, group: int, members: Sequence[int], why: str, *, step: int | None = None) -> None:
        """Record that a group ended without being trained.

        ``step`` has the meaning that it has in `hpcrl.dock.ledger.entries.Dropped`.
        """

    async def taken(self, step: int, groups: Sequence[Group]) -> None:
        """Record that ``groups`` make the batch of ``step``; return when that is durable."""

    def trained(self, step: int) -> None:
        """Record that steps up to ``step`` are trained on all ranks, so that their rollouts are no longer read."""


@dataclass(frozen=True, slots=True)
class RestoredRollouts:
    """Rollouts that a restore finds in the ledger.

    Attributes
    ----------
    finished:
        Groups that wait for a batch, by index.
    parts:
        Finished rollouts of groups whose other members have to start again.
    turns:
        Saved turns that rollouts in progress continue from, by group and member.
    given_up:
        Number of saved turns that are too old or unreadable; their rollouts start again.
    over:
        Groups that were trained or finally dropped.
    next_index:
        First index from which on the ledger knows no group.
    count:
        Rollouts that have finished in this run, without those that started again.
    """

    finished: dict[int, Group]
    parts: dict[int, Group]
    over: frozenset[int]
    next_index: int
    count: int
    turns: dict[tuple[int, int], list[SavedTurn]] = field(default_factory=dict)
    given_up: int = 0


class RolloutLedger:
    """Ledger of a run, written only by this process; a `GroupJournal`.

    Attributes
    ----------
    warehouse:
        The given warehouse; it is closed with the ledger.
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
        """Read the existing ledger, and begin a file of entries.

        Parameters
        ----------
        restored:
            The step that this process continues after.
        bound:
            ``rollouts.max_off_policy_steps``.
        limit_s:
            Maximum time in seconds of retries on a filesystem that refuses temporarily.
        checkpoints:
            Returns the steps of the existing joint checkpoints: rollouts that one of them may need are kept.
        replays:
            Whether undone steps are repeated exactly: rollouts sampled by their weights are sampled again, by weights
            of the same steps.
        warehouse:
            Warehouse in which ranks find columns in memory; None: they read the payload files.

        Raises
        ------
        CheckpointError
            The existing ledger cannot be read.
        OSError
            The filesystem refused.
        """
        self._restored, self._bound, self._replays = restored, bound, replays
        self._log = RolloutLog(rollouts_dir, attempt=attempt, restored=restored, limit_s=limit_s, warehouse=warehouse)
        self.warehouse, self._lent = warehouse, UnacknowledgedRollouts(warehouse)
        self._asked: set[int] = set()
        self._garbage = PayloadGarbageCollector(self._log.payload_dir, checkpoints=checkpoints, choose=self._unneeded)
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
        """Return the directory in which columns are durable."""
        return self._log.payload_dir

    @property
    def not_removed(self) -> int:
        """Return how often the filesystem refused to remove columns that are no longer needed."""
        return self._garbage.failures

    @property
    def full(self) -> bool:
        """Return whether memory has no space for further rollouts (see `GroupJournal.full`)."""
        return self._lent.full

    def find(self, group_size: int) -> RestoredRollouts:
        """Return the restored rollouts; those that are too old now, or whose columns are gone, start again."""
        finished: dict[int, Group] = {}
        parts: dict[int, Group] = {}
        over = self._replay.over_groups()
        waiting, oldest = self._replay.waiting(), self._restored - self._bound
        for index, held in waiting.items():
            if index in over:  # members of a group that was dropped during their write
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
        # in a long run nearly all rollouts were trained long ago, and their columns are removed
        there = self._payload_files()
        named = {held.entry.payload.file for held in self._replay.rollouts} | self._files_of_turns()
        self._replay.forget(lambda file: file not in there)
        # left by a writer that was killed before its first entry was durable; no entry refers to these columns
        for error in self._garbage.remove(there - named):
            _log.warning("unneeded columns are kept for now: %s", error)
        return RestoredRollouts(finished, parts, over, next_index, count, turns, given_up)

    def _turns(
        self, parts: dict[int, Group], finished: Collection[int]
    ) -> tuple[dict[tuple[int, int], list[SavedTurn]], int]:
        """Return the saved turns of rollouts in progress, and how many turns cannot be used.

        The groups of these rollouts are added to ``parts``.
        """
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
        """Return the turns before the first that cannot be read."""
        found = []
        for entry in each.turns:
            try:
                turn = decode_turn(read_payload(self._log.payload_dir, entry.payload))
            except (OSError, ValueError) as error:
                what = f"rollout {entry.group}/{entry.member} continues from turn {entry.turn}"
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
                # an earlier version accepted any reward, and one that is not finite would fail the run at each resume
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

        # a rollout whose group is cancelled now is written nevertheless, before the entry of the drop
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
        """Wait for a write without a time limit, because the trainer's own wait has one; log long waits."""
        began = time.monotonic()
        while not (await asyncio.wait([written], timeout=_SAY_S))[0]:
            _log.warning("a finished rollout waits for the filesystem for %.0f s", time.monotonic() - began)
        return written.result()

    def _noted(self, writing: Future[Entry]) -> asyncio.Future[Entry]:
        """Return a future of the event loop for ``writing``; entries are counted in the order of their writing."""
        written = asyncio.wrap_future(writing)
        written.add_done_callback(self._note)
        return written

    def _note(self, written: asyncio.Future[Entry]) -> None:
        # a failed write of an entry fails the next one, which has a waiting caller
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
        """Drop a group while the ledger is read, before other entries are written."""
        entry = Dropped(group=group, members=members, why=why, again=again)
        self._replay.add(entry)
        self._log.append(entry)

    async def taken(self, step: int, groups: Sequence[Group]) -> None:
        """See `GroupJournal.taken`."""
        members = [(group.index, [rollout.member for rollout in group.rollouts]) for group in groups]
        self._lent.lend(step, [rollout.place for group in groups for rollout in group.rollouts])
        await self._durable(self._noted(self._log.append(Taken(step=step, groups=members))))
        # not files of a later process, and not those whose entries may still be pending
        self._garbage.look(before=self._log.oldest_unsettled)

    def trained(self, step: int) -> None:
        """See `GroupJournal.trained`."""
        self._lent.trained(step)

    def protect(self, step: int) -> None:
        """Keep the rollouts that a checkpoint of ``step``, which is being saved, needs."""
        self._asked.add(step)

    def _unneeded(self, saved: Sequence[int], there: set[str]) -> list[str]:
        """Return files of columns that are needed by no checkpoint and no rank."""
        newest = max(saved, default=0)
        self._asked = {step for step in self._asked if step > newest}
        steps = {*saved, *self._asked} or {0}
        # ranks may still read the rollouts of a step, whether a checkpoint needs them or not
        needed = self._files_of_turns() | self._lent.files()
        for held in self._replay.rollouts:
            if any(self._needs(step, held) for step in steps):
                needed.add(held.entry.payload.file)
        unneeded = sorted(there - needed)
        if unneeded:
            self._replay.forget(set(unneeded).__contains__)
        return unneeded

    def _needs(self, step: int, held: Held) -> bool:
        """Return whether a restore of ``step`` could train on this rollout."""
        if held.state is State.WAITING:
            return True
        # a rollout that counts as an older version than that is too old at once
        return held.step is not None and held.step > step and held.version <= step + self._bound

    def close(self) -> None:
        """Finish pending writes, and release the memory."""
        self._log.close()
        if self.warehouse is not None:
            self.warehouse.close()
