"""The environment ``swe``: turns with tools in a real sandbox, and a judgement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_words import words_of
from swe_lab import BAD, GOOD, SOURCE, make_task, make_tree

from hpcrl.config.environments import SweEnv
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError
from hpcrl.rollouts.environments import Message, Reply, ToolCall, build_environments, hosted, prompt_of
from hpcrl.rollouts.environments.child import load
from hpcrl.rollouts.environments.messages import plain_messages, plain_tools
from hpcrl.rollouts.environments.swe.environment import SweEnvironment
from hpcrl.sandboxes import SandboxError, SandboxStartError
from hpcrl.sandboxes.bubblewrap import find_bubblewrap
from hpcrl.swe.task import write_tasks
from hpcrl.swe.trees import write_tar


class Scripted:
    """Says given turns, and keeps what it was told."""

    seed = 0

    def __init__(self, *turns: Reply) -> None:
        self.turns, self.told = list(turns), list[Message]()
        self.anew = 0

    async def reply(self, messages: Sequence[Message], *, anew: bool = False, within: int | None = None) -> Reply:
        self.told += plain_messages(messages)
        self.anew += anew
        return self.turns.pop(0)


def call(name: str, **arguments: Any) -> Reply:
    return Reply("", finished=True, calls=(ToolCall(name, arguments, "call-1"),))


DONE = Reply("done", finished=True)


@pytest.fixture(scope="session")
def task_set(tools: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("environment")
    (directory / "trees").mkdir()
    tree = make_tree(tools)
    write_tar(directory / "trees/lengths.tar", {path: file for path, file in tree.items() if path[0] != "."})
    (directory / "tools.zip").write_bytes(tools)
    write_tasks(
        directory / "tasks.jsonl",
        [make_task(split="train", difficulty=0.4), make_task(id="lengths-2", split="heldout")],
    )
    return directory


def config(task_set: Path, **more: Any) -> SweEnv:
    return SweEnv(name="mend", kind="swe", tasks=str(task_set / "tasks.jsonl"), **more)


@pytest.fixture
def command_timeout_s() -> float:
    """Return more seconds than a command of these tests takes on a busy machine."""
    return 30.0


@pytest.fixture
async def environment(task_set: Path, command_timeout_s: float) -> AsyncIterator[SweEnvironment]:
    try:
        find_bubblewrap()
    except SandboxStartError as error:
        pytest.skip(str(error))
    made = SweEnvironment(config(task_set, max_turns=4, command_timeout_s=command_timeout_s, max_output_characters=400))
    yield made
    await made.aclose()


async def test_it_is_made_as_in_a_run(task_set: Path) -> None:
    factory, args = config(task_set).call()
    environment = load(factory, args)
    prompt, held_out = environment.prompt("train", 5), environment.prompt("heldout", 0)
    assert (prompt.data.id, held_out.data.id) == ("lengths-1", "lengths-2")
    assert prompt.messages[-1]["content"] == "mend total and name"
    assert [tool["function"]["name"] for tool in plain_tools(prompt.tools)] == ["bash", "editor"]


def test_tests_keep_their_names_where_the_recipe_says_so(task_set: Path) -> None:
    for rename in (True, False):
        made = SweEnvironment(config(task_set, rename_tests=rename))
        assert made.prompt("train", 0).data.rename is rename


async def test_a_policy_that_mends_the_code_gets_one(environment: SweEnvironment) -> None:
    policy = Scripted(
        call("bash", command="python3 -m pytest -q -p no:cacheprovider 2>&1 | tail -5"),
        call("editor", action="replace", path=SOURCE, old="result -= parse(text)", new="result += parse(text)"),
        call("bash", command="sed -i 's/value > 1000/value >= 1000/' src/lengths/__init__.py && git status"),
        DONE,
    )
    outcome = await environment.rollout(environment.prompt("train", 0), policy)
    assert outcome.reward == 1.0, policy.told
    assert outcome.parts == {
        "fail_to_pass": 1.0,
        "pass_to_pass": 1.0,
        "judge_tampered": 0.0,
        "refused_changes": 0.0,
        "truncated": 0.0,
        "turns": 4.0,
        "summaries": 0.0,
        "command_timeouts": 0.0,
    }
    tests, edited, last = (message["content"] for message in policy.told if message["role"] == "tool")
    assert "3 failed, 6 passed" in tests
    assert "result += parse(text)" in edited
    assert "[exit code " in last


@pytest.mark.parametrize("command_timeout_s", [4.0])
async def test_tools_answer_what_cannot_be_done(environment: SweEnvironment) -> None:
    broken = ToolCall("bash", {}, "call-3", status="invalid_json", error="a quote is missing")
    policy = Scripted(
        Reply(
            "",
            finished=True,
            calls=(
                *(ToolCall("bash", {"command": command}, "c") for command in ("sleep 60", "seq 100000", "true")),
                ToolCall("bash", {"command": 3}, "c"),
                *(
                    ToolCall("editor", arguments, "c")
                    for arguments in (
                        {"action": "view", "path": "nowhere.py"},
                        {"action": "view", "path": SOURCE, "line": 3, "end_line": 3},
                        {"action": "replace", "path": SOURCE, "old": "e", "new": "f"},
                        {"action": "insert", "path": SOURCE, "line": 9999, "text": "x"},
                        {"action": "insert", "path": SOURCE, "line": 1, "text": "# new"},
                        {"action": "create", "path": "src/new/a.py", "text": "x = 1\n"},
                        {"action": "view", "path": "src/new/a.py"},
                    )
                ),
                broken,
            ),
        ),
        DONE,
    )
    outcome = await environment.rollout(environment.prompt("train", 0), policy)
    told = [message["content"] for message in policy.told if message["role"] == "tool"]
    assert told[0].endswith("[killed after 4 s]")
    assert "left out here" in told[1]
    assert len(told[1]) < 500
    assert told[2:5] == ["[no output]", "error: the argument 'command' is missing, or is not text", told[4]]
    assert told[4] == "error: there is no file nowhere.py"
    assert told[5] == "     3  import re"
    assert "occurs" in told[6]
    assert "lines" in told[7]
    assert "     2  # new" in told[8]
    assert told[9:11] == ["wrote src/new/a.py", "     1  x = 1\n     2  "]
    assert "not valid JSON" in told[11] or "no valid JSON" in told[11]
    assert (outcome.reward, outcome.parts["command_timeouts"]) == (0.0, 1.0)


async def test_limits_end_a_rollout_that_is_judged_as_it_stands(environment: SweEnvironment) -> None:
    right = call("editor", action="create", path=SOURCE, text=GOOD)
    outcome = await environment.rollout(
        environment.prompt("train", 0), Scripted(right, *[call("bash", command="true")] * 9)
    )
    assert (outcome.reward, outcome.parts["truncated"], outcome.parts["turns"]) == (1.0, 1.0, 4.0)
    cut = Scripted(Reply("", finished=False))
    outcome = await environment.rollout(environment.prompt("train", 0), cut)
    assert (outcome.reward, outcome.parts["truncated"]) == (0.0, 1.0)


async def test_calls_of_a_turn_and_the_tests_leave_time_for_a_reward(task_set: Path) -> None:
    """A rollout that takes longer than turn_timeout_s is dropped, so an agent could choose that in place of 0."""
    environment = SweEnvironment(config(task_set, turn_timeout_s=10.0, command_timeout_s=60.0))
    waits = Reply("", finished=True, calls=tuple(ToolCall("bash", {"command": "sleep 60"}, f"c{n}") for n in range(3)))
    policy = Scripted(waits, DONE)
    in_tests = Scripted(call("editor", action="create", path=SOURCE, text="import time\ntime.sleep(60)\n"), DONE)
    try:
        outcome = await environment.rollout(environment.prompt("train", 0), policy)
        graded = await environment.rollout(environment.prompt("train", 0), in_tests)
    finally:
        await environment.aclose()
    assert (outcome.reward, outcome.parts["truncated"], outcome.parts["command_timeouts"]) == (0.0, 1.0, 1.0)
    assert policy.turns == [DONE], "the work ends with the time of its turn"
    assert (graded.reward, graded.parts["fail_to_pass"]) == (0.0, 0.0)


async def test_work_continues_from_a_summary_in_the_same_sandbox(task_set: Path) -> None:
    environment = SweEnvironment(config(task_set, summary_points=[1000]))
    full = Reply("", finished=False, fits=False)
    policy = Scripted(
        call("editor", action="replace", path=SOURCE, old="result -= parse(text)", new="result += parse(text)"),
        full,
        Reply("  total is mended, name is left ", finished=True),
        call("bash", command=f"grep -c 'result += parse' {SOURCE}; sed -i 's/value > 1000/value >= 1000/' {SOURCE}"),
        DONE,
    )
    try:
        outcome = await environment.rollout(environment.prompt("train", 0), policy)
    finally:
        await environment.aclose()
    assert (outcome.reward, outcome.parts["summaries"], outcome.parts["turns"], policy.anew) == (1.0, 1.0, 4.0, 1)
    asked, begun = (message["content"] for message in policy.told[-5:] if message["role"] == "user")
    assert asked.startswith("The conversation is about to become too long.")
    assert begun.startswith("mend total and name\n\nYou have worked on this task already")
    assert begun.endswith("\n\ntotal is mended, name is left")
    assert policy.told[-1]["content"].startswith("1")


async def test_tampering_is_a_part_of_the_reward(environment: SweEnvironment) -> None:
    text = (
        f"import _pytest.runner as r\nr.CallInfo.from_call.__func__.__code__ = (lambda *a, **k: None).__code__\n{BAD}"
    )
    policy = Scripted(call("editor", action="create", path=SOURCE, text=text), DONE)
    outcome = await environment.rollout(environment.prompt("train", 0), policy)
    assert (outcome.reward, outcome.parts["judge_tampered"]) == (0.0, 1.0)


async def test_the_right_code_is_nowhere_in_the_sandbox(environment: SweEnvironment) -> None:
    find = "grep -rl 'result += parse' / --include=* 2>/dev/null --exclude-dir=proc --exclude-dir=sys | head; env"
    policy = Scripted(call("bash", command=find), DONE)
    await environment.rollout(environment.prompt("train", 0), policy)
    [told] = [message["content"] for message in policy.told if message["role"] == "tool"]
    assert "__init__.py" not in told


async def test_a_sandbox_that_is_lost_gives_no_reward(
    environment: SweEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object, **__: object) -> None:
        raise SandboxError("the node is on fire")

    monkeypatch.setattr("hpcrl.swe.judging.judge.SweJudge.run_tests", lost)
    with pytest.raises(SandboxError, match="on fire"):
        await environment.rollout(environment.prompt("train", 0), Scripted(DONE))


async def test_a_daemon_that_was_killed_is_replaced(environment: SweEnvironment) -> None:
    before = set(psutil.Process().children())  # of other tests
    prompt = environment.prompt("train", 0)
    right = call("editor", action="create", path=SOURCE, text=GOOD)
    assert (await environment.rollout(prompt, Scripted(right, DONE))).reward == 1.0
    new = [each for each in psutil.Process().children() if each not in before]
    # a zombie has no words
    [daemon] = [each for each in new if "daemon" in " ".join(words_of(each))]
    daemon.kill()
    daemon.wait()
    assert (await environment.rollout(prompt, Scripted(right, DONE))).reward == 1.0


async def test_it_works_in_a_process_of_its_own(environment: SweEnvironment, task_set: Path) -> None:
    """As in a run: nothing of its sandboxes is left when the process ends."""
    own = {"name": "mend", "kind": "swe", "tasks": str(task_set / "tasks.jsonl")}
    recipe = {"name": "r", "model": {"path": "m"}, "environments": [own], "trainer": {"steps": 1}}
    [made] = build_environments(Recipe.model_validate(recipe))
    before = psutil.Process().children(recursive=True)  # the fixture has a daemon of its own
    [process] = hosted([made])
    try:
        prompt = await prompt_of(made, "train", 0)
        right = call("editor", action="create", path=SOURCE, text=GOOD)
        outcome = await made.rollout(prompt, Scripted(right, DONE))
        assert (outcome.reward, outcome.parts["turns"]) == (1.0, 2.0)
        left = [each for each in psutil.Process().children(recursive=True) if each not in before]
        assert len(left) > 1
    finally:
        await process.aclose()
    _, alive = psutil.wait_procs(left, timeout=120)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


async def test_hidden_tests_are_not_in_the_sandbox(task_set: Path) -> None:
    environment = SweEnvironment(config(task_set, hidden_tests=True))
    policy = Scripted(call("bash", command="ls tests"), call("editor", action="create", path=SOURCE, text=GOOD), DONE)
    try:
        outcome = await environment.rollout(environment.prompt("train", 0), policy)
    finally:
        await environment.aclose()
    [listed, _] = [message["content"] for message in policy.told if message["role"] == "tool"]
    assert "test_lengths" not in listed
    assert outcome.reward == 1.0


async def test_the_recipe_names_the_backend_of_sandboxes(
    tools: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without Podman
    tasks = [make_task(split="train", image="own"), make_task(id="lengths-2", split="heldout", image="own")]
    tree = make_tree(tools)
    (tmp_path / "trees").mkdir()
    write_tar(tmp_path / "trees/lengths.tar", {path: file for path, file in tree.items() if path[0] != "."})
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    environment = SweEnvironment(config(tmp_path, sandbox_backend="podman"))
    try:
        with pytest.raises(SandboxError, match="podman"):
            await environment.rollout(environment.prompt("train", 0), Scripted(DONE))
    finally:
        await environment.aclose()
    with pytest.raises(ConfigError, match="no task has an image that bubblewrap can use: lengths-1 with own"):
        SweEnvironment(config(tmp_path))


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"min_difficulty": 0.9}, "no training task"),
        ({"tasks": "/nowhere.jsonl"}, "cannot be read"),
        ({"format": "swe-bench"}, "no files, and `trees` is missing"),
    ],
)
def test_what_cannot_be_made_is_named(task_set: Path, more: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        SweEnvironment(SweEnv(**{**config(task_set).model_dump(), **more}))
