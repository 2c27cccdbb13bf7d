"""What people see: the live view, the summary, the diagnosis, the picture."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from runs_testing import START_S, make_run, step_record, write_event, write_log, write_status, write_steps

from hpcrl.errors import MissingExtraError, UsageError
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.clocks import NodeClock
from hpcrl.runs.events import EventWriter
from hpcrl.runs.fleet import EngineView, Fleet, FleetView, Replica, judge_replica
from hpcrl.runs.metrics import MetricsWriter, StepRecord, read_metrics, read_newest
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.run_progress import Progress, read_progress
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ComponentStatus, ProcessId, RunState
from hpcrl.runs.views import follow as follow_module
from hpcrl.runs.views import report
from hpcrl.runs.views.diagnosis import diagnose, print_diagnosis
from hpcrl.runs.views.follow import _step_line, follow
from hpcrl.runs.views.listing import RunRow, listing_table
from hpcrl.runs.views.liveview import render, summary
from hpcrl.runs.views.report import write_report
from hpcrl.runs.views.usage import Usage
from hpcrl.runs.views.words import duration


def shown(*what: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(*what)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    write_status(run, RunState.COMPLETED, component_state=ComponentState.EXITED)
    write_steps(run, 40)
    return run


GOLDEN = Path(__file__).parents[1] / "golden"


def compare_screen(name: str, text: str) -> None:
    """Compare with a golden screen; delete the file to write it anew, then look at the difference."""
    path = GOLDEN / f"{name}.txt"
    text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"{path} was written")
    assert text == path.read_text()


def row(name: str, state: RunState, **changes: Any) -> RunRow:
    usual: dict[str, Any] = {
        "recipe": "words",
        "cluster": "site",
        "job": "1234567",
        "attempts": 1,
        "created_at_s": 1_790_000_000.0,
        "wall_s": 7265.0,
        "steps": 10773,
        "reward_mean": 0.734,
        "cause": "",
    }
    return RunRow(name=name, state=state, **{**usual, **changes})


def test_the_list_at_80_columns_has_whole_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.runs.views.listing.time.time", lambda: 1_790_000_000.0 + 5 * 3600)
    why = "trainer 0 failed: ValueError: the loss is not finite, and this goes on for longer than a line has room"
    rows = [
        row("quickstart-20261121-124800", RunState.COMPLETED),
        row("quickstart-20261121-124801", RunState.FAILED, cause=why, job=None),
        row("mine", RunState.SUBMITTED, wall_s=None, steps=0, reward_mean=None),
    ]
    compare_screen("ls-80", shown(listing_table(rows, 80), width=80))
    compare_screen("ls-140", shown(listing_table(rows, 140), width=140))
    long = [row("a" * 63, RunState.RUNNING), *rows]
    text = shown(listing_table(long, 80), width=80)
    assert f"{'a' * 63}  RUNNING" in text
    assert why in shown(listing_table(rows, 200, cut=False), width=260)
    assert max(map(len, text.splitlines())) <= 100


def test_the_newest_step_is_read_from_the_end_of_a_file(run: RunDir) -> None:
    assert read_newest(run) == read_metrics(run)[-1]
    with (run.metrics_dir / "0001.jsonl").open("ab") as stream:
        stream.write(b'{"step": 41, "torn')
    assert read_newest(run) == read_metrics(run)[-1]
    # the next attempt has no step yet
    write_status(run, RunState.RUNNING)
    assert read_newest(run) == read_metrics(run)[-1]


def running(tmp_path: Path, engines: int) -> tuple[RunView, Progress, list[StepRecord], Fleet]:
    """A run with many engines, one of which is stuck."""
    run = make_run(tmp_path, steps=80)
    write_status(run, RunState.RUNNING)
    write_steps(run, 40, total=80)
    newest, now_s = read_metrics(run), START_S + 200
    common = {"state": ComponentState.READY, "pid": 4242, "port": 20000, "started_at_s": START_S, "log": ""}
    components = [
        *(ComponentStatus(role="engine", replica=i, **common) for i in range(engines)),
        ComponentStatus(role="orchestrator", replica=0, **common),
        ComponentStatus(role="trainer", replica=0, **common),
    ]
    view = msgspec.structs.replace(
        observe(run), state=RunState.RUNNING, components=components, ended_at_s=now_s, heartbeat_s=now_s, cause=None
    )
    seen = [
        EngineView(
            replica=i,
            version=40,
            in_flight=12,
            running=11,
            waiting=1,
            kv_usage=0.42,
            prefix_hit_rate=0.61,
            tokens_per_s=1234.0,
            stuck=i == 3,
            quiet_s=95.0 if i == 3 else 0.0,
        )
        for i in range(engines)
    ]
    replicas = []
    for engine, component in zip(seen, components, strict=False):
        state, why = judge_replica(component, engine, 40)
        replicas.append(Replica(role="engine", replica=engine.replica, state=state, why=why, view=engine))
    fleet = Fleet(FleetView(time_s=now_s, newest=40, in_flight=96, limit=128, engines=seen), replicas)
    return view, read_progress(run, newest), newest, fleet


@pytest.mark.parametrize("engines", [2, 8, 40])
def test_the_live_screen_of_24_lines_keeps_the_engines(
    tmp_path: Path, engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrl.runs.views.liveview.time.time", lambda: START_S + 200)
    view, progress, metrics, fleet = running(tmp_path, max(engines, 4) if engines > 2 else 2)
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, color_system=None)
    screen = follow_module._LiveScreen(console)
    screen.show(view, progress, metrics, Usage(wall_h=1.0, gpu_hours=0.0, gpu_hours_by_role={}), fleet)
    lines = screen.lines(console)
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    compare_screen(f"live-80x24-{engines}", "\n".join(lines))
    if engines > 2:
        assert any(line.startswith("engine 3: no token for 95 s") for line in lines)


def test_the_status_at_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.runs.views.liveview.time.time", lambda: START_S + 200)
    view, progress, metrics, fleet = running(tmp_path, 4)
    text = shown(render(view, progress, metrics, None, fleet, width=80), width=80)
    compare_screen("status-80", text)
    assert text.count("version") == 2  # what engines serve: the newest, and the column


@pytest.fixture
def in_utc() -> Iterator[None]:
    """Times are shown in the zone of who reads; of the process, not of the variable alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_utc")
