"""The orchestrator's part of a checkpoint: where the data stands, and finished rollouts that nobody used yet."""

from __future__ import annotations

from collections import Counter

import msgspec

from hpcrl.config.recipe import Recipe
from hpcrl.decoding import prepared
from hpcrl.dock.wire import decode_array, encode_array
from hpcrl.errors import CheckpointError
from hpcrl.rollouts.batches.taken import Pending
from hpcrl.rollouts.ledger import RestoredRollouts
from hpcrl.rollouts.records import Group, SavedGroup
from hpcrl.rollouts.sampling.data_order import DataOrder, GroupTask
from hpcrl.rollouts.telemetry.counters import Counters

__all__ = ["Dealt", "OrchestratorState"]

FORMAT_VERSION = 3
_WITHOUT_NAMES = 1
"""Format of states that know the groups to start again by their indices alone."""
_WITHOUT_LEDGER = 2
"""Format of states that have finished rollouts in them."""


NOTHING = RestoredRollouts({}, {}, frozenset(), 0, 0)
"""What the ledger of a new run has."""


class Dealt(msgspec.Struct, frozen=True, array_like=True):
    """A group that was dealt out: by name, because weights of environments decide only about groups to come."""

    index: int
    environment: str
    prompt_index: int
    rollouts: int = 0
    """Finished ones, where all members have ended."""


class OrchestratorState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a restart needs to lose and repeat nothing.

    Attributes
    ----------
    step:
        Steps whose batches are consumed.
    seed, group_size:
        Of the recipe: a resume with others would deal out other prompts under the same numbers.
    next_index:
        First group that was never started.
    restart:
        Groups below ``next_index`` that were in flight: they start again, with the seeds they had.
    dealt:
        What each group of ``restart`` works on; a state of format 1 does not say.
    finished:
        Groups that wait to be consumed. An encoded state has none of them, but says which they are: the ledger of
        rollouts has the rest.
    saved:
        The same in states of formats 1 and 2, with everything in them, until the ledger has adopted them.
    logged:
        These groups, in an encoded state.
    """

    step: int
    seed: int
    group_size: int
    next_index: int
    restart: list[int]
    finished: list[Group] = msgspec.field(default_factory=list, name="waiting")
    saved: list[SavedGroup] = msgspec.field(default_factory=list, name="finished")
    counters: Counters
    dealt: list[Dealt] = []
    logged: list[Dealt] = []
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(cls, recipe: Recipe, *, step: int, next_index: int, pending: Pending) -> OrchestratorState:
        """The state of a run of ``recipe`` after ``step``."""
        return cls(
            step=step,
            seed=recipe.seed,
            group_size=recipe.rollouts.group_size,
            next_index=next_index,
            restart=[task.index for task in pending.restart],
            dealt=[Dealt(task.index, task.environment.name, task.prompt_index) for task in pending.restart],
            finished=pending.finished,
            counters=pending.counters,
        )

    @classmethod
    def fresh(cls, recipe: Recipe) -> OrchestratorState:
        """The state of a run that begins."""
        return cls.of(recipe, step=0, next_index=0, pending=Pending([], [], Counters()))

    def encode(self) -> bytes:
        """Bytes for the checkpoint; equal states give equal bytes."""
        known = [Dealt(g.index, g.environment, g.prompt_index, len(g.rollouts)) for g in self.finished]
        state = msgspec.structs.replace(self, finished=[], logged=[*self.logged, *known])
        return msgspec.msgpack.encode(state, enc_hook=encode_array)

    @classmethod
    def decode(cls, data: bytes) -> OrchestratorState:
        """The state of ``data``.

        Raises
        ------
        CheckpointError
            It is no state of a format this code knows.
        """
        try:
            state = msgspec.msgpack.decode(data, type=prepared(cls), dec_hook=decode_array)
        except msgspec.DecodeError as error:
            raise CheckpointError(f"the orchestrator's state cannot be read: {error}") from error
        if state.format_version not in (FORMAT_VERSION, _WITHOUT_LEDGER, _WITHOUT_NAMES):
            raise CheckpointError(f"orchestrator state format {state.format_version}, not {FORMAT_VERSION}")
        return state

    def check(self, *, step: int, seed: int, group_size: int) -> None:
        """Compare with what it is restored into.

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

    def deal_again(self, order: DataOrder, found: RestoredRollouts = NOTHING) -> list[GroupTask]:
        """The groups to start again, with the environments and prompts they had, whatever their weights are now.

        Parameters
        ----------
        found:
            What the ledger of rollouts has beside this state.

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
                "    hint: keep them in the recipe with a very small weight (1e-9): what was started is trained, "
                "and nothing new is dealt out; a later resume can leave them out"
            )
        done = found.over | found.finished.keys()
        return [task for index, task in sorted(tasks.items()) if index not in done]

    def going_on(self, found: RestoredRollouts) -> OrchestratorState:
        """This state with what the ledger has beside it."""
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
