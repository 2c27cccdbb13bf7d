"""Turns of rollouts in progress, as the ledger stores them: the messages before them, and the whole answers.

An interrupted rollout is started again with its saved turns: its environment starts from its prompt, and gets the
replies that were sampled before. As long as its messages are equal, token by token, nothing is sampled again; from the
first difference on, the rollout continues as a new one. So every environment can be continued, and its work between two
turns (tools, tests) is repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.rollouts.core.records import Turn, decode_record

_SETTLE_S = 1.0
"""Delay in seconds of writing a turn: one whose rollout ends within this time is written only with the rollout."""


class SavedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a rollout in progress, with its answer.

    Attributes
    ----------
    said:
        ``[S]`` int32: tokens that were appended before it; of a branch those behind the shared prefix.
    token_ids, logprobs, versions:
        ``[N]`` int32, float32, int32: of the sampled tokens.
    finish_reason:
        ``stop`` or ``length``.
    salt:
        Version of the cache salt, the oldest that the context may have been computed with.
    turn:
        Its sizes and times.
    experts:
        ``[rows, layers, experts_per_token]``, as the answer had them; None where it had none.
    mirrored:
        Whether the versions are those that it counts as, and not those of the weights that computed it: these belong to
        a step that was undone, and their results must not be shared. Not written.
    """

    said: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: str
    salt: int
    turn: Turn
    experts: NDArray[Any] | None = None
    mirrored: bool = False

    def counted_as(self, version: int) -> SavedTurn:
        """Return the turn with all tokens counted as ``version``, which is not the version of the weights."""
        return msgspec.structs.replace(self, versions=np.full_like(self.versions, version), salt=version, mirrored=True)


class _About(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a turn that are not arrays."""

    finish_reason: str
    salt: int
    turn: Turn


_ARRAYS = ("said", "token_ids", "logprobs", "versions")


def encode_turn(turn: SavedTurn) -> tuple[bytes, dict[str, NDArray[Any]]]:
    """Return the fields and arrays of a turn for `hpcrl.dock.columns.encode_columns`.

    Arrays are those of `SavedTurn`. ``experts [rows, layers, experts_per_token]`` is left out where the turn has none.
    """
    arrays: dict[str, NDArray[Any]] = {name: getattr(turn, name) for name in _ARRAYS}
    if turn.experts is not None:
        arrays["experts"] = turn.experts
    return msgspec.msgpack.encode(_About(finish_reason=turn.finish_reason, salt=turn.salt, turn=turn.turn)), arrays


def decode_turn(block: bytes | memoryview) -> SavedTurn:
    """Return the turn of a block of columns; its arrays are views into the block.

    Raises
    ------
    ValueError
        The block is not a turn, or lacks a column.
    """
    fields, arrays = decode_record(block, _ARRAYS, _About, "a turn")
    return SavedTurn(**fields, experts=arrays.get("experts"))


class TurnKeeper:
    """Writes the turns of one rollout to the ledger, and has those that are there already.

    A turn is written when the next one begins, or a second after it ended. No caller waits for the write: a lost turn
    is sampled again.

    Attributes
    ----------
    recalled:
        Number of turns that were not sampled again.
    given_up:
        Number of saved turns that could not be used, because the environment gave other messages.
    """

    def __init__(self, write: Callable[[int, SavedTurn], None], saved: Sequence[SavedTurn] = ()) -> None:
        """-

        Parameters
        ----------
        write:
            Takes the number of a turn, from 0, and the turn.
        saved:
            Those of before an interruption.
        """
        self._write, self._saved = write, list(saved)
        self._due: tuple[int, SavedTurn] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.recalled = self.given_up = 0

    def recall(self, number: int, said: NDArray[np.int32], expected: Turn) -> SavedTurn | None:
        """Return the saved turn of this number, or None where it was not saved or followed other tokens.

        After a turn that followed other tokens, no later turn is recalled.

        Parameters
        ----------
        said:
            ``[S]`` int32: tokens that were appended before it.
        expected:
            Has the sequence that they were appended to, and what that shares with an earlier one.
        """
        if number >= len(self._saved):
            return None
        turn = self._saved[number].turn
        same_place = (turn.sequence, turn.shared) == (expected.sequence, expected.shared)
        if same_place and np.array_equal(self._saved[number].said, said):
            self.recalled += 1
            return self._saved[number]
        self.given_up += len(self._saved) - number
        del self._saved[number:]
        return None

    def ended(self, number: int, turn: SavedTurn) -> None:
        """Schedule the writing of a turn that has ended."""
        self._due = (number, turn)
        self._timer = asyncio.get_running_loop().call_later(_SETTLE_S, self.flush)

    def flush(self) -> None:
        """Write the turn that has ended, where it was not written yet."""
        due = self._due
        self.close()
        if due is not None:
            self._write(*due)

    def close(self) -> None:
        """Cancel pending writing: the finished rollout contains the turn, or does not need it."""
        if self._timer is not None:
            self._timer.cancel()
        self._due = self._timer = None