def test_why_is_short_unless_events_are_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    trace = "".join(f'  File "loss.py", line {i}, in step_{i}\n' for i in range(20))
    cause = Cause(
        kind=CauseKind.ERROR,
        time_s=START_S + 99,
        message="trainer 0 failed: ValueError: the loss is not finite",
        role="trainer",
        replica=0,
        rank=0,
        error="ValueError",
        traceback=f"Traceback (most recent call last):\n{trace}ValueError: the loss is not finite\n",
    )
    write_status(run, RunState.FAILED, cause=cause)
    for i in range(12):
        data = {"role": "engine", "replica": i % 4, "cause": "engine was killed by SIGKILL", "restart": 1}
        write_event(run, "component.restarting", time_s=START_S + i, writer="supervisor", **data)
    for name, events in (("why-80", False), ("why-events-80", True)):
        console = Console(file=io.StringIO(), width=80)
        print_diagnosis(diagnose(run), console, events=events)
        compare_screen(name, console.file.getvalue())  # type: ignore[attr-defined]


def test_durations() -> None:
    assert [duration(s) for s in (None, 5, 75, 7265)] == ["-", "0:05", "1:15", "2:01:05"]


@pytest.mark.parametrize("width", [60, 120])
def test_the_live_view_shows_what_one_waits_for(run: RunDir, width: int) -> None:
    text = shown(render(observe(run), read_progress(run), read_metrics(run)), width=width)
    for part in (
        "run-1",
        "COMPLETED",
        "step 40/40",
        "held-out",
        "staleness",
        "tokens/s",
        "waiting",
        "engine 0",
        "20001",
    ):
        assert part in text.replace("\n", " ")
    assert max(map(len, text.splitlines())) <= width


def test_spare_and_lost_nodes_are_named(run: RunDir) -> None:
    view = observe(run)
    assert "spare nodes" not in shown(render(view, read_progress(run), read_metrics(run)))
    view = msgspec.structs.replace(view, spare_nodes=["n7", "n8"])
    assert "spare nodes n7, n8\n" in shown(render(view, read_progress(run), read_metrics(run)))
    view = msgspec.structs.replace(view, spare_nodes=[], lost_nodes={"n2": "the node went down"})
    text = shown(render(view, read_progress(run), read_metrics(run)))
    assert "spare nodes none left   lost n2: the node went down" in text


def test_nodes_whose_clocks_are_off_are_named(run: RunDir) -> None:
    clocks = {
        "n1": NodeClock(0.001, 0.0001),
        "n2": NodeClock(3.1, 0.0002),
        "n3": NodeClock(-7.0, 0.01),
        "n4": NodeClock(2.0, 1.5),
    }
    view = msgspec.structs.replace(observe(run), clocks=clocks)
    text = shown(render(view, read_progress(run), read_metrics(run)))
    assert "clocks are off: n2 3.1 s ± 0.0002 s ahead, n3 7 s ± 0.01 s behind; " in text
    assert "clocks are off" not in shown(render(observe(run), read_progress(run), read_metrics(run)))


