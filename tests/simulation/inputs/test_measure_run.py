"""Durations measured from a run directory whose times are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scenes import local, recipe, scenario
from typer.testing import CliRunner

from hpcrl.cli.main import app
from hpcrl.errors import ConfigError, UsageError
from hpcrl.jobplan import make_plan
from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.runs.consumed import first_step, shared_name
from hpcrl.runs.events import EventWriter
from hpcrl.runs.metrics import MetricsWriter, StepRecord
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.simulation import make_scenario, simulate
from hpcrl.simulation.inputs.durations import load_durations
from hpcrl.simulation.inputs.evidence import read_evidence
from hpcrl.simulation.inputs.measure import measure

OVERHEAD, PER_TOKEN, TOOL = 0.02, 0.003, 0.25
STEP_S, FORWARD, OPTIMIZER, PUBLISH, OTHER = 2.0, 0.4, 0.1, 0.05, 0.01


def write_run(path: Path, *, steps: int = 20, turns: bool = True) -> RunDir:
    """Rollouts one after the other, each of two requests with a tool between them; the trainer works between them."""
    run, config = RunDir(path), recipe()
    path.mkdir()
    run.write_configuration(config, local(), make_plan(config, local(), path.name, path))
    run.rollouts_dir.mkdir()
    metrics, events = MetricsWriter(run, 1), EventWriter(run, attempt=1, writer="orchestrator-0")
    for step in range(1, steps + 1):
        begin_s = 1000.0 + step * STEP_S
        tokens, lines, now = 100 + 10 * step, [], begin_s
        for member in range(2):
            asked = [(0.0, 12, 5 + step), (TOOL, 4, 10 + member)]
            recorded = [(said, sampled, wait, OVERHEAD + PER_TOKEN * sampled) for wait, said, sampled in asked]
            seconds = sum(wait + reply for _, _, wait, reply in recorded)
            now += seconds
            line = {"environment": ("reverse", "calculator")[member], "seconds": seconds, "ended_s": now}
            said, sampled = (sum(turn[i] for turn in recorded) for i in (0, 1))
            line |= {"tokens": said + sampled, "sampled_tokens": sampled}
            lines.append(json.dumps({**line, **({"turns": recorded} if turns else {})}))
        (run.rollouts_dir / f"step-{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
        phases = {
            "wait_batch": 1.0,
            "forward_backward": FORWARD * tokens / 100,
            "optimizer": OPTIMIZER,
            "publish": PUBLISH,
            "checkpoint": 0.0,
            "other": OTHER,
        }
        metrics.write(_record(step, tokens, begin_s + STEP_S, phases))
    events.close()
    metrics.close()
    return run


def _record(step: int, tokens: int, time_s: float, phases_s: dict[str, float]) -> StepRecord:
    return StepRecord(
        time_s=time_s,
        attempt=1,
        step=step,
        reward_mean=0.0,
        reward_std=0.0,
        reward_by_env={},
        reward_parts={},
        loss=0.0,
        entropy=0.0,
        mismatch_kl=0.0,
        mismatch_kl_by_lag={},
        masked_share=0.0,
        ess=1.0,
        staleness_mean=0.0,
        staleness_max=0,
        staleness_histogram={"0": 2},
        tokens=tokens,
        sampled_tokens=tokens,
        tokens_per_s=1.0,
        grad_norm=0.0,
        learning_rate=0.0,
        phases_s=phases_s,
        rollouts={"finished": 2.0 * step, "dropped_environment": 0.0, "zero_variance_groups": 0.0},
    )


def test_service_times_are_found(tmp_path: Path) -> None:
    found = measure(write_run(tmp_path / "run"))
    assert found.engine.request_overhead_s == pytest.approx(OVERHEAD, rel=0.05)
    # one request at a time: what a token costs cannot be split into base and sequence
    per_token = found.engine.step_base_s + found.engine.step_per_sequence_s
    assert per_token == pytest.approx(PER_TOKEN, rel=0.05)
    assert found.trainer.forward_backward_per_token_s * 100 == pytest.approx(FORWARD, rel=0.3)
    assert found.trainer.optimizer_s.kind == "samples"
    trace = found.environment("calculator").trace
    assert {len(rollout.turns) for rollout in trace} == {2}
    assert trace[0].turns[1].wait_s == pytest.approx(TOOL, rel=0.05)
    assert [turn.said for turn in trace[0].turns] == [12, 4]


def test_a_branch_continues_after_its_shared_tokens(tmp_path: Path) -> None:
    """The second request of one environment begins a branch; later ones are of it, and one of the first sequence."""
    run = write_run(tmp_path / "run")
    for path in run.rollouts_dir.iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines[1:]:
            first, second = line["turns"]
            line["turns"] = [[*first, 0, 0], [*second, 1, 9], [3, 2, 0.0, 0.0, 1, 0], [1, 2, 0.0, 0.0, 0, 0]]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = measure(run)
    assert {turn.kept for rollout in found.environment("reverse").trace for turn in rollout.turns} == {-1}
    for rollout in found.environment("calculator").trace:
        first = rollout.turns[0]
        assert [turn.kept for turn in rollout.turns] == [-1, 9, -1, first.said + first.sampled]
        # two requests as one: the context is that of the branch
        assert [turn.kept for turn in rollout.merged(2, 0.0).turns] == [9, first.said + first.sampled]


def test_sequences_that_are_left_are_trained_and_take_no_context(tmp_path: Path) -> None:
    """With room for one sequence of each alone; the tokens of a step are those of both."""
    branch = {"turns": [[0.0, 30, 20], [0.0, 5, 20, 20]]}
    made = {"engine.max_model_len": 64, "trainer.micro_batch_tokens": 64}
    settings = [f"{name}={value}" for name, value in made.items()]
    result = simulate(scenario(*settings, days=0.002, environments={"*": {"trace": [branch]}}))
    assert result.steps > 3
    assert result.tokens_per_step == 16 * (50 + 45)


def test_what_was_measured_can_be_simulated(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    result = simulate(make_scenario(recipe("rollouts.max_in_flight=16"), local(), measure(run), days=0.001))
    assert result.steps > 5
    assert result.rollout_s.p50 > TOOL


def test_several_runs_are_measured_as_one(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("one", "two")]
    assert len(measure(*runs).environment("reverse").trace) == 2 * len(measure(runs[0]).environment("reverse").trace)


def test_one_file_says_what_a_run_measured(tmp_path: Path) -> None:
    """What `hpcrl plan calibrate` writes is for the planner and for the simulator."""
    run, path = write_run(tmp_path / "one"), tmp_path / "mine.yaml"
    RunRecord.new(run, name="one", provenance={}).write(run)
    calibrating = ["plan", "calibrate", str(run.path), "-o", str(path)]
    result = CliRunner().invoke(app, calibrating, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert load_calibration(path).measured[0].run == "one"
    assert load_durations(path) == measure(run)
    path.write_text(path.read_text().replace("overhead_s: ", "overhead_seconds: "))
    with pytest.raises(ConfigError) as caught:
        load_durations(path)
    assert [finding.key for finding in caught.value.findings] == ["durations.engine.request_overhead_seconds"]


def test_a_run_that_says_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 4 steps"):
        measure(write_run(tmp_path / "short", steps=4))
    with pytest.raises(UsageError, match="how long each request took"):
        measure(write_run(tmp_path / "old", turns=False))


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[: len(line) // 2],  # torn where its writer was killed
        lambda line: line.replace(b'"seconds": ', b'"seconds": null, "was": '),
        lambda line: line.replace(b'"ended_s": ', b'"ended_s": NaN, "was": '),
        lambda line: line.replace(b'"turns": [[', b'"turns": [[null, "12", '),
        lambda line: b'"no object"',
        lambda line: b"[" * 100_000,
    ],
)
def test_a_damaged_line_of_a_rollout_costs_that_rollout(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    run = write_run(tmp_path / "run")
    path = run.rollouts_dir / "step-000012.jsonl"
    first, last = path.read_bytes().splitlines()
    path.write_bytes(first + b"\n" + damage(last))
    found = read_evidence(run)
    assert len(found.rollouts) == 2 * len(found.steps) - 1
    assert measure(run).trainer.optimizer_s.kind == "samples"


def test_a_shared_file_of_rollouts_that_is_damaged_costs_its_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=24)
    whole = len(read_evidence(run).rollouts)
    (run.rollouts_dir / "step-000012.jsonl").unlink()
    (run.rollouts_dir / shared_name(first_step(12))).write_bytes(b"\x1f\x8b no gzip")
    assert len(read_evidence(run).rollouts) == whole - 2
