"""The file of a page, and what stands in it: sizes, sources of values, marks, seconds of roles, comparisons."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from page_lab import GROUPS, SCRIPT, make_page_run
from runs_testing import START_S, make_run, step_record, write_event, write_steps
from scipy import stats
from slow_runs import Pace, play

from hpcrl.analysis.comparison.compared import compare_runs
from hpcrl.analysis.comparison.noise import wilson_interval
from hpcrl.analysis.finished_rollouts import read_finished, reward_line
from hpcrl.analysis.learning_difference import bootstrap_difference, held_out_differences, training_difference
from hpcrl.analysis.page.chosen_rollouts import fitted_rollout
from hpcrl.analysis.page.definitions import definition_rows
from hpcrl.analysis.page.idle_seconds import divided, role_seconds
from hpcrl.analysis.page.marks import read_marks
from hpcrl.analysis.page.material import read_material
from hpcrl.analysis.page.planned_times import planned_times
from hpcrl.analysis.page.role_hours import goodput_rows, request_rows
from hpcrl.analysis.page.work_plots import counted, work_plots
from hpcrl.analysis.page.write_html import MOST_BYTES, write_page
from hpcrl.analysis.series import (
    Line,
    MeanInterval,
    averaged,
    interval_of_sums,
    read_history,
    student_quantile,
    thinned,
)
from hpcrl.cli.main import main
from hpcrl.config.layout import JobComponent, Layout
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.errors import MissingExtraError, UsageError
from hpcrl.planning.calibration.calibration_file import load_site_calibration
from hpcrl.planning.report import find_facts, make_outlook
from hpcrl.runs.metrics import MetricsWriter
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.usage import attempt_spans


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_page_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def text(run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_page([run], tmp_path_factory.mktemp("page") / "report.html")
    assert path.stat().st_size <= MOST_BYTES
    return path.read_text()


def data_of(text: str) -> Any:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_a_page_names_no_other_place_and_allows_only_its_own_programs(text: str) -> None:
    outside = re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", text, flags=re.DOTALL)
    assert not re.findall(
        r"""(?:src|href)=["'](?!#)|@import|url\(""", re.sub(r"<script>.*</script>", "", outside, flags=re.S)
    )
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy
    assert re.search(r"script-src ('sha256-[\w+/=]+' ?){2};", policy)
    assert SCRIPT not in outside
    assert outside.count("<script>") == 1


def test_a_value_of_the_recipe_has_its_source(text: str) -> None:
    row = re.search(r'<tr><td class="key">trainer.steps</td><td>(.*?)</td><td>(.*?)</td></tr>', text)
    assert row.groups() == ("30", "--set")
    row = re.search(r'<tr><td class="key">rollouts.group_size</td><td>(.*?)</td><td>(.*?)</td></tr>', text)
    assert row[2] == "default"


def test_all_plots_have_definitions_that_the_page_has(text: str) -> None:
    named = set(re.findall(r'<a href="#(def-[\w-]+)">', text))
    assert named <= {row["id"] for row in definition_rows()}
    assert len(named) > 15
    assert "A lower learning rate, or algorithm.kl." in text


def test_marks_are_faults_and_restarts_where_they_happened(run: RunDir) -> None:
    marks = read_marks(read_history(run))
    assert [(mark.kind, mark.attempt) for mark in marks] == [("fault", 1), ("fault", 1), ("restart", 2)]
    assert marks[0].what.startswith(f"engine 0 failed and is restarted: {SCRIPT[:20]}")
    assert 7.0 < marks[0].step < marks[1].step < 8.0
    assert marks[2].step == 10.0
    assert marks[2].what == "attempt 2 begins from the checkpoint of step 10"


def test_seconds_of_a_role_add_up_to_those_that_were_held(run: RunDir) -> None:
    history = read_history(run)
    rows = role_seconds(history, run.recipe())
    held = sum(end - begin for begin, end in attempt_spans(history.run, history.view).values())
    for role in ("engine", "trainer"):
        own = [row for row in rows if row.role == role]
        assert sum(row.share for row in own) == pytest.approx(1.0, abs=1e-3)
        assert sum(row.seconds for row in own) == pytest.approx(held, rel=1e-3)
    causes = {(row.role, row.kind, row.cause): row.seconds for row in rows}
    assert causes["engine", "idle", "starts"] == pytest.approx(7.0)
    assert causes["engine", "idle", "pauses for a new version"] == pytest.approx(0.1 * 31, abs=0.2)
    work = sum(
        record.phases_s[name] for record in history.records for name in ("forward_backward", "optimizer", "other")
    )
    assert causes["trainer", "work", "forward, backward, optimizer"] == pytest.approx(work, rel=1e-4)
    waited = sum(
        seconds for (role, _, cause), seconds in causes.items() if role == "trainer" and "waits for rollouts" in cause
    )
    assert waited == pytest.approx(sum(r.phases_s["wait_batch"] for r in history.records), rel=1e-4)


