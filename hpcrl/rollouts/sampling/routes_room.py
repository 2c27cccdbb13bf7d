"""How many rollouts may have routed experts in memory while they are in flight.

What a rollout in flight will need is not known, so each counts as the longest that there can be: the limit holds
whatever becomes of them. A rollout that waits for room has nothing yet but the turns of before an interruption, and
none that runs needs one that waits; one may always run. So all that have begun end, and those that wait go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil

from hpcrl.config.recipe import Recipe
from hpcrl.config.rollouts import PAYLOAD_COPIES
from hpcrl.rollouts.sampling.policy import GroupPolicy
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsSettings

__all__ = ["RoutesRoom"]

_log = logging.getLogger(__name__)
_GIB = 1 << 30
_FREE_SHARE = 4


class RoutesRoom:
    """Places of rollouts in flight.

    Attributes
    ----------
    places:
        How many there are, at least one.
    rollout_bytes, limit_bytes:
        What one may need, and what all may need.
    """

    def __init__(
        self,
        rollout_bytes: int = 0,
        limit_bytes: int = 0,
        *,
        on_full: Callable[[int, float], None] = lambda places, gib: None,
    ) -> None:
        """Begin, empty; without bounds where a rollout needs nothing.

        Parameters
        ----------
        on_full:
            Told once, when the limit is what holds rollouts back: places, and GiB of all.
        """
        self.rollout_bytes, self.limit_bytes = rollout_bytes, limit_bytes
        self.places = max(1, limit_bytes // rollout_bytes) if rollout_bytes else 1 << 30
        self._free, self._on_full, self._told = asyncio.Semaphore(self.places), on_full, False

    @classmethod
    def of(
        cls, recipe: Recipe, routes: RoutedExpertsSettings | None, *, on_full: Callable[[int, float], None]
    ) -> RoutesRoom:
        """That of a run; without bounds where engines return no experts."""
        if routes is None:
            return cls()
        rollout = PAYLOAD_COPIES * recipe.engine.max_model_len * routes.token_bytes
        wanted = recipe.rollouts.routes_in_flight_gib
        limit = psutil.virtual_memory().available // _FREE_SHARE if wanted is None else round(wanted * _GIB)
        if limit < rollout:
            _log.warning(
                "routed experts of one rollout may need %.3g GiB, and rollouts.routes_in_flight_gib has %.3g: rollouts "
                "run one after the other\n    hint: raise it, or lower engine.max_model_len",
                rollout / _GIB,
                limit / _GIB,
            )
        return cls(rollout, limit, on_full=on_full)

    def bound(self, limit: int, group_size: int) -> int:
        """So many rollouts may be in flight where ``limit`` may for other reasons: whole groups begin, one always."""
        return min(limit, max(self.places, group_size))

    def may_start(self, policy: GroupPolicy, in_flight: int, limit: int, group_size: int) -> bool:
        """Whether a group should start beside so many rollouts, as the policy decides."""
        if policy.may_start(in_flight, self.bound(limit, group_size)):
            return True
        if not self._told and policy.may_start(in_flight, limit):
            self._told, gib = True, self.limit_bytes / _GIB
            _log.warning(
                "routed experts of rollouts in flight may take %.3g GiB: %d rollouts run at once, no more\n"
                "    hint: a larger rollouts.routes_in_flight_gib, or a smaller engine.max_model_len",
                gib,
                self.places,
            )
            self._on_full(self.places, gib)
        return False

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One rollout, from before its first request until its rows are on disk; others wait in order."""
        async with self._free:
            yield
