"""The orchestrator's part of a checkpoint: where the data stands, and finished rollouts that nobody used yet."""

from __future__ import annotations

from collections import Counter

import msgspec

from hpcrl.config.recipe import Recipe
from hpcrl.dock.wire import decode_array, encode_array
from hpcrl.errors import CheckpointError
from hpcrl.rollouts.batches.taken import Pending
from hpcrl.rollouts.records import Group
from hpcrl.rollouts.sampling.data_order import DataOrder, GroupTask
from hpcrl.rollouts.telemetry.counters import Counters

__all__ = ["Dealt", "OrchestratorState"]

FORMAT_VERSION = 2
_WITHOUT_NAMES = 1
"""Format of states that know the groups to start again by their indices alone."""


class Dealt(msgspec.Struct, frozen=True, array_like=True):
    """A group that was dealt out: by name, because weights of environments decide only about groups to come."""

    index: int
    environment: str
    prompt_index: int


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
        Groups that wait to be consumed, with everything in them.
    """

    step: int
    seed: int
    group_size: int
    next_index: int
    restart: list[int]
    finished: list[Group]
    counters: Counters
    dealt: list[Dealt] = []
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
        return msgspec.msgpack.encode(self, enc_hook=encode_array)

    @classmethod
    def decode(cls, data: bytes) -> OrchestratorState:
        """The state of ``data``.

        Raises
        ------
        CheckpointError
            It is no state of a format this code knows.
        """
        try:
            state = msgspec.msgpack.decode(data, type=cls, dec_hook=decode_array)
        except msgspec.DecodeError as error:
            raise CheckpointError(f"the orchestrator's state cannot be read: {error}") from error
        if state.format_version not in (FORMAT_VERSION, _WITHOUT_NAMES):
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

    def deal_again(self, order: DataOrder) -> list[GroupTask]:
        """The groups to start again, with the environments and prompts they had, whatever their weights are now.

        Raises
        ------
        CheckpointError
            Groups that were started belong to environments that the recipe no longer has.
        """
        if self.format_version == _WITHOUT_NAMES:
            return [order.task(index) for index in self.restart]
        tasks = {each.index: order.again(each.index, each.environment, each.prompt_index) for each in self.dealt}
        gone = Counter(each.environment for each in self.dealt if tasks[each.index] is None)
        gone.update(group.environment for group in self.finished if not order.has(group.environment))
        if gone:
            what = ", ".join(f"{name!r} ({count} groups)" for name, count in sorted(gone.items()))
            raise CheckpointError(
                f"the checkpoint of step {self.step} holds groups that were started and not yet trained, "
                f"of environments that the recipe no longer has: {what}\n"
                "    hint: keep them in the recipe with a very small weight (1e-9): what was started is trained, "
                "and nothing new is dealt out; a later resume can leave them out"
            )
        return [task for task in tasks.values() if task is not None]
