"""Rollouts that ranks may be reading, and the room in memory that they take."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.warehouse.interface import Warehouse

_log = logging.getLogger(__name__)


class UnacknowledgedRollouts:
    """Rollouts of the steps that are not yet known to be trained."""

    def __init__(self, warehouse: Warehouse | None) -> None:
        self._warehouse = warehouse
        self._steps: dict[int, list[PayloadPlace]] = {}
        self._said_full = False

    def lend(self, step: int, places: list[PayloadPlace]) -> None:
        """Record the rollouts of which the batch of ``step`` is made."""
        self._steps[step] = places

    def trained(self, step: int) -> None:
        """Release the rollouts of steps up to ``step``, which are trained on all ranks."""
        for number in [number for number in self._steps if number <= step]:
            self.release(self._steps.pop(number))

    def release(self, places: Sequence[PayloadPlace]) -> None:
        """Release rollouts that no rank reads any more."""
        if self._warehouse is not None:
            self._warehouse.release(places)

    def files(self) -> set[str]:
        """Return the payload files that ranks may read."""
        return {place.file for places in self._steps.values() for place in places}

    @property
    def full(self) -> bool:
        """Return whether memory has no space for further rollouts; warn once each time that it fills up."""
        if self._warehouse is None or not self._warehouse.full:
            self._said_full = False
            return False
        if not self._said_full:
            figures = self._warehouse.figures()
            _log.warning(
                "the warehouse of rollouts is full: %d rollouts in %.2f of %.2f GiB; no more start while whole batches "
                "wait, and ranks read newly finished ones from the shared filesystem\n"
                "    hint: a larger rollouts.warehouse.limit_gib, or a smaller rollouts.ready_batches",
                figures.blocks,
                figures.held_bytes / (1 << 30),
                figures.limit_bytes / (1 << 30),
            )
        self._said_full = True
        return True
