"""Traces of runs, read back by Perfetto's own trace processor and by the rules of the format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from perfetto_queries import query
from runs_testing import START_S, Hpcrl, make_run, write_event, write_steps
from slow_runs import Pace, play

from hpcrl.analysis.trace.run_trace import parse_steps, run_trace
from hpcrl.analysis.trace.trace_writer import write_trace
from hpcrl.errors import UsageError
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir

SLICES = """
    select process.name as process, thread.name as thread, slice.name as name, ts, dur, depth
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
    order by ts
"""
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = play(tmp_path, "traced", Pace(tool=0.5, steps=12))
    write_event(
        run, "trainer.checkpoint_saved", time_s=START_S + 5, writer="trainer-0", step=4, seconds=0.5, blocked_s=0.1
    )
    write_event(run, "evaluation", time_s=START_S + 6, writer="orchestrator-0", version=4, reward=0.5, seconds=1.0)
    write_event(
        run,
        "component.restarting",
        time_s=START_S + 7,
        writer="supervisor",
        role="engine",
        replica=0,
        restart=1,
        cause="it died " * 200,
    )
    for second, state in ((1, "STARTING"), (2, "READY"), (7, "FAILED")):
        write_event(
            run, "component.state", time_s=START_S + second, writer="supervisor", role="engine", replica=0, state=state
        )
    return run


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float, str]]]:
    """Slices of each thread, by their begin; of equal begins the longest first."""
    found: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    for event in events:
        if event["ph"] == "X":
            begin, end = event["ts"], round(event["ts"] + event["dur"], 3)
            found.setdefault((event["pid"], event["tid"]), []).append((begin, end, event["name"]))
    return {thread: sorted(each, key=lambda s: (s[0], -s[1])) for thread, each in found.items()}


def test_the_format_is_kept(run: RunDir, tmp_path: Path) -> None:
    made = run_trace(run)
    write_trace(tmp_path / "trace.json", made.events, made.about)
    document = json.loads((tmp_path / "trace.json").read_bytes(), parse_constant=pytest.fail)
    events = document["traceEvents"]
    needed = {"X": {"dur"}, "i": {"s"}, "C": {"args"}, "M": {"args"}}
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} | needed[event["ph"]] <= set(event)
        assert event["ts"] >= 0
    for thread, each in slices(events).items():
        open_ends: list[float] = []
        for begin, end, name in each:
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            # neither nested in the one around it nor behind it: viewers drop such slices
            assert not open_ends or end <= open_ends[-1], (thread, name)
            open_ends.append(end)
    assert document["otherData"]["steps"] == "1-12 of 12"


def test_perfetto_reads_it(run: RunDir, tmp_path: Path) -> None:
    made = run_trace(run)
    path = tmp_path / "trace.json"
    write_trace(path, made.events, made.about)
    problems, found, counters, instants = query(
        path,
        PROBLEMS,
        SLICES,
        "select counter_track.name as name, count(*) as n from counter join counter_track "
        "on counter.track_id = counter_track.id group by 1",
        "select slice.name as name, process.name as process, ts from slice join process_track "
        "on slice.track_id = process_track.id join process using (upid) where dur = 0",
    )
    assert problems == []
    written = [event for event in made.events if event["ph"] == "X"]
    assert len([each for each in found if each["dur"]]) == len(written)
    steps = [each for each in found if each["thread"] == "steps" and each["depth"] == 0]
    assert [each["name"] for each in steps] == [f"step {number}" for number in range(1, 13)]
    records = read_metrics(run)
    for each, record in zip(steps, records, strict=True):
        # nanoseconds of a time since the epoch, which has a resolution of a quarter of a microsecond
        assert each["dur"] == pytest.approx(1e9 * sum(record.phases_s.values()), abs=2000)
        # the clock of a trace begins with the run
        assert each["ts"] == pytest.approx(1e9 * (record.time_s - sum(record.phases_s.values()) - START_S), abs=2000)
    phases = {each["name"] for each in found if each["thread"] == "steps" and each["depth"] == 1}
    assert phases == {"waiting", "forward+backward", "optimizer", "publish", "checkpoint", "other"}
    rollouts = [
        each for each in found if each["process"] == "rollouts" and not str(each["thread"]).endswith("versions")
    ]
    whole = [each for each in rollouts if each["depth"] == 0]
    assert len(whole) == 12 * 8
    assert {each["name"] for each in rollouts if each["depth"] == 1} == {"request", "environment", "judge"}
    assert {each["name"] for each in found if each["process"] == "engine-0"} >= {"load v1", "load v12"}
    assert {(each["process"], each["thread"]) for each in found if each["name"] == "save step 4"} == {
        ("trainer", "checkpoints")
    }
    assert [each["name"] for each in found if each["thread"] == "engine 0"] == ["STARTING", "READY"]
    assert {"reward mean", "staleness mean", "staleness max"} <= {str(each["name"]) for each in counters}
    assert any(each["name"] == "component.restarting" and each["process"] == "engine-0" for each in instants)


def test_versions_of_a_rollout_follow_the_updates(run: RunDir) -> None:
    path = run.rollouts_dir / "step-000006.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    ends = [record.time_s for record in read_metrics(run)]
    # it began when the second step had ended, and ended with the sixth: updates to 3 and 4 were between
    times = {"ended_s": ends[5], "seconds": ends[5] - ends[1] - 0.1}
    line = json.loads(first) | {"group": 900, "first_version": 2, "last_version": 4, **times}
    path.write_text(json.dumps(line) + "\n" + "".join(others))
    made = run_trace(run)
    spans = [e for e in made.events if e["ph"] == "X" and e["args"].get("rollout") == "900/0"]
    assert [span["name"] for span in spans] == ["v2", "v3", "v4"]
    served = {e["args"]["version"]: e["ts"] for e in made.events if e["name"].startswith("serves v")}
    assert [round(spans[number]["ts"] - served[version], 3) for number, version in ((1, 3), (2, 4))] == [0.0, 0.0]
    assert spans[0]["ts"] + spans[0]["dur"] == pytest.approx(spans[1]["ts"], abs=0.002)


def test_calls_of_sandboxed_tools_are_spans_of_their_own(tmp_path: Path) -> None:
    made = run_trace(play(tmp_path, "boxed", Pace(tool=0.5, environment="calculator", steps=6)))
    spans = [event for event in made.events if event["ph"] == "X" and event["name"] == "sandbox"]
    # each rollout of the batches calls its tool once, for about half a second
    assert len(spans) == 6 * 8
    assert all(0.35e6 < span["dur"] < 0.65e6 for span in spans)
    assert {event["cat"] for event in spans} == {"rollouts"}


def test_its_size_is_bounded(run: RunDir) -> None:
    whole = run_trace(run)
    some = run_trace(run, most_events=len(whole.events) // 2)
    assert len(some.events) <= len(whole.events) // 2
    assert some.last == 12
    assert some.left_out == some.first - 1 > 0
    assert some.about["steps"] == f"{some.first}-12 of 12"
    with pytest.raises(UsageError, match="step 12 alone has"):
        run_trace(run, most_events=10)


def test_steps_are_chosen(run: RunDir) -> None:
    made = run_trace(run, first=3, last=5)
    names = [e["name"] for e in made.events if e["name"].startswith("step ")]
    assert names == ["step 3", "step 4", "step 5"]
    assert {e["args"]["step"] for e in made.events if "step" in e.get("args", {}) and e["cat"] == "rollouts"} == {
        3,
        4,
        5,
    }
    # what came before and later is not in it
    assert min(e["ts"] for e in made.events) >= 0
    assert not any(e["name"] == "load v12" for e in made.events)
    with pytest.raises(UsageError, match="it has steps 1 to 12"):
        run_trace(run, first=40)
    assert [parse_steps(text) for text in ("3:5", "3:", ":5", ":")] == [(3, 5), (3, None), (1, 5), (1, None)]
    for text in ("5:3", "5", "a:b", "0:0"):
        with pytest.raises(UsageError, match="--steps"):
            parse_steps(text)


def test_a_run_without_rollouts_on_record_has_the_rest(tmp_path: Path) -> None:
    run = make_run(tmp_path, "bare")
    write_steps(run, 5)
    made = run_trace(run)
    assert not any(event.get("cat") == "rollouts" for event in made.events)
    assert sum(event["name"].startswith("step ") for event in made.events) == 5
    with pytest.raises(UsageError, match="no step yet"):
        run_trace(make_run(tmp_path, "new"))


def test_the_command_says_what_is_in_it(
    run: RunDir, tmp_path: Path, hpcrl: Hpcrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path))
    code, out, err = hpcrl("trace", "traced", "-o", str(tmp_path / "t.json.gz"), "--steps", "2:4")
    assert (code, err) == (0, "")
    assert "steps 2 to 4 of 12" in out
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["otherData"]["run"] == "traced"
    code, out, err = hpcrl("trace", "traced", "--max-events", "400")
    assert code == 0
    assert "older steps are left out: a trace has at most 400 events" in err
    assert (run.path / "trace.json").is_file()
