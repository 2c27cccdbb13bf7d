"""Turns of rollouts in progress, as they lie in the ledger: what was said, and all that came back.

A rollout that was interrupted is begun again with the turns that it had: its environment starts from its prompt, and is
given the replies that were sampled before. Where it says the same, token by token, nothing is asked for again; from
where it says something else on, the rollout goes on as a new one. So every environment can be continued, and what it
does between two turns (tools, tests) is done again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.rollouts.records import Turn, decode_record

__all__ = ["SavedTurn", "TurnKeeper", "decode_turn", "encode_turn"]

_SETTLE_S = 1.0
"""A turn that is followed by the end of its rollout within this time is written with the rollout alone."""


class SavedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a rollout in progress, with its answer.

    Attributes
    ----------
    said:
        ``[S]`` int32: tokens that were appended before it.
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
        Whether the versions are those that it counts as, and not those of the weights that computed it: these are of
        a step that was undone, and what they computed is nobody else's. Not written.
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
        """The same with all tokens of one version, which is not that of the weights."""
        return msgspec.structs.replace(self, versions=np.full_like(self.versions, version), salt=version, mirrored=True)


class _About(msgspec.Struct, frozen=True, kw_only=True):
    """What of a turn is no array."""

    finish_reason: str
    salt: int
    turn: Turn


_ARRAYS = ("said", "token_ids", "logprobs", "versions")


def encode_turn(turn: SavedTurn) -> tuple[bytes, dict[str, NDArray[Any]]]:
    """What `hpcrl.dock.columns.encode_columns` wants of a turn: what is no array, and arrays as `SavedTurn` has them.

    ``experts [rows, layers, experts_per_token]`` is left out where it has none.
    """
    arrays: dict[str, NDArray[Any]] = {name: getattr(turn, name) for name in _ARRAYS}
    if turn.experts is not None:
        arrays["experts"] = turn.experts
    return msgspec.msgpack.encode(_About(finish_reason=turn.finish_reason, salt=turn.salt, turn=turn.turn)), arrays


def decode_turn(block: bytes | memoryview) -> SavedTurn:
    """The turn of a block of columns; its arrays are views into it (ValueError where it is no such block)."""
    fields, arrays = decode_record(block, _ARRAYS, _About, "a turn")
    return SavedTurn(**fields, experts=arrays.get("experts"))


class TurnKeeper:
    """The turns of one rollout on their way into the ledger, and those that it has there already.

    A turn is written when the next one begins, or a second after it. Nobody waits for that: what is lost is sampled
    again.

    Attributes
    ----------
    recalled:
        Turns that were not asked for again.
    given_up:
        Turns that were there and could not be used, because the environment said something else.
    """

    def __init__(self, write: Callable[[int, SavedTurn], None], saved: Sequence[SavedTurn] = ()) -> None:
        """Begin.

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

    def recall(self, number: int, said: NDArray[np.int32]) -> SavedTurn | None:
        """The turn of this number, where it was saved and followed the same tokens, ``said [S]`` int32.

        Where it followed others, no later turn is recalled either.
        """
        if number >= len(self._saved):
            return None
        if np.array_equal(self._saved[number].said, said):
            self.recalled += 1
            return self._saved[number]
        self.given_up += len(self._saved) - number
        del self._saved[number:]
        return None

    def ended(self, number: int, turn: SavedTurn) -> None:
        """A turn has ended."""
        self._due = (number, turn)
        self._timer = asyncio.get_running_loop().call_later(_SETTLE_S, self.flush)

    def flush(self) -> None:
        """Write the turn that has ended, where it was not written yet."""
        due = self._due
        self.close()
        if due is not None:
            self._write(*due)

    def close(self) -> None:
        """The rollout has ended: what was not written is written with it, or not needed."""
        if self._timer is not None:
            self._timer.cancel()
        self._due = self._timer = None
