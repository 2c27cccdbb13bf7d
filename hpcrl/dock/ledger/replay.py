"""What the entries of a ledger come to: where each finished rollout is, and whether anything was lost or used twice.

A restore takes steps back: what they took waits again. Weights that were sampled from after the restored step are
those of a branch that was given up, but the rollouts are as good as others, as far as they are off-policy: one that
was sampled ``n`` steps ahead of the step where the run goes on is ``n`` steps away from it, as one that is ``n`` steps
behind. So its versions are mirrored there (``v`` counts as ``2 s - v``), and the bound of staleness does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from hpcrl.dock.ledger.entries import Begin, Dropped, Entry, Finished, Kept, Taken

__all__ = ["Held", "Replay", "State"]


class State(Enum):
    """Where a finished rollout is."""

    WAITING = "waiting"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(slots=True)
class Held:
    """A finished rollout.

    Attributes
    ----------
    entry:
        As it was written.
    state:
        Where it is.
    step:
        Of the batch that took it, or by which it became too old.
    why:
        It was dropped.
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
        """Version of the first sampled token; where versions were mirrored, the oldest that any token counts as."""
        if not self.pivots:
            return self.entry.first_version
        counted = [self.entry.first_version, self.entry.last_version]
        for pivot in self.pivots:
            counted = [min(version, 2 * pivot - version) for version in counted]
        return min(counted)

    @property
    def newest(self) -> int:
        """The highest version of its tokens, as they count now."""
        return self.version if self.pivots else self.entry.last_version


class Replay:
    """The state of a ledger, entry after entry.

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
    problems:
        What contradicts itself, in sentences.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.attempts, self.step = 0, 0
        self.gone: list[Held] = []
        self.problems: list[str] = []
        self.kept: set[int] = set()
        self._groups: dict[int, dict[int, Held]] = {}
        self._over: dict[int, int | None] = {}
        """Groups that are over, with the step that may be undone."""
        for entry in entries:
            self.add(entry)

    @property
    def rollouts(self) -> list[Held]:
        """All that ever finished, by group and member; those that were dropped before a new try come first."""
        current = [held for group in sorted(self._groups) for _, held in sorted(self._groups[group].items())]
        return sorted([*self.gone, *current], key=lambda held: held.id)

    @property
    def next_index(self) -> int:
        """The first group of which, and above which, nothing was written."""
        return max([*self._groups, *self._over], default=-1) + 1

    def over_groups(self) -> frozenset[int]:
        """Groups that were trained, or dropped for good."""
        return frozenset(self._over)

    def waiting(self) -> dict[int, list[Held]]:
        """Rollouts that are neither trained nor dropped, by group and member."""
        found = {}
        for group in sorted(self._groups):
            held = [each for _, each in sorted(self._groups[group].items()) if each.state is State.WAITING]
            if held:
                found[group] = held
        return found

    def add(self, entry: Entry) -> None:
        """The next entry."""
        match entry:
            case Begin():
                self.attempts += 1
                self._undo(entry.restored)
            case Finished():
                self._finish(entry)
            case Kept():
                self.kept.add(entry.group)
            case Dropped():
                self._drop(entry)
            case Taken():
                self._take(entry)

    def _undo(self, restored: int) -> None:
        """Steps behind ``restored`` have not been."""
        self.step = min(self.step, restored)
        for group in [group for group, step in self._over.items() if step is not None and step > restored]:
            del self._over[group]
        for members in self._groups.values():
            for held in members.values():
                if held.step is not None and held.step > restored:
                    held.state, held.step, held.why = State.WAITING, None, ""
                if held.state is State.WAITING and held.newest > restored:
                    held.pivots.append(restored)

    def forget(self, file: str) -> None:
        """Leave out what lies in a file of payload that is gone, to keep what a long run remembers small."""
        for group, members in list(self._groups.items()):
            for member in [m for m, held in members.items() if held.entry.payload.file == file]:
                del members[member]
            if not members:
                del self._groups[group]
                self._over.pop(group, None)
                self.kept.discard(group)
        self.gone = [held for held in self.gone if held.entry.payload.file != file]

    def _finish(self, entry: Finished) -> None:
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
