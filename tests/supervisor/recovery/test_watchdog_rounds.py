"""What one round of the watchdog asks: replicas, the orchestrator's view of them, and what it makes of the answers."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest
from aiohttp import web
from supervisor_testing import create

from hpcrl.config.plan import HttpProbe, Role, WatchPolicy
from hpcrl.network.credentials import Credentials
from hpcrl.runs.fleet import EngineView, FleetView
from hpcrl.runs.progress import RoleProgress, progress_path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.launch.replica_launcher import Address
from hpcrl.supervisor.recovery.watchdog import ProgressSample, Pulses, Watchdog
from hpcrl.supervisor.replicas.component import Component

POLICY = WatchPolicy(floor_s=10.0, ceiling_s=100.0)
WORKS = "vllm:num_requests_running 4.0\nvllm:generation_tokens_total {}\n"


class Server:
    """A server of a replica: what it answers, and whom it was asked by."""

    def __init__(self) -> None:
        self.status, self.text, self.location = 200, WORKS.format(125), ""
        self.tokens: list[str | None] = []
        self.port = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers.get("Authorization"))
        if self.location:
            return web.Response(status=302, headers={"Location": self.location})
        return web.Response(status=self.status, text=self.text)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server, app = Server(), web.Application()
    app.router.add_get("/{path}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.port = runner.addresses[0][1]
    yield server
    await runner.cleanup()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = create(tmp_path / "runs")
    run.start_attempt()
    return run


class Clock:
    """The monotonic clock of the watchdog alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        own = SimpleNamespace(monotonic=lambda: self.now, time=time.time)
        monkeypatch.setattr("hpcrl.supervisor.recovery.watchdog.time", own)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def component(run: RunDir, role: Role, port: int = 1, *, replica: int = 0) -> Component:
    group = run.plan().group(Role.ENGINE if role is Role.ENGINE else Role.TRAINER)
    group = group.model_copy(update={"role": role})
    if role is Role.ENGINE:
        group = group.model_copy(update={"ready": HttpProbe(path="/health")})
    made = Component(group, replica, address=Address("127.0.0.1", port), log="log", on_change=lambda _: None)
    made.state, made.started_at_s = ComponentState.READY, 1.0
    return made


def view_of(run: RunDir, *, updating: bool) -> None:
    engines = [EngineView(replica=0, version=1, updating=updating)]
    FleetView(time_s=time.time(), newest=1, in_flight=4, limit=8, engines=engines).write(run, 1)


class Judged(Watchdog):
    """A watchdog whose rounds are written down; it ends after as many as are wanted."""

    def __init__(self, run: RunDir, components: Sequence[Component], *, wanted: int) -> None:
        policy = WatchPolicy(floor_s=0.1, ceiling_s=1.0)
        super().__init__(run, attempt=1, policy=policy, components=components, on_hung=lambda *_: None)
        self.rounds: list[list[tuple[str, list[ProgressSample | None]]]] = []
        self._wanted = wanted

    def _judge(self, ready: Sequence[Component], seen: Sequence[Sequence[ProgressSample | None]]) -> None:
        self.rounds.append([(each.label, list(signs)) for each, signs in zip(ready, seen, strict=True)])
        view_of(self._run, updating=True)
        if len(self.rounds) == self._wanted:
            raise KeyError("enough")


async def test_each_round_asks_who_is_ready_and_reads_what_the_orchestrator_says_by_then(
    run: RunDir, server: Server
) -> None:
    engine, starting = component(run, Role.ENGINE, server.port), component(run, Role.ENGINE, replica=1)
    starting.state = ComponentState.STARTING
    watchdog = Judged(run, [starting, engine], wanted=2)
    with pytest.raises(KeyError, match="enough"):
        await watchdog.run()
    first, second = watchdog.rounds
    assert [label for label, _ in first] == [label for label, _ in second] == ["engine 0"]
    # before the second round the orchestrator had said that weights are changed
    assert [sign is not None and sign.pauses for [(_, [sign])] in (first, second)] == [False, True]
    # the token of the run and of this attempt
    assert set(server.tokens) == {Credentials.of_run(run.path, 1).headers["Authorization"]}


