"""Access of ranks and people to the columns of finished rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hpcrl.dock.columns import decode_columns
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.sequences import own_tokens
from hpcrl.dock.warehouse.interface import Location
from hpcrl.dock.warehouse.reading import BlockReader
from hpcrl.rollouts.batches.excerpt import excerpt

MAX_TEXT_CHARACTERS = 4000
"""Maximum characters of a rollout in the file for people; of a longer text the middle is left out."""


class RolloutColumns:
    """Read access to rollout columns, and how to describe them in a batch.

    Attributes
    ----------
    payload_dir:
        Directory of the run in which all columns are durable.
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
        """Return the current location of the warehouse; None where it is not reachable."""
        return self._locate()

    def text(self, place: PayloadPlace) -> str:
        """Return the text of a rollout's tokens, a long one without its middle, or why ranks cannot read the columns.

        The common beginning of several sequences is in it once.
        """
        try:
            columns = decode_columns(BlockReader(self.location, self.payload_dir).glance(place))[1]
            return excerpt(own_tokens(columns), self._decode, MAX_TEXT_CHARACTERS)
        except (OSError, ValueError, KeyError) as error:
            return f"(cannot be read: {error})"
