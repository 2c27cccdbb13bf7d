"""Every server of ours, every path it has and one that it has not: nobody is answered without the run's token."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from hpcrl.errors import RunDirError, UsageError
from hpcrl.inference.dynamo.router import Front, front_apps
from hpcrl.inference.embedded.serving.process import engine_app
from hpcrl.inference.metrics import EngineMetrics, Registry
from hpcrl.inference.vllm.access import RunAccess
from hpcrl.inference.vllm.routed_experts_middleware import RunAccessBehindRouterWithRows, RunAccessWithRows
from hpcrl.network.auth import Gate, RefusedRequest
from hpcrl.network.credentials import Credentials, ensure_token, read_token
from hpcrl.network.routed_experts_reference import PATH
from hpcrl.reporting.log_limits import LogBudget
from hpcrl.rollouts.batches.http import dock_app
from hpcrl.runs.events import read_events
from hpcrl.runs.refusals import gate_of
from hpcrl.runs.role import RoleContext
from hpcrl.runs.rundir import RunDir
from hpcrl.weights.read.fanout import FanoutServer

ATTEMPT = 2


class Touched:
    """Stands behind a door: whatever is asked of it is remembered, and fails."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        raise RuntimeError(name)


def engine(gate: Gate, behind: Any) -> web.Application:
    return engine_app(gate, cast(Any, Serving(behind)), behind, EngineMetrics(Registry({})))


class Serving:
    """What an engine's handlers keep of it at once."""

    def __init__(self, behind: Any) -> None:
        self.engine = self.facts = self.tokenizer = behind


def dynamo(port: int) -> Callable[[Gate, Any], web.Application]:
    def make(gate: Gate, behind: Any) -> web.Application:
        return front_apps(Front(behind, behind, timeout_s=1.0, health_s=1.0), gate)[port]

    return make


def fanout(gate: Gate, behind: Any) -> web.Application:
    return FanoutServer("127.0.0.1", gate=gate, node="n", fetch=behind).app()


SERVERS: dict[str, Callable[[Gate, Any], web.Application]] = {
    "engine": engine,
    "dock": lambda gate, behind: dock_app(behind, gate),
    "dynamo": dynamo(0),
    "dynamo-metrics": dynamo(1),
    "fanout": fanout,
}


def routes(app: web.Application) -> list[tuple[str, str]]:
    """Method and path of all that an application has, and of something that it has not."""
    known = []
    for route in app.router.routes():
        assert route.resource is not None
        path = route.resource.canonical
        for name in ("step", "version", "key", "file", "part"):
            path = path.replace(f"{{{name}}}", "1")
        assert "{" not in path, path
        known.append((route.method, path))
    assert known
    return [*known, ("GET", "/there/is/no/such/path"), ("POST", "/collective_rpc"), ("OPTIONS", "/"), ("DELETE", "/x")]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    for _ in range(ATTEMPT):
        run.start_attempt()
    return run


def context(run: RunDir, attempt: int = ATTEMPT) -> RoleContext:
    return RoleContext(run, attempt=attempt, role="engine", replica=0, rank=0)


@pytest.mark.parametrize("name", SERVERS)
async def test_every_path_of_every_server_needs_the_token(name: str, run: RunDir) -> None:
    behind = Touched()
    app = SERVERS[name](gate_of(context(run), name), behind)
    mine = context(run).credentials
    async with TestClient(TestServer(app)) as client:

        async def status(method: str, path: str, headers: dict[str, str]) -> int:
            async with client.request(method, path, headers=headers, data=b"{" if method == "POST" else None) as answer:
                await answer.read()
                return answer.status

        before = list(behind.calls)
        for method, path in routes(app):
            for headers in ({}, {"Authorization": "Bearer"}, Credentials("0" * 64, ATTEMPT).headers):
                assert await status(method, path, headers) == 401, (method, path, headers)
            basic = {"Authorization": mine.headers["Authorization"].replace("Bearer", "Basic")}
            assert await status(method, path, basic) == 401, (method, path)
            # one that was left of the first attempt, and one of an attempt that is to come
            for attempt in (ATTEMPT - 1, ATTEMPT + 1):
                zombie = context(run, attempt).credentials.headers
                assert await status(method, path, zombie) == 403, (method, path)
            looks = path in ("/health", "/liveness", "/metrics", "/metrics/run") and method in ("GET", "HEAD")
            found = await status(method, path, Credentials(mine.token).headers)
            assert (found != 403) == looks, (method, path, found)
            if not looks:
                assert behind.calls == before, (method, path)
            before = list(behind.calls)
        for method, path in routes(app):
            assert await status(method, path, mine.headers) not in (401, 403), (method, path)
    told = read_events(run, attempt=ATTEMPT, kind="access.refused")
    assert {event.data["reason"] for event in told} >= {"no_token", "wrong_token", "other_attempt"}
    assert all(event.data["server"] == name and event.data["peer"] == "127.0.0.1" for event in told)
    assert mine.token.encode() not in b"".join(path.read_bytes() for path in run.events_dir.iterdir())


