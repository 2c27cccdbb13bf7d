"""Exercises for start models: what is said in demonstrations is what tools say, and tests decide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from swe_lab import PYTHON

from hpcrl.config.environments import SweEnv
from hpcrl.errors import UsageError
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.generation_config import GenerationConfig
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.environments import Message, Prompt, Reply, ToolCall
from hpcrl.rollouts.environments.messages import plain_messages
from hpcrl.rollouts.environments.swe.environment import SweEnvironment
from hpcrl.rollouts.rendering import Renderer
from hpcrl.swe.diffs import parse_diff
from hpcrl.swe.making import exercises
from hpcrl.swe.making.exercises import write_exercises
from hpcrl.swe.task import SweDemonstration, SweTask, read_tasks
from hpcrl.trainer.warmup.demonstrations import render_demonstration

TASKS = 128
WORDS = ('\n{"name": "bash", "arguments": {"command": "', '"}}\n', "sed -i s/")


@pytest.fixture(scope="module")
def directory(tools: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exercises") / "set"
    write_exercises(path, tasks=TASKS, seed=3, tools=tools, python=PYTHON)
    return path


@pytest.fixture(scope="module")
def tasks(directory: Path) -> list[SweTask]:
    return list(read_tasks(directory / "tasks.jsonl"))


def environment_of(directory: Path) -> SweEnvironment:
    return SweEnvironment(SweEnv(name="mend", kind="swe", tasks=str(directory / "tasks.jsonl"), system="mend"))


def shown(task: SweTask) -> set[tuple[str, str]]:
    """Return the files that the policy sees, by the command that shows them."""
    return {call for each in task.demonstrations for call in each.calls if call[0].startswith("cat ")}


def test_held_out_tasks_are_others(tasks: list[SweTask]) -> None:
    train, held_out = ([task for task in tasks if task.split == name] for name in ("train", "heldout"))
    assert (len(train), len(held_out)) == (TASKS * 3 // 4, TASKS // 4)
    assert len({task.id for task in tasks}) == TASKS
    assert not {task.instruction for task in train} & {task.instruction for task in held_out}
    seen, unseen = (set().union(*map(shown, listed)) for listed in (train, held_out))
    assert len(unseen) > TASKS // 4
    assert not seen & unseen


def test_tasks_of_one_wrong_module(tools: bytes, tmp_path: Path) -> None:
    """A task has one wrong line in one file; files of held-out tasks are in no training task."""
    made = write_exercises(tmp_path / "one", tasks=TASKS, seed=3, tools=tools, python=PYTHON, wrong_modules=1)
    train, held_out = ([task for task in made if task.split == name] for name in ("train", "heldout"))
    assert (len(train), len(held_out)) == (TASKS * 3 // 4, TASKS // 4)
    for task in made:
        assert len(task.fail_to_pass) == 1
        assert len(task.pass_to_pass) == 7
        assert len(parse_diff(task.bug)) == len(parse_diff(task.solution)) == 1
        assert {each.right: len(each.calls) for each in task.demonstrations} == {True: 2, False: 1}
    seen, unseen = (set().union(*map(shown, listed)) for listed in (train, held_out))
    assert len(unseen) > TASKS // 8
    assert not seen & unseen


def test_equal_seeds_give_equal_tasks(tasks: list[SweTask], tools: bytes, tmp_path: Path) -> None:
    again = write_exercises(tmp_path / "again", tasks=TASKS, seed=3, tools=tools, python=PYTHON)
    other = write_exercises(tmp_path / "other", tasks=TASKS, seed=4, tools=tools, python=PYTHON)
    assert again == tasks
    assert [task.bug for task in other] != [task.bug for task in tasks]


def test_a_set_is_not_written_over_another(directory: Path, tools: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not empty"):
        write_exercises(directory, tasks=16, seed=0, tools=tools, python=PYTHON)


def test_too_many_tasks_are_refused_with_the_number_there_is(tools: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fewer different tasks") as refused:
        write_exercises(tmp_path / "many", tasks=100_000, seed=0, tools=tools, python=PYTHON)
    most = int(str(refused.value).rpartition("at most ")[2])
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match=f"at most {most}$"):
        write_exercises(tmp_path / "many", tasks=most + 1, seed=0, tools=tools, python=PYTHON)
    made = write_exercises(tmp_path / "many", tasks=most, seed=0, tools=tools, python=PYTHON)
    assert len({(task.tree, task.instruction, task.bug) for task in made}) == most


def test_an_interrupted_set_is_not_there(tools: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "set").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(exercises, "write_program_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_exercises(tmp_path / "set", tasks=16, seed=0, tools=tools, python=PYTHON)
    assert [path.name for path in tmp_path.rglob("*")] == ["set"]
    assert len(write_exercises(tmp_path / "set", tasks=16, seed=0, tools=tools, python=PYTHON)) == 16


class Played:
    """Says the turns of a demonstration, and keeps what it was told."""

    seed = 0

    def __init__(self, demonstration: SweDemonstration) -> None:
        calls = [ToolCall("bash", {"command": command}, "call") for command, _ in demonstration.calls]
        self.turns = [Reply("", finished=True, calls=(call,)) for call in calls]
        self.turns.append(Reply(demonstration.last, finished=True))
        self.told: list[Message] = []

    async def reply(self, messages: Sequence[Message], *, anew: bool = False, within: int | None = None) -> Reply:
        self.told += plain_messages(messages)
        return self.turns.pop(0)

    def endpoint(self) -> Any:
        raise NotImplementedError


@pytest.mark.usefixtures("sandboxes")
async def test_demonstrations_are_true(directory: Path, tasks: list[SweTask]) -> None:
    """Real tools say what demonstrations have them say, and the judge pays the right ones alone."""
    environment = environment_of(directory)
    try:
        for split in ("train", "heldout"):
            prompt = environment.prompt(split, 1)  # type: ignore[arg-type]
            ways: dict[Any, SweDemonstration] = {each.right: each for each in prompt.data.demonstrations}
            assert set(ways) == {True, False}
            for right, demonstration in ways.items():
                played = Played(demonstration)
                outcome = await environment.rollout(prompt, played)
                told = [message["content"] for message in played.told if message["role"] == "tool"]
                assert told == [result for _, result in demonstration.calls]
                assert outcome.reward == float(right), demonstration
                assert outcome.parts["turns"] == len(demonstration.calls) + 1
                assert outcome.parts["truncated"] == 0
    finally:
        await environment.aclose()
    assert all(len(each.calls) == 4 for task in tasks for each in task.demonstrations if each.right)


@pytest.mark.parametrize("chat", ["qwen2.5", "glm-5"])
def test_a_warm_up_reads_the_tokens_of_a_rollout(
    chat: Literal["qwen2.5", "glm-5"], directory: Path, tmp_path: Path
) -> None:
    """The ids of a demonstration are those that the policy samples and gets; each of its turns is read as a call."""
    write_character_tokenizer(tmp_path, chat=chat, words=WORDS)
    tokenizer = ChatTokenizer(tmp_path)
    renderer = Renderer(tokenizer, chat_format=chat)
    ends = frozenset(GenerationConfig.read(tmp_path).eos_token_ids) | {tokenizer.eos_token_id}
    environment = environment_of(directory)
    prompt = environment.prompt("train", 0)
    messages = environment.demonstration(prompt, correct=True, rng=random.Random(0))
    ids, said = render_demonstration(tokenizer, messages, ends)
    rolled = renderer.opening(prompt.messages, tools=prompt.tools)
    calls: tuple[ToolCall, ...] = ()
    turns = 0
    for message in messages[len(prompt.messages) :]:
        if message["role"] == "tool":
            extension = renderer.extension([message], ended_by=rolled[-1], calls=calls, tools=prompt.tools)
            assert extension is not None
            assert not extension.ended_otherwise
            rolled += extension.token_ids
            continue
        assert rolled == ids[: len(rolled)]
        assert not any(said[: len(rolled)]) or turns
        end = next(at for at in range(len(rolled), len(ids)) if ids[at] in ends) + 1
        assert all(said[len(rolled) : end])
        parsed = renderer.parse(ids[len(rolled) : end], tools=prompt.tools, turn=turns)
        wanted = [call["function"] for call in message.get("tool_calls", ())]
        assert [{"name": call.name, "arguments": call.arguments} for call in parsed.calls] == wanted
        assert parsed.text == message["content"]
        assert parsed.thinking == (message["reasoning_content"] if chat == "glm-5" else "")
        assert all(call.status == "ok" for call in parsed.calls)
        rolled, calls, turns = ids[:end], parsed.calls, turns + 1
    assert (rolled, turns) == (ids, 5)
    [word] = tokenizer.encode(WORDS[0])
    assert ids.count(word) == (4 if chat == "qwen2.5" else 0)


def test_a_task_without_demonstrations_has_none(directory: Path) -> None:
    environment = environment_of(directory)
    bare = SweTask(id="bare", instruction="mend", fail_to_pass=("tests/test_a.py::test_a",), tree="trees/a.tar")
    prompt = Prompt(split="train", index=0, messages=({"role": "user", "content": "mend"},), data=bare)
    with pytest.raises(NotImplementedError, match="no right demonstration"):
        environment.demonstration(prompt, correct=True, rng=random.Random(0))
