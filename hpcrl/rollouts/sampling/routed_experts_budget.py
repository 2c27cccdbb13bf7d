"""Maximum number of rollouts in flight, by the memory of their routed experts.

The future size of a rollout in flight is unknown, so each counts as the longest possible one, and the limit always
holds. A deadlock is impossible: a waiting rollout has at most the turns from before an interruption, no running rollout
depends on a waiting one, and one may always run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil

from hpcrl.config.recipe import Recipe
from hpcrl.config.rollouts import PAYLOAD_COPIES
from hpcrl.rollouts.sampling.policy import GroupAdmission
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsSettings

_log = logging.getLogger(__name__)
_GIB = 1 << 30
_FREE_SHARE = 4


class RoutedExpertsBudget:
    """Places of rollouts in flight.

    Attributes
    ----------
    places:
        Number of places, at least one.
    rollout_bytes, limit_bytes:
        Maximum memory of one rollout, and of all rollouts.
    """

    def __init__(
        self,
        rollout_bytes: int = 0,
        limit_bytes: int = 0,
        *,
        on_full: Callable[[int, float], None] = lambda places, gib: None,
    ) -> None:
        """Initialise without rollouts; without bounds where a rollout needs no memory.

        Parameters
        ----------
        on_full:
            Called once, when this limit keeps rollouts from starting, with the number of places and the limit in GiB.
        """
        self.rollout_bytes, self.limit_bytes = rollout_bytes, limit_bytes
        self.places = max(1, limit_bytes // rollout_bytes) if rollout_bytes else 1 << 30
        self._free, self._on_full, self._told = asyncio.Semaphore(self.places), on_full, False

    @classmethod
    def of(
        cls, recipe: Recipe, routes: RoutedExpertsSettings | None, *, on_full: Callable[[int, float], None]
    ) -> RoutedExpertsBudget:
        """Return the budget of a run; without bounds where engines return no routed experts."""
        if routes is None:
            return cls()
        rollout = PAYLOAD_COPIES * recipe.engine.max_model_len * routes.token_bytes
        wanted = recipe.rollouts.routes_in_flight_gib
        limit = psutil.virtual_memory().available // _FREE_SHARE if wanted is None else round(wanted * _GIB)
        if limit < rollout:
            _log.warning(
                "routed experts of one rollout may need %.3g GiB, and rollouts.routes_in_flight_gib has %.3g: rollouts "
                "run one after the other\n    hint: raise rollouts.routes_in_flight_gib, or lower engine.max_model_len",
                rollout / _GIB,
                limit / _GIB,
            )
        return cls(rollout, limit, on_full=on_full)

    def bound(self, limit: int, group_size: int) -> int:
        """Return how many rollouts may be in flight, at most ``limit``: whole groups, and at least one group."""
        return min(limit, max(self.places, group_size))

    def may_start(self, policy: GroupAdmission, in_flight: int, limit: int, group_size: int) -> bool:
        """Return whether a group should start, by the policy and the memory for routed experts.

        A warning is logged once where only memory prevents the start.
        """
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
        """Hold one rollout's place, from before its first request until its rows are on disk; others wait in order."""
        async with self._free:
            yield
