"""Questions from a file, by the commands: what `recipe check` and `env try` say of good and bad files."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from start_models import write_tiny_model

import hpcrl as hpcrl_package
from hpcrl.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
Hpcrl = Callable[..., tuple[int, str]]

RECIPE = """\
extends: quickstart
name: mine
environments:
  - name: sums
    kind: dataset
    path: questions.jsonl
    columns: {prompt: question}
    held_out_share: 0.25
    rewards:
      - {kind: numeric, extract: hashes}
      - {kind: function, name: brief, function: "brief_reward:score", weight: 0.5}
"""
MODULE = """\
def score(reply, answer, row):
    if not reply:
        raise LookupError("nothing to judge")
    return 1.0 / len(reply.splitlines())
"""


@pytest.fixture
def hpcrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Hpcrl:
    """A command beside a recipe and its questions; the exit code, and what it prints."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/brief_reward.py").write_text(MODULE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    rows = [{"question": f"What is {i} plus 2?", "answer": f"{i}+2\n#### {i + 2}"} for i in range(40)]
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, rows[0]]))
    (tmp_path / "model").mkdir()
    write_tiny_model(tmp_path / "model")
    # the interpreter that tries environments may have another checkout installed
    checkout = Path(hpcrl_package.__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}{os.pathsep}{checkout}")
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, **changes: object) -> tuple[int, str]:
        sets = [part for key, value in changes.items() for part in ("--set", f"environments.0.{key}={value}")]
        monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments, *sets])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        return code, out + err

    return call


def test_a_good_file_is_made_and_what_is_odd_is_a_note(hpcrl: Hpcrl) -> None:
    code, out = hpcrl("recipe", "check", "recipe.yaml")
    assert code == 0, out
    assert "1 of your environments made" in out
    assert "note: environment sums: 1 rows are duplicates, and are used more often: line " in out


def test_a_question_is_tried_with_its_answer(hpcrl: Hpcrl) -> None:
    code, out = hpcrl("env", "try", "recipe.yaml", "--task", "3")
    assert code == 1
    assert "reward 1.25, numeric 1, brief 0.5, unfinished 0" in out
    said = "rollout: environment 'sums' raised CheckerError: part 'brief' of the reward: LookupError: nothing to judge"
    assert said in out
    assert "brief_reward.py:3 in score" in out


def test_tools_of_a_row_are_shown_before_a_run(hpcrl: Hpcrl, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    rows = [{"question": f"{i} plus 2?", "t": tools, "answer": {"name": "add"}} for i in range(40)]
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = {"columns": "{prompt: question, tools: t}", "rewards": "[{kind: tool_call}]"}
    code, out = hpcrl("env", "try", "recipe.yaml", **changes)
    assert code == 0, out
    assert "tools\n  add\n" in out
    assert "none: the environment has no demonstrations" in out
    code, out = hpcrl("env", "check", "recipe.yaml", "--tasks", "2", **changes)
    assert code == 0, out
    assert "right" in out


def test_bad_rows_are_named_with_the_line_of_the_recipe(hpcrl: Hpcrl, tmp_path: Path) -> None:
    with (tmp_path / "questions.jsonl").open("a") as stream:
        stream.write('{"question": "\x07", "answer": "1"}\n{"question": "What?", "answer": "1"}\n')
    for command in (["recipe", "check"], ["env", "try"]):
        code, out = hpcrl(*command, "recipe.yaml", **{"rewards.0.extract_answer": "hashes"})
        assert code == 2
        assert "recipe.yaml:6: environments.sums.path: " in out
        assert "questions.jsonl, line 42: no JSON" in out
        assert "questions.jsonl, line 43: column 'answer' has no part 'hashes'" in out
        assert "\x07" not in out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "other.jsonl"}, "other.jsonl cannot be read: No such file or directory"),
        ({"rewards.1.function": "brief_reward:scores"}, "environments.sums.rewards.1: 'brief_reward' has no function"),
        ({"hub": "openai/gsm8k"}, "path and hub are given"),
        ({"held_out_path": "held_out.jsonl"}, "held_out_share and held_out_path are given"),
        ({"rewards.1.name": "numeric"}, "another part is called 'numeric'"),
        ({"template": "Solve it."}, "it names no column"),
        ({"template": "'{question'"}, "is not a template"),
        ({"curriculum": "{weights: {easy: 1}}"}, "columns.difficulty names no column"),
        ({"curriculum": "{min_pass_rate: 0.5}"}, "columns.pass_rate names no column"),
        ({"curriculum": "{min_pass_rate: 0.5, max_pass_rate: 0.2}"}, "0.5 is more than max_pass_rate 0.2"),
        ({"rewards": "[{kind: length, penalty: 1}]"}, "one of limit_tokens and limit_characters is given"),
        ({"rewards": "[{kind: format, pattern: '.*'}]"}, "no checker of the answer has a weight above 0"),
        ({"rewards": "[{kind: tool_call}]"}, "columns.tools names no column, so no reply calls a tool"),
        ({"kind": "harness", "command": "[x]", "columns": "{tools: t}"}, "a program offers its own tools"),
        (
            {"kind": "harness", "command": "[x]", "rewards": "[{kind: exact, name: timed_out}]"},
            "another part is called 'timed_out'",
        ),
        ({"rewards": "[{kind: regex, pattern: '('}]"}, "is not a regular expression"),
        ({"columns": "{prompt: text}"}, "column 'text' does not exist"),
        ({"revision": "main"}, "a revision is of a data set of the hub"),
        ({"columns": "{messages: m}", "template": "'{question}'"}, "columns.messages has the whole prompt"),
        ({"train_values": "[test]"}, "'test' is a value of train_values, too"),
    ],
)
def test_what_contradicts_itself_is_refused(hpcrl: Hpcrl, changes: dict[str, object], said: str) -> None:
    code, out = hpcrl("recipe", "check", "recipe.yaml", **changes)
    assert code == 2, out
    assert said in out, out
    # what a field itself refuses says what is wrong and no more
    assert "hint: " in out or said.startswith("is not a ")


def test_the_example_of_the_documentation(hpcrl: Hpcrl, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
    recipe = (ROOT / "docs/examples/questions/recipe.yaml").read_text(encoding="utf-8")
    lines = (ROOT / "docs/examples/questions/questions.jsonl").read_text(encoding="utf-8").splitlines()
    section = text.partition("## Questions from a file\n")[2]
    assert recipe.endswith(section.partition("```yaml\n")[2].partition("```")[0])
    assert section.partition("```json\n")[2].partition("\n")[0] in lines
    command, *wanted = re.search(r"    \$ hpcrl (.*)\n((?:    .*\n)+)", section).groups()  # type: ignore[union-attr]
    monkeypatch.chdir(ROOT)
    code, out = hpcrl(*command.split())
    assert code == 0
    assert out == textwrap.dedent(wanted[0])