async def asgi(app: Any, scope: dict[str, Any]) -> list[Any]:
    """What an ASGI application sends; reading the body of the request is an error."""
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def test_vllms_server_is_behind_the_same_door(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RUN_DIR": run.path, "ATTEMPT": ATTEMPT, "ROLE": "engine", "REPLICA": 0}.items():
        monkeypatch.setenv(f"HPCRL_{name}", str(value))
    reached: list[str] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})

    async def status(app: Any, path: str, authorization: str = "", method: str = "POST", kind: str = "http") -> Any:
        headers = [(b"authorization", authorization.encode())] if authorization else []
        scope = {"type": kind, "method": method, "path": path, "headers": headers, "client": ("10.0.0.9", 1)}
        first = (await asgi(app, scope))[0]
        return first.get("status", first)

    guarded, behind_router = RunAccess(vllm), RunAccess(vllm, open_health=True)
    with_rows = (RunAccessWithRows(vllm), RunAccessBehindRouterWithRows(vllm))
    mine = context(run).credentials
    paths = (
        "/collective_rpc",
        "/init_weight_transfer_engine",
        "/pause",
        "/v1/models",
        "/metrics",
        "/health",
        "/nothing",
        PATH,
    )
    for app in (guarded, behind_router, *with_rows):
        for path in paths:
            assert await status(app, path) == 401
            assert await status(app, path, "Bearer " + "0" * 64) == 401
            assert await status(app, path, context(run, 1).credentials.headers["Authorization"]) == 403
            assert await status(app, path, mine.headers["Authorization"][:-1] + "9") == 403
    assert await status(guarded, "/health", method="GET") == 401
    assert await status(behind_router, "/metrics", method="GET") == 401
    assert await status(guarded, "/x", kind="websocket") == {"type": "websocket.close", "code": 1008}
    assert not reached
    assert await status(behind_router, "/health", method="GET") == 200
    assert await status(guarded, "/metrics", f"Bearer {mine.token}", method="GET") == 200
    assert await status(guarded, "/pause", mine.headers["Authorization"]) == 200
    assert await asgi(guarded, {"type": "lifespan"}) == []  # the server's own start and end
    assert reached == ["http", "http", "http", "lifespan"]
    told = read_events(run, attempt=ATTEMPT, kind="access.refused")
    assert {event.data["path"] for event in told} >= {"/collective_rpc", "/pause", "/metrics"}
    assert {event.data["peer"] for event in told} == {"10.0.0.9"}


def test_vllms_middleware_refuses_requests_outside_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCRL_RUN_DIR", raising=False)
    with pytest.raises(RunDirError, match="hint"):
        RunAccess(cast(Any, Touched()))


async def test_strangers_cannot_fill_the_disk() -> None:
    told: list[RefusedRequest] = []
    gate = Gate("engine", Credentials("5" * 64, 1), report=told.append)
    for number in range(5000):
        assert gate.refusal("GET", f"/{number}{'x' * 10_000}\n", None, "10.0.0.9") is not None
    assert gate.refused == 5000
    assert 20 < len(told) < 40
    assert all(len(refused.path) <= 200 and refused.path.isprintable() for refused in told)


async def test_suppressed_refusals_are_reported_later() -> None:
    told: list[RefusedRequest] = []
    gate = Gate("engine", Credentials("5" * 64, 1), report=told.append)
    gate._budget = LogBudget(every_s=0.05)
    for _ in range(200):
        gate.refusal("GET", "/x", None, "10.0.0.9")
    async with asyncio.timeout(20.0):
        while sum(refused.requests for refused in told) < 200:
            await asyncio.sleep(0.01)


def test_the_token_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    ensure_token(tmp_path)
    path = tmp_path / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = read_token(path)
    assert len(first) == 64
    ensure_token(tmp_path)
    assert read_token(path) == first
    path.chmod(0o640)
    with pytest.raises(RunDirError, match="is not a file of this user"):
        read_token(path)
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirError, match="cannot be read"):
        read_token(path)
    path.unlink()
    path.write_text("hello")
    path.chmod(0o600)
    with pytest.raises(RunDirError, match="no token"):
        read_token(path)


def test_what_a_traceback_shows_is_not_the_token(tmp_path: Path) -> None:
    ensure_token(tmp_path)
    credentials = Credentials.of_run(tmp_path, 1)
    assert credentials.token not in f"{credentials} {credentials!r} {[credentials]}"


def test_outside_of_a_run_a_server_without_token_listens_on_loopback_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_gate = Gate("engine", None)
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        open_gate.check_host(host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "node-1", ""):
        with pytest.raises(UsageError, match="hint"):
            open_gate.check_host(host)
    Gate("engine", Credentials("5" * 64)).check_host("0.0.0.0")
    # as a program; it refuses before it reads the model
    monkeypatch.delenv("HPCRL_RUN_DIR", raising=False)
    command = [sys.executable, "-m", "hpcrl.inference.embedded.server", "--model", str(tmp_path), "--host", "0.0.0.0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 2
    assert "--token-file" in done.stderr


async def test_an_orchestrator_of_an_older_attempt_is_refused(run: RunDir) -> None:
    """After ports are used again, one that was left over meets an engine of the living attempt."""
    from hpcrl.rollouts.engines.client import EngineClient, EngineError

    behind = Touched()
    server = TestServer(engine(gate_of(context(run), "engine"), behind))
    await server.start_server()
    before = list(behind.calls)
    zombie, living = context(run, 1).credentials, context(run).credentials
    async with server, aiohttp.ClientSession(headers=zombie.headers) as session:
        client = EngineClient(session, name="engine-0", url=f"http://127.0.0.1:{server.port}")
        calls = ("/pause?mode=keep", "/start_weight_update", "/update_weights", "/update_weight_version")
        for call in calls:
            with pytest.raises(EngineError, match="attempt 2 of the run, the request to attempt 1"):
                await client.control(call, {"new_version": "9"}, timeout_s=5.0)
        assert behind.calls == before
        async with aiohttp.ClientSession(headers=living.headers) as own:
            with pytest.raises(EngineError, match="500"):  # it gets through, to what stands for the engine
                await EngineClient(own, name="engine-0", url=client.url).control("/pause", timeout_s=5.0)
