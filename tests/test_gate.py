"""What a door answers with, whom it opens to without a token, and what counts as a file with a token."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from patience import patience

from hpcrl.errors import RunDirError
from hpcrl.network.auth import Gate, RefusedRequest
from hpcrl.network.credentials import Credentials, ensure_token, read_token
from hpcrl.reporting.log_limits import LogBudget

TOKEN = "0123456789abcdef" * 4


async def answers(
    gate: Gate, socket: Path, *requests: tuple[str, str, Mapping[str, str]]
) -> list[tuple[int, str | None, str | None]]:
    """Status, ``Connection`` and ``WWW-Authenticate`` of each request to a server that listens on a socket file."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(middlewares=[gate.middleware()])
    app.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    found = []
    try:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session:
            for method, path, headers in requests:
                async with session.request(method, f"http://here{path}", headers=headers) as response:
                    said = response.headers
                    found.append((response.status, said.get("Connection"), said.get("WWW-Authenticate")))
    finally:
        await runner.cleanup()
    return found


async def test_a_door_says_how_to_come_in_and_closes_behind_strangers(tmp_path: Path) -> None:
    told: list[RefusedRequest] = []
    gate = Gate("server", Credentials(TOKEN, 2), report=told.append, open_health=True)
    ours, older = ({"Authorization": f"Bearer {TOKEN}.{attempt}"} for attempt in (2, 1))
    found = await answers(
        gate,
        tmp_path / "socket",
        ("GET", "/health", {}),
        ("POST", "/health", {}),
        ("GET", "/other", older),
        ("GET", "/other", ours),
    )
    assert found == [(200, "close", None), (401, "close", "Bearer"), (403, "close", None), (200, None, None)]
    # a socket file knows no address of who asks
    assert [(refused.peer, refused.reason) for refused in told] == [("", "no_token"), ("", "other_attempt")]


async def test_a_stranger_who_is_gone_already_has_no_address() -> None:
    told: list[RefusedRequest] = []
    guard = Gate("server", Credentials(TOKEN, 2), report=told.append).middleware()

    async def never(_: web.Request) -> web.StreamResponse:
        raise AssertionError("nothing is answered without the token")

    request = make_mocked_request("GET", "/other")
    assert request.remote is None
    assert (await guard(request, never)).status == 401
    assert [refused.peer for refused in told] == [""]


async def test_a_stranger_is_reported_by_its_address_and_gets_the_reason() -> None:
    told: list[RefusedRequest] = []
    guard = Gate("server", Credentials(TOKEN, 2), report=told.append).middleware()

    async def never(_: web.Request) -> web.StreamResponse:
        raise AssertionError("nothing is answered without the token")

    answer = await guard(make_mocked_request("GET", "/other").clone(remote="10.0.0.9"), never)
    assert isinstance(answer, web.Response)
    assert answer.text == "this server accepts only requests with the token of its run"
    assert [refused.peer for refused in told] == ["10.0.0.9"]


def test_who_asks_other_servers_of_a_run_brings_its_token_along() -> None:
    assert Gate("server", Credentials(TOKEN, 7)).headers == {"Authorization": f"Bearer {TOKEN}.7"}
    assert Gate("server", None).headers == {}


