"""Values of timelines, of the table of engines and of the lines of mismatch, of a run of three steps, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from page_lab import browser, draw_whole, needs_chromium
from runs_testing import START_S, make_run, step_record, write_event, write_status

from hpcrl.analysis.page.marks import read_marks
from hpcrl.analysis.page.material import read_material
from hpcrl.analysis.page.role_hours import engine_rows
from hpcrl.analysis.page.time_spans import timelines
from hpcrl.analysis.page.write_html import write_page
from hpcrl.analysis.series import read_history
from hpcrl.runs.metrics import MetricsWriter
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState

PHASES = {"wait_batch": 1.0, "forward_backward": 2.0, "optimizer": 0.5, "publish": 0.25, "checkpoint": 0.0}
#: mismatch of all tokens, and where it was probed with replay and without
MISMATCH = {1: (1e-4, None, None), 2: (2e-4, 1e-5, 3e-4), 3: (4e-4, None, None)}
FIRST_S = 10.0
"""Seconds from the start to the begin of the first step; steps take 3.75 s each."""
STEP_S = sum(PHASES.values())
ROLES = [
    # lane, seconds from the first state on, length, state
    ("engine 0", 0.0, 4.0, "starting"),
    ("engine 0", 4.0, 26.0, "ready"),
    ("engine 1", 0.0, 5.0, "starting"),
    ("engine 1", 5.0, 7.0, "ready"),
    ("engine 1", 12.0, 3.0, "restarting"),
    ("engine 1", 15.0, 15.0, "ready"),
    ("trainer 0", 0.0, 8.0, "starting"),
    ("trainer 0", 8.0, 22.0, "ready"),
]
BEGIN_S, END_S = 1.0, 31.0
"""Seconds from the start to the first state of all, and to their end."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = make_run(tmp_path_factory.mktemp("values"), steps=3)
    run.start_attempt()
    write_status(run, RunState.COMPLETED)
    writer = MetricsWriter(run, 1)
    for step, (mismatch, replayed, unreplayed) in MISMATCH.items():
        values = {"mismatch_kl": mismatch, "replayed_mismatch_kl": replayed, "unreplayed_mismatch_kl": unreplayed}
        time_s = START_S + FIRST_S + STEP_S * step
        writer.write(msgspec.structs.replace(step_record(step), time_s=time_s, phases_s=PHASES, **values))
    writer.close()
    events: list[tuple[float, str, dict[str, Any]]] = [(0.5, "attempt.started", {})]
    for lane, begin_s, _, state in ROLES:
        role, replica = lane.split()
        facts = {"role": role, "replica": int(replica)}
        if state == "restarting":
            more = {"restart": 1, "pause_s": 3.0, "cause": "it was killed", "cause_kind": "signal"}
            events.append((BEGIN_S + begin_s, "component.restarting", facts | more))
        else:
            events.append((BEGIN_S + begin_s, "component.state", facts | {"state": state.upper()}))
    for lane in dict.fromkeys(each[0] for each in ROLES):
        role, replica = lane.split()
        events.append((END_S, "component.state", {"role": role, "replica": int(replica), "state": "EXITED"}))
    for at_s, kind, facts in sorted(events, key=lambda event: event[0]):
        write_event(run, kind, time_s=START_S + at_s, writer="supervisor", **facts)
    updates = (("engine-0", 0.4), ("engine-0", 0.9), ("engine-1", 1.5), ("engine-0", 0.6))
    for number, (engine, seconds) in enumerate(updates):
        facts = {"engine": engine, "version": number, "seconds": seconds, "pause_s": 0.25}
        write_event(run, "engine.weights_updated", time_s=START_S + 14.0 + number, writer="orchestrator-0", **facts)
    for at_s, kind in ((13.0, "engine.away"), (15.5, "engine.back")):
        write_event(run, kind, time_s=START_S + at_s, writer="orchestrator-0", engine="engine-1", why="killed")
    return run


