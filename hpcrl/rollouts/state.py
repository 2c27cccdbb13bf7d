"""The orchestrator's part of a checkpoint: where the data stands, and finished rollouts that nobody used yet."""

from __future__ import annotations

import msgspec

from hpcrl.dock.wire import decode_array, encode_array
from hpcrl.errors import CheckpointError
from hpcrl.rollouts.counters import Counters
from hpcrl.rollouts.records import Group

__all__ = ["OrchestratorState"]

FORMAT_VERSION = 1


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
    format_version: int = FORMAT_VERSION

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
        if state.format_version != FORMAT_VERSION:
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