def test_requests_router_and_pool_have_their_figures(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_steps(run, 3)
    # a run without router, pool and requests on record has no such table
    assert request_rows(read_material(run)) == []
    writer = MetricsWriter(run, 1)
    for step, retries in ((4, 0.0), (5, 3.0)):
        counters = {"engine_requests": 10.0 * step, "engine_retries": retries, "unusable_answers": 1.0}
        writer.write(msgspec.structs.replace(step_record(step), rollouts=counters))
    writer.close()
    orchestrator = {"writer": "orchestrator-0"}
    for number in range(2):
        write_event(run, "router.engine_added", time_s=START_S + 1, engine=f"engine-{number}", **orchestrator)
    write_event(run, "router.engine_removed", time_s=START_S + 2, engine="engine-1", **orchestrator)
    for kind, at in (("away", 3.0), ("back", 10.0), ("away", 20.0), ("back", 25.0), ("away", 40.0)):
        write_event(run, f"router.{kind}", time_s=START_S + at, why="refused", **orchestrator)
    write_event(run, "component.restarting", time_s=START_S + 4, role="router", replica=0, cause="killed")
    for put_s, get_s in ((0.25, 0.5), (0.01, 0.01)):
        write_event(run, "store.canary", time_s=START_S + 1, host="n1", put_s=put_s, get_s=get_s)
    write_event(run, "store.segment_joined", time_s=START_S + 1, segment="n1", segments=1)
    write_event(run, "store.segment_lost", time_s=START_S + 9, segment="n1", segments=0)
    material = read_material(run)
    assert request_rows(material) == [
        ("requests to engines", "50"),
        ("requests that were made again", "3 (6.00%)"),
        ("answers that were damaged or unusable", "1"),
        ("router: engines taken in", "2"),
        ("router: engines left out", "1"),
        ("router: did not answer", "3 times, 0:12, 1 until the end of an attempt"),
        ("router: restarts", "1"),
        ("KV pool: segments that joined", "1"),
        ("KV pool: segments that were lost", "1"),
        ("KV pool: slowest trial block of 1 MiB, put and got", "0.750 s"),
        ("KV pool: restarts of its master", "0"),
    ]
    (plot,) = [plot for plot in work_plots([material]) if plot.id == "repeated-requests"]
    assert plot.lines[0][2].ys[-2:] == [0.0, 3.0]
    text = write_page([run], tmp_path / "page.html").read_text()
    assert "<td>router: engines left out</td><td>1</td>" in text


def test_hours_that_each_role_held_and_the_share_of_steps_that_count(tmp_path: Path) -> None:
    run = make_page_run(tmp_path, steps=12)
    common = {"partition": "gpu", "gres": "gres", "exclusive": True, "cpus": 8, "memory_gib": 1.0}
    components = tuple(
        JobComponent(roles=(role,), nodes=nodes, gpus_per_node=gpus, **common)
        for role, nodes, gpus in (("trainer", 2, 8), ("engine", 1, 4))
    )
    plan = run.plan().model_copy(update={"layout": Layout(kind="hetjob", components=components)})
    run.write_configuration(run.recipe(), run.cluster(), plan)
    material = read_material(run)
    records = material.history.records
    # the supervisor of the first attempt begins at 9 s and ends 2 s after step 10; the next one begins 1 s later, and
    # its last sign of life is at 100 s
    middle = records[9].time_s
    held_s = (middle + 2 - (START_S + 9)) + (START_S + 100 - (middle + 3))
    steps_s = sum(sum(record.phases_s.values()) for record in records)
    rows = dict(goodput_rows(material))
    assert rows["goodput: steps that count, of the time held"].startswith(f"{steps_s / held_s:.1%} ")
    assert rows["GPU-hours of trainer"] == f"{16 * held_s / 3600:,.1f}"
    assert rows["GPU-hours of engine"] == f"{4 * held_s / 3600:,.1f}"
    assert rows["GPU-hours"] == f"{20 * held_s / 3600:,.1f}"
    tokens = sum(record.tokens for record in records)
    assert rows["tokens trained"] == f"{tokens:,}"
    text = write_page([run], tmp_path / "page.html").read_text()
    assert f"<td>GPU-hours of trainer</td><td>{rows['GPU-hours of trainer']}</td>" in text


def test_times_of_the_plan_are_next_to_those_that_were_measured(tmp_path: Path) -> None:
    run = play(tmp_path, "planned", Pace(tool=2.0))
    material = read_material(run)
    measured = {name: (plan, found) for name, plan, found in planned_times(material).rows}
    steps = sorted(sum(record.phases_s.values()) for record in material.history.records[-12:])
    median_s = (steps[5] + steps[6]) / 2
    assert measured["seconds of a step (median)"] == ("unknown", f"{median_s:,.2f} s")
    assert planned_times(material).why_not
    recipe, cluster = load_recipe("qwen3_30b_a3b").value, load_cluster("h200-28").value
    run.write_configuration(recipe, cluster, run.plan())
    loop = make_outlook(recipe, cluster, load_site_calibration(cluster), find_facts(recipe)).loop
    assert loop is not None
    found = planned_times(read_material(run))
    rows = {name: (plan, own) for name, plan, own in found.rows}
    assert found.why_not == ""
    assert rows["seconds of a step (median)"] == (f"{loop.step_s:,.2f} s", f"{median_s:,.2f} s")
    assert rows["engines' seconds for the rollouts of a step"] == (f"{loop.rollout_s:,.2f} s", "unknown")


def test_intervals_are_divided_by_a_cover() -> None:
    inside, outside = divided([(0.0, 10.0), (20.0, 21.0)], [(2.0, 3.0), (2.5, 4.0), (9.0, 30.0), (8.0, 8.5)])
    assert inside == [(2.0, 4.0), (8.0, 8.5), (9.0, 10.0), (20.0, 21.0)]
    assert outside == [(0.0, 2.0), (4.0, 8.0), (8.5, 9.0)]
    assert divided([(1.0, 2.0)], []) == ([], [(1.0, 2.0)])


def test_intervals_are_those_of_scipy() -> None:
    for freedom in (1, 2, 3, 7, 30, 1000):
        assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-3)
    values = [0.1, 0.5, 0.2, 0.9, 0.4]
    expected = stats.t.interval(0.95, 4, loc=sum(values) / 5, scale=stats.sem(values))
    found = interval_of_sums(5, sum(values), sum(value * value for value in values))
    assert (found.low, found.high) == pytest.approx(expected, abs=1e-3)
    assert interval_of_sums(1, 0.5, 0.25) == MeanInterval(0.5, None, None, 1)
    wilson = stats.binomtest(7, 10).proportion_ci(method="wilson")
    assert wilson_interval(0.7, 10) == pytest.approx((wilson.low, wilson.high), rel=1e-4)
    assert wilson_interval(1.2, 10) is None
    assert wilson_interval(0.5, 0) is None


