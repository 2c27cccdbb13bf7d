"""The real library verifiers through the gateway: its rollouts, rewards, errors and settings."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from gateway_testing import GatewayBench, gateway_bench, sequences
from harness import make_run, running
from patience import patience
from stub_engine import EOS, StubEngine, decode, encode

from hpcrl.config.verifiers_environment import VerifiersEnv
from hpcrl.errors import ConfigError
from hpcrl.rollouts.environments import Outcome, PolicyEndpoint
from hpcrl.rollouts.environments.trial import NullPolicy
from hpcrl.rollouts.environments.verifiers import worker_process
from hpcrl.rollouts.environments.verifiers.environment import VerifiersEnvironment, VerifiersRolloutError
from hpcrl.runs.views.rollouts import verify_rollouts

ROOT = Path(__file__).parents[3]
VERIFIERS = ROOT / ".verifiers"
WORKER = str(Path(worker_process.__file__).parent / "foreign/verifiers_worker.py")
EXAMPLES = ROOT / "docs/examples/verifiers"

pytestmark = [
    pytest.mark.slow,
    # the processes of verifiers, which take seconds to start, belong to one event loop
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not (VERIFIERS / "hpcrl-bootstrap").is_file(),
        reason="verifiers is not there (tools/bootstrap.py --verifiers)",
    ),
]


def config(where: Path | str, **changes: Any) -> VerifiersEnv:
    python = str(VERIFIERS / "bin/python")
    return VerifiersEnv.model_validate(
        {"name": "v", "kind": "verifiers", "path": str(where), "python": python, **changes}
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def notebook() -> AsyncIterator[VerifiersEnvironment]:
    environment = VerifiersEnvironment(config(EXAMPLES / "notebook"))
    yield environment
    environment.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def poker() -> AsyncIterator[VerifiersEnvironment]:
    environment = VerifiersEnvironment(config(EXAMPLES / "poker", truncated_reward=-3.0))
    yield environment
    environment.close()


class Endpoint(NullPolicy):
    """The endpoint of a bench, as a policy."""

    def __init__(self, bench: GatewayBench) -> None:
        super().__init__()
        self._bench = bench

    def endpoint(self) -> Any:
        return self

    async def __aenter__(self) -> PolicyEndpoint:
        return self._bench.endpoint

    async def __aexit__(self, *_: object) -> None:
        return None


async def check_recorded(bench: GatewayBench) -> None:
    """All that was sampled is trained on, once, and each prompt continues the one before."""
    rollout = await bench.rollout()
    ((ids, sampled),) = sequences(rollout)
    turns = [bench.tokenizer.encode(text) for text in bench.said]
    assert [token for token, flag in zip(ids, sampled, strict=True) if flag] == [t for turn in turns for t in turn]
    assert len(bench.prompts()) == len(turns) == bench.counters.gateway_requests
    for prompt, turn in zip(bench.prompts(), turns, strict=True):
        assert ids[: len(prompt) + len(turn)] == [*prompt, *turn]


async def test_a_tool_of_an_environment(tmp_path: Path, notebook: VerifiersEnvironment) -> None:
    async with gateway_bench(tmp_path / "model") as bench:
        prompt = notebook.prompt("train", 1)
        word = re.findall(r"word='(\w+)'", prompt.messages[-1]["content"])[0]
        call = f'{{"name": "notebook_keep", "arguments": {{"word": "{word}"}}}}'
        bench.said = [f"<tool_call>\n{call}\n</tool_call><|im_end|>", f"It is {word}.<|im_end|>"]
        outcome = await notebook.rollout(prompt, Endpoint(bench))
        assert outcome == Outcome(1.0, {"truncated": 0.0, "kept": 1.0, "turns": 2.0})
        # the tool ran, and what it has returned stands between the turns
        assert f"<tool_response>\n{word}\n" in bench.text(bench.prompts()[1])
        await check_recorded(bench)


async def test_several_turns_of_a_game(tmp_path: Path, poker: VerifiersEnvironment) -> None:
    index = next(i for i in range(100) if '"QK"' in poker.prompt("heldout", i).messages[-1]["content"])
    async with gateway_bench(tmp_path / "model") as bench:
        bench.said = ["I say [check].<|im_end|>", "Then [call].<|im_end|>"]
        outcome = await poker.rollout(poker.prompt("heldout", index), Endpoint(bench))
        assert outcome == Outcome(-2.0, {"truncated": 0.0, "payoff": -2.0, "legal": 1.0})
        await check_recorded(bench)


async def test_a_full_context_is_judged_or_has_the_reward_of_the_recipe(
    tmp_path: Path, poker: VerifiersEnvironment, notebook: VerifiersEnvironment
) -> None:
    async with gateway_bench(tmp_path / "model", max_model_len=64) as bench:
        assert await poker.rollout(poker.prompt("train", 0), Endpoint(bench)) == Outcome(-3.0, {"truncated": 1.0})
        outcome = await notebook.rollout(notebook.prompt("train", 0), Endpoint(bench))
        assert outcome == Outcome(0.0, {"truncated": 1.0, "kept": 0.0, "turns": 0.0})
        assert not bench.prompts()


async def test_a_rollout_that_is_cancelled_frees_the_engine(tmp_path: Path, poker: VerifiersEnvironment) -> None:
    async with gateway_bench(tmp_path / "model") as bench:
        bench.said = ["[check]<|im_end|>"]
        bench.stub.request_s = lambda number: 3600.0
        rollout = asyncio.create_task(poker.rollout(poker.prompt("train", 0), Endpoint(bench)))
        async with asyncio.timeout(120 * patience()):
            while not bench.stub.in_flight:
                await asyncio.sleep(0.01)
            rollout.cancel()
            await asyncio.gather(rollout, return_exceptions=True)
            while bench.stub.in_flight:
                await asyncio.sleep(0.01)
        assert bench.counters.gateway_aborts == 1


BAD = """
import verifiers.v1 as vf

