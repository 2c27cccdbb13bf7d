"""State of a ledger from its entries: the place of each finished rollout, and rollouts that were lost or used twice.

A restore undoes steps: their rollouts wait again. Weights after the restored step belong to an abandoned branch, but
the rollouts that were sampled from them are as good as others, as far as they are off-policy: one that was sampled
``n`` steps after the restored step is ``n`` steps away from it, like one that is ``n`` steps behind. So its versions
are mirrored at the restored step ``s`` (``v`` counts as ``2 s - v``), and the bound of staleness applies as always.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hpcrl.dock.ledger.entries import Begin, Dropped, Entry, Finished, Kept, Taken, TurnSaved

_FORGET_STEPS = 500


class State(Enum):
    """State of a finished rollout."""

    WAITING = "waiting"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(slots=True)
class Held:
    """A finished rollout that the ledger knows.

    Attributes
    ----------
    entry:
        As it was written.
    state:
        Its state.
    step:
        Step of the batch that took it, or by which it became too old.
    why:
        Reason why it was dropped.
    pivots:
        Steps at which versions were mirrored since, in order.
    """

    entry: Finished
    state: State = State.WAITING
    step: int | None = None
    why: str = ""
    again: bool = False
    pivots: list[int] = field(default_factory=list)

    @property
    def id(self) -> tuple[int, int]:
        return self.entry.group, self.entry.member

    @property
    def version(self) -> int:
        """Return the version of the first sampled token; after mirroring, the oldest that any token counts as."""
        return _counted(self.entry, self.pivots)

    @property
    def newest(self) -> int:
        """Return the highest version of its tokens, as they count now."""
        return self.version if self.pivots else self.entry.last_version


@dataclass(slots=True)
class Unfinished:
    """A rollout in progress.

    Attributes
    ----------
    turns:
        Its turns so far, in order.
    pivots:
        As those of `Held`, of each turn.
    """

    turns: list[TurnSaved] = field(default_factory=list)
    pivots: list[list[int]] = field(default_factory=list)

    def add(self, entry: TurnSaved) -> None:
        """Take in the next entry of the ledger."""
        del self.turns[entry.turn :], self.pivots[entry.turn :]
        self.turns.append(entry)
        self.pivots.append([])

    def restore(self, step: int) -> None:
        """Restore ``step``: mirror the versions of turns that are newer than it."""
        for turn, pivots in zip(self.turns, self.pivots, strict=True):
            if (_counted(turn, pivots) if pivots else turn.last_version) > step:
                pivots.append(step)

    @property
    def mirrored(self) -> bool:
        """Return whether weights of undone steps have sampled any of its turns."""
        return any(self.pivots)

    @property
    def version(self) -> int:
        """Return the version as that of `Held`."""
        if not self.mirrored:
            return self.turns[0].first_version
        return min(_counted(turn, pivots) for turn, pivots in zip(self.turns, self.pivots, strict=True))


def _counted(entry: Finished | TurnSaved, pivots: Sequence[int]) -> int:
    """Return the version of the first token; after mirroring, the oldest that any token counts as."""
    if not pivots:
        return entry.first_version
    counted = [entry.first_version, entry.last_version]
    for pivot in pivots:
        counted = [min(version, 2 * pivot - version) for version in counted]
    return min(counted)


class Replay:
    """State of a ledger, entry by entry.

    Attributes
    ----------
    attempts:
        Processes that wrote.
    step:
        The last step that was taken and not undone.
    kept:
        Groups of which all members have ended.
    gone:
        Rollouts that were dropped before their group started again.
    unfinished:
        Rollouts in progress of which turns were saved, by group and member.
    problems:
        Contradictions, in sentences.
    next_index:
        The first group of which, and above which, nothing was written.
    forgotten:
        Rollouts that `forget` has left out, but for those in `gone`.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.attempts = self.step = self.next_index = self.forgotten = 0
        self.gone: list[Held] = []
        self.problems: list[str] = []
        self.kept: set[int] = set()
        self.unfinished: dict[tuple[int, int], Unfinished] = {}
        self._groups: dict[int, dict[int, Held]] = {}
        self._over: dict[int, int | None] = {}
        """Groups that are over, with the step that may be undone."""
        for entry in entries:
            self.add(entry)

    @classmethod
    def of_long_run(cls, entries: Iterable[Entry], files: Collection[str]) -> Replay:
        """Return the replay of a long run without what no restore can use, so that its memory does not grow.

        Parameters
        ----------
        files:
            Existing payload files. Most rollouts of a long run were trained long ago, and their columns were removed.
        """
        replay, forgot = cls(), 0
        for entry in entries:
            replay.add(entry)
            if isinstance(entry, Taken) and entry.step >= forgot + _FORGET_STEPS:
                # far behind the newest step: a restore undoes fewer steps
                replay.forget(lambda file: file not in files, over_before=entry.step - _FORGET_STEPS)
                forgot = entry.step
        return replay

    @property
    def rollouts(self) -> list[Held]:
        """Return all rollouts that ever finished, by group and member; those dropped before a new try come first."""
        current = [held for group in sorted(self._groups) for _, held in sorted(self._groups[group].items())]
        return sorted([*self.gone, *current], key=lambda held: held.id)

    def over_groups(self) -> frozenset[int]:
        """Return the groups that were trained, or dropped permanently."""
        return frozenset(self._over)

    def find(self, group: int, member: int) -> Held | None:
        """Return the newest try of the rollout of this group and member."""
        return self._groups.get(group, {}).get(member)

    def waiting(self) -> dict[int, list[Held]]:
        """Return the rollouts that are neither trained nor dropped, by group and member."""
        found = {}
        for group in sorted(self._groups):
            held = [each for _, each in sorted(self._groups[group].items()) if each.state is State.WAITING]
            if held:
                found[group] = held
        return found

    def add(self, entry: Entry) -> None:
        """Apply the next entry."""
        if isinstance(entry, Finished | TurnSaved | Dropped):
            self.next_index = max(self.next_index, entry.group + 1)
        match entry:
            case Begin():
                if not entry.continues:
                    self.attempts += 1
                    self._undo(entry.restored)
            case Finished():
                self._finish(entry)
            case TurnSaved():
                self._save_turn(entry)
            case Kept():
                self.kept.add(entry.group)
                self._end_turns(entry.group)
            case Dropped():
                self._drop(entry)
            case Taken():
                self._take(entry)

    def _undo(self, restored: int) -> None:
        """Undo the steps after ``restored``."""
        self.step = min(self.step, restored)
        for group in [group for group, step in self._over.items() if step is not None and step > restored]:
            del self._over[group]
        for members in self._groups.values():
            for held in members.values():
                if held.step is not None and held.step > restored:
                    held.state, held.step, held.why = State.WAITING, None, ""
                if held.state is State.WAITING and held.newest > restored:
                    held.pivots.append(restored)
        for each in self.unfinished.values():
            each.restore(restored)

    def forget(self, gone: Callable[[str], bool], *, over_before: int | None = None) -> None:
        """Forget rollouts whose payload files were removed, so that memory does not grow with the run.

        Parameters
        ----------
        gone:
            Returns whether a file was removed.
        over_before:
            Only groups that were over before this step are forgotten; None: all groups.
        """
        for group, members in list(self._groups.items()):
            if over_before is not None and (self._over.get(group, over_before) or 0) >= over_before:
                continue
            for member in [m for m, held in members.items() if gone(held.entry.payload.file)]:
                del members[member]
                self.forgotten += 1
            if not members:
                del self._groups[group]
                self._over.pop(group, None)
                self.kept.discard(group)
        self.gone = [held for held in self.gone if not gone(held.entry.payload.file)]

    def _save_turn(self, entry: TurnSaved) -> None:
        # a turn whose group was dropped while it was being written has no effect
        if entry.group in self._over or entry.group in self.kept:
            return
        each = self.unfinished.setdefault((entry.group, entry.member), Unfinished())
        if entry.turn > len(each.turns):
            what = f"turn {entry.turn} of rollout {entry.group}/{entry.member} was saved"
            self.problems.append(f"{what}, and of those before it only {len(each.turns)}")
            del self.unfinished[entry.group, entry.member]
            return
        each.add(entry)

    def _end_turns(self, group: int) -> None:
        for name in [name for name in self.unfinished if name[0] == group]:
            del self.unfinished[name]

    def _finish(self, entry: Finished) -> None:
        self.unfinished.pop((entry.group, entry.member), None)
        members = self._groups.setdefault(entry.group, {})
        before = members.get(entry.member)
        if before is not None:
            if before.state is State.DROPPED and before.again:
                self.gone.append(before)
            else:
                what = f"rollout {entry.group}/{entry.member} finished again"
                self.problems.append(f"{what}, and was {before.state.value} already")
        elif entry.group in self._over:
            self.problems.append(f"rollout {entry.group}/{entry.member} finished after its group was over")
        members[entry.member] = Held(entry)

    def _drop(self, entry: Dropped) -> None:
        members = self._groups.setdefault(entry.group, {})
        for member in entry.members:
            held = members.get(member)
            if held is None or held.state is not State.WAITING:
                state = "did not finish" if held is None else f"was {held.state.value} already"
                self.problems.append(f"rollout {entry.group}/{member} was dropped ({entry.why}), and {state}")
                continue
            held.state, held.step, held.why, held.again = State.DROPPED, entry.step, entry.why, entry.again
        if entry.again:
            self.kept.discard(entry.group)
        else:
            self._over[entry.group] = entry.step
            self._end_turns(entry.group)

    def _take(self, entry: Taken) -> None:
        if entry.step != self.step + 1:
            self.problems.append(f"step {entry.step} was taken after step {self.step}")
        self.step = entry.step
        for group, members in entry.groups:
            waiting = {m for m, held in self._groups.get(group, {}).items() if held.state is State.WAITING}
            if set(members) != waiting:
                what = f"step {entry.step} took members {sorted(members)} of group {group}"
                self.problems.append(f"{what}, of which {sorted(waiting)} had finished and were not used")
            for member in members:
                held = self._groups.get(group, {}).get(member)
                if held is not None and held.state is State.TRAINED:
                    self.problems.append(f"rollout {group}/{member} is in steps {held.step} and {entry.step}")
                elif held is not None:
                    held.state, held.step, held.why = State.TRAINED, entry.step, ""
            self._over[group] = entry.step
