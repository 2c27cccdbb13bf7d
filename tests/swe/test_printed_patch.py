"""Patches that programs print, judged in real sandboxes; and the rows that such programs get."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_words import words_of
from swe_lab import PYTHON

from hpcrl.config.environments import HarnessEnv
from hpcrl.errors import UsageError
from hpcrl.rollouts.environments.harness.environment import HarnessEnvironment
from hpcrl.sandboxes import SandboxStartError
from hpcrl.swe.diffs import make_diff
from hpcrl.swe.judging.printed_patch import judge_printed_patch
from hpcrl.swe.making.exercises import write_exercises
from hpcrl.swe.task import SweTask, read_tasks


@pytest.fixture(scope="module")
def path(tools: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("printed") / "set"
    write_exercises(directory, tasks=32, seed=1, tools=tools, python=PYTHON)
    return directory / "tasks.jsonl"


@pytest.fixture(scope="module")
def task(path: Path) -> SweTask:
    return next(iter(read_tasks(path)))


@pytest.fixture(scope="module")
def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, path.with_name("rows.jsonl").read_text().splitlines())}


def test_rows_have_what_the_program_finds_and_no_solution(
    path: Path, task: SweTask, rows: dict[str, dict[str, Any]]
) -> None:
    assert rows.keys() == {each.id for each in read_tasks(path)}
    row = rows[task.id]
    assert row.keys() == {"prompt", "id", "split", "files"}
    assert (row["prompt"], row["split"]) == (task.instruction, task.split)
    assert "tests/test_modules.py" in row["files"]
    changed = {line[6:].strip() for line in task.solution.splitlines() if line.startswith("+++ b/")}
    wrong = [line[1:] for line in task.solution.splitlines() if line.startswith("-") and line[1:2] != "-"]
    assert {name for name in changed if any(line in row["files"][name].splitlines() for line in wrong)} == changed


@pytest.mark.slow
def test_the_right_patch_gets_1_and_others_0(path: Path, task: SweTask, rows: dict[str, dict[str, Any]]) -> None:
    def judged(patch: str) -> float:
        return judge_printed_patch(patch, task.id, rows[task.id], tasks=str(path))

    assert judged(task.solution) == 1.0
    # what an environment gives has lost the newlines at its ends
    assert judged(task.solution.strip("\n")) == 1.0
    assert judged("") == judged("no patch") == judged(task.bug) == 0.0
    files = rows[task.id]["files"]
    module = task.fail_to_pass[0].rpartition("_")[2] + ".py"
    blank = {module: files[module] + "\n\n\n# the end\n\n\n"}
    assert judged(make_diff({module: files[module]}, blank)) == 0.0
    tests = {"tests/test_modules.py": "def test_all():\n    pass\n"}
    assert judged(make_diff({name: files[name] for name in tests}, tests)) == 0.0
    assert judged(make_diff({"conftest.py": None}, {"conftest.py": "import os\nos._exit(0)\n"})) == 0.0
    with pytest.raises(UsageError, match="there is no task 'other'"):
        judge_printed_patch("", "other", {}, tasks=str(path))


@pytest.mark.slow
def test_limits_of_the_sandbox_are_arguments(path: Path, task: SweTask) -> None:
    """A repository without space is no failure of an agent."""
    assert judge_printed_patch(task.solution, task.id, {}, tasks=str(path), disk_gib=0.5, memory_gib=1) == 1.0
    with pytest.raises(SandboxStartError, match=r"has no space(.|\n)*raise disk_gib"):
        judge_printed_patch(task.solution, task.id, {}, tasks=str(path), disk_gib=1e-5)
    with pytest.raises(UsageError, match="disk_gib is 0"):
        judge_printed_patch(task.solution, task.id, {}, tasks=str(path), disk_gib=0)


@pytest.mark.slow
def test_a_killed_daemon_costs_no_judgement(path: Path, task: SweTask) -> None:
    assert judge_printed_patch(task.solution, task.id, {}, tasks=str(path)) == 1.0
    own = psutil.Process().children(recursive=True)
    daemons = [each for each in own if "hpcrl.sandboxes.daemon" in words_of(each)]
    assert daemons
    for each in daemons:
        each.send_signal(signal.SIGKILL)
    assert judge_printed_patch(task.solution, task.id, {}, tasks=str(path)) == 1.0


async def test_a_program_sees_no_answer(path: Path, tmp_path: Path) -> None:
    config = HarnessEnv.model_validate(
        {
            "name": "exercises",
            "kind": "harness",
            "path": str(path.with_name("rows.jsonl")),
            "split_column": "split",
            "held_out_values": ["heldout"],
            "columns": {"answer": "id"},
            "command": ["true"],
            "rewards": [
                {
                    "kind": "function",
                    "function": "hpcrl.swe.judging.printed_patch:judge_printed_patch",
                    "args": {"tasks": str(path)},
                }
            ],
        }
    )
    environment = HarnessEnvironment(config)
    try:
        told = json.loads(environment._task(environment.prompt("heldout", 0), 0))
    finally:
        await environment.aclose()
    assert told["row"].keys() == {"prompt", "split", "files"}
    assert told["row"]["split"] == "heldout"
