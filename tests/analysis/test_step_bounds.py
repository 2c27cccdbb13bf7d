"""What bounds a step is named rightly where one cause was made slow, and the parts of a step add up to it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path

import pytest
from runs_testing import Hpcrl, make_run, write_steps
from slow_runs import Pace, play

from hpcrl.analysis.bounds.rollout_states import RolloutStays, Stay, TimeHolder, rollout_stays
from hpcrl.analysis.bounds.slow_report import slow_report
from hpcrl.analysis.bounds.step_bound import largest_side, read_windows
from hpcrl.analysis.bounds.tried_settings import try_settings
from hpcrl.analysis.bounds.waiting_time import HandoffTimes, wait_parts
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.errors import UsageError
from hpcrl.planning.calibration.calibration_file import load_site_calibration
from hpcrl.planning.report import find_facts, make_outlook
from hpcrl.runs.metrics import read_metrics
from hpcrl.simulation.inputs.timeline import Interval

CASES = {
    "engines": (Pace(reply=3.0), "engines"),
    "environment": (Pace(tool=3.0), "environments"),
    "sandbox": (Pace(tool=3.0, environment="calculator"), "sandboxes"),
    "judge": (Pace(judge=3.0), "judge"),
    "trainer": (Pace(forward_backward=3.0), "trainer"),
    "publish": (Pace(publish=3.0), "hand-off"),
    "checkpoint": (Pace(checkpoint=8.0), "checkpoint"),
    # synchronous: no rollout begins before engines have the version
    "loading": (Pace(load=3.0, bound=0), "hand-off"),
    "writing": (Pace(write=3.0, bound=0), "hand-off"),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_slow_part_is_named(tmp_path: Path, case: str) -> None:
    pace, side = CASES[case]
    run = play(tmp_path, case, pace)
    for window in read_windows(run):
        assert largest_side(window)[0] == side, window
        assert largest_side(window)[1] > 0.5
        assert sum(part.seconds for part in window.parts) == pytest.approx(window.step_s, rel=1e-9)
        assert sum(part.share for part in window.parts) == pytest.approx(1.0, rel=1e-9)
        assert window.attributed == window.steps
    assert read_windows(run)[0].steps == 21  # the first three warm up


def test_now_differs_from_the_run(tmp_path: Path) -> None:
    run = play(tmp_path, "turned", Pace(forward_backward=3.0, steps=30))
    slow = play(tmp_path, "late", Pace(forward_backward=60.0, publish=500.0, steps=30))
    lines = (run.metrics_dir / "0001.jsonl").read_bytes().splitlines(keepends=True)
    other = (slow.metrics_dir / "0001.jsonl").read_bytes().splitlines(keepends=True)
    (run.metrics_dir / "0001.jsonl").write_bytes(b"".join([*lines[:25], *other[25:]]))
    _, now = read_windows(run)
    assert (now.first, now.last) == (25, 30)
    assert largest_side(now)[0] == "hand-off"


def stays(*parts: tuple[float, float, TimeHolder]) -> RolloutStays:
    found = tuple(Stay(begin, end, holder, "env") for begin, end, holder in parts)
    return RolloutStays(found[0].begin_s, found[-1].end_s, found)


def test_a_wait_is_shared_by_those_that_run() -> None:
    engine, judge = TimeHolder.ENGINES, TimeHolder.JUDGE
    rollouts = [stays((0, 4, engine)), stays((0, 2, engine), (2, 6, judge))]
    parts = wait_parts(1.0, 8.0, rollouts, HandoffTimes())
    # 1-2 both at engines; 2-4 one of each; 4-6 the judge alone; 6-8 all have ended
    assert parts == {(engine, "env"): 2.0, (judge, "env"): 3.0, (TimeHolder.BATCH, ""): 2.0}


def test_frozen_engines_and_rollouts_that_have_not_begun() -> None:
    rollouts = [stays((3, 6, TimeHolder.ENGINES))]
    handoff = HandoffTimes(frozen=[Interval(4, 5)], moving=[Interval(0, 2)], engines=2)
    parts = wait_parts(1.0, 6.0, rollouts, handoff)
    # 1-2 a version moves; 2-3 nothing of the batch runs; 3-6 an engine, of two one frozen for a second
    assert parts == {(TimeHolder.HAND_OFF, ""): 1.5, (TimeHolder.ADMISSION, ""): 1.0, (TimeHolder.ENGINES, "env"): 2.5}


def test_parts_always_add_up_to_the_wait() -> None:
    noise = random.Random(1)
    for _ in range(200):
        rollouts = []
        for _ in range(noise.randrange(1, 6)):
            edges = sorted(noise.uniform(-5, 5) for _ in range(4))
            pairs = itertools.pairwise(edges)
            rollouts.append(stays(*((a, b, noise.choice(list(TimeHolder))) for a, b in pairs)))
        spans = [Interval(*sorted((noise.uniform(-5, 5), noise.uniform(-5, 5)))) for _ in range(3)]
        begin = noise.uniform(-6, 4)
        end = begin + noise.uniform(0, 5)
        parts = wait_parts(begin, end, rollouts, HandoffTimes(spans, spans[:2], 2))
        assert sum(parts.values()) == pytest.approx(end - begin, abs=1e-9)
        assert min(parts.values(), default=0.0) >= 0.0


def test_waits_without_rollouts_on_record_are_unknown(tmp_path: Path) -> None:
    run = make_run(tmp_path, "old")
    write_steps(run, 12)
    whole, _ = read_windows(run)
    assert {part.name for part in whole.parts if part.side == "unknown"} == {"unknown"}
    assert whole.attributed == 0
    assert sum(part.seconds for part in whole.parts) == pytest.approx(whole.step_s)
    line = b'{"environment": "a", "ended_s": 5.0, "seconds": 1.0, "turns": []}'
    assert rollout_stays([line], sandboxed=frozenset(), delayed={}) is None
    assert rollout_stays([b'{"torn'], sandboxed=frozenset(), delayed={}) is None


def test_clocks_of_nodes_are_taken_off() -> None:
    line = json.dumps({"environment": "a", "ended_s": 105.0, "seconds": 2.0, "turns": [[1, 1, 0.5, 1.0]]}).encode()
    (found,) = rollout_stays([line], sandboxed=frozenset(), delayed={"a": 1.0}, ahead_s=100.0) or []
    assert [(round(s.begin_s, 6), round(s.end_s, 6), s.holder) for s in found.stays] == [
        (3.0, 3.5, TimeHolder.ENVIRONMENTS),
        (3.5, 4.5, TimeHolder.ENGINES),
        (4.5, 5.0, TimeHolder.ENVIRONMENTS),
    ]


def test_a_setting_is_predicted_as_another_run_has_it(tmp_path: Path) -> None:
    """The loop of the test, which the simulator was not made from, runs with the setting."""
    pace = Pace(tool=1.5, places=8, bound=8, batch=8, steps=40)
    run = play(tmp_path, "few", pace)
    more = play(tmp_path, "more", dataclasses.replace(pace, places=16))
    before, after = (read_windows(each)[0].step_s for each in (run, more))
    assert after < 0.7 * before
    settings = try_settings(run)
    tried = {each.change: each for each in settings.tried}
    assert tried["rollouts.max_in_flight=16"].step_s == pytest.approx(after, rel=0.2)
    assert tried["environment words twice as fast"].effect < -0.2
    # a change of no effect is in the document, and not in the table
    assert abs(tried["checkpoint.every_steps=40"].effect) < 0.03
    shown = {each.change for each in settings.noticed()}
    assert "rollouts.max_in_flight=16" in shown
    assert "checkpoint.every_steps=40" not in shown


def test_what_the_plan_predicts_is_shown(tmp_path: Path) -> None:
    run = play(tmp_path, "planned", Pace(tool=2.0))
    recipe, cluster = load_recipe("qwen3_30b_a3b").value, load_cluster("h200-28").value
    run.write_configuration(recipe, cluster, run.plan())
    report = slow_report(run)
    loop = make_outlook(recipe, cluster, load_site_calibration(cluster), find_facts(recipe)).loop
    assert loop is not None
    assert (report.plan.step_s, report.plan.bound) == (loop.step_s, loop.bound)
    assert f"bound by {loop.bound}" in report.lines[2]
    # the recorded rollouts are of another environment than the recipe has now
    assert "do not say how long environment" in report.settings.because
    assert "what would help is unknown" in report.lines[2]


def test_a_run_without_enough_steps_says_what_is_unknown(tmp_path: Path) -> None:
    run = play(tmp_path, "short", Pace(steps=5))
    assert "steps" in try_settings(run).because
    with pytest.raises(UsageError, match="no step yet"):
        read_windows(make_run(tmp_path, "new"))


def test_the_command_says_it_in_three_lines_and_a_table(
    tmp_path: Path, hpcrl: Hpcrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path))
    run = play(tmp_path, "slow", Pace(tool=3.0))
    code, out, _ = hpcrl("why", "slow", "--slow")
    lines = out.splitlines()
    assert code == 0
    assert "bound by environments" in lines[0]
    assert lines[1].startswith("now, steps ")
    assert lines[2].startswith("plan: none, cluster profile local describes no hardware; shorter with rollouts.max_in")
    assert lines[3] == ""
    assert max(map(len, lines[3:])) <= 100
    total = next(line for line in lines if line.startswith("all "))
    assert "100.0%" in total
    assert "the table has those of at least 3%," in " ".join(out.split())
    code, out, _ = hpcrl("why", "slow", "--slow", "--json")
    document = json.loads(out)
    assert (document["schema"], document["bound"]) == ("hpcrl.why_slow/1", "environments")
    metrics = read_metrics(run)[3:]
    mean = sum(sum(record.phases_s.values()) for record in metrics) / len(metrics)
    assert document["over_run"]["step_s"] == pytest.approx(mean)
    code, _, err = hpcrl("why", "slow", "--slow", "--events")
    assert code == 2
    assert "exclude each other" in err