def test_the_share_of_other_experts_is_shown_where_engines_say_theirs(run: RunDir) -> None:
    records = read_metrics(run)
    assert "routes" not in shown(render(observe(run), read_progress(run), records))
    said = [msgspec.structs.replace(record, routing_mismatch=3.4e-5) for record in records[-2:]]
    text = shown(render(observe(run), read_progress(run), [*records[:-2], *said]))
    assert "routes" in text
    assert text.count("3.4e-05") == 2


def test_a_run_without_a_step_has_a_view_too(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "step 0/40" in shown(render(observe(run), read_progress(run), []))


def test_the_summary(run: RunDir) -> None:
    text = shown(summary(observe(run), read_progress(run), read_metrics(run), picture="/x/report.png"))
    assert "0.137 -> 0.733 of 64 (after step 0 -> 40)" in text
    assert "largest 3, bound 4" in text
    assert "of the trainer's time" in text
    assert "/x/report.png" in text


def test_skipped_steps_are_counted_in_every_view_and_why_names_what_was_to_blame(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.RUNNING)
    what = (
        "the gradient norm of step 7 is nan; the weights were left as they are\n"
        "    gradients that are not finite: layers.0.mlp.experts.down_proj\n"
        "    rollouts: group 7 member 3 (the engine's log-probability of 1 tokens is not finite)"
    )
    writer = MetricsWriter(run, 1)
    for step in range(1, 9):
        writer.write(msgspec.structs.replace(step_record(step), skipped=step in (4, 7)))
    writer.close()
    write_event(run, "trainer.step_skipped", time_s=START_S + 40, writer="trainer-0", step=7, in_a_row=1, what=what)
    view, progress, metrics = observe(run), read_progress(run), read_metrics(run)
    assert "2 steps skipped for gradients that are not finite (the last one step 7): hpcrl why run-1" in shown(
        render(view, progress, metrics)
    )
    assert "skipped steps 2, the last one step 7" in " ".join(shown(summary(view, progress, metrics)).split())
    lines = [_step_line(record, progress) for record in metrics]
    assert [line.split()[1] for line in lines if "SKIPPED" in line] == ["4/40", "7/40"]
    console = Console(file=io.StringIO(), width=80)
    print_diagnosis(diagnose(run), console)
    assert f"steps that were skipped\n  {what}\n" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_without_skipped_steps_says_nothing_of_them(run: RunDir) -> None:
    view, progress, metrics = observe(run), read_progress(run), read_metrics(run)
    assert "skipped" not in shown(render(view, progress, metrics), summary(view, progress, metrics))


def test_without_a_terminal_a_step_is_one_line_and_printed_once(run: RunDir) -> None:
    console = Console(file=io.StringIO(), width=80)
    assert follow(run, console).state is RunState.COMPLETED
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "run-1 COMPLETED"
    assert len([line for line in lines if line.startswith("step ")]) == 40
    assert len([line for line in lines if line.startswith("held-out")]) == 5


def test_lines_of_a_resumed_run_begin_with_its_new_attempt(run: RunDir) -> None:
    """What was followed before is not told again; what is done again from an earlier step is."""
    write_status(run, RunState.COMPLETED)
    again = [msgspec.structs.replace(record, attempt=2) for record in read_metrics(run)[34:37]]
    with contextlib.closing(MetricsWriter(run, 2)) as metrics:
        for record in again:
            metrics.write(record)
    with contextlib.closing(EventWriter(run, attempt=2, writer="orchestrator-0")) as events:
        events.emit("evaluation", version=36, reward=0.5)
    console = Console(file=io.StringIO(), width=80)
    follow(run, console, after_attempt=1)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[:2] for line in lines if line.startswith("step")] == [
        ["step", "35/40"],
        ["step", "36/40"],
        ["step", "37/40"],
    ]
    assert [line for line in lines if line.startswith("held-out")] == ["held-out reward 0.500 after step 36"]


