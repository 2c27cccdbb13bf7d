"""How an engine replica is called, by what supervisor and orchestrator say; and how status shows it."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from hpcrl.runs.fleet import EngineView, FleetView, WorkerView, judge_replica, read_fleet
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ComponentStatus
from hpcrl.runs.views.fleet_table import fleet_document, fleet_table

S = ComponentState


def component(state: ComponentState, replica: int = 0, restarts: int = 0) -> ComponentStatus:
    return ComponentStatus(
        role="engine", replica=replica, state=state, restarts=restarts, last_failure="was killed" if restarts else ""
    )


SERVES = EngineView(replica=0, version=5)
AWAY = EngineView(replica=0, version=-1, answers=False, why="no answer to /health within 5 s")
SILENT_RANK = EngineView(replica=0, version=5, stuck=True, quiet_s=31.0, running=7, servers=16, silent_rank=9)
STUCK = EngineView(replica=0, version=5, stuck=True, quiet_s=31.0, running=7)


@pytest.mark.parametrize(
    ("state", "restarts", "view", "newest", "expected"),
    [
        (S.PENDING, 0, None, None, ("starting", "")),
        (S.STARTING, 0, SERVES, 5, ("starting", "")),
        (S.STARTING, 1, None, 5, ("restarting", "was killed")),
        (S.RESTARTING, 1, AWAY, 5, ("restarting", "was killed")),
        (S.READY, 0, None, None, ("unknown", "the orchestrator does not report it")),
        (S.READY, 0, EngineView(replica=0, version=-1), 5, ("starting", "it has no weights yet")),
        (S.READY, 2, EngineView(replica=0, version=-1, loading=5), 5, ("restarting", "loads version 5")),
        (S.READY, 0, SERVES, 5, ("healthy", "")),
        (S.READY, 1, SERVES, 5, ("healthy", "")),
        (S.READY, 0, EngineView(replica=0, version=5, loading=6), 6, ("healthy", "")),
        (S.READY, 0, EngineView(replica=0, version=5, loading=6, routed=False), 6, ("stale", "version 6 is published")),
        (S.READY, 0, SERVES, 6, ("stale", "version 6 is published")),
        (S.READY, 0, AWAY, 5, ("suspect", "no answer to /health within 5 s")),
        (S.READY, 0, SILENT_RANK, 5, ("suspect", "no token of rank 9 of 16 for 31 s")),
        (S.READY, 0, STUCK, 5, ("suspect", "no token for 31 s, with 7 requests")),
        (S.STOPPING, 0, SERVES, 5, ("dead", "stopping")),
        (S.EXITED, 0, SERVES, 5, ("dead", "exited")),
        (S.FAILED, 3, AWAY, 5, ("dead", "failed")),
        (S.LOST, 0, SERVES, 5, ("dead", "lost")),
    ],
)
def test_each_state(
    state: ComponentState, restarts: int, view: EngineView | None, newest: int | None, expected: tuple[str, str]
) -> None:
    found, why = judge_replica(component(state, restarts=restarts), view, newest)
    assert (found.value, why) == expected


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.start_attempt()
    return run


def write(run: RunDir, age_s: float = 0.0, workers: Sequence[WorkerView] = ()) -> None:
    FleetView(
        time_s=time.time() - age_s,
        newest=6,
        in_flight=61,
        limit=96,
        router=True,
        workers=list(workers),
        engines=[
            EngineView(
                replica=0,
                version=6,
                in_flight=30,
                routed=True,
                running=28,
                waiting=2,
                kv_usage=0.874,
                prefix_hit_rate=0.61,
                tokens_per_s=1234.5,
                preemptions=3,
                window=48.4,
            ),
            EngineView(replica=1, version=5, routed=False, why="it has version 5, others serve 6: torn"),
        ],
    ).write(run, 1)


def shown(run: RunDir) -> str:
    components = [component(S.READY), component(S.READY, 1), component(S.RESTARTING, 2, restarts=1)]
    text = io.StringIO()
    Console(file=text, width=160).print(fleet_table(read_fleet(run, 1, components)))
    return text.getvalue()


def test_the_table_has_load_and_scores_of_each_engine(run: RunDir) -> None:
    write(run)
    head, columns, zero, one, two = shown(run).splitlines()
    assert head.strip() == ("engines: 61 rollouts in flight, at most 96; newest version 6; the router answers")
    assert " ".join(columns.split()) == "engine health version in flight running waiting KV prefix hits tokens/s"
    assert " ".join(zero.split()) == "engine 0 healthy 6 30 of 48 28 2 87% 61% 1,234"
    assert "stale" in one
    assert one.split()[3:9] == ["5", "0", "?", "?", "?", "?"]
    assert one.rstrip().endswith("it has version 5, others serve 6: torn")
    assert two.split()[:4] == ["engine", "2", "restarting", "?"]


def test_workers_of_environments_are_counted_and_those_in_trouble_named(run: RunDir) -> None:
    write(run)
    assert "workers" not in shown(run)
    seen = [
        WorkerView(replica=0, up=True, calls=12),
        WorkerView(replica=1, up=False, losses=2),
        WorkerView(replica=2, up=True, calls=9, losses=1),
    ]
    write(run, workers=seen)
    *_, head, one, two = shown(run).splitlines()
    assert head == "workers of environments: 2 of 3 are there, with 21 rollouts and prompts (9 to 12 each)"
    assert [one.strip(), two.strip()] == ["worker 1: away; lost 2 times", "worker 2: there, with 9; lost 1 time"]
    document = json.loads(json.dumps(fleet_document(read_fleet(run, 1, []))))
    assert document["workers"][1] == {"replica": 1, "up": False, "calls": 0, "losses": 2}
    write(run, workers=[WorkerView(replica=number, up=False, losses=1) for number in range(20)])
    assert len(shown(run).splitlines()) == 5 + 1 + 8 + 1
    assert shown(run).rstrip().endswith("and 12 more that were lost")


def test_what_is_old_or_torn_or_not_there_is_unknown(run: RunDir) -> None:
    for age_s in (None, 60.0):
        if age_s is not None:
            write(run, age_s)
        text = shown(run)
        assert text.startswith("engines: the orchestrator does not report them now")
        assert text.count("unknown") == 2
        assert "healthy" not in text
    FleetView.path(run, 1).write_text("{")
    assert FleetView.read(run, 1) is None


def test_the_document_says_null_for_what_is_unknown(run: RunDir) -> None:
    write(run)
    components = [component(S.READY), component(S.RESTARTING, 2, restarts=1)]
    document = json.loads(json.dumps(fleet_document(read_fleet(run, 1, components))))
    assert (document["newest"], document["limit"], document["router_answers"]) == (6, 96, True)
    zero, two = document["replicas"]
    assert (zero["state"], zero["version"], zero["kv_usage"], zero["in_flight"]) == ("healthy", 6, 0.874, 30)
    assert (two["state"], two["why"], two["version"], two["running"]) == ("restarting", "was killed", None, None)
    assert zero.keys() == two.keys()