__all__ = ["BadTaskset"]


class BadTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def points(self, trace):
        if "break" in trace.last_reply:
            raise KeyError("broken")
        return {}


class BadConfig(vf.TasksetConfig):
    fail: str = ""


class BadTaskset(vf.Taskset[BadTask, BadConfig]):
    def load(self):
        if self.config.fail:
            raise OSError(self.config.fail)
        return [BadTask(vf.TaskData(prompt=f"{number}")) for number in range(40)]
"""
TWO = """

class TwoConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    right: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class TwoEnv(vf.Env[TwoConfig]):
    async def run(self, task, agents):
        for agent, reward in ((agents.left, 1.0), (agents.right, 2.0)):
            trace = await agent.run(task)
            trace.record_reward("points", reward)


__all__.append("TwoEnv")
"""
#: makes environments one after the other in one process: importing the library takes seconds
BUILD = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("worker", {WORKER!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
for build in json.load(sys.stdin):
    try:
        worker.make_backend(build)
    except Exception as error:
        print(json.dumps(worker.described(error)))
    else:
        print("{{}}")
"""
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"args": {"fail": "no disk"}}, "args", "the tasks cannot be read: OSError: no disk"),
    ({"args": {"fial": "x"}}, "args", "taskset.fial: Extra inputs are not permitted"),
    ({"path": "/nowhere"}, "path", "/nowhere does not exist"),
    ({"path": None, "package": "not-there"}, "package", "has no module not_there"),
    ({"settings": {"retries": {"max_retries": 2}}}, "settings.retries", "verifiers would repeat a failed rollout"),
    ({"settings": {"agent": {"retries": {"max_retries": 2}}}}, "settings.agent.retries", "verifiers would repeat"),
    ({"settings": {"agent": {"harness": {"id": "bash"}}}}, "settings.agent", "the harness bash of agent runs commands"),
    ({"settings": {"taskset": {}}}, "settings", "taskset is given by package and args"),
    ({"agent": "other"}, "agent", "there is no agent 'other'"),
    ({"path": "two"}, "agent", "the environment has several agents: left, right"),
    ({"path": "two", "agent": "left"}, "agent", "right would be the policy too"),
    ({"path": "broken"}, "path", "ModuleNotFoundError: No module named 'nothing'"),
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "bad_tasks.py").write_text(BAD)
    (tmp_path / "two_tasks.py").write_text(BAD + TWO)
    (tmp_path / "broken_tasks.py").write_text("import nothing")
    return tmp_path / "bad_tasks.py"