def test_timelines_have_the_seconds_of_states_and_phases(run: RunDir) -> None:
    history = read_history(run)
    roles, steps = timelines(history, read_marks(history))
    assert [tuple(bar[:4]) for bar in roles["bars"]] == ROLES
    assert (roles["lanes"], roles["zero_s"]) == (["engine 0", "engine 1", "trainer 0"], START_S + BEGIN_S)
    # the restart of the engine is a mark where it began
    assert next((mark["x"], mark["kind"]) for mark in roles["marks"] if "engine 1" in mark["what"]) == (12.0, "fault")
    own = [tuple(bar[1:4]) for bar in steps["bars"] if bar[0] == "trainer 0"]
    assert own == [
        (pytest.approx(STEP_S * step + at), seconds, phase)
        for step in range(3)
        for at, seconds, phase in (
            (0.0, 1.0, "waiting"),
            (1.0, 2.0, "forward+backward"),
            (3.0, 0.5, "optimizer"),
            (3.5, 0.25, "publish"),
        )
    ]
    # an update ends when its event says so, and lasts as long as that says
    updates = [bar for bar in steps["bars"] if bar[3] == "weight update"]
    assert [(bar[0], bar[1], bar[2]) for bar in updates] == [
        ("engine 0", pytest.approx(14.0 - 0.4 - FIRST_S), 0.4),
        ("engine 0", pytest.approx(15.0 - 0.9 - FIRST_S), 0.9),
        ("engine 1", pytest.approx(16.0 - 1.5 - FIRST_S), 1.5),
        ("engine 0", pytest.approx(17.0 - 0.6 - FIRST_S), 0.6),
    ]
    assert updates[0][4] == "version 0, pause 0.25 s"
    (away,) = [bar for bar in steps["bars"] if bar[3] == "away"]
    assert away == ["engine 1", pytest.approx(3.0), 2.5, "away", "killed"]


def test_the_table_of_engines_has_what_happened_to_each(run: RunDir) -> None:
    rows = {row.pop("engine"): row for row in engine_rows(read_material(run))}
    states = {name: row.pop("state") for name, row in rows.items()}
    assert set(states) == {"engine 0", "engine 1"}
    assert rows == {
        "engine 0": {"updates": "3", "median": "0.60 s", "longest": "0.90 s", "away": "0", "restarts": "0"},
        "engine 1": {"updates": "1", "median": "1.50 s", "longest": "1.50 s", "away": "1", "restarts": "1"},
    }


@needs_chromium
@pytest.mark.slow
async def test_a_browser_draws_these_values(run: RunDir, tmp_path: Path) -> None:
    path = write_page([run], tmp_path / "report.html")
    async with browser.chromium_page() as page:
        await page.look(1280)
        await page.open(path)
        await draw_whole(page)
        assert page.messages == []
        traces = await page.evaluate(
            "document.getElementById('canvas-mismatch').data.map((trace) => [trace.name, trace.x, trace.y])"
        )
        lines = {name: dict(zip(xs, ys, strict=True)) for name, xs, ys in traces if name and "mismatch" not in name}
        assert lines["all tokens"] == {step: pytest.approx(values[0], rel=1e-3) for step, values in MISMATCH.items()}
        # only steps that were probed have a point
        assert lines["with router replay"] == {2: pytest.approx(1e-5, rel=1e-3)}
        assert lines["without replay"] == {2: pytest.approx(3e-4, rel=1e-3)}
        bars = await page.evaluate(
            "document.getElementById('canvas-timeline-roles').data.filter((trace) => trace.type === 'bar')"
            ".flatMap((trace) => trace.y.map((lane, i) => [lane, trace.base[i], trace.x[i], trace.name]))"
        )
        assert sorted(map(tuple, bars)) == sorted(ROLES)
        # each bar has a shape: the kind of trace is there, though most others are left out of the program
        shapes = "document.querySelectorAll('#canvas-timeline-roles .bars .point path').length"
        assert await page.evaluate(shapes) == len(ROLES)
        cells = await page.evaluate(
            "[...document.querySelectorAll('table')].map((table) => [...table.rows].map((row) => "
            "[...row.cells].map((cell) => cell.textContent))).find((rows) => rows[0].includes('weight updates'))"
        )
        assert cells[0] == ["engine", "state", "weight updates", "median", "longest", "away", "restarts"]
        assert [row[:1] + row[2:] for row in cells[1:]] == [
            ["engine 0", "3", "0.60 s", "0.90 s", "0", "0"],
            ["engine 1", "1", "1.50 s", "1.50 s", "1", "1"],
        ]
