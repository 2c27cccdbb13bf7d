"""Batches ahead of their step: the shard of step s + 1 is asked for, and fetched, while step s trains.

The first request for a step makes the orchestrator build its batch, in a task of its own. So a batch is built and is
on its way while the one before it is trained, and a rank holds one shard in addition to the one that it trains on.
"""

from __future__ import annotations

import threading
import time

from hpcrl.dock.client import DockClient
from hpcrl.dock.wire import BatchShard
from hpcrl.errors import DeadlineError

_LOOK_S = 5.0
"""Seconds between two reports of a waiting rank."""


class _Ahead:
    """One shard that is fetched in a thread."""

    def __init__(self, step: int) -> None:
        self.step, self.done = step, threading.Event()
        self.shard: BatchShard | None = None
        self.error: Exception | None = None
        self.wanted_since_s: float | None = None
        """Time of the monotonic clock when the rank began to wait for it; None while it trains the step before."""


class BatchFetcher:
    """The shards of one data-parallel rank, step after step."""

    def __init__(self, client: DockClient, *, rank: int, world_size: int, last_step: int) -> None:
        """Remember the ranks; no request is sent yet.

        Parameters
        ----------
        rank, world_size:
            Rank, and number of the data-parallel ranks.
        last_step:
            Last step to fetch: a batch beyond it would consume rollouts without being trained.
        """
        self._client, self._rank, self._world_size, self._last_step = client, rank, world_size, last_step
        self._ahead: _Ahead | None = None
        self._closed = threading.Event()

    def take(self, step: int) -> BatchShard:
        """Return the shard of ``step``, and begin to fetch the next one.

        While a step trains, requests to an orchestrator that does not answer are repeated. Deadlines count from this
        call, as if nothing had been prefetched.

        Raises
        ------
        DeadlineError, PeerLostError, FencedError
            As `DockClient.batch`.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.step != step:
            shard = self._client.batch(step, rank=self._rank, world_size=self._world_size)
        else:
            shard = self._wait(ahead)
        if step < self._last_step and not self._closed.is_set():
            self._ahead = _Ahead(step + 1)
            # a daemon: a request that hangs must not keep a process that has failed for another reason
            name = f"batch-{step + 1}"
            threading.Thread(target=self._fetch, args=(self._ahead,), name=name, daemon=True).start()
        return shard

    def close(self) -> None:
        """Ask for nothing more; a request that is under way is left to end by itself."""
        self._closed.set()

    def _wait(self, ahead: _Ahead) -> BatchShard:
        if not ahead.done.is_set():
            # so that the orchestrator knows that waiting for rollouts in flight has no benefit
            self._client.trained(ahead.step - 1)
            ahead.wanted_since_s = time.monotonic()
            limit_s = self._client.wait_timeout_s
            while not ahead.done.wait(min(_LOOK_S, limit_s)):
                self._client.on_wait()
                if time.monotonic() - ahead.wanted_since_s > limit_s:
                    what = f"the batch of step {ahead.step} did not come within {limit_s:g} s"
                    raise DeadlineError(f"{what} from {self._client.url}")
        if ahead.error is not None:
            raise ahead.error
        assert ahead.shard is not None
        return ahead.shard

    def _fetch(self, ahead: _Ahead) -> None:
        """Fetch a shard in a thread, and store it or an error in ``ahead``."""
        try:
            while not self._closed.is_set() and ahead.shard is None:
                ahead.shard = self._client.poll(
                    ahead.step,
                    rank=self._rank,
                    world_size=self._world_size,
                    wanted_since_s=lambda: ahead.wanted_since_s,
                    ended=self._closed,
                )
        except Exception as error:  # noqa: BLE001 - raised in the caller that waits for the shard
            ahead.error = error
        finally:
            ahead.done.set()