@pytest.mark.parametrize(("late_s", "forgotten"), [(4.9, False), (5.1, True)])
async def test_after_a_stop_of_our_own_everything_is_measured_anew(
    run: RunDir, clock: Clock, late_s: float, forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was stopped for half of the shortest limit did not see whether others went on."""
    trainer = component(run, Role.TRAINER)
    watchdog = Watchdog(run, attempt=1, policy=POLICY, components=[], on_hung=lambda *_: None)
    watchdog._pulse(trainer, clock.now)
    slept: list[bool] = []

    async def sleep(seconds: float) -> None:
        slept.append(trainer in watchdog._pulses)
        if len(slept) == 2:
            raise KeyError("enough")
        clock.now += seconds + late_s

    monkeypatch.setattr("hpcrl.supervisor.recovery.watchdog.asyncio", SimpleNamespace(sleep=sleep, **KEPT))
    with pytest.raises(KeyError, match="enough"):
        await watchdog.run()
    assert slept == [True, not forgotten]


async def nothing(*_: object) -> list[object]:
    return []


KEPT = {"gather": nothing, "to_thread": nothing}


@pytest.mark.parametrize("then", ["stands still", "went on", "takes weights"])
async def test_a_second_look_decides_whether_a_replica_hangs(
    run: RunDir, server: Server, clock: Clock, then: str
) -> None:
    """By what the replica shows and the orchestrator says at that moment."""
    engine = component(run, Role.ENGINE, server.port)
    watchdog = Watchdog(run, attempt=1, policy=POLICY, components=[engine], on_hung=lambda *_: None)
    view_of(run, updating=False)
    assert not await watchdog.still_hangs(engine)  # it begins to be measured here
    clock.now += 21.0
    server.text = WORKS.format(126 if then == "went on" else 125)
    view_of(run, updating=then == "takes weights")
    assert await watchdog.still_hangs(engine) is (then == "stands still")
    assert server.tokens[-1] == Credentials.of_run(run.path, 1).headers["Authorization"]


async def test_a_second_look_waits_half_of_the_shortest_limit(
    run: RunDir, server: Server, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that answers within it is only slow."""
    engine = component(run, Role.ENGINE, server.port)
    watchdog = Watchdog(run, attempt=1, policy=POLICY, components=[engine], on_hung=lambda *_: None)
    waits: list[float | None] = []
    session = watchdog._session

    def noted(timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
        waits.append(timeout.total)
        return session(timeout)

    monkeypatch.setattr(watchdog, "_session", noted)
    view_of(run, updating=False)
    await watchdog.still_hangs(engine)
    assert waits == [POLICY.floor_s / 2] == [5.0]


def test_a_look_is_one_at_all_servers() -> None:
    pulses = Pulses(POLICY, 0.0, servers=2)
    with pytest.raises(ValueError, match="shorter"):
        pulses.see([ProgressSample(1, False, "work")], 0.0)


async def test_who_went_on_after_an_alarm_gets_twice_as_long(run: RunDir, server: Server, clock: Clock) -> None:
    engine = component(run, Role.ENGINE, server.port)
    watchdog = Watchdog(run, attempt=1, policy=POLICY, components=[engine], on_hung=lambda *_: None)
    view_of(run, updating=False)
    pulse = watchdog._pulse(engine, clock.now)
    pulse.see([ProgressSample(1, False, "work", 0.0)], clock.now)
    assert not pulse.problem(clock.now + 10.0)
    assert pulse.problem(clock.now + 10.5)
    assert not await watchdog.still_hangs(engine)
    pulse.see([ProgressSample(2, False, "work", 0.0)], clock.now)
    assert not pulse.problem(clock.now + 20.0)
    assert pulse.problem(clock.now + 20.5)


@pytest.mark.parametrize("answer", ["status", "redirect", "no number", "nobody"])
async def test_an_answer_that_says_nothing_is_none(run: RunDir, server: Server, answer: str) -> None:
    """What a refusal says must not look like an idle engine; nor is a token sent on to where a redirect points."""
    engine = component(run, Role.ENGINE, server.port)
    router = component(run, Role.ROUTER, server.port)
    watchdog = Watchdog(run, attempt=1, policy=POLICY, components=[engine], on_hung=lambda *_: None)
    async with aiohttp.ClientSession() as session:
        (sign,) = await watchdog._look(engine, session)
        assert sign is not None
        assert (sign.tokens, sign.work, sign.waits, sign.pauses) == (125.0, 4.0, False, False)
        assert await watchdog._look(router, session) == [ProgressSample(None, True, "")]
        if answer == "status":
            server.status = 503
        elif answer == "redirect":
            server.location = "/elsewhere"
        elif answer == "no number":
            server.text = "vllm:num_requests_running many\n"
        else:
            engine.address = router.address = Address("127.0.0.1", 1)
        asked = len(server.tokens)
        assert await watchdog._look(engine, session) == [None]
        if answer != "no number":  # a router is only asked whether it is there
            assert await watchdog._look(router, session) == [None]
        assert len(server.tokens) - asked == {"nobody": 0, "no number": 1}.get(answer, 2)


@pytest.mark.parametrize(
    ("progress", "longest_s"),
    [
        ({"phase": "publish", "longest_s": {"publish": 7.0, "optimizer": 9.0}}, 7.0),
        ({"phase": "publish", "longest_s": {"optimizer": 9.0}}, math.inf),
        ({"phase": "running", "longest_s": {"running": 90.0}}, 5.0),
        ({"phase": "wait", "waits": True}, 5.0),
    ],
)
async def test_a_role_is_judged_by_the_file_of_its_life(
    run: RunDir, progress: dict[str, object], longest_s: float
) -> None:
    """By the longest of the phase that it is in; whoever says again and again that it waits, by the pause of that."""
    trainer, other = component(run, Role.TRAINER), component(run, Role.TRAINER, replica=1)
    trainer.started_at_s = 100.0
    watchdog = Watchdog(run, attempt=1, policy=POLICY, components=[trainer], on_hung=lambda *_: None)
    path = progress_path(run, 1, "trainer", 0)
    path.parent.mkdir()
    async with aiohttp.ClientSession() as session:
        for time_s, known in ((99.9, False), (100.0, True), (120.0, True)):
            said = RoleProgress(time_s=time_s, counts={"step": 3.0}, **progress)  # type: ignore[arg-type]
            path.write_bytes(msgspec.json.encode(said))
            (sign,) = await watchdog._look(trainer, session)
            assert (sign is not None) is known
            if sign is not None:
                assert (sign.token, sign.waits, sign.longest_s) == (time_s, False, longest_s)
                assert sign.words == f"step 3, {progress['phase']}"
        assert await watchdog._look(other, session) == [None]


def test_of_several_servers_people_see_the_sum_and_who_is_silent(run: RunDir, clock: Clock) -> None:
    engine = component(run, Role.ENGINE)
    engine.address = Address("127.0.0.1", 1, servers=(("127.0.0.1", 1), ("127.0.0.1", 2)))
    watchdog = Watchdog(run, attempt=1, policy=POLICY, components=[engine], on_hung=lambda *_: None)
    one = ProgressSample((1.0,), False, "one", tokens=5.0, work=2.0)
    two = ProgressSample((1.0,), False, "two", tokens=7.0, work=1.0)
    for signs, words in (
        ([one, two], "12 tokens, 3 requests"),
        ([one, None], "5 tokens, 2 requests, 1 of 2 servers do not answer"),
        # what was seen last stays
        ([None, None], "5 tokens, 2 requests, 1 of 2 servers do not answer"),
    ):
        watchdog._judge([engine], [signs])
        assert engine.progress == words


def test_progress_is_noted_when_there_was_some(run: RunDir, clock: Clock) -> None:
    trainer = component(run, Role.TRAINER)
    watchdog = Watchdog(run, attempt=1, policy=POLICY, components=[trainer], on_hung=lambda *_: None)
    watchdog._judge([trainer], [[None]])
    assert trainer.progress_at_s is None
    before_s = time.time()
    watchdog._judge([trainer], [[ProgressSample(1, False, "step 1")]])
    first_s = trainer.progress_at_s
    assert first_s is not None
    assert before_s <= first_s <= time.time()
    watchdog._judge([trainer], [[ProgressSample(1, False, "step 1")]])
    assert trainer.progress_at_s == first_s
    watchdog._judge([trainer], [[ProgressSample(2, False, "step 2")]])
    assert trainer.progress_at_s > first_s


def test_what_holds_for_a_replica_holds_for_each_of_its_servers() -> None:
    pulses = Pulses(POLICY, 0.0, servers=2)
    old, new = ProgressSample(1, False, "work", 0.0), ProgressSample(2, False, "work", 0.0)
    pulses.see([old, old], 0.0)
    pulses.see([new, old], 8.0)
    assert pulses.since == 8.0  # one of them went on
    pulses.see([new, old], 10.5)
    assert pulses.problem(10.5) == "rank 1 of 2: no progress for 10 s (work); the limit was 10 s"
    pulses.extra_s = 5.0
    assert pulses.extra_s == 5.0
    assert pulses.problem(15.0) == ""
    pulses.extra_s = 0.0
    pulses.extend_deadline()
    assert pulses.problem(10.5) == ""


def test_who_answers_for_a_first_time_late_is_judged_from_then(run: RunDir) -> None:
    """A second of a pause in which nothing was to be expected is none of progress that failed to come."""
    pulses = Pulses(POLICY, 0.0, servers=1)
    works, pauses = ProgressSample(1, False, "work", 0.0), ProgressSample(1, False, "work", 0.0, pauses=True)
    pulses.see([works], 0.0)
    pulses.see([pauses], 4.0)
    pulses.see([works], 6.0)
    pulses.see([works], 14.0)
    assert pulses.problem(14.0) == ""  # four of the fourteen seconds do not count
    assert pulses.problem(14.5).startswith("no progress for 10 s")
