"""Values of sweeps: grids, samples, seeds, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from hpcrl.config.load import load_recipe
from hpcrl.errors import ConfigError
from hpcrl.runs.views.swept_words import short_names, value_words
from hpcrl.sweeps.space import MAX_MEMBERS, overrides_of, sweep_points

RATE = "trainer.optimizer.learning_rate"


def test_a_grid_is_every_combination_in_order() -> None:
    points = sweep_points(grid=[f"{RATE}=1e-6,3e-6", "rollouts.group_size=4,8,16"])
    assert [(float(p[RATE]), int(p["rollouts.group_size"])) for p in points] == [
        (rate, size) for rate in (1e-6, 3e-6) for size in (4, 8, 16)
    ]


def test_values_reach_the_recipe_as_they_were_written() -> None:
    for point in sweep_points(grid=[f"{RATE}=1e-6,0.25", "name=a-b,'c'", "trainer.steps=3,7"]):
        recipe = load_recipe("quickstart", overrides_of(point)).value
        assert recipe.trainer.optimizer.learning_rate == float(point[RATE])
        assert recipe.name == json.loads(point["name"])
        assert recipe.trainer.steps == int(point["trainer.steps"])


def test_brackets_and_quotes_keep_commas_together() -> None:
    points = sweep_points(grid=["a=[1,2],[3]", 'b="x,y",{c: 1}'])
    assert [json.loads(point["a"]) for point in points] == [[1, 2], [1, 2], [3], [3]]
    assert [json.loads(point["b"]) for point in points[:2]] == ["x,y", {"c": 1}]


def test_seeds_replicate_each_setting_from_the_recipes_own_seed_on() -> None:
    points = sweep_points(grid=["a=1,2"], seeds=3, first_seed=10)
    assert [(p["a"], p["seed"]) for p in points] == [(a, str(seed)) for a in "12" for seed in (10, 11, 12)]


def test_samples_are_the_same_each_time_and_inside_their_bounds() -> None:
    samples = ["a=loguniform(1e-7,1e-5)", "b=uniform(-1,1)", "c=int_uniform(2,4)", "d=choice(x,y)"]
    code = f"from hpcrl.sweeps.space import sweep_points; print(sweep_points(samples={samples!r}, count=200))"
    # another process has another hash of texts
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    points = sweep_points(samples=samples, count=200)
    assert printed.strip() == str(points)
    rates = [float(point["a"]) for point in points]
    assert all(1e-7 <= rate <= 1e-5 for rate in rates)
    # half of the draws of a log-uniform number are below the geometric mean of its bounds
    below = sum(rate < math.sqrt(1e-7 * 1e-5) for rate in rates)
    assert 70 <= below <= 130
    assert {json.loads(point["c"]) for point in points} == {2, 3, 4}
    assert {json.loads(point["d"]) for point in points} == {"x", "y"}
    assert all(len(point["a"].partition("e")[0].replace(".", "")) <= 4 for point in points)
    assert sweep_points(samples=samples, count=200, sample_seed=1) != points


def test_no_point_is_drawn_twice() -> None:
    """Another run of it would have the same seed, and its results would count as those of another seed."""
    points = sweep_points(samples=["a=choice(1,2)", "b=int_uniform(1,3)"], count=6)
    assert sorted((point["a"], point["b"]) for point in points) == [(a, b) for a in "12" for b in "123"]


def test_each_sample_is_combined_with_the_grid() -> None:
    points = sweep_points(grid=["a=1,2"], samples=["b=uniform(0,1)"], count=3)
    assert [point["a"] for point in points] == ["1", "2"] * 3
    assert [point["b"] for point in points[::2]] == [point["b"] for point in points[1::2]]
    assert len({point["b"] for point in points}) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grid": ["a"]}, "has no key or no '='"),
        ({"grid": ["a=1"]}, "has one value, 1"),
        ({"grid": ["a=[1,2,3]"]}, "separate values by commas"),
        ({"grid": ["a=1,2", "a=3,4"]}, "is given twice"),
        ({"grid": ["a=1,1"]}, "--seeds N"),
        ({"grid": ["a=1,1.0"]}, "--seeds N"),
        ({"grid": ["a={b: 1},{b: 2}", "a.b=3,4"]}, "would set again what the sweep sets as a"),
        ({"grid": ["a.b=3,4"], "samples": ["a=choice({b: 1},{b: 2})"], "count": 2}, "would set again"),
        ({"grid": ["a=1,.nan"]}, "not a finite number"),
        ({"grid": ["a={,1"]}, "not a YAML value"),
        ({"grid": ["a=1,2"], "samples": ["a=uniform(1,2)"], "count": 2}, "is in --grid as well"),
        ({"grid": ["a.b=1,2"], "fixed": ["a.b=3"]}, "would set again"),
        ({"grid": ["a.b=1,2"], "fixed": ["a={b: 1}"]}, "would set again"),
        ({"grid": ["seed=1,2"], "seeds": 2}, "is set by another option as well"),
        ({"samples": ["a=uniform(1,2)"]}, "add --random N"),
        ({"count": 3}, "there is nothing to sample"),
        ({"samples": ["a=normal(0,1)"], "count": 2}, "known are uniform(...), loguniform(...)"),
        ({"samples": ["a=uniform(2,1)"], "count": 2}, "LOW must be less than HIGH"),
        ({"samples": ["a=uniform(1)"], "count": 2}, "two numbers are needed"),
        ({"samples": ["a=loguniform(0,1)"], "count": 2}, "must be positive"),
        ({"samples": ["a=int_uniform(0.5,2)"], "count": 2}, "whole numbers"),
        ({"samples": ["a=choice(1)"], "count": 2}, "two values or more"),
        ({"samples": ["a=choice(1,2)", "b=int_uniform(1,3)"], "count": 7}, "6 different ones were found"),
    ],
)
def test_what_is_wrong_is_named_with_a_hint(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep_points(**options)
    assert words in str(caught.value)
    assert "hint: " in str(caught.value)


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        sweep_points(grid=["a", "b=1"], samples=["c=no(1)"], count=1)
    assert [finding.key for finding in caught.value.findings] == ["a", "b", "c"]


def test_the_number_of_members_is_bounded_before_anything_is_drawn() -> None:
    assert len(sweep_points(grid=["a=1,2"], seeds=MAX_MEMBERS // 2)) == MAX_MEMBERS
    with pytest.raises(ConfigError, match="2,000,000,000 runs; the maximum is 256"):
        sweep_points(samples=["a=uniform(0,1)"], count=10**9, seeds=2)


def test_columns_have_short_and_unique_names() -> None:
    assert short_names([RATE, "seed"]) == {RATE: "learning_rate", "seed": "seed"}
    names = short_names(["a.b.rate", "c.b.rate", "d.xrate"])
    assert names == {"a.b.rate": "a.b.rate", "c.b.rate": "c.b.rate", "d.xrate": "xrate"}
    assert [value_words(text) for text in ('"a b"', "3e-06", "[1, 2]", "true")] == ["a b", "3e-06", "[1, 2]", "true"]
