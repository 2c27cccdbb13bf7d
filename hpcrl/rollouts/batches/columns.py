"""Where ranks, and people, find the columns of finished rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hpcrl.dock.columns import decode_columns
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.warehouse.interface import Location
from hpcrl.dock.warehouse.reading import BlockReader
from hpcrl.rollouts.batches.excerpt import excerpt

__all__ = ["MAX_TEXT_CHARACTERS", "RolloutColumns"]

MAX_TEXT_CHARACTERS = 4000
"""Maximum characters of a rollout in the file for people; of a longer text the middle is left out."""


class RolloutColumns:
    """What a batch says of them.

    Attributes
    ----------
    payload_dir:
        Of the run, where all of them are durable.
    """

    def __init__(
        self,
        payload_dir: Path,
        locate: Callable[[], Location | None],
        *,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """Remember where they are.

        Parameters
        ----------
        locate:
            Says how the warehouse is reached now; None where there is none.
        decode:
            Token ids to text.
        """
        self.payload_dir, self._locate, self._decode = payload_dir, locate, decode

    @property
    def location(self) -> Location | None:
        """Where the warehouse can be reached now."""
        return self._locate()

    def text(self, place: PayloadPlace) -> str:
        """Of the tokens of a rollout, a long one without its middle; where ranks cannot read it either, why."""
        try:
            columns = decode_columns(BlockReader(self.location, self.payload_dir).glance(place))[1]
            return excerpt(columns["token_ids"], self._decode, MAX_TEXT_CHARACTERS)
        except (OSError, ValueError, KeyError) as error:
            return f"(cannot be read: {error})"