def test_a_role_has_the_token_of_the_run_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_token(tmp_path)
    monkeypatch.setenv("HPCRL_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("HPCRL_ATTEMPT", "3")
    assert Credentials.from_env() == Credentials(read_token(tmp_path / "token"), 3)
    monkeypatch.delenv("HPCRL_RUN_DIR")
    assert Credentials.from_env() is None


def test_what_is_not_a_file_with_a_token_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xff" * 64)
    path.chmod(0o600)
    with pytest.raises(RunDirError, match="holds no token"):
        read_token(path)
    path.unlink()
    os.mkfifo(path, 0o600)  # nobody writes to it
    with pytest.raises(RunDirError, match="is not a file of this user with mode 0600"):
        read_token(path)


def test_a_token_without_an_attempt_looks_and_changes_nothing() -> None:
    credentials = Credentials(TOKEN, 2)

    def reason(method: str, path: str) -> str | None:
        refusal = credentials.refusal(method, path, f"Bearer {TOKEN}")
        return refusal and refusal.reason

    for path in ("/health", "/liveness", "/metrics", "/metrics/run"):
        assert [reason(method, path) for method in ("GET", "HEAD", "POST", "DELETE")] == [
            None,
            None,
            *["no_attempt"] * 2,
        ]
    assert {reason(method, path) for method in ("GET", "HEAD") for path in ("/", "/groups", "/metrics/")} == {
        "no_attempt"
    }


@pytest.mark.parametrize(
    ("header", "status", "reason"),
    [
        (f"Bearer {TOKEN}.2", None, None),
        (f"  bearer   {TOKEN}.2 ", None, None),
        (f"BEARER {TOKEN}.2", None, None),
        (None, 401, "no_token"),
        ("", 401, "no_token"),
        ("Bearer", 401, "no_token"),
        ("Bearer .2", 401, "no_token"),
        (f"Basic {TOKEN}.2", 401, "no_token"),
        (f"{TOKEN}.2", 401, "no_token"),
        (f"Bearer {TOKEN[1:]}.2", 401, "wrong_token"),
        (f"Bearer {TOKEN}0.2", 401, "wrong_token"),
        ("Bearer ü.2", 401, "wrong_token"),
        ("Bearer \udcff.2", 401, "wrong_token"),
        (f"Bearer {TOKEN}.3", 403, "other_attempt"),
        (f"Bearer {TOKEN}.2.2", 403, "other_attempt"),
        (f"Bearer {TOKEN}.02", 403, "other_attempt"),
        (f"Bearer {TOKEN}.", 403, "no_attempt"),
    ],
)
def test_a_header_brings_token_and_attempt(header: str | None, status: int | None, reason: str | None) -> None:
    refusal = Credentials(TOKEN, 2).refusal("GET", "/groups", header)
    assert (status, reason) == (None, None) if refusal is None else (refusal.status, refusal.reason) == (status, reason)


def test_a_server_outside_of_a_run_serves_every_attempt_that_has_the_token() -> None:
    server = Credentials(TOKEN)
    assert [server.refusal("POST", "/x", f"Bearer {each}") for each in (TOKEN, f"{TOKEN}.1", f"{TOKEN}.9")] == [
        None
    ] * 3
    refusal = server.refusal("POST", "/x", f"Bearer {'f' * 64}.1")
    assert refusal is not None
    assert refusal.reason == "wrong_token"


def test_a_refusal_names_both_attempts_and_repeats_little_of_what_it_was_sent() -> None:
    refusal = Credentials(TOKEN, 2).refusal("GET", "/x", f"Bearer {TOKEN}.{'8' * 1000}")
    assert refusal is not None
    assert "attempt 2 of the run" in refusal.message
    assert f"attempt {'8' * 20}" in refusal.message
    assert "8" * 21 not in refusal.message


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601])
def test_a_token_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    with pytest.raises(RunDirError, match="is not a file of this user"):
        read_token(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_token_that_its_owner_alone_may_use_is_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(mode)
    assert read_token(path) == TOKEN


def test_a_token_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_token(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "token").stat().st_uid + 1)
    with pytest.raises(RunDirError, match="is not a file of this user"):
        read_token(tmp_path / "token")


@pytest.mark.parametrize("text", ["", TOKEN[1:], f"{TOKEN}0", TOKEN.upper(), f"{TOKEN} {TOKEN}", f"{TOKEN}\n{TOKEN}"])
def test_a_file_that_holds_anything_but_one_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(RunDirError, match="holds no token"):
        read_token(path)


def test_of_two_that_make_a_token_at_once_both_have_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_token(tmp_path)
    first = read_token(tmp_path / "token")
    monkeypatch.setattr(os.path, "lexists", lambda path: False)  # the other one looked before the file was there
    ensure_token(tmp_path)
    assert read_token(tmp_path / "token") == first


def test_only_the_health_of_a_server_is_open_and_only_where_it_is_asked_for() -> None:
    credentials = Credentials(TOKEN, 2)
    closed, opened = Gate("server", credentials), Gate("server", credentials, open_health=True)
    for method, path in (
        ("HEAD", "/health"),
        ("POST", "/health"),
        ("GET", "/healthy"),
        ("GET", "/"),
        ("health", "GET"),
    ):
        assert opened.refusal(method, path, None, "10.0.0.9") is not None
    assert opened.refusal("GET", "/health", None, "10.0.0.9") is None
    assert closed.refusal("GET", "/health", None, "10.0.0.9") is not None


async def test_outside_of_a_run_all_requests_are_answered(tmp_path: Path) -> None:
    gate = Gate("server", None, open_health=True)
    found = await answers(gate, tmp_path / "socket", ("GET", "/health", {}), ("POST", "/other", {}))
    assert found == [(200, None, None)] * 2
    assert gate.refused == 0


