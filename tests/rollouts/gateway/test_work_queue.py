"""Calls of programs share the event loop with everything else that runs there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_testing import GatewayBench, gateway_bench

from hpcrl.rollouts.gateway import server
from hpcrl.rollouts.gateway.work_queue import WorkQueue
from hpcrl.rollouts.telemetry.metrics_text import render_metrics

BODY: Any = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}]}


class Turns:
    """Counts turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._next()

    def _next(self) -> None:
        self.count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


async def begun(queue: WorkQueue, owners: str, **kind: bool) -> list[tuple[str, int]]:
    """Owners in the order in which their pieces began, each with its turn of the event loop."""
    turns, found = Turns(), list[tuple[str, int]]()

    async def piece(owner: str) -> None:
        await queue.wait(owner, **kind)
        found.append((owner, turns.count))

    await asyncio.gather(*map(piece, owners))
    turns.stop()
    return found


async def test_few_pieces_begin_in_one_turn_of_the_loop() -> None:
    found = await begun(WorkQueue(per_turn=3), "abcdefghijklmnopqrst")
    assert [owner for owner, _ in found] == list("abcdefghijklmnopqrst")
    counts: dict[int, int] = {}
    for _, turn in found:
        counts[turn] = counts.get(turn, 0) + 1
    assert max(counts.values()) == 3
    # behind those that began at once no turn is left out: the processor is used while there is work
    _, *later = sorted(counts)
    assert later == list(range(later[0], later[-1] + 1))


async def test_a_rollout_with_many_calls_delays_others_by_one_of_them() -> None:
    found = await begun(WorkQueue(per_turn=1), "aaaaaaabc")
    # the first begins at once, and then owners take turns
    assert "".join(owner for owner, _ in found) == "aabcaaaaa"


async def test_the_end_of_a_call_comes_before_the_beginning_of_another() -> None:
    queue = WorkQueue(per_turn=1)
    order: list[str] = []

    async def piece(name: str, *, ends_call: bool) -> None:
        await queue.wait(name, ends_call=ends_call)
        order.append(name)

    pieces = [piece("first", ends_call=False), piece("second", ends_call=False), piece("answer", ends_call=True)]
    await asyncio.gather(*pieces)
    assert order == ["first", "answer", "second"]


async def test_a_cancelled_piece_takes_no_place() -> None:
    queue = WorkQueue(per_turn=1)
    order: list[int] = []

    async def piece(number: int) -> None:
        await queue.wait("a")
        order.append(number)

    tasks = [asyncio.create_task(piece(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert len(queue) == 4
    tasks[1].cancel()
    tasks[3].cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (order, len(queue)) == ([0, 2, 4], 0)
    # and nothing of them is left
    assert (await begun(queue, "b"))[0][0] == "b"


async def test_waits_are_measured() -> None:
    queue = WorkQueue(per_turn=1)
    assert queue.summary() == (0, 0.0, 0.0)
    tasks = [asyncio.create_task(queue.wait("a")) for _ in range(100)]
    await asyncio.sleep(0)
    assert queue.summary().waiting == 99
    await asyncio.gather(*tasks)
    found = queue.summary()
    assert found.waiting == 0
    assert 0 < found.p99_s <= found.waited_s


async def ask(bench: GatewayBench, http: aiohttp.ClientSession, number: int) -> Any:
    body = {**BODY, "messages": [{"role": "user", "content": f"Hello {number}."}]}
    headers = {"Authorization": f"Bearer {bench.endpoint.key}"}
    async with http.post(f"{bench.endpoint.url}/chat/completions", json=body, headers=headers) as answer:
        return await answer.json()


async def test_calls_that_are_ready_together_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendering and parsing run in different turns of the loop, a few in each, however many calls are there."""
    async with gateway_bench(tmp_path, max_branches=64, change=lambda stub: stub.awake.clear()) as bench:
        bench.said = ["Hi.<|im_end|>"] * 40
        turns = Turns()
        rendered, parsed = list[int](), list[int]()
        spy_on(monkeypatch, bench.recorder._reader, "read", lambda: rendered.append(turns.count))
        spy_on(monkeypatch, bench.turns, "parse", lambda: parsed.append(turns.count))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            asked = [asyncio.create_task(ask(bench, http, number)) for number in range(40)]
            async with asyncio.timeout(60):
                while len(rendered) < 40:
                    await asyncio.sleep(0.01)
            bench.stub.awake.set()
            answers = await asyncio.gather(*asked)
        turns.stop()
        assert {answer["choices"][0]["message"]["content"] for answer in answers} == {"Hi."}
        for found in (rendered, parsed):
            assert len(found) == 40
            assert max(found.count(turn) for turn in found) <= 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("responses", {"input": "Hello."}),
        ("messages", {"messages": [{"role": "user", "content": "Hello."}]}),
    ],
)
async def test_requests_of_other_forms_are_read_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    async with gateway_bench(tmp_path) as bench:
        bench.said = ["Hi.<|im_end|>"]
        waited, order = bench.recorder._queue.wait, list[str]()

        async def wait(owner: Any, **kind: bool) -> None:
            assert owner is bench.recorder
            await waited(owner, **kind)
            order.append("turn")

        monkeypatch.setattr(bench.recorder._queue, "wait", wait)
        spy_on(monkeypatch, server._DIALECTS[path], "request", lambda: order.append("read"))
        headers = {"Authorization": f"Bearer {bench.endpoint.key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{bench.endpoint.url}/{path}", json=body, headers=headers) as answer,
        ):
            assert answer.status == 200
        assert order[:2] == ["turn", "read"]


async def test_a_client_that_hangs_up_in_the_queue_asks_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_bench(tmp_path) as bench:
        bench.said = ["Hi.<|im_end|>"]
        queue = bench.recorder._queue
        wait, closed = queue.wait, asyncio.Event()

        async def closed_first(owner: Any, **kind: bool) -> None:
            await closed.wait()
            await wait(owner, **kind)

        monkeypatch.setattr(queue, "wait", closed_first)
        async with aiohttp.ClientSession() as http:
            asked = asyncio.create_task(ask(bench, http, 0))
            async with asyncio.timeout(60):
                while not len(bench.recorder.calls):
                    await asyncio.sleep(0.01)
                asked.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asked
                while len(bench.recorder.calls):
                    await asyncio.sleep(0.01)
            closed.set()
            answer = await ask(bench, http, 1)
        assert answer["choices"][0]["message"]["content"] == "Hi."
        assert (len(bench.stub.requests), bench.counters.gateway_requests) == (1, 1)


async def test_length_and_waits_are_metrics(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path) as bench:
        gateway: Any = bench.turns.sampler.gateway
        lines = render_metrics({}, gateway.gauges(), {}).splitlines()
    samples = dict(line.split() for line in lines if not line.startswith("#"))
    assert samples == {
        "hpcrl_rollouts_gateway_waiting": "0",
        "hpcrl_rollouts_gateway_wait_p99_seconds": "0",
        "hpcrl_rollouts_gateway_waited_seconds_total": "0",
    }


def spy_on(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, note: Callable[[], None]) -> None:
    """Call ``note`` whenever a method is called."""
    method = getattr(target, name)

    def spied(*given: Any, **named: Any) -> Any:
        note()
        return method(*given, **named)

    monkeypatch.setattr(target, name, spied)
