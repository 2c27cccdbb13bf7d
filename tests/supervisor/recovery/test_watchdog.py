"""When a replica counts as hung, and what an engine's metrics say."""

from __future__ import annotations

import math
import time
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from supervisor_testing import create

from hpcrl.config.plan import HttpProbe, Role, WatchPolicy
from hpcrl.reporting import reports
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.fleet import EngineView, FleetView
from hpcrl.runs.progress import RoleProgress, progress_path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.launch.replica_launcher import Address
from hpcrl.supervisor.recovery import watchdog
from hpcrl.supervisor.recovery.watchdog import ProgressSample, ProgressTracker, Watchdog, read_engine_metrics
from hpcrl.supervisor.replicas.component import Component

POLICY = WatchPolicy(floor_s=10.0, ceiling_s=100.0)


def busy(token: object, longest_s: float | None = None) -> ProgressSample:
    return ProgressSample(token, False, "work", longest_s)


def test_the_limit_follows_the_longest_pause() -> None:
    pulse = ProgressTracker(POLICY, 0.0)
    for now in range(0, 41, 4):
        pulse.see(busy(now), float(now))
    assert pulse.limit_s == 20.0
    assert pulse.problem(40.0) == ""
    for now in range(42, 62, 2):
        pulse.see(busy(40), float(now))
    assert "no progress for 21 s" in pulse.problem(61.0)


def test_nothing_that_has_no_work_or_was_never_measured_is_hung() -> None:
    pulse = ProgressTracker(POLICY, 0.0)
    assert pulse.problem(1e6) == ""  # it never showed anything
    pulse.see(busy(1), 0.0)
    pulse.see(busy(1), 99.0)
    assert pulse.problem(99.0) == ""  # a first step may take up to the ceiling
    pulse.see(ProgressSample(1, True, "", None), 500.0)
    assert pulse.problem(500.0) == ""
    pulse.see(busy(1), 501.0)
    assert pulse.problem(505.0) == ""  # its work began just now


def test_work_that_was_done_before_is_judged_by_the_floor_where_nothing_was_measured() -> None:
    """An engine that sampled between two looks, and then hangs."""
    pulse = ProgressTracker(POLICY, 0.0)
    pulse.see(busy(1)._replace(begun=True), 0.0)
    pulse.see(busy(1)._replace(begun=True), 11.0)
    assert "the limit was 10 s" in pulse.problem(11.0)


def test_no_answer_is_judged_by_the_floor_alone() -> None:
    pulse = ProgressTracker(POLICY, 0.0)
    pulse.extra_s = 1000.0
    pulse.see(busy(1), 0.0)
    pulse.see(None, 9.0)
    assert pulse.problem(10.0) == ""
    assert pulse.problem(11.0) == "it has not answered for 11 s"


def test_after_a_false_alarm_it_waits_twice_as_long() -> None:
    pulse = ProgressTracker(POLICY, 0.0)
    pulse.see(busy(1, 0.0), 0.0)
    assert pulse.problem(11.0)
    pulse.see(busy(2, 0.0), 11.5)
    pulse.extend_deadline()
    assert pulse.problem(30.0) == ""
    assert pulse.problem(32.0)


async def test_time_in_which_nothing_can_be_reported_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path / "runs")
    trainer = Component(
        run.plan().group(Role.TRAINER), 0, address=Address("127.0.0.1", 1), log="log", on_change=lambda _: None
    )
    run.start_attempt()
    watchdog = Watchdog(run, attempt=1, policy=POLICY, components=[trainer], on_hung=lambda *_: None)
    path = progress_path(run, 1, "trainer", 0)
    path.parent.mkdir()
    path.write_bytes(msgspec.json.encode(RoleProgress(time_s=time.time(), phase="publish")))
    async with aiohttp.ClientSession() as session:
        (sign,) = await watchdog._look(trainer, session)
        assert sign is not None
        assert not sign.pauses
    monkeypatch.setattr(reports, "problems", lambda: ["status.json cannot be written: [Errno 28]"])
    async with aiohttp.ClientSession() as session:
        (sign,) = await watchdog._look(trainer, session)
    assert sign is not None
    assert sign.pauses
    pulse = ProgressTracker(POLICY, 0.0)
    pulse.see(sign._replace(longest_s=0.1), 0.0)
    pulse.see(sign._replace(longest_s=0.1), 60.0)
    assert pulse.problem(61.0) == ""


