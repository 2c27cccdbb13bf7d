"""Runs side by side, from files as roles write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from runs_testing import START_S, Hpcrl, make_run, step_record, write_event, write_status

from hpcrl.analysis.comparison.compared import Comparison, compare_runs
from hpcrl.analysis.comparison.comparison_table import comparison_lines
from hpcrl.analysis.comparison.noise import (
    Bounded,
    difference_interval,
    pooled_interval,
    student_quantile,
    wilson_interval,
)
from hpcrl.errors import UsageError
from hpcrl.runs.metrics import MetricsWriter
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.snapshot import Checkout, Snapshot
from hpcrl.runs.status import RunState
from hpcrl.storage.files import write_json

REWARDS = {0: 0.1, 4: 0.3, 8: 0.6, 12: 0.8}


def trained(
    root: Path,
    name: str,
    *,
    rewards: Mapping[int, float] = REWARDS,
    steps: int = 12,
    tokens: int = 1000,
    rate: float | None = None,
    seed: int = 0,
    step_s: float = 100.0,
    commit: str | None = "a" * 40,
) -> RunDir:
    """A run that has ended: ``step_s`` seconds a step from the start of its supervisor on."""
    run = make_run(root, name, steps=steps)
    recipe = run.recipe()
    optimizer = recipe.trainer.optimizer
    if rate is not None:
        optimizer = optimizer.model_copy(update={"learning_rate": rate})
    trainer = recipe.trainer.model_copy(update={"optimizer": optimizer})
    run.write_configuration(recipe.model_copy(update={"seed": seed, "trainer": trainer}), run.cluster(), run.plan())
    write_status(run, RunState.COMPLETED)
    writer = MetricsWriter(run, 1)
    for step in range(1, steps + 1):
        counters = {"started": 20.0 * step, "finished": 18.0 * step, "dropped_stale": 2.0 * step, "dropped_engine": 0.0}
        time_s = START_S + step_s * step
        writer.write(msgspec.structs.replace(step_record(step), tokens=tokens, time_s=time_s, rollouts=counters))
    writer.close()
    write_event(run, "run.state", time_s=START_S, writer="supervisor", state="STARTING")
    write_event(run, "run.state", time_s=START_S + step_s * steps, writer="supervisor", state="COMPLETED")
    for version, reward in rewards.items():
        time_s = START_S + step_s * version
        write_event(
            run, "evaluation", time_s=time_s, writer="orchestrator-0", version=version, reward=reward, prompts=64
        )
    if commit is not None:
        snapshot = Snapshot(
            taken_at_s=START_S,
            hpcrl_version="1.0",
            hpcrl_path="/hpcrl",
            hpcrl_sha256="f" * 64,
            checkout=Checkout(commit=commit, dirty=False, diff_sha256=""),
            python="3.11.2",
            packages={"/python": {"torch": "2.13.0"}},
            environments={},
            recipe_sha256="",
            cluster_sha256="",
        )
        (run.snapshots_dir / "0001").mkdir(parents=True)
        write_json(run.snapshots_dir / "0001/snapshot.json", snapshot)
    return run


def differing(found: Comparison) -> dict[str, list[str]]:
    return {each.key: each.values for each in found.differences}


def test_intervals_agree_with_published_tables() -> None:
    quantiles = [round(student_quantile(freedom), 3) for freedom in (1, 2, 3, 4, 10, 29)]
    assert quantiles == [12.706, 4.303, 3.182, 2.776, 2.228, 2.045]
    assert round(student_quantile(5, 0.99), 3) == 4.032
    low, high = wilson_interval(0.8, 10) or (0, 0)
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)
    # Newcombe 1998, table II, method 10: 56/70 - 48/80
    first, second = Bounded(48 / 80, *wilson_interval(48 / 80, 80)), Bounded(56 / 70, *wilson_interval(56 / 70, 70))  # type: ignore[misc]
    low, high = difference_interval(first, second)
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)
    assert wilson_interval(1.2, 10) is None
    assert wilson_interval(0.5, 0) is None


def test_a_pooled_interval_needs_two_runs_on_one_side() -> None:
    assert pooled_interval([0.1], [0.5]) is None
    low, high, freedom = pooled_interval([0.1, 0.3], [0.6]) or (0, 0, 0)
    assert freedom == 1
    # mean 0.2, spread 0.1414, half width 12.706 * 0.1414 * sqrt(1.5)
    assert (low + high) / 2 == pytest.approx(0.4)
    assert high - low == pytest.approx(2 * 12.7062 * 0.141421 * 1.224745, rel=1e-4)


def test_rewards_are_compared_at_equal_cost(tmp_path: Path) -> None:
    first = trained(tmp_path, "first")
    # twice the tokens of a step in half of the time
    second = trained(tmp_path, "second", tokens=2000, step_s=50.0, rewards={0: 0.1, 4: 0.5, 8: 0.7}, rate=3e-6)
    found = compare_runs([first, second], reward=0.6)
    steps, tokens, hours = found.equal
    assert (steps.axis, steps.at, [point.reward for point in steps.points if point]) == ("steps", 8, [0.6, 0.7])
    # the first has seen 12,000 tokens at its last evaluation, the second 16,000
    assert (tokens.axis, tokens.at) == ("tokens", 12_000)
    assert [(p.step, p.reward, p.tokens) for p in tokens.points if p] == [(12, 0.8, 12_000), (4, 0.5, 8000)]
    # the profile has no GPUs
    assert (hours.axis, hours.at) == ("hours", pytest.approx(400 / 3600))
    assert [p.step for p in hours.points if p] == [4, 8]
    assert found.reward is not None
    assert [(p.step, p.tokens, round(3600 * (p.hours or 0))) for p in found.reward.points if p] == [
        (8, 8000, 800),
        (8, 16_000, 400),
    ]
    assert differing(found) == {
        "recipe.trainer.optimizer.learning_rate": [str(first.recipe().trainer.optimizer.learning_rate), "3e-06"]
    }
    assert [run.drops for run in found.runs] == [{"too old when finished": 24}] * 2
    assert [run.started for run in found.runs] == [240, 240]


def test_one_run_each_is_compared_with_the_noise_of_evaluation(tmp_path: Path) -> None:
    base = trained(tmp_path, "base")
    same = trained(tmp_path, "same", rewards={0: 0.1, 12: 0.75}, rate=3e-6)
    better = trained(tmp_path, "better", rewards={0: 0.1, 12: 0.99}, rate=5e-6)
    near, far = compare_runs([base, same, better]).noise
    assert (near.first, near.second, near.step, near.more_than_noise) == (["A"], ["B"], 12, False)
    assert (far.second, far.more_than_noise, far.noise) == (["C"], True, "evaluation")
    assert far.difference == pytest.approx(0.19)
    assert "64 rollouts" in far.method
    assert "1 run and 1 run" in far.method


def test_seeds_tell_the_noise_of_training(tmp_path: Path) -> None:
    runs = [trained(tmp_path, f"a{seed}", seed=seed, rewards={12: 0.5 + 0.1 * seed}) for seed in (0, 1)]
    runs += [trained(tmp_path, f"b{seed}", seed=seed, rewards={12: 0.55 + 0.1 * seed}, rate=3e-6) for seed in (0, 1)]
    found = compare_runs(runs)
    assert found.replicates == [["A", "B"], ["C", "D"]]
    (verdict,) = found.noise
    assert (verdict.noise, verdict.more_than_noise) == ("seeds", False)
    assert "2 runs and 2 runs" in verdict.method
    # a spread of 0.02 between seeds instead of 0.1, and four times the difference
    runs = [trained(tmp_path, f"c{seed}", seed=seed, rewards={12: 0.50 + 0.02 * seed}) for seed in (0, 1)]
    runs += [trained(tmp_path, f"d{seed}", seed=seed, rewards={12: 0.70 + 0.02 * seed}, rate=3e-6) for seed in (0, 1)]
    (verdict,) = compare_runs(runs).noise
    assert verdict.more_than_noise
    assert verdict.difference == pytest.approx(0.2)


def test_a_run_of_other_code_does_not_count_as_a_replicate(tmp_path: Path) -> None:
    runs = [trained(tmp_path, "a", seed=0), trained(tmp_path, "b", seed=1, commit="b" * 40)]
    found = compare_runs(runs)
    assert found.replicates == [["A"], ["B"]]
    assert differing(found) == {"recipe.seed": ["0", "1"], "code.commit": ["a" * 12, "b" * 12]}


def test_unknown_is_named(tmp_path: Path) -> None:
    known = trained(tmp_path, "known")
    bare = make_run(tmp_path, "bare")
    found = compare_runs([known, bare])
    assert found.runs[1].drops is None
    assert [point is None for equal in found.equal for point in equal.points].count(False) == 0
    assert found.noise[0].more_than_noise is None
    assert any(note.startswith("B: no held-out evaluation") for note in found.notes)
    assert any("hours are unknown" in note for note in found.notes)
    text = "\n".join(comparison_lines(found))
    assert "B - A: unknown" in text
    # a run without a snapshot does not say which packages it had: that is no difference
    assert not any(key.startswith("package.") for key in differing(found))


def test_rewards_outside_of_0_to_1_have_no_interval(tmp_path: Path) -> None:
    run = trained(tmp_path, "whole")
    other = trained(tmp_path, "other", rate=3e-6)
    run.rollouts_dir.mkdir(exist_ok=True)
    (run.rollouts_dir / "step-000012.jsonl").write_text('{"reward": 3.5}\n')
    found = compare_runs([run, other])
    assert {point.interval for point in found.runs[0].points} == {""}
    assert {point.interval for point in found.runs[1].points} == {"Wilson"}
    assert found.noise[0].more_than_noise is None


def test_sets_have_the_intervals_that_were_recorded(tmp_path: Path) -> None:
    runs = [trained(tmp_path, name) for name in ("a", "b")]
    for run, value in zip(runs, (0.4, 0.9), strict=True):
        mean = {"value": value, "low": value - 0.05, "high": value + 0.05, "prompts": 200}
        write_event(
            run, "evaluation.set", time_s=START_S + 900, writer="orchestrator-0", set="hard", version=8, mean=mean
        )
    found = compare_runs(runs, heldout="hard")
    assert [[(p.step, p.low, p.interval, p.count) for p in run.points] for run in found.runs] == [
        [(8, pytest.approx(0.35), "bootstrap", 200)],
        [(8, pytest.approx(0.85), "bootstrap", 200)],
    ]
    with pytest.raises(UsageError, match="it has hard"):
        compare_runs(runs, heldout="easy")


def test_faults_and_attempts_are_counted(tmp_path: Path) -> None:
    run, other = trained(tmp_path, "faulty"), trained(tmp_path, "calm")
    for restart in (1, 2):
        write_event(run, "component.restarting", time_s=START_S + restart, role="engine", replica=0, restart=restart)
    write_status(run, RunState.COMPLETED)
    found = compare_runs([run, other])
    assert found.runs[0].faults == {"replica restarted": 2}
    assert [each.attempts for each in found.runs] == [2, 1]


def test_missing_records_leave_tokens_unknown(tmp_path: Path) -> None:
    run, other = trained(tmp_path, "torn"), trained(tmp_path, "whole")
    path = run.metrics_dir / "0001.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[6:]))  # the record of step 6 is gone
    found = compare_runs([run, other])
    assert [point.tokens for point in found.runs[0].points] == [0, 4000, None, None]
    assert found.runs[0].tokens is None
    assert "tokens of some steps are unknown" in "\n".join(found.notes)


def test_the_command_prints_a_table_of_100_columns(
    tmp_path: Path, hpcrl: Hpcrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path))
    names = [f"a-run-with-a-very-long-name-{number}-" + "x" * 60 for number in range(5)]
    for number, name in enumerate(names):
        trained(tmp_path, name, rate=1e-6 * (number + 1))
    code, out, err = hpcrl("compare", *names, "--reward", "0.8")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    assert out.count("learning_rate") == 2  # four runs next to each other, and the fifth below
    assert "steps to 0.800" in out
    code, out, _ = hpcrl("compare", *names[:2], "--json")
    document = json.loads(out)
    assert document["schema"] == "hpcrl.compare/1"
    assert [run["label"] for run in document["runs"]] == ["A", "B"]
    assert document["equal"][0]["points"][0]["count"] == 64


def with_tags(run: RunDir, created_at_s: float, *tags: str) -> None:
    record = RunRecord.read(run)
    msgspec.structs.replace(record, tags=list(tags), created_at_s=created_at_s).write(run)


def test_runs_with_a_tag_are_compared_from_the_oldest_on(
    tmp_path: Path, hpcrl: Hpcrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path))
    for name, created_at_s, tags in (
        ("young", 30.0, ["night", "wide"]),
        ("old", 10.0, ["night", "wide"]),
        ("middle", 20.0, ["night"]),
        ("other", 15.0, ["day"]),
    ):
        with_tags(trained(tmp_path, name), created_at_s, *tags)

    def compared(*arguments: str) -> list[str]:
        code, out, err = hpcrl("compare", *arguments, "--json")
        assert (code, err) == (0, "")
        return [run["name"] for run in json.loads(out)["runs"]]

    assert compared("--tag", "night") == ["old", "middle", "young"]
    assert compared("--tag", "night", "--tag", "wide") == ["old", "young"]
    # a run that is named comes first, and counts once
    assert compared("young", "other", "--tag", "night") == ["young", "other", "old", "middle"]
    code, _, err = hpcrl("compare", "--tag", "never")
    assert code == 2
    assert "no run has the tag never" in err
    code, _, err = hpcrl("compare", "--tag", "day")
    assert code == 2
    assert "two runs or more" in err
    # a run that cannot be read is named, and does not stop the others
    (tmp_path / "other/run.json").write_text("{}")
    code, _, err = hpcrl("compare", "--tag", "night")
    assert code == 0
    assert "other is left out: " in err


def test_other_words_lead_to_it(tmp_path: Path, hpcrl: Hpcrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path))
    trained(tmp_path, "only")
    code, _, err = hpcrl("compare", "only", "only")
    assert code != 0
    assert "two runs or more" in err
    code, _, err = hpcrl("diff", "only")
    assert code == 2
    assert "Did you mean 'compare'" in err
