"""Batches that are asked for while the step before them trains; by a client that the test answers for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from patience import patience, wait_for

from hpcrl.dock.ahead import BatchFetcher
from hpcrl.dock.wire import BatchShard, BatchStats
from hpcrl.errors import DeadlineError, PeerLostError


def shard(step: int) -> BatchShard:
    return BatchShard(step=step, rank=1, world_size=4, micro_batches=[], stats=BatchStats.of_tokens())


class Client:
    """Answers of a dock, as `DockClient` gives them."""

    url = "http://dock:80"

    def __init__(self, *, wait_timeout_s: float = 30.0) -> None:
        self.wait_timeout_s = wait_timeout_s
        self.said: list[str] = []
        self.answers: queue.SimpleQueue[BatchShard | Exception | None] = queue.SimpleQueue()
        self.wanted: Callable[[], float | None] = lambda: None
        self.ended: threading.Event | None = None
        self.waits = 0

    def batch(self, step: int, *, rank: int, world_size: int) -> BatchShard:
        self.said.append(f"batch {step} of {rank} in {world_size}")
        return shard(step)

    def poll(self, step: int, *, rank: int, world_size: int, wanted_since_s: Any, ended: Any) -> BatchShard | None:
        self.said.append(f"ahead {step} of {rank} in {world_size}")
        self.wanted, self.ended = wanted_since_s, ended
        answer = self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def trained(self, step: int) -> None:
        self.said.append(f"trained {step}")

    def on_wait(self) -> None:
        self.waits += 1


def fetcher(client: Client, last_step: int = 9) -> BatchFetcher:
    return BatchFetcher(client, rank=1, world_size=4, last_step=last_step)  # type: ignore[arg-type]


def asked(client: Client, what: str) -> None:
    wait_for(lambda: what in client.said, 10.0 * patience(), what)


def test_the_next_batch_is_asked_for_while_one_trains() -> None:
    client = Client()
    batches = fetcher(client)
    assert batches.take(1) == shard(1)
    asked(client, "ahead 2 of 1 in 4")
    assert client.wanted() is None
    client.answers.put(None)  # not ready yet: it is asked for again
    client.answers.put(shard(2))
    wait_for(lambda: client.said.count("ahead 2 of 1 in 4") == 2, 10.0 * patience(), "the second request")
    thread = next((each for each in threading.enumerate() if each.name == "batch-2"), None)
    if thread is not None:
        thread.join(10.0 * patience())
    assert batches.take(2) == shard(2)
    # it was there: nobody was told that somebody waits
    assert client.said[:3] == ["batch 1 of 1 in 4", "ahead 2 of 1 in 4", "ahead 2 of 1 in 4"]
    assert not any(each.startswith("trained") for each in client.said)
    asked(client, "ahead 3 of 1 in 4")
    batches.close()
    client.answers.put(None)


def test_who_comes_too_early_says_so_and_waits() -> None:
    client = Client()
    batches = fetcher(client)
    batches.take(1)
    asked(client, "ahead 2 of 1 in 4")
    began_s = time.monotonic()
    taken: list[BatchShard] = []
    thread = threading.Thread(target=lambda: taken.append(batches.take(2)))
    thread.start()
    asked(client, "trained 1")
    wait_for(lambda: client.wanted() is not None, 10.0 * patience(), "somebody who waits")
    since_s = client.wanted()
    assert since_s is not None
    assert began_s <= since_s <= time.monotonic()
    client.answers.put(shard(2))
    thread.join(10.0 * patience())
    assert taken == [shard(2)]
    batches.close()
    client.answers.put(None)


def test_an_error_is_raised_where_the_batch_is_wanted() -> None:
    client = Client()
    batches = fetcher(client)
    batches.take(1)
    client.answers.put(PeerLostError("the orchestrator is stopping"))
    with pytest.raises(PeerLostError, match="is stopping"):
        batches.take(2)
    # and the next one is asked for as if nothing had been
    assert batches.take(2) == shard(2)
    batches.close()
    client.answers.put(None)


def test_a_batch_that_does_not_come_has_the_time_of_one_that_is_waited_for() -> None:
    client = Client(wait_timeout_s=0.2)
    batches = fetcher(client)
    batches.take(1)
    asked(client, "ahead 2 of 1 in 4")
    began_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"the batch of step 2 did not come within 0\.2 s from http://dock:80"):
        batches.take(2)
    assert time.monotonic() - began_s >= 0.2
    assert client.waits >= 1
    client.answers.put(None)
    batches.close()
    client.answers.put(None)


def test_another_step_than_the_next_is_asked_for_anew() -> None:
    client = Client()
    batches = fetcher(client)
    batches.take(1)
    asked(client, "ahead 2 of 1 in 4")
    assert batches.take(5) == shard(5)
    assert "batch 5 of 1 in 4" in client.said
    asked(client, "ahead 6 of 1 in 4")
    batches.close()
    for _ in range(2):
        client.answers.put(None)


def test_nothing_is_asked_for_after_the_last_step_or_the_end() -> None:
    client = Client()
    batches = fetcher(client, last_step=3)
    assert batches.take(3) == shard(3)
    batches = fetcher(client, last_step=9)
    batches.close()
    batches.take(4)
    time.sleep(0.05)
    assert client.said == ["batch 3 of 1 in 4", "batch 4 of 1 in 4"]


def test_an_end_is_known_to_the_request_that_is_under_way() -> None:
    client = Client()
    batches = fetcher(client)
    batches.take(1)
    asked(client, "ahead 2 of 1 in 4")
    thread = next(each for each in threading.enumerate() if each.name == "batch-2")
    assert thread.daemon
    assert client.ended is not None
    assert not client.ended.is_set()
    batches.close()
    assert client.ended.is_set()
    client.answers.put(None)
    thread.join(10.0 * patience())
    assert not thread.is_alive()
    assert client.said == ["batch 1 of 1 in 4", "ahead 2 of 1 in 4"]
