"""``hpcrl env check`` and ``hpcrl swe``: what is wrong with tasks is said before there is a run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from swe_lab import GOOD, SOURCE, make_task, make_tree

from hpcrl.cli.main import main
from hpcrl.config.recipe import Recipe
from hpcrl.rollouts.environments import Outcome
from hpcrl.rollouts.environments.task_check import check_tasks
from hpcrl.rollouts.environments.task_check import main as check_by_request
from hpcrl.sandboxes import SandboxStartError
from hpcrl.sandboxes.bubblewrap import find_bubblewrap
from hpcrl.sandboxes.limits_report import LimitsReport
from hpcrl.swe.diffs import make_diff
from hpcrl.swe.task import SweTask, write_tasks
from hpcrl.swe.trees import write_tar


def _write(directory: Path, tools: bytes, *tasks: SweTask) -> Path:
    try:
        find_bubblewrap()
    except SandboxStartError as error:
        pytest.skip(str(error))
    (directory / "trees").mkdir()
    tree = make_tree(tools)
    write_tar(directory / "trees/lengths.tar", {path: file for path, file in tree.items() if path[0] != "."})
    (directory / "tools.zip").write_bytes(tools)
    write_tasks(directory / "tasks.jsonl", tasks)
    return directory / "tasks.jsonl"


def _recipe(environment: dict[str, object]) -> Recipe:
    return Recipe.model_validate(
        {"name": "r", "model": {"path": "m"}, "environments": [{"name": "one", **environment}], "trainer": {"steps": 1}}
    )


HELD_OUT = make_task(id="other", split="heldout")


def test_good_tasks_are_good(tools: bytes, tmp_path: Path) -> None:
    tasks = _write(tmp_path, tools, make_task(split="train"), HELD_OUT)
    found = check_tasks(_recipe({"kind": "swe", "tasks": str(tasks)}), ["one"], 1)["one"]
    assert found["problems"] == []
    assert found["played"]["right"] == [1.0, 1.0]
    assert len(found["played"]) == 5
    assert all(rewards == [0.0] for name, rewards in found["played"].items() if name != "right")


def test_a_wrong_solution_and_a_task_without_a_bug_are_named(tools: bytes, tmp_path: Path) -> None:
    wrong = make_diff({SOURCE: "x"}, {SOURCE: "y"})
    easy = make_task(split="train", bug="", solution=make_diff({SOURCE: GOOD}, {SOURCE: "broken("}))
    found = check_tasks(_recipe({"kind": "swe", "tasks": str(_write(tmp_path, tools, easy, HELD_OUT))}), ["one"], 1)[
        "one"
    ]
    assert "task 0: an empty reply earns 1" in found["problems"]
    assert "task 0: the right answer earns 0" in found["problems"]
    write_tasks(tmp_path / "tasks.jsonl", [make_task(split="train", solution=wrong), HELD_OUT])
    found = check_tasks(_recipe({"kind": "swe", "tasks": str(tmp_path / "tasks.jsonl")}), ["one"], 1)["one"]
    assert "does not fit" in found["problems"][0]


def test_other_environments_are_checked_by_their_demonstrations() -> None:
    found = check_tasks(_recipe({"kind": "calculator"}), ["one"], 2)["one"]
    assert found["problems"] == []
    assert found["played"] == {"nothing": [0.0, 0.0], "right": [1.0, 1.0, 1.0, 1.0]}


def test_a_flaky_test_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = itertools.cycle([0.0, 1.0, 0.0])  # of an empty reply, and of two right answers

    async def changing(*_: object) -> Outcome:
        return Outcome(next(rewards))

    monkeypatch.setattr("hpcrl.rollouts.environments.calculator.CalculatorEnvironment.rollout", changing)
    found = check_tasks(_recipe({"kind": "calculator"}), ["one"], 1)["one"]
    assert found["problems"] == ["task 0: the right answer earns 1 and 0: it has a flaky test"]


def test_an_environment_that_cannot_be_made_has_an_exit_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "name: r\nmodel: {path: m}\ntrainer: {steps: 1}\n"
        f"environments: [{{name: mend, kind: swe, tasks: {tmp_path}/nothing.jsonl, try_before_submit: false}}]\n"
    )
    monkeypatch.setattr("sys.argv", ["hpcrl", "env", "check", str(recipe), "--tasks", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "mend: something is wrong\n  it cannot be made" in capsys.readouterr().out


def test_the_command_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "name: r\nmodel: {path: m}\nenvironments: [{name: sums, kind: calculator}]\ntrainer: {steps: 1}\n"
    )
    monkeypatch.setattr("sys.argv", ["hpcrl", "env", "check", str(recipe), "--tasks", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "sums: good\n  nothing: reward 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "tried"), [({"kind": "calculator"}, 0), ({"kind": "swe", "tasks": "nothing.jsonl"}, 1)]
)
def test_limits_are_tried_for_environments_with_sandboxes(
    environment: dict[str, object], tried: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[LimitsReport] = []

    async def report() -> LimitsReport:
        asked.append(LimitsReport("no bubblewrap"))
        return asked[-1]

    monkeypatch.setattr("hpcrl.rollouts.environments.task_check.limits_report", report)
    request = {"recipe": _recipe(environment).model_dump(mode="json"), "names": ["one"], "tasks": 1}
    (tmp_path / "request.json").write_text(json.dumps(request))
    check_by_request("tasks", str(tmp_path))
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert len(asked) == tried
    assert answer["limits"] == ({"problem": "no bubblewrap", "checks": []} if tried else None)
    assert answer["environments"]["one"]["made"] is not bool(tried)
    # of an environment that was not asked for nothing is tried
    (tmp_path / "request.json").write_text(json.dumps({**request, "names": []}))
    check_by_request("tasks", str(tmp_path))
    assert len(asked) == tried


def test_tasks_are_listed_shown_and_checked(
    tools: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, tools, make_task(), make_task(id="easy", bug="", solution=""))

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["hpcrl", "swe", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().out

    code, out = run("ls", str(tmp_path), "--json")
    assert code == 0
    assert [each["id"] for each in json.loads(out)["tasks"]] == ["lengths-1", "easy"]
    assert "lengths-1" in run("ls", str(tmp_path))[1]
    assert "+        result += parse(text)" in run("show", str(tmp_path), "lengths-1")[1]
    assert run("show", str(tmp_path), "missing")[0] == 2
    code, out = run("check", str(tmp_path), "lengths-1")
    assert code == 0
    assert out.startswith("lengths-1: right patch 1, no patch 0 (")
    code, out = run("check", str(tmp_path), "easy")
    assert code == 1
    assert "no patch gets 1" in out