def test_a_role_that_measures_itself_is_judged_by_its_own_phases() -> None:
    pulse = ProgressTracker(POLICY, 0.0)
    pulse.see(busy(1, math.inf), 0.0)  # its first checkpoint
    assert pulse.limit_s == 100.0
    pulse.see(busy(2, 0.0), 50.0)  # a beat
    assert pulse.limit_s == 10.0
    pulse.see(busy(3, 6.0), 51.0)
    assert pulse.limit_s == 30.0


def test_a_wait_is_not_a_measure_of_work() -> None:
    """Neither one that begins with work nor one that ends with it: how long it had something to do is not known."""
    pulse = ProgressTracker(POLICY, 0.0)
    pulse.see(busy(1), 0.0)
    pulse.see(busy(2), 2.0)
    assert pulse.limit_s == 10.0
    pulse.see(ProgressSample(3, True, ""), 20.0)
    assert pulse.limit_s == 10.0
    pulse.see(busy(4), 60.0)
    assert pulse.limit_s == 10.0
    pulse.see(busy(5), 64.0)
    assert pulse.limit_s == 20.0
    # the longest one counts
    pulse.see(busy(6), 65.0)
    assert pulse.limit_s == 20.0


def test_the_first_look_is_not_a_measure() -> None:
    pulse = ProgressTracker(POLICY, 0.0)
    pulse.see(busy(1), 4.0)
    assert pulse.limit_s == 100.0


def test_a_pause_within_a_phase_that_a_role_measures_is_not_a_measure_of_others() -> None:
    pulse = ProgressTracker(POLICY, 0.0)
    pulse.see(busy(1, 1.0), 0.0)
    pulse.see(busy(2, 1.0), 50.0)
    pulse.see(busy(3), 53.0)
    assert pulse.limit_s == 15.0


@pytest.mark.parametrize(("pause_s", "limit_s"), [(1.0, 10.0), (2.0, 10.0), (2.2, 11.0), (20.0, 100.0), (21.0, 100.0)])
def test_the_limit_stays_between_floor_and_ceiling(pause_s: float, limit_s: float) -> None:
    pulse = ProgressTracker(POLICY, 0.0)
    pulse.see(busy(1), 0.0)
    pulse.see(busy(2), pause_s)
    assert pulse.limit_s == pytest.approx(limit_s)
    pulse.extra_s = 7.0
    assert pulse.limit_s == pytest.approx(limit_s + 7.0)


def test_limits_are_exceeded_only_behind_them() -> None:
    pulse = ProgressTracker(POLICY, 0.0)
    pulse.see(busy(1, 0.0), 0.0)
    pulse.see(busy(1, 0.0), 10.0)
    assert pulse.problem(10.0) == ""
    assert pulse.problem(10.01) == "no progress for 10 s (work); the limit was 10 s"
    pulse.see(busy(2, 2.5), 20.0)
    pulse.see(None, 29.0)
    assert pulse.problem(30.0) == ""
    assert pulse.problem(30.01) == "it has not answered for 10 s"


def test_a_replica_that_is_excused_again_and_again_waits_no_longer_than_the_ceiling() -> None:
    pulse = ProgressTracker(POLICY, 0.0)
    pulse.see(busy(1, 0.0), 0.0)
    limits = []
    for _ in range(5):
        limits.append(pulse.limit_s)
        pulse.extend_deadline()
    assert limits == [10.0, 20.0, 40.0, 80.0, 100.0]


def test_progress_is_what_differs_from_the_last_look() -> None:
    pulse = ProgressTracker(POLICY, 0.0)
    looks = [
        busy(1),
        busy(1),
        None,
        busy(1),
        busy(2),
        ProgressSample(2, True, ""),
        ProgressSample(2, True, ""),
        ProgressSample(3, True, ""),
        busy(3),
    ]
    seen = [pulse.see(look, float(now)) for now, look in enumerate(looks)]
    assert seen == [True, False, False, False, True, False, False, True, False]


def test_metrics_of_an_engine() -> None:
    text = """# HELP vllm:num_requests_running Sequences in the batch.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.25e+02
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 9.0
vllm:iteration_tokens_total_sum{engine="0"} 700.0
vllm:request_success_total{finished_reason="stop"} 5.0
"""
    sign = read_engine_metrics(text)
    words = "125 tokens, 4 requests"
    assert sign == ProgressSample((0.0, 125.0, 700.0), False, words, begun=True, tokens=125.0, work=4.0)
    assert read_engine_metrics("").pauses