async def test_settings_that_are_wrong(package: Path) -> None:
    paths = {"two": str(package.parent / "two_tasks.py"), "broken": str(package.parent / "broken_tasks.py")}
    right: list[dict[str, Any]] = [
        {},
        {"settings": {"agent": {"harness": {"id": "bash"}}}, "host_commands": True},
        {
            "path": "two",
            "agent": "left",
            "settings": {"right": {"client": {"type": "eval", "base_url": "http://x/v1"}}},
        },
    ]
    builds = []
    for changes in [*(each[0] for each in WRONG), *right]:
        given = {**changes, "path": paths.get(changes.get("path") or "", changes.get("path", str(package)))}
        config_of = VerifiersEnv.model_validate({"name": "v", "kind": "verifiers", "python": "python", **given})
        builds.append(config_of.model_dump(mode="json"))
    made = await asyncio.to_thread(
        subprocess.run,
        [VERIFIERS / "bin/python", "-P", "-c", BUILD],
        input=json.dumps(builds),
        capture_output=True,
        text=True,
        check=True,
        timeout=200 * patience(),
    )
    found = [json.loads(line) for line in made.stdout.splitlines()]
    for (_, key, what), error in zip(WRONG, found, strict=False):
        assert error.get("key") == key, error
        assert what in error["message"]
    assert found[len(WRONG) :] == [{}] * len(right)


async def test_a_setting_that_is_wrong_is_named(package: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"environments\.v\.path: .*does not contain a package\n +hint: give a directory"
    ):
        VerifiersEnvironment(config(package.parent))


async def test_a_task_without_a_reward_fails(tmp_path: Path, package: Path) -> None:
    environment = VerifiersEnvironment(config(package))
    try:
        async with gateway_bench(tmp_path / "model") as bench:
            bench.said = ["Hm.<|im_end|>", "break<|im_end|>"]
            for what in ("there is no reward", "KeyError: 'broken'"):
                with pytest.raises(VerifiersRolloutError, match=what):
                    await environment.rollout(environment.prompt("train", 0), Endpoint(bench))
    finally:
        environment.close()


async def test_agents_that_are_all_the_policy(tmp_path: Path, package: Path) -> None:
    environment = VerifiersEnvironment(config(package.with_name("two_tasks.py"), agent="*"))
    try:
        async with gateway_bench(tmp_path / "model") as bench:
            bench.said = ["One.<|im_end|>", "Two.<|im_end|>"]
            outcome = await environment.rollout(environment.prompt("train", 0), Endpoint(bench))
            assert outcome.reward == 1.5
            assert {"left/points": 1.0, "right/points": 2.0}.items() <= outcome.parts.items()
            # both conversations are recorded, as two sequences
            assert len(sequences(await bench.rollout())) == 2
    finally:
        environment.close()


async def test_the_recipe_of_the_docs(tmp_path: Path) -> None:
    """Its environment in a running orchestrator: rollouts are trained on and verified."""
    text = (EXAMPLES / "recipe.yaml").read_text()
    assert text[text.index("environments:") :] in (ROOT / "docs/environments.md").read_text()
    (made,) = yaml.safe_load(text)["environments"]
    made = {**made, "path": str(ROOT / made["path"]), "python": str(ROOT / made["python"])}

    def add(token_ids: list[int], seed: int) -> list[int]:
        a, b = re.findall(r"(\d+) \+ (\d+)", decode(token_ids))[-1]
        return [*encode(f"It is {int(a) + int(b) + seed % 2}"), EOS]

    run = make_run(
        tmp_path,
        environments=[made],
        rollouts={"rollouts_per_step": 4, "group_size": 2, "max_in_flight": 4, "sampling": {"max_new_tokens": 32}},
        evaluation={"every_steps": 0, "prompts": 1},
        engine={"max_model_len": 256},
    )
    async with running(run, StubEngine(answer=add)) as loop:
        shard = await loop.batch(1)
        assert set(shard.stats.reward_parts) == {f"sums/{name}" for name in ("right", "characters", "truncated")}
        assert {rollout.reward for rollout in loop.last_rollouts()} <= {0.0, 1.0}
        assert all("It is" in decode(rollout.token_ids.tolist()) for rollout in loop.last_rollouts())
    assert not verify_rollouts(run).problems