def test_ctrl_c_is_answered(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_status(run, RunState.RUNNING, supervisor=me)
    answers = iter([KeyboardInterrupt(), KeyboardInterrupt()])

    def sleep(_: float) -> None:
        raise next(answers)

    def stop(count: int) -> str:
        if count == 2:
            write_status(run, RunState.CANCELLED)
        return f"told {count}"

    monkeypatch.setattr("hpcrl.runs.views.follow.time.sleep", sleep)
    console = Console(file=io.StringIO(), width=80)
    assert follow(run, console, on_interrupt=stop).state is RunState.CANCELLED
    assert "told 1\ntold 2" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_diagnosis_of_a_killed_engine(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    cause = Cause(
        kind=CauseKind.EXIT,
        time_s=START_S + 50,
        message="engine 0 was killed by SIGKILL",
        role="engine",
        replica=0,
        signal=9,
    )
    write_status(run, RunState.FAILED, cause=cause, component_state=ComponentState.FAILED)
    write_log(run, "".join(f"line {i}\n" for i in range(40)))
    diagnosis = diagnose(run)
    assert "out-of-memory" in diagnosis.hint
    assert diagnosis.last_words[-1] == "line 39"
    console = Console(file=io.StringIO(), width=60)
    print_diagnosis(diagnosis, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "hpcrl resume run-1" in text
    assert "from the beginning" in text


def test_the_diagnosis_says_where_clocks_cannot_tell(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    doubt = "the clocks of n1 and n2 differ by 3.1 s ± 0.3 s: whether trainer 0 or engine 0 failed first is unknown"
    cause = Cause(kind=CauseKind.EXIT, time_s=START_S, message="trainer 0 exited with code 1", node="n1", doubt=doubt)
    write_status(run, RunState.FAILED, cause=cause, component_state=ComponentState.FAILED)
    console = Console(file=io.StringIO(), width=200)
    print_diagnosis(diagnose(run), console)
    assert doubt in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_diagnosis_of_a_run_that_continues(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_status(run, RunState.RUNNING, supervisor=me)
    diagnosis = diagnose(run)
    assert diagnosis.sentence == "the run has not ended: it is RUNNING"
    assert diagnosis.ways_on[0] == "hpcrl status run-1 --watch"


def test_a_lost_segment_of_the_pool_is_that_of_its_engine(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.RUNNING)
    for engine, host in ((0, "10.0.0.2"), (1, "10.0.0.3"), (2, "10.0.0.3")):
        with contextlib.closing(EventWriter(run, attempt=1, writer=f"engine-{engine}")) as events:
            events.emit("store.canary", host=host, put_s=0.1, get_s=0.1)
    with contextlib.closing(EventWriter(run, attempt=1, writer="store-0")) as events:
        events.emit("store.segment_lost", segment="10.0.0.2:15007", segments=2)
        events.emit("store.segment_lost", segment="10.0.0.3:15008", segments=1)
    one, shared = (consequence.what for consequence in diagnose(run).consequences)
    assert "the segment 10.0.0.2:15007 of engine 0 left the KV pool with its blocks (segments left: 2)" in one
    assert "the segment 10.0.0.3:15008 left the KV pool" in shared


def test_an_engine_that_has_not_shown_its_adapter_is_named(run: RunDir) -> None:
    with contextlib.closing(EventWriter(run, attempt=1, writer="orchestrator")) as events:
        events.emit("engine.adapter_unproven", engine="engine-3", version=8, tries=8)
    said = [consequence.what for consequence in diagnose(run).consequences]
    assert any("engine-3 has not shown in 8 versions that it computes with the adapter" in what for what in said)


def test_the_picture(run: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert write_report(run).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert b"<svg" in write_report(run, tmp_path / "picture.svg").read_bytes()
    with pytest.raises(UsageError, match="xyz"):
        write_report(run, tmp_path / "picture.xyz")


def test_the_picture_of_a_long_run_has_no_more_parts_than_that_of_a_short_one() -> None:
    """A shape for each step took half a minute for 10,000 steps."""
    figure = pytest.importorskip("matplotlib.figure")
    records = [step_record(step) for step in (1, 2, 3, *range(6, 400))]
    parts = []
    for some in (records[:9], records):
        axis = figure.Figure().subplots()
        report._draw_phases(axis, some)
        parts.append(len(axis.get_children()))
    assert parts[0] == parts[1]
    # a gap in the records is a gap in the picture, and a step is as wide as it is
    waiting = axis.patches[0].get_data()
    assert list(waiting.edges[:6]) == [0.5, 1.5, 2.5, 3.5, 5.5, 6.5]
    assert list(waiting.values[:5]) == [
        *(r.phases_s["wait_batch"] for r in records[:3]),
        0,
        records[3].phases_s["wait_batch"],
    ]


def test_the_moving_mean_is_that_of_its_window() -> None:
    values = [0.0, 1.0, 5.0, 2.0] * 20
    expected = [sum(w) / len(w) for w in (values[max(0, i - 4) : i + 5] for i in range(80))]
    assert report._smooth(values) == pytest.approx(expected)


def test_no_picture_without_steps_or_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    with pytest.raises(UsageError, match="no step yet"):
        write_report(run)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[report\]"):
        write_report(run)
