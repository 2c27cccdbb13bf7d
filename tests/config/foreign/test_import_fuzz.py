"""Foreign files with values that nobody expects: each becomes a recipe or one refusal, and no number is made up."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hpcrl.cli.recipe_import import show_import
from hpcrl.config.foreign.foreign_settings import Outcome
from hpcrl.config.foreign.importing import import_recipe, known_keys
from hpcrl.errors import UsageError

FUZZ_S = 40.0
SYSTEMS = ("prime-rl", "verl", "nemo-rl", "slime")
_ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2.5, 10**30, math.nan, math.inf, -math.inf),
    *("", "abc", "1", "0", "-3", "1e400", "2024-13-01", "${x}", "\x1b[2J", "\n- a: [", "$HOME/x"),
    *([], [1], ["a", None], [{"id": "x"}], [[]], {}, {"id": 1}),
)


def refused(path: Path, name: str, text: str) -> str:
    (path / name).write_text(text)
    with pytest.raises(UsageError) as error:
        import_recipe(path / name)
    return str(error.value)


def test_deep_files_are_refused(tmp_path: Path) -> None:
    deep = "[" * 3000 + "]" * 3000
    assert "nested too deeply" in refused(tmp_path, "a.toml", f"max_steps = 3\nx = {deep}\n")
    assert "nested too deeply" in refused(tmp_path, "a.toml", f"max_steps = 3\n{'a.' * 3000}b = 1\n")


def test_references_that_stand_for_too_much_are_refused(tmp_path: Path) -> None:
    many = ", ".join(f"k{number}: '${{b}}'" for number in range(20))
    assert "references" in refused(tmp_path, "a.yaml", f"policy: {{a: '${{b}}'}}\ngrpo: {{}}\nb: {{{many}}}\n")


@pytest.mark.parametrize("name", ["2024-13-01", "run[", "{a", "[" * 2000, "!!python/object:os.system x"])
def test_a_word_that_yaml_cannot_read_is_text(tmp_path: Path, name: str) -> None:
    """A name in the arguments of a script, and the default of a reference."""
    words = f"trainer.experiment_name={name.replace(' ', '_')} data.max_prompt_length=8 actor_rollout_ref.rollout.n=4"
    (tmp_path / "a.sh").write_text(f"python -m verl.trainer.main_ppo {words}\n")
    values = {each.key: each.value for each in import_recipe(tmp_path / "a.sh").settings}
    assert values["trainer.experiment_name"] == name.replace(" ", "_")
    assert values["data.max_prompt_length"] == 8
    document = {"policy": {"model_name": f"${{oc.select:foo,{name.replace('}', '')}}}"}, "grpo": {}}
    (tmp_path / "a.yaml").write_text(json.dumps(document))
    if "}" not in name:
        values = {each.key: each.value for each in import_recipe(tmp_path / "a.yaml").settings}
        assert values["policy.model_name"] == name


def test_dates_of_toml_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[model]\nname = 07:32:00\n[orchestrator]\nbatch_size = 1979-05-27\nenv = [{id = "x", since = 1979-05-27}]\n'
    (tmp_path / "a.toml").write_text(text)
    made = import_recipe(tmp_path / "a.toml")
    assert yaml.safe_load(made.text("a.toml"))["model"]["path"] == "07:32:00"
    assert {each.key: each.outcome for each in made.settings}["orchestrator.batch_size"] is Outcome.LOST
    with pytest.raises(typer.Exit):  # the recipe lacks something
        show_import(tmp_path / "a.toml", None, None, as_json=True)
    assert json.loads(capsys.readouterr().out)["system"] == "prime-rl"


@pytest.mark.parametrize(
    ("name", "tree", "lost", "target"),
    [
        ("verl", {"actor_rollout_ref": {"rollout": {"n": "many"}}}, "actor_rollout_ref.rollout.n", "group_size"),
        ("verl", {"data": {"train_batch_size": math.inf}}, "data.train_batch_size", "rollouts_per_step"),
        ("verl", {"data": {"train_batch_size": 2.5}}, "data.train_batch_size", "rollouts_per_step"),
        ("nemo-rl", {"grpo": {"num_prompts_per_step": [4]}}, "grpo.num_prompts_per_step", "rollouts_per_step"),
        ("nemo-rl", {"loss_fn": {"reference_policy_kl_penalty": "a"}}, "loss_fn.reference_policy_kl_penalty", "kl:"),
        ("slime", {"kl-coef": math.nan}, "kl-coef", "kl:"),
        ("slime", {"rollout-batch-size": "1e400"}, "rollout-batch-size", "rollouts_per_step"),
        ("prime-rl", {"deployment": {"num_train_nodes": "2"}}, "", "ranks: 16"),
        ("prime-rl", {"deployment": {"num_train_nodes": "two"}}, "deployment.num_train_nodes", "ranks"),
    ],
)
def test_a_number_that_is_none_is_lost_and_not_made_up(
    tmp_path: Path, name: str, tree: dict[str, Any], lost: str, target: str
) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(tree))
    made = import_recipe(tmp_path / "a.yaml", name)  # type: ignore[arg-type]
    found = {each.key: each.outcome for each in made.settings}
    text = made.text("a.yaml").partition("\nname:")[2]
    if lost:
        assert found[lost] is Outcome.LOST
        assert target not in text
    else:
        assert target in text


def test_a_batch_of_nothing_divides_nothing(tmp_path: Path) -> None:
    for name, tree in (
        ("slime", {"rollout-batch-size": 8, "n-samples-per-prompt": 4, "global-batch-size": 0}),
        ("slime", {"rollout-batch-size": 8, "n-samples-per-prompt": 0}),
        (
            "nemo-rl",
            {
                "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4},
                "policy": {"train_global_batch_size": 0},
            },
        ),
    ):
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(tree))
        import_recipe(tmp_path / "a.yaml", name)  # type: ignore[arg-type]


def fuzz(path: Path, rng: random.Random, go_on: Callable[[], bool]) -> int:
    """Import trees of known keys with odd values; return their number."""
    count = 0
    # a file that `defaults` names and that does not exist is refused in words
    keys = {
        name: [key for key in known_keys(name) if not set("*?") & set(key) and key.split(".")[0] != "defaults"]
        for name in SYSTEMS
    }
    while go_on():
        count += 1
        name = rng.choice(SYSTEMS)
        chosen = rng.sample(keys[name], rng.choice((1, 2, 3, 30, 200)))
        tree: dict[str, Any] = {}
        for key in chosen:
            holder: Any = tree
            *sections, last = key.split(".") if name != "slime" else [key]
            for section in sections:
                below = holder.setdefault(section, {})
                holder = below if isinstance(below, dict) else {}
            holder[last] = copy.deepcopy(rng.choice(_ODD))  # a key below it may be chosen as well
        (path / "fuzzed.yaml").write_text(yaml.safe_dump(tree))
        try:
            made = import_recipe(path / "fuzzed.yaml", name)  # type: ignore[arg-type]
            assert isinstance(yaml.safe_load(made.text("fuzzed.yaml")), dict)
            assert len(made.settings) >= len(tree) > 0 or not tree
        except Exception as error:
            raise AssertionError(f"{name}: {tree}") from error
    return count


def test_odd_values_of_each_system(tmp_path: Path) -> None:
    left = iter(range(60))
    fuzz(tmp_path, random.Random(29), lambda: next(left, None) is not None)


@pytest.mark.campaign
def test_odd_values_for_a_minute(tmp_path: Path) -> None:
    seed = int(os.environ.get("HPCRL_FUZZ_SEED", str(random.SystemRandom().randrange(1 << 32))))
    until = time.monotonic() + FUZZ_S
    print(f"HPCRL_FUZZ_SEED={seed}: {fuzz(tmp_path, random.Random(seed), lambda: time.monotonic() < until)} files")
