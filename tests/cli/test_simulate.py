"""``hpcrl simulate`` as people and programs call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpcrl.cli.main import app
from hpcrl.errors import UsageError
from hpcrl.simulation import SimulationResult

DURATIONS = """
version: 1
environments:
  "*":
    turns: {kind: constant, value: 2}
    prompt_tokens: {kind: constant, value: 12}
    sampled_tokens: {kind: lognormal, median: 10, sigma: 0.5}
    tool_s: {kind: pareto, minimum: 0.1, alpha: 1.5, maximum: 60}
engine: {step_base_s: 0.005, kv_tokens: 4096}
trainer: {forward_backward_per_token_s: 1e-4}
handoff: {load_s: {kind: constant, value: 0.1}}
"""


@pytest.fixture
def durations(tmp_path: Path) -> str:
    path = tmp_path / "durations.yaml"
    path.write_text(DURATIONS)
    return str(path)


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", "quickstart", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_has_the_documented_schema(durations: str) -> None:
    document = json.loads(call("--durations", durations, "--days", "0.0005", "--nodes", "2,4", "--json"))
    assert document["version"] == 1
    results = [SimulationResult.model_validate_json(json.dumps(result)) for result in document["results"]]
    assert [result.nodes for result in results] == [2, 4]
    assert all(result.steps for result in results)


def test_files_are_written(durations: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, saved = tmp_path / "out", tmp_path / "saved.yaml"
    text = call(
        "--durations", durations, "--days", "0.0005", "-o", str(out), "--mtbf-h", "1", "--save-durations", str(saved)
    )  # fmt: skip
    assert "node failures" in text
    assert SimulationResult.model_validate_json((out / "simulation-2.json").read_bytes()).mtbf_h == 1
    assert (out / "simulation-2.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(call("--durations", str(saved), "--days", "0.0005", "--json"))


def test_what_a_sample_stands_for_is_reported(durations: str) -> None:
    sampled = call("--durations", durations, "--days", "0.0005", "--nodes", "40", "--sample", "2")
    assert "40 nodes: 2 of 20 engines, with their share of the rollouts, stand for all" in sampled
    whole = call("--durations", durations, "--days", "0.0005", "--nodes", "4", "--sample", "0")
    assert "stand for all" not in whole


def test_without_durations_the_planner_gives_them() -> None:
    arguments = ["simulate", "glm5_swe", "-c", "h200-28", "--days", "0.02", "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    found = SimulationResult.model_validate_json(json.dumps(json.loads(result.stdout)["results"][0]))
    assert found.durations.startswith("predicted by the planner for glm5_swe on h200-28")
    assert found.steps
    assert 0 < found.engine.kv_peak < 1
    # so few steps say nothing about waiting; the plan's figures stand beside those that there are
    assert found.engines_wait is None
    text = CliRunner().invoke(app, arguments[:-1], catch_exceptions=False).stdout
    assert ["engines", "wait", "?"] in [line.split() for line in text.splitlines()]
    assert "too few steps to measure how long engines wait" in text
    assert "28.8 min simulated" in text
    assert "the same figures  hpcrl plan  simulated" in text


def test_a_calibration_is_for_predictions(durations: str) -> None:
    arguments = ["simulate", "quickstart", "--durations", durations, "--calibration", "mine.yaml"]
    with pytest.raises(UsageError, match="leave it out with --durations"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--durations FILE"),
        (("--nodes", "2;4"), "commas"),
        (("--mtbf-h", "-1"), "positive"),
        (("--days", "0"), "--days"),
    ],
)
def test_wrong_calls_name_the_hint(durations: str, arguments: tuple[str, ...], message: str) -> None:
    given = ("--durations", durations, *arguments) if arguments else ()
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(app, ["simulate", "quickstart", *given], catch_exceptions=False)
