"""Recipes and profiles mutated at random: every answer is for a person, and all commands give the same one."""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from start_models import write_tiny_model
from value_paths import paths_of

from hpcrl.cli.main import main
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.errors import HpcrlError
from hpcrl.submit.prepare import prepare

BUDGET_S = 40.0
#: texts of one value, as somebody may write it
ODD = (
    *("null", "~", "true", "no", "0", "-1", "1", "2", "3", "7", "8", "64", "010", "0x1F", "0o17", "1e400", "-.inf"),
    *(".nan", "9" * 400, "1_000", "12:30:45", "2024-13-45", "2024-01-31", "2001-12-14t21:59:43.10-05:00", "''"),
    *(
        "' '",
        '"\\0"',
        '"\\ud800"',
        '"\\e[31m"',
        "CHANGE_ME",
        "<change me>",
        "..",
        "/",
        "~",
        "$HOME",
        "[]",
        "{}",
        "[[]]",
    ),
    *("{a: {b: {c: d}}}", "[1, 2, 3]", "!!binary aGk=", "!!python/object:os.system x", "!!set {a}", "!!timestamp x"),
    *("&a [*a]", "*gone", "1e-3", "1.5", "0.0", "é", "日本", "x" * 5000, "9007199254740993", "-0.0", "1e308", "y"),
)
STARTS = ("quickstart", "quickstart_colocated", "quickstart_lora", "qwen3_30b_a3b", "glm5_swe", "low_memory")
SITES = ("local", "h200-28", "devcluster", "roce-h100", "pyxis-site")


def mutated(tree: dict[str, Any], rng: random.Random) -> str:
    """The text of a file with some of its values, keys or lines changed."""
    tree = json.loads(json.dumps(tree))
    marks: dict[str, str] = {}
    for number in range(rng.choice((1, 1, 1, 2, 3))):
        paths = list(paths_of(tree))
        path = rng.choice(paths)
        holder: Any = tree
        for part in path[:-1]:
            holder = holder[part]
        match rng.randrange(8):
            case 0 if isinstance(holder, dict):
                del holder[path[-1]]
            case 1 if isinstance(holder, dict):
                holder[rng.choice((f"{path[-1]}x", "kind", "name", "extends", "é", ""))] = holder.pop(path[-1])
            case 2:
                holder[path[-1]] = [holder[path[-1]]]
            case 3:
                holder[path[-1]] = rng.choice((0, 1, 2, 5, 7, 33, -1, 0.5, True, None, "x", 1 << 60))
            case 4 if isinstance(holder[path[-1]], int | float) and not isinstance(holder[path[-1]], bool):
                holder[path[-1]] = type(holder[path[-1]])(holder[path[-1]] * rng.choice((0, 0.5, 2, 3, 1000, -1)))
            case _:
                marks[f"MARK{number}"] = rng.choice(ODD)
                holder[path[-1]] = f"MARK{number}"
    text = yaml.safe_dump(tree, sort_keys=False)
    for mark, odd in marks.items():
        text = text.replace(mark, odd)
    if rng.random() < 0.1:
        text = rng.choice(("\ufeff", "---\n", "%YAML 1.1\n---\n", "# é\n")) + text
    if rng.random() < 0.05:
        text += rng.choice(("name: again\n", "\t\n", "...\n---\nx: 1\n", "? [a]\n: b\n", "[" * 3000, "a: &x {b: *x}\n"))
    return text


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The command line in this process, in a directory with a whole model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    write_tiny_model(tmp_path / "model")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
        return code, *capsys.readouterr()

    return call


def bases() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Packaged recipes and profiles with all their values written out."""
    recipes = [load_recipe(name).value.model_dump(mode="json") for name in STARTS]
    for recipe in recipes:
        recipe["environments"] = [env for env in recipe["environments"] if env["kind"] != "custom"] or [
            {"name": "reverse", "kind": "words", "task": "reverse"}
        ]
    return recipes, [load_cluster(name).value.model_dump(mode="json") for name in SITES]


@pytest.mark.campaign
def test_mutated_recipes_and_profiles(words: Callable[..., Any], tmp_path: Path) -> None:
    seed = int(os.environ.get("HPCRL_FUZZ_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"HPCRL_FUZZ_SEED={seed}")
    rng, (recipes, sites) = random.Random(seed), bases()
    deadline, tried, started, compared = time.monotonic() + BUDGET_S, 0, 0, 0
    said = list[str]()
    while time.monotonic() < deadline:
        recipe, site = tmp_path / "recipe.yaml", tmp_path / "site.yaml"
        base = dict(rng.choice(recipes))
        whole = rng.random() < 0.5
        if whole:
            base["model"] = {**base["model"], "path": "model"}
        place = {**rng.choice(sites), "name": "site"}
        damaged = rng.random()
        recipe.write_text(mutated(base, rng) if damaged < 0.7 else yaml.safe_dump(base), encoding="utf-8")
        site.write_text(mutated(place, rng) if damaged > 0.5 else yaml.safe_dump(place), encoding="utf-8")
        tried += 1
        case = f"seed {seed}, case {tried}:\n{recipe.read_text()[:3000]}\n--- site\n{site.read_text()[:2000]}"
        try:
            found = prepare(str(recipe), str(site), environ={}, cwd=tmp_path)
        except HpcrlError as error:
            said.append(str(error))
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n{case}") from error
        else:
            started += found.starts
            assert all(math.isfinite(len(each.what)) and each.what for each in found.problems), case
        if rng.random() < 0.15:
            compared += 1
            try:
                submit, _, refusal = words("submit", str(recipe), "-c", str(site), "--dry-run")
                check, *_ = words("recipe", "check", str(recipe), "-c", str(site))
                plan, out, _ = words("plan", str(recipe), "-c", str(site), "--json")
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}\n{case}") from error
            assert check == submit or "hpcrl warmup" in refusal, case
            if plan in (0, 3, 4) and out:
                starts = json.loads(out)["forecast"]["starts"]
                # a dry run does not ask Slurm, of which there is none here
                slurm = submit == 0 and {each["key"] for each in starts["problems"]} == {"job"}
                assert starts["ok"] == (submit == 0 and not slurm), f"{refusal}\n{case}"
    print(f"{tried} tried, {started} would start, {compared} compared")
    assert tried > 20
    assert compared
    assert all(text.strip() for text in said)