def test_an_engine_whose_requests_are_aborted_again_and_again_is_hung_all_the_same() -> None:
    """Each of them for a shorter time than the limit."""
    pulse = ProgressTracker(POLICY, 0.0)
    at_work = busy(1)._replace(begun=True)
    pulse.see(at_work, 0.0)
    for now in range(4, 20, 4):
        pulse.see(at_work, float(now))
        assert pulse.problem(float(now)) == ""
        pulse.see(at_work._replace(pauses=True), now + 2.0)
    pulse.see(at_work, 20.0)
    assert "no progress for 12 s" in pulse.problem(20.0)
    idle = ProgressTracker(POLICY, 0.0)
    idle.see(at_work._replace(pauses=True), 0.0)
    for now in range(2, 1000, 2):
        idle.see(at_work._replace(pauses=True), float(now))
    idle.see(at_work, 1000.0)
    assert idle.problem(1000.0) == ""


async def looked_at(tmp_path: Path, fleet: FleetView | None) -> ProgressSample:
    """What the watchdog sees of an engine with four requests, of which the orchestrator says ``fleet``."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running 4.0\nvllm:generation_tokens_total 125.0\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        run = create(tmp_path / "runs")
        group = run.plan().group(Role.ENGINE).model_copy(update={"ready": HttpProbe(path="/health")})
        address = Address("127.0.0.1", port)
        engine = Component(group, 0, address=address, log="log", on_change=lambda _: None)
        attempt = run.start_attempt()
        watchdog = Watchdog(run, attempt=attempt, policy=POLICY, components=[engine], on_hung=lambda *_: None)
        if fleet is not None:
            fleet.write(run, attempt)
        await watchdog._read_fleet()
        async with aiohttp.ClientSession() as session:
            (sign,) = await watchdog._look(engine, session)
    finally:
        await runner.cleanup()
    assert sign is not None
    return sign


@pytest.mark.parametrize(
    ("views", "ages"),
    [
        pytest.param([EngineView(replica=0, version=1, updating=True)], False, id="it changes its weights"),
        pytest.param([EngineView(replica=0, version=1)], True, id="it samples"),
        pytest.param([EngineView(replica=1, version=1, updating=True)], True, id="another one changes its weights"),
        pytest.param([EngineView(role="decode", replica=0, version=1, updating=True)], True, id="one of another role"),
        pytest.param(None, True, id="nobody says"),
    ],
)
async def test_an_engine_whose_weights_are_changed_is_not_hung(
    tmp_path: Path, views: list[EngineView] | None, ages: bool
) -> None:
    """With requests that wait for the end of the update, and without a token for longer than the limit."""
    fleet = None if views is None else FleetView(time_s=time.time(), newest=1, in_flight=4, limit=8, engines=views)
    sign = await looked_at(tmp_path, fleet)
    assert sign.work == 4.0
    pulse = ProgressTracker(POLICY, 0.0)
    for now in range(0, 130, 10):
        pulse.see(sign, float(now))
    assert bool(pulse.problem(120.0)) is ages


def component_of(run: RunDir, role: Role, *, ready: bool = True) -> Component:
    group = run.plan().group(Role.TRAINER).model_copy(update={"role": role})
    made = Component(group, 0, address=Address("127.0.0.1", 1), log="log", on_change=lambda _: None)
    if ready:
        made.state, made.started_at_s = ComponentState.READY, 1.0
    return made


def test_who_hangs_is_reported_once_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was judged already, has ended meanwhile or goes on is not."""
    run = create(tmp_path / "runs")
    trainer, orchestrator = component_of(run, Role.TRAINER), component_of(run, Role.ORCHESTRATOR)
    told: list[tuple[Component, str]] = []
    watched = [trainer, orchestrator]
    watchdog = Watchdog(run, attempt=1, policy=POLICY, components=watched, on_hung=lambda *what: told.append(what))
    monkeypatch.setattr("hpcrl.supervisor.recovery.watchdog.time.monotonic", lambda: clock[0])
    stuck, beats = busy("a", 0.0), busy("b", 0.0)
    clock = [1000.0]
    watchdog._judge(watched, [[stuck], [beats]])
    clock[0] = 1009.0
    watchdog._judge(watched, [[stuck], [beats]])
    assert told == []
    assert (trainer.progress, orchestrator.progress) == ("work", "work")
    clock[0] = 1011.0
    watchdog._judge(watched, [[stuck], [busy("c", 0.0)]])
    assert told == [(trainer, "no progress for 11 s (work); the limit was 10 s")]
    trainer.verdict = Cause(kind=CauseKind.HUNG, time_s=1.0, message="hung")
    watchdog._judge(watched, [[stuck], [busy("d", 0.0)]])
    assert len(told) == 1
    trainer.verdict, trainer.state = None, ComponentState.STOPPING
    watchdog._judge(watched, [[stuck], [busy("e", 0.0)]])
    assert len(told) == 1
    # another life is another measure
    trainer.state, trainer.started_at_s = ComponentState.READY, 2.0
    watchdog._judge(watched, [[stuck], [busy("f", 0.0)]])
    assert len(told) == 1


