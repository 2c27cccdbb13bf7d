"""Environments of one's own, in their own process: what they can do, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from harness import CALCULATOR, WORDS, make_recipe, make_run, running
from my_environment import Obedient
from patience import patience
from stub_engine import EOS, StubEngine, encode

import hpcrl
from hpcrl.errors import ConfigError, EnvironmentFailedError
from hpcrl.processes.environment_marks import SANDBOX_MEMORY_VARIABLE
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.environments import (
    Environment,
    EnvironmentLostError,
    EnvironmentRaisedError,
    Message,
    Reply,
    ToolCall,
    build_environments,
    hosted,
    prompt_of,
)
from hpcrl.rollouts.environments.child import frames_of
from hpcrl.rollouts.environments.child_process import environment_of_child
from hpcrl.rollouts.environments.workers.__main__ import own_sandbox_memory
from hpcrl.runs.cause import from_record
from hpcrl.runs.role import FailureRecord, RoleContext

Build = Callable[..., Environment]
#: of hpcrl itself: the checkout may have any name, and user code may lie in it
PACKAGE = os.path.join(os.path.dirname(hpcrl.__file__), "")


class Script:
    """A policy that says what it is told to, and raises what it is told to raise."""

    def __init__(self, *replies: str | Reply | Exception, seed: int = 0) -> None:
        self.replies, self.seed = list(replies), seed
        self.heard: list[Message] = []

    async def reply(self, messages: Sequence[Message]) -> Reply:
        self.heard += messages
        reply = self.replies.pop(0)
        await asyncio.sleep(0)
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, Reply) else Reply(text=reply, finished=True)


def custom(factory: str = "my_environment:Obedient", name: str = "mine", **config: Any) -> dict[str, Any]:
    return {"name": name, "kind": "custom", "factory": factory, **config}


@pytest.fixture
async def build(tmp_path: Path) -> AsyncIterator[Build]:
    """Builds one environment; its process is ended at the end of the test."""
    async with AsyncExitStack() as stack:

        def make(factory: str = "my_environment:Obedient", on_lost: Any = lambda name, why: None, **config: Any) -> Any:
            recipe = make_recipe(tmp_path, environments=[custom(factory, **config)])
            environments = build_environments(recipe, on_lost=on_lost)
            for each in hosted(environments):
                stack.push_async_callback(each.aclose)
            return environments[0]

        yield make


async def roll_out(environment: Environment, *replies: str | Exception, index: int = 0, seed: int = 0) -> Any:
    prompt = await prompt_of(environment, "train", index)
    return await environment.rollout(prompt, Script(*replies, seed=seed))


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def until_counted(environment: Environment, what: str, count: int) -> None:
    """Wait until so many rollouts hang in the process, or have been cancelled there."""
    async with asyncio.timeout(60.0 * patience()):
        while (await roll_out(environment, "count")).parts[what] != count:
            await asyncio.sleep(0.01)


async def test_custom_environments(build: Build, tmp_path: Path) -> None:
    mine = build("my_environment:Echo", args={"word": "hi"})
    assert mine.name == "mine"
    assert (await roll_out(mine, "hi")).reward == 1.0
    assert (await roll_out(mine, "ho")).reward == 0.0
    obedient = build()
    outcome = await roll_out(obedient, "go", index=5, seed=(1 << 63) - 1)
    assert outcome.parts["index"] == 5
    assert outcome.parts["seed"] == float((1 << 63) - 1)
    assert outcome.parts["pid"] != os.getpid()
    environments = build_environments(make_recipe(tmp_path, environments=[WORDS, CALCULATOR]))
    assert not hosted(environments)


@pytest.mark.parametrize(
    ("factory", "args", "message"),
    [
        ("no_such_module:Thing", {}, "cannot be imported"),
        ("my_environment:Thing", {}, "no callable 'Thing'"),
        ("my_environment:NUMBER", {}, "no callable 'NUMBER'"),
        ("my_environment:Echo", {}, "raised TypeError"),
        ("my_environment:NotOne", {}, "lacks prompt, rollout, demonstration"),
        ("failing_environment:Thing", {}, r"ZeroDivisionError(.|\n)*failing_environment\.py:2 in <module>: 1 / 0"),
        ("dying_environment:Thing", {}, "its process ended with exit code 3"),
    ],
)
def test_custom_environments_that_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str, args: Any, message: str
) -> None:
    (tmp_path / "failing_environment.py").write_text("# raises\n1 / 0\n")
    (tmp_path / "dying_environment.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        build_environments(make_recipe(tmp_path, environments=[custom(factory, args=args)]))
    assert caught.value.findings[0].key == "environments.mine.factory"


def test_an_import_that_hangs_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hanging_environment.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = make_recipe(tmp_path, environments=[custom("hanging_environment:Thing", start_timeout_s=0.5)])
    with pytest.raises(ConfigError, match=r"gave no answer within 0\.5 s"):
        build_environments(recipe)


async def test_the_example_of_the_documentation(build: Build, tmp_path: Path, monkeypatch: Any) -> None:
    text = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "documented_counting.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    counting = build("documented_counting:Counting", name="counting", args={"limit": 20})
    prompt = counting.prompt("train", 3)
    number = int(prompt.messages[0]["content"])
    wrong = counting.demonstration(prompt, correct=False, rng=random.Random(0))
    assert wrong[-1]["content"] != str(number + 1)
    assert (await counting.rollout(prompt, Script(str(number + 1)))).reward == 1.0


async def test_the_example_of_tools(build: Build, tmp_path: Path, monkeypatch: Any) -> None:
    """Tools, calls and results pass between the processes, and a malformed call is told to the policy."""
    text = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    code = text.partition("# my_package/weather.py\n")[2].partition("```")[0]
    (tmp_path / "documented_weather.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    weather = build("documented_weather:Weather", name="weather")
    prompt = weather.prompt("heldout", 0)
    assert [tool["function"]["name"] for tool in prompt.tools] == ["weather"]
    assert prompt == await prompt_of(weather, "heldout", 0)
    good = ToolCall("weather", {"city": "Rome"}, "call_0_0", raw="{}", span=(1, 5))
    bad = ToolCall("", {}, "call_0_1", status="invalid_json", error="no number")
    policy = Script(Reply("", True, thinking="hm", calls=(good, bad)), "It is blue.")
    assert (await weather.rollout(prompt, policy)).reward == 1.0
    results = policy.heard[len(prompt.messages) :]
    assert results == [
        {"role": "tool", "tool_call_id": "call_0_0", "name": "weather", "content": "blue"},
        {
            "role": "tool",
            "tool_call_id": "call_0_1",
            "name": "unknown",
            "content": "error: the tool call was not run: its arguments are not valid JSON (no number)",
        },
    ]


async def test_demonstrations_draw_from_the_callers_generator(build: Build) -> None:
    here, there = random.Random(3), random.Random(3)
    plain, mine = Obedient(), build()
    for index in range(3):
        wanted = plain.demonstration(plain.prompt("train", index), correct=True, rng=here)
        assert list(mine.demonstration(mine.prompt("train", index), correct=True, rng=there)) == wanted
    assert here.getstate() == there.getstate()
    echo = build("my_environment:Echo", args={"word": "hi"})
    with pytest.raises(NotImplementedError):
        echo.demonstration(echo.prompt("train", 0), correct=True, rng=here)


async def test_the_process_has_nothing_of_the_run(build: Build, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HPCRL_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("HPCRL_TOKEN", "secret")
    with (tmp_path / "token").open("w") as token:
        os.set_inheritable(token.fileno(), True)
        mine = build()
        policy = Script("look around", "")
        await mine.rollout(await prompt_of(mine, "train", 0), policy)
    assert policy.heard[-1]["content"] == repr(([], [], True))
    (process,) = hosted([mine])
    command = Path(f"/proc/{process._child.pid}/cmdline").read_text().split("\0")
    assert "-P" in command
    assert not any(str(tmp_path) in word or "secret" in word for word in command)


def test_the_process_has_the_limit_of_all_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRL_TOKEN", "secret")
    monkeypatch.setenv(SANDBOX_MEMORY_VARIABLE, "1024:a")
    found = environment_of_child()
    ours = {name: value for name, value in found.items() if name.startswith("HPCRL_")}
    assert ours == {SANDBOX_MEMORY_VARIABLE: "1024:a"}
    # a worker with memory of its own shares the limit with no other
    assert own_sandbox_memory(ours, 3) == {SANDBOX_MEMORY_VARIABLE: "1024:a-3"}
    assert own_sandbox_memory({}, 3) == {}


async def test_what_the_code_raises_arrives_with_its_own_frames(build: Build) -> None:
    mine = build()
    with pytest.raises(EnvironmentRaisedError) as caught:
        await roll_out(mine, "raise")
    text = str(caught.value)
    assert "environment 'mine' raised KeyError: 'missing'" in text
    assert "my_environment.py" in text
    assert 'in _fail: table["missing"]' in text
    assert "child.py" not in text
    with pytest.raises(EnvironmentRaisedError, match="LookupError: no such prompt"):
        await prompt_of(mine, "train", 666)
    with pytest.raises(EnvironmentRaisedError, match=r"its reward is .much. \(str\), which is not a number"):
        await roll_out(mine, "bad outcome")
    with pytest.raises(EnvironmentRaisedError, match=r"ValueError: message 0: its content is int, not text"):
        await roll_out(mine, "bad message")
    # what it prints is not a message
    assert (await roll_out(mine, "print")).reward == 1.0


async def test_what_the_policy_raises_is_the_callers_unless_it_is_the_environments_fault(build: Build) -> None:
    mine = build()
    with pytest.raises(EngineError, match="no engine"):
        await roll_out(mine, EngineError("no engine"))
    with pytest.raises(EngineError, match="later"):
        await roll_out(mine, "again", EngineError("later"))
    assert (await roll_out(mine, "again", ValueError("that cannot be"))).reward == 1.0
    assert (await roll_out(mine, "count")).parts["refused"] == 1.0
    await until_counted(mine, "cancelled", 1)


@pytest.mark.parametrize(("order", "how"), [("die", "was killed by SIGKILL"), ("leave", "ended with exit code 7")])
async def test_a_process_that_dies_is_reported_and_started_again(build: Build, order: str, how: str) -> None:
    lost: list[tuple[str, str]] = []
    mine = build(on_lost=lambda name, why: lost.append((name, why)))
    first = (await roll_out(mine, "go")).parts["pid"]
    tool = int((await roll_out(mine, "tool")).parts["tool"])
    others = [asyncio.create_task(roll_out(mine, "hang")) for _ in range(3)]
    await asyncio.sleep(0.1)
    results = await asyncio.gather(roll_out(mine, order), *others, return_exceptions=True)
    assert all(isinstance(each, EnvironmentLostError) and how in str(each) for each in results)
    assert {each.death for each in results if isinstance(each, EnvironmentLostError)} == {("mine", 1)}
    assert lost == [("mine", how)]
    # what it had started goes with it
    async with asyncio.timeout(120.0):
        while is_running(tool):
            await asyncio.sleep(0.01)
    assert (await roll_out(mine, "go")).parts["pid"] != first
    with pytest.raises(EnvironmentLostError) as caught:
        await roll_out(mine, order)
    assert caught.value.death == ("mine", 2)


async def test_a_blocked_event_loop_is_ended_and_started_again(build: Build) -> None:
    lost: list[str] = []
    limit_s = 1.0 * patience()
    mine = build(on_lost=lambda name, why: lost.append(why), answer_timeout_s=limit_s)
    with pytest.raises(EnvironmentLostError, match="event loop is blocked"):
        await roll_out(mine, "block")
    assert len(lost) == 1
    assert (await roll_out(mine, "go")).reward == 1.0


async def test_a_rollout_that_hangs_is_dropped_and_the_others_go_on(build: Build) -> None:
    mine = build(turn_timeout_s=0.5 * patience())
    hanging = asyncio.create_task(roll_out(mine, "hang"))
    assert (await roll_out(mine, "go")).reward == 1.0
    with pytest.raises(EnvironmentRaisedError, match=r"gave no answer within [\d.]+ s(.|\n)*mine\.turn_timeout_s"):
        await hanging
    await until_counted(mine, "cancelled", 1)


async def test_a_cancelled_rollout_is_cancelled_there(build: Build) -> None:
    mine = build()
    work = [asyncio.create_task(roll_out(mine, "hang")) for _ in range(5)]
    # those that still wait for the policy would not see the end of their own work
    await until_counted(mine, "hanging", 5)
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    await until_counted(mine, "cancelled", 5)


async def test_many_rollouts_at_once(build: Build) -> None:
    mine = build()
    outcomes = await asyncio.gather(*(roll_out(mine, "again", "x", index=i, seed=i) for i in range(300)))
    assert [(o.parts["index"], o.parts["seed"]) for o in outcomes] == [(i, i) for i in range(300)]
    assert len({o.parts["pid"] for o in outcomes}) == 1


async def test_the_end_of_an_environment_is_the_end_of_its_process(build: Build) -> None:
    mine = build()
    pid = int((await roll_out(mine, "go")).parts["pid"])
    (process,) = hosted([mine])
    await process.aclose()
    assert not Path(f"/proc/{pid}").exists()


async def test_the_process_does_not_outlive_an_orchestrator_that_is_killed() -> None:
    """Not even one whose event loop is blocked, so that it cannot see the end of the connection."""
    program = """if True:
        import sys
        sys.path.append(sys.argv[1])
        from hpcrl.config.environments import CustomEnv
        from hpcrl.rollouts.environments.hosted import HostedEnvironment
        environment = HostedEnvironment(CustomEnv(name="mine", kind="custom", factory="my_environment:Obedient"))
        print(environment._child.pid, flush=True)
        environment.prompt("train", 777)
    """
    command = [sys.executable, "-c", program, str(Path(__file__).parents[1])]
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = int(await parent.stdout.readline())
        assert is_running(child)
        parent.kill()
        await parent.wait()
        async with asyncio.timeout(120.0):
            while is_running(child):
                await asyncio.sleep(0.01)
    finally:
        if parent.returncode is None:
            parent.kill()
            await parent.wait()


async def test_a_run_survives_the_death_of_an_environment(tmp_path: Path) -> None:
    """64 failures in a row end a run; one death is one of them, however many rollouts it ends."""
    orders = iter(["go"] * 20 + ["die"])

    def answer(token_ids: list[int], seed: int) -> list[int]:
        return [*encode(next(orders, "go")), EOS]

    rollouts = {"rollouts_per_step": 32, "max_in_flight": 128, "max_off_policy_steps": 8}
    run = make_run(tmp_path, environments=[custom()], rollouts=rollouts)
    stub = StubEngine(answer=answer)
    stub.request_s = 0.2
    async with running(run, stub) as loop:
        shards = await loop.train(1, 5)
        assert shards[-1].stats.reward_by_env == {"mine": 1.0}
        (lost,) = loop.events("environment.lost")
        assert lost.data == {"environment": "mine", "why": "was killed by SIGKILL"}
        assert loop.parts.counters.dropped_environment > 0
        pids = [environment._child.pid for environment in hosted(loop.environments)]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("split", "count"), [("heldout", "none of the 8 rollouts that"), ("train", r"(6[4-9]|7\d) rollouts failed")]
)
async def test_what_the_environment_raises_is_why_the_run_ends(tmp_path: Path, split: str, count: str) -> None:
    """Its type, its message and its own frames, as `ls`, `--follow` and `why` show them."""
    environments = [custom("my_environment:Broken", args={"split": split})]
    run = make_run(tmp_path, environments=environments, evaluation={"prompts": 8})
    async with running(run, StubEngine()) as loop:
        assert loop.work is not None
        with pytest.raises(EnvironmentFailedError) as caught:
            async with asyncio.timeout(30.0 * patience()):
                await loop.work
    context = RoleContext(run, attempt=run.attempts()[-1], role="orchestrator", replica=0, rank=0)
    context.record_failure(caught.value)
    (record,) = FailureRecord.read_all(run, context.attempt)
    cause = from_record(record)
    # others fail while the run is being ended
    assert re.match(
        rf"environment 'mine' raised ZeroDivisionError: a test suite without tests \({count}", cause.message
    )
    assert cause.details
    assert "in judge: raise ZeroDivisionError" in cause.details[-1]
    assert not any(line.strip().startswith(PACKAGE) for line in cause.details)
    assert cause.traceback == ""


@pytest.mark.parametrize(
    "place", ["hpcrl/rollouts/environments", "environments of ö", "<frozen", "importlib", "tests/hpcrl"]
)
def test_frames_of_the_users_code_are_known_by_where_ours_lie(tmp_path: Path, place: str) -> None:
    """Whatever its directories are called; also beside the package, where a name begins as that of ours does."""
    package = Path(hpcrl.__file__).parent
    for base in (tmp_path / place, package / "rollouts" / f"environments_{place}"):
        file = str(base / "mine.py")
        namespace: dict[str, Any] = {}
        exec(compile("def judge():\n    raise ValueError('no')\n", file, "exec"), namespace)
        with pytest.raises(ValueError, match="no") as caught:
            namespace["judge"]()
        assert f"{file}:2 in judge" in frames_of(caught.value)


async def test_an_environment_that_cannot_be_made_is_why_the_run_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path, environments=[custom("my_environment:Echo", args={"words": "hi"})])
    with pytest.raises(EnvironmentFailedError) as caught:
        async with running(run):
            pass
    assert str(caught.value).startswith("environments.mine.factory: my_environment:Echo(**args) raised TypeError: ")
