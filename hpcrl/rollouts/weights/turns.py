"""Versions of engines that take turns with the trainer on its devices: they come with a turn, not from the store.

The trainer has put the weights into engines that are frozen before it announces a version. What is left is to label
them, and to let requests go on. The other way round, a batch is what ends the engines' turn: it is not given while a
version is on its way, or while an evaluation of exactly one version goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.weights.updates import WeightUpdater

__all__ = ["TurnUpdater"]


class TurnUpdater(WeightUpdater):
    """A `WeightUpdater` of colocated engines."""

    _trains = 0
    """The step whose batch was given, until engines serve its version."""

    async def let_train(self, step: int, *, wait_s: float) -> bool:
        """Whether the engines' turn may end, so that the batch of ``step`` may be given; waits for that for a while.

        Not before an evaluation of the version that they serve has begun, where one is due.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._changed:
                # asked again, or by another rank: its turn has begun
                await self._changed.wait_for(
                    lambda: self._trains == step or (not self._holds and self._served >= step - 1)
                )
                self._trains = step
        return self._trains == step

    def _training(self) -> bool:
        return self._pool.version < self._trains

    def exchanging(self, engine: Engine) -> bool:
        """Whether it sleeps, or its weights change."""
        return self._training() or super().exchanging(engine)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """See `WeightUpdater.held`: the trainer's turn waits, too; one that has begun comes to its end before."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._training())
            self._holds += 1
            self._held_version = self._pool.version
        try:
            yield
        finally:
            async with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    async def _report_served(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._pool.version > self._served)
                self._served = self._pool.version
            self._on_served(self._served)
            async with self._changed:
                # to `let_train`, behind what was begun just now
                self._changed.notify_all()

    async def _look_for_versions(self) -> None:
        """Each is announced."""

    async def _initialise(self, engine: Engine) -> None:
        """The trainer talks to engines itself."""

    async def _collect(self) -> None:
        """There are no files."""

    async def _prove(self, engine: Engine, version: int, before: int) -> bool:
        """There is no version in the store to compare with. The engine labels no other weights than were put there."""
        return False

    async def _load(self, engine: Engine, version: int) -> tuple[int, float]:
        limit_s, began = self._pace.floor_s, time.monotonic()
        engine.begin_exchange()
        await engine.client.control("/update_weight_version", {"new_version": str(version)}, timeout_s=limit_s)
        await engine.client.control("/resume", timeout_s=limit_s)
        return version, time.monotonic() - began