def test_a_trainer_is_not_blamed_while_the_orchestrator_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for it in the middle of its own work; whichever of the two is looked at first."""
    run = create(tmp_path / "runs")
    trainer, orchestrator = component_of(run, Role.TRAINER), component_of(run, Role.ORCHESTRATOR)
    told: list[Component] = []
    watchdog = Watchdog(
        run, attempt=1, policy=POLICY, components=[], on_hung=lambda component, _: told.append(component)
    )
    monkeypatch.setattr("hpcrl.supervisor.recovery.watchdog.time.monotonic", lambda: clock[0])
    clock = [1000.0]
    watchdog._judge([trainer, orchestrator], [[busy("a", 0.0)], [busy("b", math.inf)]])
    clock[0] = 1011.0
    watchdog._judge([trainer, orchestrator], [[busy("a", 0.0)], [busy("b", math.inf)]])
    assert told == []
    watchdog._judge([trainer, orchestrator], [[busy("a", 0.0)], [busy("c", math.inf)]])
    assert told == [trainer]


@pytest.mark.parametrize(("known", "limit_s"), [(True, 10.0), (False, 210.0)])
def test_an_engine_of_which_nothing_is_known_may_be_at_an_update(tmp_path: Path, known: bool, limit_s: float) -> None:
    run = create(tmp_path / "runs")
    policy = WatchPolicy(floor_s=10.0, ceiling_s=100.0, update_timeout_s=200.0)
    engine, trainer = component_of(run, Role.ENGINE), component_of(run, Role.TRAINER)
    watchdog = Watchdog(run, attempt=1, policy=policy, components=[], on_hung=lambda *_: None)
    if known:
        views = [EngineView(replica=0, version=1)]
        watchdog._fleet = FleetView(time_s=1.0, newest=1, in_flight=0, limit=1, engines=views)
    now = 1000.0
    pulse = watchdog._pulse(engine, now)
    pulse.see([busy("a", 0.0)], now)
    pulse.see([busy("a", 0.0)], now + limit_s - 1.0)
    assert pulse.problem(now + limit_s - 0.5) == ""
    pulse.see([busy("a", 0.0)], now + limit_s + 1.0)
    assert "no progress" in pulse.problem(now + limit_s + 1.0)
    # a trainer has no updates
    assert watchdog._pulse(trainer, now).extra_s == 0.0


@pytest.mark.parametrize(("floor_s", "pause_s"), [(1.0, 0.25), (3600.0, 2.0)])
async def test_it_looks_several_times_within_the_shortest_limit(
    floor_s: float, pause_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that hangs is known a quarter of the floor later; of a long floor it looks every two seconds."""
    run = create(tmp_path / "runs")
    run.start_attempt()
    policy = WatchPolicy(floor_s=floor_s, ceiling_s=2 * floor_s)
    watchdog = Watchdog(run, attempt=1, policy=policy, components=[], on_hung=lambda *_: None)
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyError("enough")

    monkeypatch.setattr("hpcrl.supervisor.recovery.watchdog.asyncio.sleep", sleep)
    with pytest.raises(KeyError, match="enough"):
        await watchdog.run()
    assert pauses == [pause_s] * 3


async def test_metrics_without_end_are_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        monkeypatch.setattr(watchdog, "_MAX_METRICS_BYTES", len(text))
        sign = await watchdog._look_at_server(url, session, updating=False)
        assert (sign is not None and sign.work) == 1
        monkeypatch.setattr(watchdog, "_MAX_METRICS_BYTES", len(text) - 1)
        assert await watchdog._look_at_server(url, session, updating=False) is None
