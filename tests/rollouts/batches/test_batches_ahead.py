"""Batches that are built and fetched while the step before them trains."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from harness import make_run, running
from patience import wait_for
from shards import make_shard
from stub_engine import StubEngine

from hpcrl.dock.ahead import BatchFetcher
from hpcrl.dock.client import DockClient
from hpcrl.dock.wire import encode_shard
from hpcrl.errors import DeadlineError, PeerLostError


class Dock:
    """Serves shards of any step, from a step on only when it is told to; it can go away and come back."""

    def __init__(self, *, held: int = 1 << 30) -> None:
        self.held, self.asked, self.trained = held, list[str](), list[str]()
        self.port = free_port()
        self._stack = contextlib.ExitStack()

    def get(self, path: str) -> tuple[int, bytes]:
        step = int(path.split("?", maxsplit=1)[0].rsplit("/", 1)[1])
        self.asked.append(path)
        return (204, b"") if step >= self.held else (200, encode_shard(make_shard(step)))

    def start(self) -> None:
        dock = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                time.sleep(0.01)
                self.reply(*dock.get(self.path))

            def do_POST(self) -> None:
                dock.trained.append(self.path)
                self.reply(200, b"")

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Be quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(server.shutdown)
        self._stack.callback(server.server_close)

    def stop(self) -> None:
        self._stack.close()

    def fetcher(self, *, wait_s: float = 30.0, connect_s: float = 0.3, **changes: Any) -> BatchFetcher:
        url = f"http://127.0.0.1:{self.port}"
        client = DockClient(url, wait_timeout_s=wait_s, connect_timeout_s=connect_s, **changes)
        return BatchFetcher(client, rank=0, world_size=1, last_step=3)


Start = Callable[..., Dock]


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def begin(**settings: Any) -> Dock:
            dock = Dock(**settings)
            dock.start()
            stack.callback(dock.stop)
            return dock

        yield begin


def test_a_shard_is_there_before_its_step_and_none_behind_the_last(start: Start) -> None:
    dock = start()
    batches = dock.fetcher()
    assert batches.take(1).step == 1
    wait_for(lambda: batches._ahead is not None and batches._ahead.done.is_set(), 20, "the batch of step 2")
    dock.stop()
    # nothing is asked any more
    assert batches.take(2).step == 2
    dock.start()
    assert [batches.take(3).step for _ in range(1)] == [3]
    assert ["ahead=1" in path for path in dock.asked] == [False, True, True]
    assert all("/batch/4" not in path for path in dock.asked)


def test_an_orchestrator_that_is_away_while_a_step_trains_is_not_lost(start: Start) -> None:
    dock = start(held=2)
    batches = dock.fetcher()
    batches.take(1)
    dock.stop()
    time.sleep(1.0)  # longer than a connection may be lost
    dock.held = 3
    dock.start()
    assert batches.take(2).step == 2


def test_one_that_goes_away_while_the_trainer_waits_is_lost(start: Start) -> None:
    dock = start(held=2)
    batches = dock.fetcher()
    batches.take(1)
    waited: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(PeerLostError, match="cannot be reached") as error:
            batches.take(2)
        waited.append(error.value)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: bool(dock.trained), 20, "word that step 1 is trained")
    assert dock.trained == ["/dock/trained/1"]
    dock.stop()
    thread.join(20.0)
    assert waited


def test_how_long_a_connection_is_lost_counts_from_its_loss(start: Start) -> None:
    """Not from when the trainer began to wait: a batch may take longer than a connection may be lost."""
    dock = start(held=2)
    batches = dock.fetcher(connect_s=2.0)
    batches.take(1)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(batches.take(2).step))
    thread.start()
    wait_for(lambda: bool(dock.trained), 20, "word that step 1 is trained")
    time.sleep(2.2)
    dock.stop()
    time.sleep(0.3)
    dock.held = 3
    dock.start()
    thread.join(20.0)
    assert found == [2]


def test_the_deadline_counts_from_when_the_trainer_waits(start: Start) -> None:
    dock, waits = start(held=2), list[float]()
    batches = dock.fetcher(wait_s=1.0, on_wait=lambda: waits.append(time.monotonic()))
    batches.take(1)
    time.sleep(1.2)
    began_s = time.monotonic()
    with pytest.raises(DeadlineError, match="batch of step 2 did not come within 1 s"):
        batches.take(2)
    assert time.monotonic() - began_s >= 1.0
    assert waits
    batches.close()


def test_what_the_orchestrator_answers_ahead_is_raised_when_its_step_comes(start: Start) -> None:
    dock = start()
    batches = dock.fetcher()
    dock.get = lambda path: (410, b"stopping") if "ahead" in path else Dock.get(dock, path)  # type: ignore[method-assign]
    assert batches.take(1).step == 1
    with pytest.raises(PeerLostError, match="410: stopping"):
        batches.take(2)


async def test_the_next_batch_is_built_while_a_step_trains_after_any_interruption(tmp_path: Path) -> None:
    async with running(make_run(tmp_path), StubEngine()) as loop:
        server = loop.parts.batch_server
        batches = BatchFetcher(loop.client, rank=0, world_size=1, last_step=10)
        first = await asyncio.to_thread(batches.take, 1)
        # the rank asked once, and goes away: the task that builds is not its own
        await loop.until(lambda: 2 in server._builds)
        batches.close()
        await loop.until(server._builds[2].done)
        assert (first.step, server.step) == (1, 2)
        # no more than one ahead, and of the state before it nothing is gone
        assert set(server._builds) == {1, 2}
        assert len((await loop.checkpoint(0)).logged) >= 2 * 4
        again = BatchFetcher(loop.client, rank=0, world_size=1, last_step=10)
        await loop.publish(1)
        second = await asyncio.to_thread(again.take, 2)
        await loop.until(lambda: set(server._builds) == {2, 3})
        assert second.stats.staleness_max <= 1
        state = await loop.checkpoint(2)
        again.close()
    assert state.counters.consumed == 2 * 16
