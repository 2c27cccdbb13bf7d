"""Weight versions of colocated engines, which share devices with the trainer and get versions in turns.

The trainer has put the weights into frozen engines before it announces a version; they do not come from the store. The
updater only labels them and resumes requests. Conversely a batch ends the engines' turn: it is not given out while a
version is being announced, or during an evaluation of exactly one version.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.weights.updates import WeightUpdater


class TurnUpdater(WeightUpdater):
    """A `WeightUpdater` of colocated engines."""

    _trains = 0
    """Step whose batch was given out, until engines serve its version."""

    async def release_batch_when_served(self, step: int, *, wait_s: float) -> bool:
        """Return whether the engines' turn may end, so that the batch of ``step`` may be given out.

        Waits up to ``wait_s`` seconds. The turn does not end before a due evaluation of the served version has begun.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._changed:
                # a repeated request, or one of another rank: the trainer's turn has begun already
                await self._changed.wait_for(
                    lambda: self._trains == step or (not self._holds and self._served >= step - 1)
                )
                self._trains = step
        return self._trains == step

    def _training(self) -> bool:
        return self._pool.version < self._trains

    def exchanging(self, engine: Engine) -> bool:
        """Return whether the engine sleeps, or its weights are being changed."""
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
                # wakes `release_batch_when_served`, after the evaluation that was begun just now
                self._changed.notify_all()

    async def _look_for_versions(self) -> None:
        """Do nothing: each version is announced."""

    async def _initialise(self, engine: Engine) -> None:
        """Do nothing: the trainer initialises the engines itself."""

    async def _collect(self) -> None:
        """Do nothing: there are no files to remove."""

    async def _prove(self, engine: Engine, version: int, before: int) -> bool:
        """Return False: the store has no version to compare with.

        The engine labels only weights that were put there.
        """
        return False

    async def _load(self, engine: Engine, version: int) -> tuple[int, float]:
        limit_s, began = self._pace.floor_s, time.monotonic()
        engine.begin_exchange()
        await engine.client.control("/update_weight_version", {"new_version": str(version)}, timeout_s=limit_s)
        await engine.client.control("/resume", timeout_s=limit_s)
        return version, time.monotonic() - began
