"""What the dock is asked over HTTP, and how each of its answers comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from hpcrl.network.auth import Gate
from hpcrl.rollouts.batches.http import dock_app
from hpcrl.rollouts.batches.server import ConflictError


class Asked:
    """A dock that remembers what it was asked, and answers or fails as a test says."""

    def __init__(self) -> None:
        self.stopping = False
        self.calls: list[tuple[Any, ...]] = []
        self.answer: Any = None
        self.error: Exception | None = None

    def _say(self, *call: Any) -> Any:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return self.answer

    async def batch(self, step: int, *, rank: int, world_size: int, wait_s: float, ahead: bool) -> bytes | None:
        return self._say("batch", step, rank, world_size, wait_s, ahead)  # type: ignore[no-any-return]

    async def trained(self, step: int) -> None:
        self._say("trained", step)

    async def published(self, version: int) -> None:
        self._say("published", version)

    async def snapshot(self, step: int) -> bytes:
        return self._say("snapshot", step)  # type: ignore[no-any-return]

    async def finish(self, version: int, *, wait_s: float) -> bool:
        return self._say("finish", version, wait_s)  # type: ignore[no-any-return]

    async def evaluate(self, key: str, given: str, *, seed: int, wait_s: float) -> bytes | None:
        return self._say("evaluate", key, given, seed, wait_s)  # type: ignore[no-any-return]

    def metrics(self) -> str:
        return self._say("metrics")  # type: ignore[no-any-return]

    async def run_metrics(self) -> str:
        return self._say("run_metrics")  # type: ignore[no-any-return]


Served = tuple[Asked, TestClient[Any, Any]]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    dock = Asked()
    async with TestClient(TestServer(dock_app(dock, Gate("dock", None)))) as client:
        yield dock, client


async def ask(served: Served, method: str, path: str) -> tuple[int, str, bytes]:
    async with served[1].request(method, path) as response:
        return response.status, response.content_type, await response.read()


@pytest.mark.parametrize(
    ("question", "answer", "call", "said"),
    [
        ("GET /health", None, None, (200, "text/plain", b"ok")),
        ("GET /metrics", "a 1\n", ("metrics",), (200, "text/plain", b"a 1\n")),
        ("GET /metrics/run", "b 2\n", ("run_metrics",), (200, "text/plain", b"b 2\n")),
        ("POST /dock/trained/7", None, ("trained", 7), (200, "text/plain", b"ok")),
        ("POST /dock/published/8", None, ("published", 8), (200, "text/plain", b"ok")),
        ("POST /dock/snapshot/9", b"\x81", ("snapshot", 9), (200, "application/msgpack", b"\x81")),
    ],
)
async def test_each_question_reaches_its_answer(
    served: Served, question: str, answer: Any, call: Any, said: tuple[int, str, bytes]
) -> None:
    served[0].answer = answer
    assert await ask(served, *question.split()) == said
    assert served[0].calls == ([] if call is None else [call])


@pytest.mark.parametrize(
    ("query", "wait_s", "ahead"),
    [
        ("", 0.0, False),
        ("&wait_s=2.5", 2.5, False),
        ("&wait_s=2.5&ahead=1", 2.5, True),
        ("&ahead=0", 0.0, False),
        # nobody is held longer than half a minute, whatever is asked for
        ("&wait_s=31", 30.0, False),
        ("&wait_s=29.5", 29.5, False),
        ("&wait_s=-1", 0.0, False),
    ],
)
@pytest.mark.parametrize("shard", [b"shard", None])
async def test_a_shard_or_a_word_that_there_is_none_yet(
    served: Served, query: str, wait_s: float, ahead: bool, shard: bytes | None
) -> None:
    served[0].answer = shard
    status, kind, body = await ask(served, "GET", f"/dock/batch/3?rank=1&world_size=4{query}")
    assert served[0].calls == [("batch", 3, 1, 4, wait_s, ahead)]
    if shard is None:
        assert (status, body) == (204, b"")
    else:
        assert (status, kind, body) == (200, "application/msgpack", b"shard")


@pytest.mark.parametrize(("done", "status"), [(True, 200), (False, 204)])
async def test_whether_the_last_version_is_evaluated_is_the_status(served: Served, done: bool, status: int) -> None:
    served[0].answer = done
    assert (await ask(served, "POST", "/dock/finish/12?wait_s=1.5"))[0] == status
    assert served[0].calls == [("finish", 12, 1.5)]


@pytest.mark.parametrize(
    ("path", "error", "status", "words"),
    [
        ("/dock/batch/3?rank=0&world_size=1", ConflictError("not now"), 409, "not now"),
        ("/dock/batch/3?rank=0&world_size=1", ValueError("no number"), 400, "ValueError: no number"),
        ("/dock/batch/3?rank=0&world_size=1", KeyError("rank"), 400, "KeyError: 'rank'"),
        ("/dock/batch/3?world_size=1", None, 400, "KeyError: 'rank'"),
        ("/dock/batch/3?rank=0", None, 400, "KeyError: 'world_size'"),
        ("/dock/batch/3?rank=one&world_size=1", None, 400, "ValueError: invalid literal"),
        ("/dock/batch/3?rank=0&world_size=1&wait_s=long", None, 400, "ValueError: could not convert"),
        ("/dock/batch/three?rank=0&world_size=1", None, 404, "404"),
    ],
)
async def test_what_cannot_be_answered_says_why(
    served: Served, path: str, error: Exception | None, status: int, words: str
) -> None:
    served[0].error = error
    found, _, body = await ask(served, "GET", path)
    assert (found, body.decode().startswith(words)) == (status, True)


async def test_an_orchestrator_that_stops_says_so_to_the_trainer_alone(served: Served) -> None:
    served[0].stopping = True
    for method, path in (("GET", "/dock/batch/3?rank=0&world_size=1"), ("POST", "/dock/trained/1")):
        assert await ask(served, method, path) == (410, "text/plain", b"the orchestrator is stopping")
    assert (await ask(served, "GET", "/health"))[0] == 200
    assert served[0].calls == []


async def test_an_evaluation_is_asked_for_until_it_is_there(served: Served) -> None:
    dock, client = served
    path, query = f"/dock/evaluate/{'0a' * 16}", {"set": '{"name": "eval"}', "seed": "3", "wait_s": "2"}
    assert (await client.post(path, params=query)).status == 204
    dock.answer = b'{"mean": 1}'
    response = await client.post(path, params=query)
    assert (response.status, await response.json()) == (200, {"mean": 1})
    assert dock.calls == [("evaluate", "0a" * 16, '{"name": "eval"}', 3, 2.0)] * 2
    dock.error = ConflictError("another evaluation")
    response = await client.post(path, params=query)
    assert (response.status, await response.text()) == (409, "another evaluation")
    dock.error = ValueError("no set")
    assert (await client.post(path, params=query)).status == 400
    assert (await client.post(path, params={"set": "{}"})).status == 400
    assert (await client.post("/dock/evaluate/../batch", params=query)).status in (404, 405)
