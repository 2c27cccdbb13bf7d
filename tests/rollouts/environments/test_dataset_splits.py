"""No question is trained on and held out; which one is which depends on the question alone."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dataset_testing import OneReply, asked, config_of, make_dataset, questions, write_jsonl

from hpcrl.config.load import load_recipe
from hpcrl.errors import ConfigError
from hpcrl.rollouts.environments import trial
from hpcrl.rollouts.environments.dataset.partition import read_partition


def both(path: Path, **changes: Any) -> tuple[set[str], set[str]]:
    environment = make_dataset(path, **changes)
    return {*asked(environment, "train", 500)}, {*asked(environment, "heldout", 500)}


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_a_share_is_held_out_by_the_question(tmp_path: Path, share: float) -> None:
    rows = questions(400)
    train, held_out = both(write_jsonl(tmp_path / "q.jsonl", rows), held_out_share=share)
    assert not train & held_out
    assert train | held_out == {row["prompt"] for row in rows}
    assert abs(len(held_out) - 400 * share) < 25
    # more rows move no question to the other side
    more = questions(450)
    train_of_more, held_out_of_more = both(write_jsonl(tmp_path / "more.jsonl", more), held_out_share=share)
    assert train < train_of_more
    assert held_out < held_out_of_more


def test_nothing_depends_on_the_order_of_rows(tmp_path: Path) -> None:
    rows = [*questions(100), {"prompt": "What is 5 plus 1?", "answer": "six"}]
    here = make_dataset(write_jsonl(tmp_path / "q.jsonl", rows))
    random.Random(1).shuffle(rows)
    there = make_dataset(write_jsonl(tmp_path / "shuffled.jsonl", rows))
    for split in ("train", "heldout"):
        assert [here.prompt(split, i) for i in range(120)] == [there.prompt(split, i) for i in range(120)]


def test_nothing_depends_on_the_process(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{**row, "d": str(i % 3)} for i, row in enumerate(questions(60))])
    config = config_of(path, columns={"difficulty": "d"}, curriculum={"weights": {"0": 1, "1": 3, "2": 0.5}})
    code = """
import json, sys
from hpcrl.rollouts.environments.dataset import make
environment = make(json.loads(sys.argv[1]))
print([environment.prompt(split, i).messages for split in ("train", "heldout") for i in range(50)])
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", code, config.model_dump_json()],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert "plus" in printed.pop()


def test_equal_questions_are_on_one_side_and_named(tmp_path: Path) -> None:
    rows = questions(60)
    again = [{**row, "prompt": f"\tWhat  is\n{row['prompt'][8:]} "} for row in rows]
    path = write_jsonl(tmp_path / "q.jsonl", rows + again)
    environment = make_dataset(path, held_out_share=0.5)
    train, held_out = ({" ".join(p.split()) for p in asked(environment, split, 200)} for split in ("train", "heldout"))
    assert not train & held_out
    assert len(train | held_out) == 60
    (note,) = environment.notes
    assert note.startswith("60 rows are duplicates, and are used more often: line ")


def test_rows_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    rows = [*questions(30), {"prompt": "What is 3  plus 1?", "answer": "5"}]
    rows += [rows[0], rows[1]]
    notes = make_dataset(write_jsonl(tmp_path / "q.jsonl", rows)).notes
    assert any("1 rows have the prompt of another row, with another answer: line" in note for note in notes)
    assert any("are duplicates" in note and "line 32" in note for note in notes)


def test_a_split_by_a_column(tmp_path: Path) -> None:
    rows = [{**row, "split": ("train", "test", "dev", "extra")[i % 4]} for i, row in enumerate(questions(40))]
    rows.append({**rows[1], "split": "train", "prompt": " " + rows[1]["prompt"]})
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    environment = make_dataset(path, split_column="split", held_out_values=["test", "dev"])
    train, held_out = ({*asked(environment, split, 99)} for split in ("train", "heldout"))
    assert train == {row["prompt"] for row in rows if row["split"] == "train"} - {rows[-1]["prompt"]}
    assert held_out == {row["prompt"] for row in rows if row["split"] in ("test", "dev")}
    assert environment.notes == [
        "10 rows are neither for training nor held out, by split: 10 with extra",
        "1 training rows have the prompt of a held-out row, and are excluded from training: line 41 as held-out line 2",
    ]
    with pytest.raises(ConfigError, match=r"split_column: .*gives no held-out question"):
        make_dataset(path, split_column="split", held_out_values=["validation"])