def test_a_long_line_keeps_its_extremes_and_a_stack_its_means() -> None:
    values: list[float | None] = [1.0] * 10_000
    values[7_777], values[123], values[5] = 9.0, -3.0, None
    line = Line("", range(10_000), values)
    short = thinned(line, 1000)
    assert len(short.xs) <= 1000
    assert (7_777, 9.0) in zip(short.xs, short.ys, strict=True)
    assert (123, -3.0) in zip(short.xs, short.ys, strict=True)
    mean = averaged(Line("", range(10_000), [float(i % 10) for i in range(10_000)]), 1000)
    assert len(mean.xs) == 1000
    assert mean.ys[0] == pytest.approx(4.5)
    assert thinned(Line("", [1], [2.0])).ys == [2.0]


def test_rewards_have_intervals_over_groups_of_a_window(run: RunDir) -> None:
    finished = read_finished(run)
    line = reward_line(finished)
    means = [
        [
            sum(h.entry.reward for h in held if h.entry.group == group) / 3
            for group in sorted({h.entry.group for h in held})
        ]
        for held in finished.trained.values()
    ]
    # a window of 30 steps has two to each side
    window = [mean for step in means[8:13] for mean in step]
    assert len(window) == 5 * GROUPS
    expected = stats.t.interval(0.95, len(window) - 1, loc=sum(window) / len(window), scale=stats.sem(window))
    assert line.ys[10] == pytest.approx(sum(window) / len(window))
    assert (line.lows[10], line.highs[10]) == pytest.approx(expected, abs=1e-3)


def test_counters_that_begin_again_are_not_negative() -> None:
    records = [
        msgspec.structs.replace(step_record(step), rollouts={"dropped_stale": count})
        for step, count in enumerate((2.0, 5.0, 1.0, 1.0), 1)
    ]
    assert counted(records, ("dropped_stale",), "").ys == [2.0, 3.0, 1.0, 0.0]


