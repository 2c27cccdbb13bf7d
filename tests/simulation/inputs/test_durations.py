"""Durations: files, distributions, and what is wrong with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random
from statistics import mean, median

import pytest
import yaml
from pydantic import TypeAdapter
from scenes import constant, durations

from hpcrl.errors import ConfigError
from hpcrl.planning.distributions import Distribution, drawer, mean_of
from hpcrl.simulation import load_durations, save_durations
from hpcrl.simulation.inputs.least_squares import least_squares
from hpcrl.simulation.inputs.timeline import Arrivals, Busy, Crowd, Interval, Kind

DOCS = Path(__file__).resolve().parents[3] / "docs/simulation.md"


@pytest.mark.parametrize(
    "value",
    [
        constant(3.0),
        {"kind": "lognormal", "median": 10.0, "sigma": 0.5},
        {"kind": "pareto", "minimum": 1.0, "alpha": 3.0},
        {"kind": "pareto", "minimum": 1.0, "alpha": 1.5, "maximum": 50.0},
        {"kind": "samples", "values": [1.0, 2.0, 9.0]},
        {"kind": "tail", "median": 0.3, "tail_share": 0.1, "tail_factor": 10.0},
    ],
)
def test_draws_have_the_mean(value: dict[str, object]) -> None:
    distribution = TypeAdapter[Distribution](Distribution).validate_python(value)
    draw = drawer(distribution, Random(3))
    values = [draw() for _ in range(60_000)]
    assert mean(values) == pytest.approx(mean_of(distribution), rel=0.03)
    if value["kind"] == "lognormal":
        assert median(values) == pytest.approx(10.0, rel=0.02)
    if value.get("maximum"):
        assert max(values) <= 50.0


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    before = durations()
    save_durations(before, tmp_path / "d.yaml")
    assert load_durations(tmp_path / "d.yaml") == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("environments: {}\n", "engine"),
        ("steps: 3\n", "steps"),
        ("environments:\n  '*': {turns: {kind: constant, value: 1}}\n", "prompt_tokens, sampled_tokens"),
        ("engine: {step_base_s: 0}\n", "step_base_s"),
        ("handoff: {load_s: {kind: pareto, minimum: 3, alpha: 2, maximum: 1}}\n", "below minimum"),
        ("handoff: {load_s: {kind: weibull}}\n", "load_s"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_durations(path)


def test_the_example_of_the_documentation_is_right(tmp_path: Path) -> None:
    text = DOCS.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    path = tmp_path / "d.yaml"
    path.write_text(text)
    assert load_durations(path).environment("swe").trace == ()
    assert yaml.safe_load(text)["version"] == 1


def test_least_squares_finds_coefficients_and_never_negative_ones() -> None:
    rng = Random(0)
    rows = [[1.0, rng.random(), rng.random()] for _ in range(200)]
    assert least_squares(rows, [2.0 + 3.0 * a + 4.0 * b for _, a, b in rows]) == pytest.approx([2.0, 3.0, 4.0])
    found = least_squares(rows, [2.0 + 3.0 * a - 4.0 * b for _, a, b in rows])
    assert found[2] == 0.0
    assert min(found) >= 0.0
    assert least_squares([[1.0, 1.0]] * 5, [2.0] * 5) == pytest.approx([2.0, 0.0])


def test_timelines_add_up() -> None:
    busy = Busy([Interval(0.0, 2.0), Interval(1.0, 3.0)])
    assert busy.integral(Interval(0.0, 3.0)) == pytest.approx(4.0)
    assert busy.mean(Interval(1.0, 2.0)) == pytest.approx(2.0)
    assert busy.integral(Interval(5.0, 9.0)) == 0.0
    assert Arrivals([(1.0, 5), (2.0, 7), (3.0, 9)]).tokens(Interval(1.0, 2.0)) == 12


def test_work_on_shared_cpus_is_shorter_alone() -> None:
    long, other, third = Interval(0.0, 4.0), Interval(1.0, 3.0), Interval(2.0, 3.0)
    crowd = Crowd([Kind([long]), Kind([other, third])], cpus=1.0)
    # 1 alone, 1 beside one, 1 beside two, 1 alone
    assert crowd.alone(long) == pytest.approx(1 + 1 / 2 + 1 / 3 + 1)
    assert crowd.alone(third) == pytest.approx(1 / 3)
    assert crowd.alone(Interval(5.0, 6.0)) == pytest.approx(1.0)
    # a kind of which one can work at a time counts once
    assert Crowd([Kind([long]), Kind([other, third], most=1.0)], cpus=1.0).alone(third) == pytest.approx(1 / 2)
    # and one interval may stand for several
    assert Crowd([Kind([long]), Kind([other], each=3.0)], cpus=1.0).alone(other) == pytest.approx(2 / 4)
    assert Crowd([Kind([long]), Kind([other, third])], cpus=0.0).alone(long) == pytest.approx(4.0)


def test_the_simulator_needs_no_heavy_package() -> None:
    code = "import sys, hpcrl.simulation, hpcrl.simulation.inputs.measure; print('\\n'.join(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(out) & {"torch", "numpy", "matplotlib", "aiohttp"}
