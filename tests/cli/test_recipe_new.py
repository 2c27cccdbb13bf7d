"""``hpcrl recipe new``: six answers, by options or on a terminal, make a recipe that is accepted."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import patience, wait_for
from start_models import TINY_CONFIG, write_tiny_model

from hpcrl.cli.main import main
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.table import check_rules

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = {"--model": "tiny", "--task": "words", "--cluster": "local", "--size": "0", "--steps": "8", "--goal": "try"}
New = Callable[..., tuple[int, str, str]]


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> New:
    """The command in a directory of its own; options replace those of `ANSWERS`."""
    monkeypatch.chdir(tmp_path)

    def call(file: str = "mine.yaml", **changed: str) -> tuple[int, str, str]:
        options = {**ANSWERS, **{f"--{key}": value for key, value in changed.items()}}
        words = [word for option, value in options.items() for word in (option, value)]
        return run("recipe", "new", file, *words)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpcrl", *words])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    call.run = run  # type: ignore[attr-defined]
    return call


def test_options_alone_make_a_recipe_that_check_accepts(new: New) -> None:
    code, out, err = new()
    assert (code, out) == (0, "mine.yaml\n"), err
    assert "hpcrl warmup mine.yaml" in err
    recipe = load_recipe("mine.yaml").value
    assert (recipe.name, recipe.trainer.steps, recipe.environments[0].kind) == ("mine", 8, "words")
    assert recipe.model.warmup is not None
    code, out, err = new.run("recipe", "check", "mine.yaml")  # type: ignore[attr-defined]
    assert code == 0, err
    assert "mine.yaml: good on local" in out
    before = Path("mine.yaml").read_text()
    code, _, err = new(steps="9")
    assert (code, "exists; nothing was changed" in err) == (2, True)
    assert Path("mine.yaml").read_text() == before


@pytest.mark.parametrize(
    ("name", "text", "kind", "columns"),
    [
        ("a.jsonl", '{"question": "1+1?", "answer": "so it is\\n#### 2"}\n', "numeric", ("question", "answer")),
        ("b.csv", "problem,solution\n1+1?,2\n", "numeric", ("problem", "solution")),
        ("c.tsv", "prompt\tanswer\nhow?\tso\n", "exact", ("prompt", "answer")),
    ],
)
def test_columns_and_checker_of_a_file_are_read_from_its_first_row(
    name: str, text: str, kind: str, columns: tuple[str, str], new: New
) -> None:
    # the held-out share is chosen by a hash: of a few rows it may be none
    rows = text.splitlines()
    head, row = ("", rows[0]) if name.endswith("jsonl") else (f"{rows[0]}\n", rows[1])
    old = "how?" if "how?" in row else "1+1?"
    Path(name).write_text(head + "".join(row.replace(old, f"{number} {old}") + "\n" for number in range(60)))
    code, _, err = new(task=name)
    assert code == 0, err
    (environment,) = load_recipe("mine.yaml").value.environments
    assert (environment.columns.prompt, environment.columns.answer) == columns
    assert [reward.kind for reward in environment.rewards] == [kind]


def test_a_first_row_that_is_nested_too_deeply_is_named(new: New) -> None:
    Path("deep.jsonl").write_text("[" * 100_000)
    code, _, err = new(task="deep.jsonl")
    assert code == 2
    assert "deep.jsonl: its first row cannot be read" in err


def test_nodes_of_a_site_are_shared_between_trainer_and_engines(new: New) -> None:
    write_tiny_model(
        Path("model"), {**TINY_CONFIG, "num_experts": 16, "num_attention_heads": 8, "num_key_value_heads": 8}
    )
    for size, nodes, ranks, replicas, placement in ((1, 1, 4, 1, "shared_node"), (5, 2, 16, 3, "apart")):
        file = f"size{size}.yaml"
        code, _, err = new(file, model="model", cluster="h200-28", size=str(size), task="calculator", goal="train")
        assert code == 0, err
        recipe = load_recipe(file).value
        shape = (recipe.trainer.nodes, recipe.trainer.ranks, recipe.engine.replicas, recipe.engine.placement)
        assert shape == (nodes, ranks, replicas, placement)


def test_a_node_of_one_gpu_is_used_by_both(new: New) -> None:
    write_tiny_model(Path("model"), TINY_CONFIG)
    Path("card.yaml").write_text(
        "extends: h200-28\nname: card\npartitions:\n  gpu:\n    nodes: 1\n"
        "    node: {gpus: 1, nics: [{name: mlx5_0, gb_s: 50}]}\n"
    )
    code, _, err = new(model="model", cluster="card.yaml", size="1", task="calculator", goal="train")
    assert code == 0, err
    recipe = load_recipe("mine.yaml")
    assert (recipe.value.trainer.ranks, recipe.value.engine.placement) == (1, "shared_gpus")
    assert recipe.value.engine.memory.gpu_memory_utilization < 0.5
    check_rules(recipe, load_cluster("card.yaml"))


def test_a_goal_of_comparing_ends_with_a_sweep(new: New) -> None:
    code, _, err = new(goal="compare")
    assert code == 0
    assert "hpcrl submit mine.yaml --grid trainer.optimizer.learning_rate=" in err
    assert load_recipe("mine.yaml").value.evaluation.prompts == 256


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"task": "poems"}, "is not a task"),
        ({"task": "no.jsonl"}, "there is no file no.jsonl"),
        ({"task": "nowhere:Thing"}, "cannot be imported"),
        ({"goal": "win"}, "is not a goal"),
        ({"cluster": "nowhere"}, "nowhere"),
        ({"cluster": "h200-28", "size": "0"}, "0 nodes are too few"),
        ({"cluster": "h200-28", "size": "1000"}, "1000"),
    ],
)
def test_an_answer_that_cannot_be_used_writes_nothing(changed: dict[str, str], words: str, new: New) -> None:
    code, _, err = new(**changed)
    assert code in (2, 3)
    assert words in err
    assert "hint: " in err
    assert not list(Path.cwd().iterdir())


def test_without_a_terminal_the_missing_options_are_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpcrl", "recipe", "new", "mine.yaml", "--model", "tiny", "--size", "0"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "add --task --cluster --steps --goal" in done.stderr
    assert not list(tmp_path.iterdir())


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, directory: Path) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-P", "-m", "hpcrl", "recipe", "new", "mine.yaml"]
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + 60.0 * patience()
        while words not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self._master], [], [], 0.2)[0]:
                self.text += os.read(self._master, 4096).decode()

    def answer(self, question: str, text: str) -> None:
        self.wait_for(question)
        self.text = ""
        os.write(self._master, f"{text}\n".encode())

    def end(self) -> int:
        code = self.process.wait(60.0 * patience())
        os.close(self._master)
        return code


def test_six_questions_on_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    terminal.answer("Model", "")
    terminal.answer("[words]: ", "words:sort")
    terminal.answer("Cluster profile", "")
    terminal.answer("GPUs", "0")
    terminal.answer("Optimizer steps", "0")
    terminal.answer("at least 1", "12")
    terminal.answer("[try]: ", "")
    terminal.wait_for("hpcrl submit mine.yaml")
    assert terminal.end() == 0
    recipe = load_recipe(str(tmp_path / "mine.yaml")).value
    assert (recipe.environments[0].name, recipe.trainer.steps) == ("sort", 12)


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    terminal.answer("Model", "")
    terminal.wait_for("[words]: ")
    # one that comes between the question and the read of its answer is seen at the next
    wait_for(lambda: terminal.process.send_signal(signal.SIGINT) or terminal.process.poll(), 60.0, "its end")
    assert terminal.end() != 0
    assert not list(tmp_path.iterdir())
