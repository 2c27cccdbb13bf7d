"""State of the orchestrator in a checkpoint: position in the data, and finished rollouts that are not consumed yet."""

from __future__ import annotations

from collections import Counter

import msgspec

from hpcrl.config.recipe import Recipe
from hpcrl.dock.wire import decode_array, encode_array
from hpcrl.errors import CheckpointError
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Group, SavedGroup
from hpcrl.rollouts.environments.data_order import DataOrder, GroupTask
from hpcrl.rollouts.ledger.ledger import RestoredRollouts
from hpcrl.rollouts.ledger.taken import Pending
from hpcrl.storage.msgspec_types import prepared

FORMAT_VERSION = 3
_WITHOUT_NAMES = 1
"""Format of states that identify the groups to start again only by their indices."""
_WITHOUT_LEDGER = 2
"""Format of states that contain finished rollouts."""


NOTHING = RestoredRollouts({}, {}, frozenset(), 0, 0)
"""Restored rollouts of a new run."""


class DispatchedGroup(msgspec.Struct, frozen=True, array_like=True):
    """Dispatched group, by the name of its environment: changed weights of environments concern later groups only."""

    index: int
    environment: str
    prompt_index: int
    rollouts: int = 0
    """Number of finished rollouts, where all members have ended."""


class OrchestratorState(msgspec.Struct, frozen=True, kw_only=True):
    """State with which a restart neither loses nor repeats a rollout.

    Attributes
    ----------
    step:
        Steps whose batches are consumed.
    seed, group_size:
        Values of the recipe: a resume with others would give other prompts the same indices.
    next_index:
        Index of the first group that was never started.
    restart:
        Groups below ``next_index`` that were in flight: they start again, with the seeds they had.
    dealt:
        Tasks of the groups of ``restart``; missing in a state of format 1.
    finished:
        Groups that wait to be consumed. An encoded state only identifies them: the ledger of rollouts has their
        content.
    saved:
        The same with their content, in states of formats 1 and 2, until the ledger has adopted them.
    logged:
        Identities of these groups, in an encoded state.
    """

    step: int
    seed: int
    group_size: int
    next_index: int
    restart: list[int]
    finished: list[Group] = msgspec.field(default_factory=list, name="waiting")
    saved: list[SavedGroup] = msgspec.field(default_factory=list, name="finished")
    counters: Counters
    dealt: list[DispatchedGroup] = []
    logged: list[DispatchedGroup] = []
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(cls, recipe: Recipe, *, step: int, next_index: int, pending: Pending) -> OrchestratorState:
        """Return the state of a run of ``recipe`` after ``step``."""
        return cls(
            step=step,
            seed=recipe.seed,
            group_size=recipe.rollouts.group_size,
            next_index=next_index,
            restart=[task.index for task in pending.restart],
            dealt=[DispatchedGroup(task.index, task.environment.name, task.prompt_index) for task in pending.restart],
            finished=pending.finished,
            counters=pending.counters,
        )

    @classmethod
    def fresh(cls, recipe: Recipe) -> OrchestratorState:
        """Return the state of a run that begins."""
        return cls.of(recipe, step=0, next_index=0, pending=Pending([], [], Counters()))

    def encode(self) -> bytes:
        """Return the bytes for the checkpoint; equal states give equal bytes."""
        known = [DispatchedGroup(g.index, g.environment, g.prompt_index, len(g.rollouts)) for g in self.finished]
        state = msgspec.structs.replace(self, finished=[], logged=[*self.logged, *known])
        return msgspec.msgpack.encode(state, enc_hook=encode_array)

    @classmethod
    def decode(cls, data: bytes) -> OrchestratorState:
        """Return the decoded state.

        Raises
        ------
        CheckpointError
            The data cannot be read, or has a format that this code does not know.
        """
        try:
            state = msgspec.msgpack.decode(data, type=prepared(cls), dec_hook=decode_array)
        except msgspec.DecodeError as error:
            raise CheckpointError(f"the orchestrator's state cannot be read: {error}") from error
        if state.format_version not in (FORMAT_VERSION, _WITHOUT_LEDGER, _WITHOUT_NAMES):
            raise CheckpointError(f"orchestrator state format {state.format_version}, not {FORMAT_VERSION}")
        return state

    def check(self, *, step: int, seed: int, group_size: int) -> None:
        """Raise CheckpointError where the state does not belong to this recipe.

        Raises
        ------
        CheckpointError
            It belongs to another step or recipe.
        """
        expected = {"step": step, "seed": seed, "group_size": group_size}
        wrong = [
            f"{name} {getattr(self, name)}, not {value}"
            for name, value in expected.items()
            if getattr(self, name) != value
        ]
        if wrong:
            raise CheckpointError(f"the orchestrator's state does not fit: it has {'; '.join(wrong)}")

    def groups_to_redispatch(self, order: DataOrder, found: RestoredRollouts = NOTHING) -> list[GroupTask]:
        """Return the groups to start again, with their original environments and prompts.

        Parameters
        ----------
        found:
            Rollouts in the ledger that are newer than this state.

        Raises
        ------
        CheckpointError
            Groups that were started belong to environments that the recipe no longer has.
        """
        tasks = {index: order.task(index) for index in self.restart if self.format_version == _WITHOUT_NAMES}
        tasks |= {index: order.task(index) for index in range(self.next_index, found.next_index)}
        named = {each.index: (each.environment, each.prompt_index) for each in [*self.dealt, *self.logged]}
        held = [*found.finished.values(), *found.parts.values()]
        named |= {group.index: (group.environment, group.prompt_index) for group in held}
        gone = Counter(group.environment for group in self.saved if not order.has(group.environment))
        for index, (environment, prompt_index) in named.items():
            task = order.again(index, environment, prompt_index)
            if task is None:
                gone[environment] += 1
            else:
                tasks[index] = task
        if gone:
            what = ", ".join(f"{name!r} ({count} groups)" for name, count in sorted(gone.items()))
            raise CheckpointError(
                f"the checkpoint of step {self.step} holds groups that were started and not yet trained, "
                f"of environments that the recipe no longer has: {what}\n"
                "    hint: keep them in the recipe with a very small weight (1e-9): groups that were started are "
                "trained, and hardly any new one starts"
            )
        done = found.over | found.finished.keys()
        return [task for index, task in sorted(tasks.items()) if index not in done]

    def with_ledger(self, found: RestoredRollouts) -> OrchestratorState:
        """Return this state extended by the rollouts that the ledger has."""
        finished = {group.index: group for group in self.finished if group.index not in found.over} | found.finished
        counters = msgspec.structs.replace(
            self.counters,
            finished=max(self.counters.finished, found.count),
            turns_given_up=self.counters.turns_given_up + found.given_up,
        )
        return msgspec.structs.replace(
            self,
            next_index=max(self.next_index, found.next_index),
            restart=[index for index in self.restart if index not in found.over and index not in finished],
            finished=[group for _, group in sorted(finished.items())],
            counters=counters,
        )
