"""Rollouts that failed, and the count of each mean, are in every view of a run."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from runs_testing import make_run, step_record, write_event, write_status

from hpcrl.cli.main import main
from hpcrl.runs.metrics import MetricsWriter, read_metrics
from hpcrl.runs.observe import observe
from hpcrl.runs.rollout_failures import EnvironmentFailures, FirstFailure, RolloutFailures, failures_path, read_failures
from hpcrl.runs.run_progress import read_progress
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views import report
from hpcrl.runs.views.follow import follow
from hpcrl.runs.views.liveview import render, summary

WHAT = "NameError: name 'ITEMZ' is not defined"
WHERE = "/home/me/shop.py:31 in tool"


def shop(failed: dict[str, int], *, started: int = 1392, finished: int = 933) -> EnvironmentFailures:
    first = {cause: FirstFailure(time_s=1.0, what=WHAT, where=WHERE) for cause in failed}
    return EnvironmentFailures(environment="shop", started=started, finished=finished, failed=failed, first=first)


def say(run: RunDir, attempt: int, *environments: EnvironmentFailures) -> None:
    report_ = RolloutFailures(time_s=1.0, environments=list(environments))
    failures_path(run, attempt).write_bytes(msgspec.json.encode(report_))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path, steps=3)
    write_status(run, RunState.COMPLETED)
    with contextlib.closing(MetricsWriter(run, 1)) as metrics:
        for step in (1, 2, 3):
            counts = {"reward_count": 64, "reward_count_by_env": {"words": 64}}
            metrics.write(msgspec.structs.replace(step_record(step), **counts))
    for version, failed in ((0, 0), (3, 7)):
        write_event(
            run, "evaluation", time_s=100.0 + version, version=version, last_version=version, due=version,
            reward=0.125, by_env={"shop": 0.125}, prompts=8 - failed, failed=failed, counted=8, failures="zero",
            first_failure={"environment": "shop", "what": WHAT, "where": WHERE} if failed else None,
        )  # fmt: skip
    return run


def text_of(*parts: Any, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    for part in parts:
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def screens(run: RunDir) -> str:
    view, metrics = observe(run), read_metrics(run)
    progress = read_progress(run, metrics)
    return text_of(render(view, progress, metrics, width=200), summary(view, progress, metrics))


def command(capsys: Any, monkeypatch: Any, root: Path, *words: str) -> str:
    monkeypatch.setattr("sys.argv", ["hpcrl", words[0], "--runs-root", str(root), *words[1:]])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert not end.value.code, err
    return str(out)


def test_every_view_names_share_cause_first_exception_and_place(
    run: RunDir, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    say(run, 1, shop({"raised": 350, "timeout": 8}))
    counts = "environment shop: 358 of 1,392 rollouts failed (25.7%): 350 raised an exception, 8 timed out"
    console = Console(file=io.StringIO(), width=80)
    follow(run, console)
    followed = console.file.getvalue()  # type: ignore[attr-defined]
    document = json.loads(command(capsys, monkeypatch, tmp_path, "status", "--json"))
    why = command(capsys, monkeypatch, tmp_path, "why")
    for text in (
        screens(run),
        followed,
        document["warnings"][0],
        why,
        command(capsys, monkeypatch, tmp_path, "status"),
    ):
        joined = " ".join(text.split())
        assert counts in joined
        assert WHAT in joined
        assert WHERE in joined
    assert followed.count("warning: environment shop") == 1
    (found,) = document["progress"]["rollouts"]
    assert found["failed"] == {"raised": 350, "timeout": 8}
    listed = command(capsys, monkeypatch, tmp_path, "ls")
    assert "failed" in listed.splitlines()[0]
    assert "26%" in listed
    assert json.loads(command(capsys, monkeypatch, tmp_path, "ls", "--json"))["runs"][0]["failed_share"] == 358 / 1392
    assert json.loads(command(capsys, monkeypatch, tmp_path, "why", "--json"))["failed_rollouts"][0] == counts
    title = report._title(observe(run), read_progress(run), read_metrics(run))
    assert counts in title
    assert "7 failed, counted as 0" in title
    assert report.write_report(run).is_file()


def test_a_small_share_is_reported_and_is_not_a_warning(
    run: RunDir, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    say(run, 1, shop({"engine": 10}, started=1000, finished=950))
    assert "10 of 1,000 rollouts failed (1.0%): 10 got no answer of an engine" in screens(run)
    document = json.loads(command(capsys, monkeypatch, tmp_path, "status", "--json"))
    assert document["warnings"] == []
    assert "failed" not in command(capsys, monkeypatch, tmp_path, "ls").splitlines()[0]
    say(run, 1, shop({"engine": 20}, started=1000, finished=950))
    assert len(json.loads(command(capsys, monkeypatch, tmp_path, "status", "--json"))["warnings"]) == 1


def test_each_mean_has_its_count(run: RunDir, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    text = screens(run)
    assert f"reward {read_metrics(run)[-1].reward_mean:.3f} of 64" in text
    assert "held-out 0.125 of 8 (7 failed, counted as 0) after step 3" in text
    rows = [line.split() for line in text.splitlines()]
    assert [row[2] for row in rows if row[:1] in (["1"], ["2"], ["3"])] == ["64", "64", "64"]  # in the table of steps
    assert "0.125 -> 0.125 of 8 (7 failed, counted as 0)" in text
    console = Console(file=io.StringIO(), width=80)
    follow(run, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "held-out reward 0.125 of 8 (7 failed, counted as 0) after step 3" in lines
    assert all(" of 64  staleness" in line for line in lines if line.startswith("step "))
    assert " of 64" in command(capsys, monkeypatch, tmp_path, "ls")
    assert "held-out after step 3: reward 0.125 of 8 (7 failed" in command(capsys, monkeypatch, tmp_path, "why")


def test_attempts_are_added_up_and_a_damaged_file_is_left_out(run: RunDir) -> None:
    say(run, 1, shop({"raised": 3}, started=100, finished=90))
    for _ in range(2):
        write_status(run, RunState.COMPLETED)
    failures_path(run, 2).write_bytes(b'{"time_s": nu')
    say(run, 3, shop({"raised": 2, "lost": 1}, started=50, finished=40))
    (found,) = read_failures(run)
    assert (found.started, found.finished, found.failed) == (150, 130, {"raised": 5, "lost": 1})


def test_a_run_of_an_earlier_version_is_judged_by_its_counters(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=3)
    write_status(run, RunState.COMPLETED)
    counters = {"started": 1392.0, "finished": 933.0, "dropped_environment": 358.0, "dropped_engine": 0.0}
    with contextlib.closing(MetricsWriter(run, 1)) as metrics:
        metrics.write(msgspec.structs.replace(step_record(1), rollouts=counters))
    assert "358 of 1,392 rollouts failed (25.7%): 358 failed in the environment" in screens(run)