def test_a_gate_lets_people_look_who_bring_the_token_alone() -> None:
    gate = Gate("server", Credentials(TOKEN, 2))
    assert gate.refusal("GET", "/metrics", f"Bearer {TOKEN}", "10.0.0.9") is None
    assert gate.refusal("POST", "/metrics", f"Bearer {TOKEN}", "10.0.0.9") is not None
    assert gate.refused == 1


async def test_a_connection_waits_to_be_admitted_until_it_proves_that_it_is_of_the_run() -> None:
    gate = Gate("server", Credentials(TOKEN, 2), open_health=True)
    gate.pending.opened("connection", "10.0.0.9", lambda: None)
    for method, path, header in (("GET", "/health", None), ("GET", "/x", None), ("GET", "/x", f"Bearer {TOKEN}.1")):
        gate.refusal(method, path, header, "10.0.0.9", connection="connection")
        assert len(gate.pending) == 1
    assert gate.refusal("GET", "/x", f"Bearer {TOKEN}.2", "10.0.0.9", connection="connection") is None
    assert len(gate.pending) == 0


async def test_a_request_that_is_answered_admits_its_own_connection() -> None:
    gate = Gate("server", Credentials(TOKEN, 2))

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response()

    ours, other = (make_mocked_request("GET", "/x", {"Authorization": f"Bearer {TOKEN}.2"}) for _ in range(2))
    for request in (ours, other):
        gate.pending.opened(request.transport, "10.0.0.9", lambda: None)
    await gate.middleware()(ours, answer)
    assert len(gate.pending) == 1
    gate.pending.lost(ours.transport)
    assert len(gate.pending) == 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told_at_intervals(told: list[RefusedRequest]) -> tuple[Gate, Clock]:
    """Make a gate that reports one refusal at once, and then one for each step of a clock that tests move."""
    gate, clock = Gate("server", Credentials(TOKEN, 2), report=told.append), Clock()
    gate._budget = LogBudget(burst=1, every_s=0.01, clock=clock)
    return gate, clock


async def all_told(gate: Gate, told: list[RefusedRequest]) -> None:
    async with asyncio.timeout(5.0 * patience()):
        while sum(refused.requests for refused in told) < gate.refused:
            await asyncio.sleep(0.005)


async def test_each_burst_of_refusals_is_reported_whole() -> None:
    told: list[RefusedRequest] = []
    gate, clock = told_at_intervals(told)
    for burst in range(3):
        for number in range(4):
            gate.refusal("GET", f"/{burst}/{number}", None, "10.0.0.9")
        await all_told(gate, told)
    assert [refused.requests for refused in told] == [1, 3, 4, 4]
    # each stands for those before it
    assert [refused.path for refused in told] == ["/0/0", "/0/3", "/1/3", "/2/3"]
    assert clock.now == 100.0


async def test_a_report_that_was_late_counts_as_one() -> None:
    told: list[RefusedRequest] = []
    gate, clock = told_at_intervals(told)
    for _ in range(2):
        gate.refusal("GET", "/x", None, "10.0.0.9")
    clock.now += 0.01  # one more may be reported, and is
    await all_told(gate, told)
    gate.refusal("GET", "/x", None, "10.0.0.9")
    assert len(told) == 2


async def test_nothing_is_reported_twice() -> None:
    told: list[RefusedRequest] = []
    gate, clock = told_at_intervals(told)
    for _ in range(2):
        gate.refusal("GET", "/x", None, "10.0.0.9")
    clock.now += 0.01
    gate.refusal("GET", "/x", None, "10.0.0.9")
    assert [refused.requests for refused in told] == [1, 2]
    await asyncio.sleep(0.03)  # when the report would have come that was put off
    assert len(told) == 2


def test_what_a_stranger_sent_is_reported_short_and_in_one_line() -> None:
    told: list[RefusedRequest] = []
    gate = Gate("server", Credentials(TOKEN, 2), report=told.append)
    assert gate.refusal("GET\x1b[2J" + "A" * 1000, "/\r\n" + "b" * 1000, None, "10.0.0.9") is not None
    (refused,) = told
    assert (refused.server, refused.peer, refused.reason, refused.requests) == ("server", "10.0.0.9", "no_token", 1)
    assert refused.method.startswith("GET\\x1b[2JA")
    assert refused.path.startswith("/\\r\\nb")
    assert len(refused.method) == len(refused.path) == 200


def test_a_refusal_that_cannot_be_recorded_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    def full(refused: RefusedRequest) -> None:
        raise OSError("no space left")

    gate = Gate("server", Credentials(TOKEN, 2), report=full)
    refusal = gate.refusal("GET", "/x", None, "10.0.0.9")
    assert refusal is not None
    assert refusal.status == 401
    assert "no space left" in caplog.text
