"""Calibration files: the shipped one, one of a site, and one made from a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hpcrl.config.cluster import LocalCluster, PathsConfig
from hpcrl.config.plan import FileProbe, Plan, Role, RoleGroup, RolePolicy
from hpcrl.config.recipe import ModelConfig, Recipe, RolloutConfig, TrainerConfig, WordsEnv
from hpcrl.errors import ConfigError, UsageError
from hpcrl.planning.calibration.calibration_file import ConstantName, EfficiencyName, load_calibration
from hpcrl.planning.fit_calibration import calibrate, calibration_yaml
from hpcrl.planning.report import make_outlook
from hpcrl.runs.metrics import MetricsWriter, StepRecord
from hpcrl.runs.rundir import RunDir


def test_the_shipped_file_has_every_number_with_a_source() -> None:
    calibration = load_calibration()
    assert set(calibration.efficiencies) == set(EfficiencyName.__args__)  # type: ignore[attr-defined]
    assert set(calibration.constants) == set(ConstantName.__args__)  # type: ignore[attr-defined]
    assert all(
        len(entry.source) > 10 for entry in (*calibration.efficiencies.values(), *calibration.constants.values())
    )


def test_a_file_of_a_site_has_priority(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("format_version: 1\nefficiencies:\n  nic: {value: 0.5, source: our fabric}\n")
    calibration = load_calibration(path)
    assert calibration.share("nic") == 0.5
    assert calibration.share("pcie") == load_calibration().share("pcie")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("efficiencies:\n  nic: {value: 1.5, source: a}\n", "at most 1"),
        ("efficiencies:\n  nic: {value: 0.5}\n", "source"),
        ("efficiencies:\n  nics: {value: 0.5, source: a}\n", "nics"),
        ("workloads:\n  swe: {source: a, prompt_tokens: 5, tokens: {sigma: 1}}\n", "median or values"),
    ],
)
def test_what_is_wrong_is_reported(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        load_calibration(path)
    with pytest.raises(UsageError, match="calibrate RUN"):
        load_calibration(tmp_path / "none.yaml")


def make_run(root: Path, steps: int) -> RunDir:
    """A run of 2 s of training, 3 s of waiting and 1,000 tokens a step."""
    run = RunDir(root / "run-1")
    run.path.mkdir()
    recipe = Recipe(
        name="words",
        model=ModelConfig(path="/nowhere"),
        environments=(WordsEnv(name="words", kind="words"),),
        rollouts=RolloutConfig(rollouts_per_step=10, group_size=5, max_in_flight=20),
        trainer=TrainerConfig(steps=steps),
    )
    group = RoleGroup(
        role=Role.TRAINER,
        replicas=1,
        ranks=1,
        command=("true",),
        ready=FileProbe(),
        start_timeout_s=1.0,
        policy=RolePolicy(stop_timeout_s=1.0),
    )
    plan = Plan(
        run="run-1",
        recipe="words",
        cluster="local",
        run_dir=run.path,
        groups=(group,),
        first_port=20000,
        last_port=20009,
        time_limit_s=60.0,
    )
    run.write_configuration(
        recipe, LocalCluster(name="local", kind="local", paths=PathsConfig(runs_root=str(root))), plan
    )
    writer = MetricsWriter(run, 1)
    for step in range(1, steps + 1):
        writer.write(_record(step))
    writer.close()
    run.rollouts_dir.mkdir()
    line = {
        "environment": "words",
        "tokens": 100,
        "sampled_tokens": 40,
        "seconds": 4.5,
        "turns": [[50, 20, 0.0, 1.0], [10, 20, 0.5, 1.0]],
    }
    (run.rollouts_dir / "step-000001.jsonl").write_text("\n".join([json.dumps(line)] * 10) + '\n{"torn')
    return run


def _record(step: int) -> StepRecord:
    phases = {"wait_batch": 3.0, "forward_backward": 2.0, "optimizer": 0.1, "publish": 0.2, "other": 0.0}
    zero = dict.fromkeys(
        (
            "reward_mean",
            "reward_std",
            "loss",
            "entropy",
            "mismatch_kl",
            "masked_share",
            "ess",
            "staleness_mean",
            "grad_norm",
            "learning_rate",
        ),
        0.0,
    )
    return StepRecord(
        **zero,
        time_s=float(step),
        attempt=1,
        step=step,
        reward_by_env={},
        reward_parts={},
        mismatch_kl_by_lag={},
        staleness_max=0,
        staleness_histogram={},
        tokens=1000,
        sampled_tokens=400,
        tokens_per_s=200.0,
        phases_s=phases,
        rollouts={},
    )


def test_a_run_gives_a_file_that_predicts_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, 20)
    path = tmp_path / "mine.yaml"
    path.write_text(calibration_yaml(calibrate(run, None)))
    assert yaml.safe_load(path.read_text())["measured"][0]["train_s_per_token"] == pytest.approx(0.002)
    calibration = load_calibration(path)
    workload = calibration.workloads["words"]
    assert (workload.prompt_tokens, workload.turns, workload.sampled_share) == (50.0, 2.0, pytest.approx(0.8))
    assert workload.judge_s is not None
    assert workload.judge_s.values[0] == pytest.approx(2.0)
    outlook = make_outlook(run.recipe(), run.cluster(), calibration, "not there")
    assert outlook.loop is not None
    assert outlook.loop.trainer_s == pytest.approx(2.3, rel=0.02)
    # 400 tokens in 5.3 s: engines are the slower side
    assert outlook.loop.step_s == pytest.approx(5.3, rel=0.15)
    assert outlook.loop.bound == "rollouts"


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="let it run longer"):
        calibrate(make_run(tmp_path, 5), None)