def test_two_runs_are_compared_with_intervals(run: RunDir, tmp_path: Path) -> None:
    better = make_page_run(tmp_path, "night-2", gain=0.3, faults=False)
    recipe = better.recipe()
    trainer = recipe.trainer.model_copy(update={"steps": 31})
    better.write_configuration(recipe.model_copy(update={"trainer": trainer}), better.cluster(), better.plan())
    one, two = read_material(run), read_material(better)
    trained = training_difference(one.finished, two.finished)
    assert trained.what == "reward in training, steps 26 to 30"
    assert trained.difference == pytest.approx(0.3, abs=0.08)
    assert trained.more_than_noise is True
    assert "20 and 20 prompts" in trained.method
    (names, held_out), *_ = held_out_differences([one.history, two.history])
    assert (names, held_out.what) == ("night-2 minus night-1", "held-out reward after step 30")
    assert held_out.difference == pytest.approx(0.3)
    # one method, in one place: the page says what `hpcrl compare` says
    (verdict,) = compare_runs([run, better]).noise
    assert (held_out.low, held_out.high) == (verdict.low, verdict.high)
    assert (held_out.more_than_noise, held_out.method) == (verdict.more_than_noise, verdict.method)
    assert training_difference(one.finished, one.finished).more_than_noise is False
    assert held_out_differences([one.history, one.history]) == []
    path = write_page([run, better], tmp_path / "two.html")
    text = path.read_text()
    assert re.search(r'<td class="key">trainer.steps</td><td>30</td><td>31</td>', text)
    data = data_of(text)
    loss = next(plot for plot in data["plots"] if plot["id"] == "loss")
    assert [line["run"] for line in loss["lines"]] == [0, 1]


def test_a_bootstrap_agrees_with_welch() -> None:
    one = [((i * 37) % 101) / 101 for i in range(200)]
    two = [0.05 + ((i * 53) % 89) / 89 for i in range(150)]
    low, high = bootstrap_difference(one, two)
    expected = stats.ttest_ind(two, one, equal_var=False).confidence_interval(0.95)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.01)
    with pytest.raises(ValueError, match="two numbers"):
        bootstrap_difference([0.1], two)


def test_a_run_without_a_ledger_has_a_page_that_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, "old")
    write_steps(run, 12)
    write_event(run, "engine.away", time_s=START_S + 30, writer="orchestrator-0", engine="engine-0")
    text = write_page([run], tmp_path / "old.html").read_text()
    assert "old has no ledger of rollouts" in text
    assert "engine-0 is away: ?" in text


def test_long_rollouts_leave_out_their_middles() -> None:
    turn = {"said": [("said", "a" * 50_000)], "sampled": [("text", "b" * 50_000)], "tokens": [["b", -0.1, 3]] * 4000}
    document = {"rank": "best", "facts": {}, "turns": [{**turn, "count": number} for number in range(300)], "text": ""}
    small = fitted_rollout(document, 100_000)
    assert len(json.dumps(small)) <= 100_000
    counts = [each["count"] for each in small["turns"]]
    assert counts[0] == 0
    assert counts[-1] == 299
    assert len(counts) + small["turns_left_out"] == 300
    assert small["turns"][0]["left_out"] + len(small["turns"][0]["tokens"]) == 4000
    assert "characters are left out" in small["turns"][0]["said"][0][1]
    whole = fitted_rollout({**document, "turns": [{**turn, "said": [("said", "a")], "sampled": []}]}, 500_000)
    assert (whole["turns_left_out"], whole["turns"][0]["left_out"], whole["turns"][0]["said"]) == (
        0,
        0,
        [["said", "a"]],
    )


def test_a_page_needs_a_step_and_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    with pytest.raises(UsageError, match="no step yet"):
        write_page([run], tmp_path / "a.html")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[report\]"):
        write_page([run], tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()


def test_the_command(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_page_run(tmp_path, "night-2", faults=False)

    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["hpcrl", "report", *words])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    page = tmp_path / "two.html"
    assert call(str(run.path), str(other.path), "-o", str(page)) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert [each["name"] for each in data_of(page.read_text())["runs"]] == ["night-1", "night-2"]
    assert call(str(run.path), str(other.path), "-o", str(tmp_path / "two.png")) == 2
    assert "a page, FILE.html, can have several runs" in " ".join(capsys.readouterr().err.replace("│", " ").split())