def test_a_file_of_its_own_is_held_out(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", questions(20))
    held_out = write_jsonl(tmp_path / "test.jsonl", questions(25)[18:])
    environment = make_dataset(train, held_out_path=str(held_out))
    assert {*asked(environment, "train", 40)} == {row["prompt"] for row in questions(18)}
    assert {*asked(environment, "heldout", 40)} == {row["prompt"] for row in questions(25)[18:]}
    (note,) = environment.notes
    assert note.startswith("2 training rows have the prompt of a held-out row")
    assert "line 19 as held-out line 1" in note
    with pytest.raises(ConfigError, match=r"held_out_path: .*line 1: column 'prompt' does not exist"):
        make_dataset(train, held_out_path=str(write_jsonl(tmp_path / "bad.jsonl", [{"answer": 1}])))


def test_each_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = Path.open

    def counted(self: Path, *args: Any, **named: Any) -> Any:
        opened.append(self.name)
        return real(self, *args, **named)

    train = write_jsonl(tmp_path / "train.jsonl", questions(20))
    held_out = write_jsonl(tmp_path / "test.jsonl", questions(25)[20:])
    monkeypatch.setattr(Path, "open", counted)
    make_dataset(train, held_out_path=str(held_out))
    assert sorted(opened) == ["test.jsonl", "train.jsonl"]


def test_weights_by_difficulty(tmp_path: Path) -> None:
    rows = [{**row, "level": i % 4} for i, row in enumerate(questions(200))]
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    level = {row["prompt"]: row["level"] for row in rows}
    environment = make_dataset(path, columns={"difficulty": "level"}, curriculum={"weights": {"1": 3, "2": 1}})
    prompts = asked(environment, "train", 4000)
    shares = [sum(level[prompt] == each for prompt in prompts) / 4000 for each in range(4)]
    assert (shares[0], shares[3]) == (0, 0)
    assert abs(shares[1] - 0.75) < 0.03
    # all of a difficulty is asked
    assert {p for p in prompts if level[p] == 2} == {p for p in both(path)[0] if level[p] == 2}
    # held-out questions are those of every recipe on this file
    assert {*asked(environment, "heldout", 500)} == both(path)[1]
    assert any("training rows have a difficulty without a weight" in note for note in environment.notes)
    with pytest.raises(
        ConfigError, match=r"curriculum.weights: .*has the difficulty hard\n    hint: there are 0, 1, 2"
    ):
        make_dataset(path, columns={"difficulty": "level"}, curriculum={"weights": {"hard": 1}})


def test_a_filter_by_pass_rate(tmp_path: Path) -> None:
    rows = [{**row, "rate": i / 100} for i, row in enumerate(questions(101))]
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    bounds = {"min_pass_rate": 0.2, "max_pass_rate": 0.8}
    environment = make_dataset(path, columns={"pass_rate": "rate"}, curriculum=bounds)
    rate = {row["prompt"]: row["rate"] for row in rows}
    train, held_out = ({*asked(environment, split, 400)} for split in ("train", "heldout"))
    assert train == {p for p in rate if 0.2 <= rate[p] <= 0.8} - held_out
    assert held_out == both(path)[1]
    assert any("excluded by their pass rate" in note for note in environment.notes)
    for bad in ("1.5", "nan", "often"):
        rows[3]["rate"] = bad
        with pytest.raises(ConfigError, match=f"line 4: column 'rate' is {bad}, which is not a share"):
            make_dataset(write_jsonl(path, rows), columns={"pass_rate": "rate"}, curriculum=bounds)


def test_a_file_of_many_rows_takes_what_it_takes_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    with path.open("w") as stream:
        for i in range(20_000):
            stream.write(json.dumps({"prompt": f"What is {i} plus 1?", "answer": i + 1, "unread": "x" * 400}) + "\n")
    partition = read_partition(config_of(path))
    kept = sum(map(len, partition.train[""])) + sum(map(len, partition.held_out))
    assert kept < 20_000 * 80 < path.stat().st_size / 4


async def test_answers_of_the_example_earn_the_best_reward() -> None:
    root = Path(__file__).resolve().parents[3]
    recipe = yaml.safe_load((root / "docs/examples/questions/recipe.yaml").read_text(encoding="utf-8"))
    (config,) = recipe["environments"]
    path = root / config.pop("path")
    environment = make_dataset(path, *config.pop("rewards"), **config)
    rng = random.Random(0)
    for split, count in (("train", 18), ("heldout", 6)):
        for index in range(count):
            prompt = environment.prompt(split, index)  # type: ignore[arg-type]
            said = environment.demonstration(prompt, correct=True, rng=rng)[-1]["content"]
            assert (await environment.rollout(prompt, OneReply(said))).reward == pytest.approx(1.1)
    environment.close()


def test_a_wrong_demonstration_is_wrong(tmp_path: Path) -> None:
    """Of two answers each is right for half of the questions: a share of right demonstrations would be much more."""
    rows = [{"prompt": f"Is {i} even?", "answer": "no" if i % 2 else "yes"} for i in range(40)]
    environment = make_dataset(write_jsonl(tmp_path / "q.jsonl", rows))
    rng = random.Random(0)
    for index in range(20):
        prompt = environment.prompt("train", index)
        said = environment.demonstration(prompt, correct=False, rng=rng)[-1]["content"]
        assert {said, prompt.data.answer} == {"yes", "no"}
    environment.close()
    same = make_dataset(write_jsonl(tmp_path / "s.jsonl", [{**row, "answer": "yes"} for row in rows]))
    with pytest.raises(NotImplementedError, match="all rows have the same answer"):
        same.demonstration(same.prompt("train", 0), correct=False, rng=rng)
    same.close()


def test_a_benchmark_that_another_environment_trains_on_is_named(tmp_path: Path) -> None:
    rows = questions(30)
    again = {"prompt": " What is  3 plus\n1?", "answer": "4"}
    files = {
        "train": write_jsonl(tmp_path / "train.jsonl", rows[:20]),
        "test": write_jsonl(tmp_path / "test.jsonl", rows[20:25]),
        "benchmark": write_jsonl(tmp_path / "b.jsonl", [*rows[18:19], again]),
    }
    shared = {"kind": "dataset", "rewards": [{"kind": "exact"}]}
    sums = {"name": "sums", "path": str(files["train"]), "held_out_path": str(files["test"]), **shared}
    benchmark = {"name": "benchmark", "path": str(files["test"]), "held_out_path": str(files["benchmark"]), **shared}
    recipe = tmp_path / "recipe.yaml"
    for weight, expected in ((0, 1), (1, 2)):
        environments = [sums, {**benchmark, "weight": weight}]
        recipe.write_text(yaml.safe_dump({"extends": "quickstart", "environments": environments}))
        found = trial.check(load_recipe(str(recipe)).value)
        assert found["findings"] == []
        notes = [note for note in found["notes"] if "trains on" in note]
        assert len(notes) == expected
        assert "2 held-out rows of environment benchmark have a prompt that environment sums trains on: " in notes[-1]
        assert "line 2 as line 4" in notes[-1]


def test_questions_that_are_nearly_the_same_are_noted(tmp_path: Path) -> None:
    train = ["How many eggs?", "What is 1.5 - 2?", "What is 2*(3+4)?", "Say A.", "Is f(x) = 5!?"]
    held_out = [
        "how many\u200b eggs",
        "What is 15 - 2?",
        "What is (2*3)+4?",
        "say a",
        "Is f(x) = 5?",
        "What is 1.5 + 2?",
    ]
    files = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": each, "answer": "1"} for each in texts])
        for name, texts in (("train", train), ("held_out", held_out))
    ]
    partition = read_partition(config_of(files[0], held_out_path=str(files[1])))
    assert len(partition.train[""]) == len(train)
    assert len(partition.held_out) == len(held_out)
    assert partition.notes == [
        "2 held-out prompts differ from a training prompt only in case, punctuation or invisible characters: "
        + partition.notes[0].rpartition(": ")[2]
    ]
    assert {*partition.notes[0].rpartition(": ")[2].split(", ")} == {"line 1 as line 1", "line 4 as line 4"}
