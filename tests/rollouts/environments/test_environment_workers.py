"""Workers of environments in real processes: prompts and rollouts, the death of a worker, silence, its own failures."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from harness import CALCULATOR, WORDS
from patience import patience
from worker_lab import WorkerLab

from hpcrl.config.environments import CustomEnv
from hpcrl.rollouts.environments import (
    Environment,
    EnvironmentLostError,
    EnvironmentRaisedError,
    Message,
    Reply,
    prompt_of,
)
from hpcrl.rollouts.environments.base import PolicyEndpoint
from hpcrl.rollouts.environments.workers import hosting
from hpcrl.rollouts.environments.workers.hosting import EnvironmentHost

MINE = {"name": "mine", "kind": "custom", "factory": "my_environment:Obedient"}


class Script:
    """A policy that says what it is told to."""

    def __init__(self, *replies: str, seed: int = 0) -> None:
        self.replies, self.seed = list(replies), seed
        self.heard: list[Message] = []

    async def reply(self, messages: Sequence[Message]) -> Reply:
        self.heard += messages
        await asyncio.sleep(0)
        return Reply(text=self.replies.pop(0), finished=True)


async def roll_out(environment: Environment, *replies: str, index: int = 0) -> Any:
    prompt = await prompt_of(environment, "train", index)
    return await environment.rollout(prompt, Script(*replies))


async def hang(lab: WorkerLab, environment: Environment, indices: Sequence[int]) -> list[asyncio.Task[Any]]:
    """Begin rollouts that hang in their environment; returns when all of them do."""
    policies = [Script("hang") for _ in indices]
    prompts = await asyncio.gather(*(prompt_of(environment, "train", index) for index in indices))
    begun = [environment.rollout(prompt, policy) for prompt, policy in zip(prompts, policies, strict=True)]
    tasks = [asyncio.create_task(rollout) for rollout in begun]
    await lab.until(lambda: not any(policy.replies for policy in policies))
    return tasks


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def test_environments_of_every_kind_run_at_workers(tmp_path: Path) -> None:
    async with WorkerLab(tmp_path, 2, [MINE, WORDS, CALCULATOR]) as lab:
        mine, words, calculator = lab.environments
        assert [each.name for each in lab.environments] == ["mine", "words", "calculator"]
        await lab.until_up(0, 1)
        outcomes = await asyncio.gather(*(roll_out(mine, "again", "x", index=i) for i in range(40)))
        assert [outcome.parts["index"] for outcome in outcomes] == list(range(40))
        assert len({outcome.parts["pid"] for outcome in outcomes}) == 2
        # rollouts of a prompt stay together
        prompt = await prompt_of(mine, "train", 7)
        group = await asyncio.gather(*(mine.rollout(prompt, Script("go")) for _ in range(8)))
        assert len({outcome.parts["pid"] for outcome in group}) == 1
        prompt = await prompt_of(words, "train", 3)
        assert prompt.messages
        word = str(prompt.messages[-1]["content"]).split()[-1]
        assert (await words.rollout(prompt, Script(word[::-1]))).reward == 1.0
        assert (await roll_out(calculator, "run 1+1", "answer nothing")).reward == 0.0
        with pytest.raises(EnvironmentRaisedError, match="LookupError: no such prompt"):
            await prompt_of(mine, "train", 666)
        assert not lab.told.lost


async def test_a_killed_worker_costs_its_rollouts_alone(tmp_path: Path) -> None:
    async with WorkerLab(tmp_path, 2, [MINE]) as lab:
        (mine,) = lab.environments
        await lab.until_up(0, 1)
        pids = {int((await roll_out(mine, "go", index=i)).parts["pid"]) for i in range(2)}
        hanging = await hang(lab, mine, range(10, 20))
        assert [link.load for link in lab.workers.links] == [5, 5]
        os.kill(lab.processes[0].pid, signal.SIGKILL)
        await lab.until(lambda: lab.told.lost)
        ((replica, _, calls),) = lab.told.lost
        assert (replica, calls) == (0, 5)
        await lab.until(lambda: sum(task.done() for task in hanging) == 5)
        errors = [task.exception() for task in hanging if task.done()]
        assert all(isinstance(error, EnvironmentLostError) for error in errors)
        assert {error.death for error in errors if isinstance(error, EnvironmentLostError)} == {("env 0", 0)}
        # nothing of the worker is left, and the processes of the other one are
        await lab.until(lambda: sum(is_running(pid) for pid in pids) == 1)
        # others go on, at the worker that is left
        assert [(await roll_out(mine, "go", index=i)).reward for i in range(4)] == [1.0] * 4
        lab.processes[0].wait()
        lab.start(0)
        await lab.until_up(0)
        assert lab.told.back == [0]
        found = await asyncio.gather(*(roll_out(mine, "again", "x", index=i) for i in range(30, 50)))
        assert len({outcome.parts["pid"] for outcome in found}) == 2
        assert not lab.told.silent
        for task in hanging:
            task.cancel()


async def test_a_worker_that_is_silent_is_lost_and_complained_about(tmp_path: Path) -> None:
    async with WorkerLab(tmp_path, 2, [MINE]) as lab, AsyncExitStack() as stack:
        (mine,) = lab.environments
        await lab.until_up(0, 1)
        hanging = await hang(lab, mine, range(4))
        assert [link.load for link in lab.workers.links] == [2, 2]
        pid = lab.processes[1].pid
        os.kill(pid, signal.SIGSTOP)
        stack.callback(os.kill, pid, signal.SIGCONT)
        await lab.until(lambda: lab.told.lost)
        assert [(replica, calls) for replica, _, calls in lab.told.lost] == [(1, 2)]
        assert lab.told.silent == [(1, "it was silent for 4 s")]
        await lab.until(lambda: sum(task.done() for task in hanging) == 2)
        assert (await roll_out(mine, "go", index=9)).reward == 1.0
        # it was only slow
        os.kill(pid, signal.SIGCONT)
        await lab.until_up(1)
        assert lab.told.back == [1]
        for task in hanging:
            task.cancel()


async def test_a_process_that_dies_costs_its_worker_nothing(tmp_path: Path) -> None:
    async with WorkerLab(tmp_path, 1, [MINE, WORDS]) as lab:
        mine, words = lab.environments
        await lab.until_up(0)
        prompt = await prompt_of(words, "train", 3)
        first = (await roll_out(mine, "go")).parts["pid"]
        with pytest.raises(EnvironmentLostError, match="was killed by SIGKILL") as caught:
            await roll_out(mine, "die")
        first_death = caught.value.death
        assert first_death[0] == "mine at env 0"
        assert lab.told.processes == [("mine", "at worker 0: was killed by SIGKILL")]
        assert (await roll_out(mine, "go")).parts["pid"] != first
        with pytest.raises(EnvironmentLostError) as caught:
            await roll_out(mine, "leave")
        assert caught.value.death[0] == "mine at env 0"
        assert caught.value.death != first_death
        assert (await words.rollout(prompt, Script("?"))).reward < 1.0
        assert not lab.told.lost


async def test_a_blocked_process_is_ended_and_replaced(tmp_path: Path) -> None:
    async with WorkerLab(tmp_path, 1, [{**MINE, "answer_timeout_s": 1.0 * patience()}]) as lab:
        (mine,) = lab.environments
        await lab.until_up(0)
        with pytest.raises(EnvironmentLostError, match="event loop is blocked"):
            await roll_out(mine, "block")
        assert (await roll_out(mine, "go")).reward == 1.0
        assert "my_environment.py" in lab.log.read_text(), "stacks of the process"


async def test_a_new_orchestrator_gets_processes_of_its_own(tmp_path: Path) -> None:
    async with WorkerLab(tmp_path, 1, [MINE]) as lab:
        (mine,) = lab.environments
        await lab.until_up(0)
        first = int((await roll_out(mine, "go")).parts["pid"])
        # another connection, as of an orchestrator whose first one was cut without a word
        async with lab.http.ws_connect(f"{lab.urls[0]}/environments/mine") as socket:
            assert (await socket.receive()).type is aiohttp.WSMsgType.BINARY
            await lab.until(lambda: not is_running(first))
        assert (await roll_out(mine, "go")).parts["pid"] != first


async def test_only_the_run_is_answered(tmp_path: Path) -> None:
    async with WorkerLab(tmp_path, 1, [MINE]) as lab, aiohttp.ClientSession() as stranger:
        await lab.until_up(0)
        for path in ("/health", "/watch", "/environments/mine", "/"):
            async with stranger.get(lab.urls[0] + path) as response:
                assert response.status == 401
        async with lab.http.get(f"{lab.urls[0]}/health") as response:
            assert (response.status, await response.text()) == (200, "ok")
        async with lab.http.get(f"{lab.urls[0]}/environments/other") as response:
            assert response.status == 404


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factory": "my_environment:Thing"}, "no callable 'Thing'"),
        ({"factory": "silent_environment:Thing"}, "gave no prompt: LookupError: nothing here"),
    ],
)
async def test_a_worker_whose_environments_fail_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, message: str
) -> None:
    text = "from my_environment import Obedient\nclass Thing(Obedient):\n    def prompt(self, split, index):\n"
    (tmp_path / "silent_environment.py").write_text(f"{text}        raise LookupError('nothing here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with WorkerLab(tmp_path, 1, [{**MINE, **settings}]) as lab:
        async with asyncio.timeout(60.0 * patience()):
            assert await asyncio.to_thread(lab.processes[0].wait) == 1
        (record,) = (lab.run.attempt_dir(lab.attempt) / "failures").glob("env-0.json")
        assert message in record.read_text()
        assert not lab.workers.links[0].up


async def test_endpoints_of_the_policy_are_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asking_environment.py").write_text(
        "from hpcrl.rollouts.environments import Outcome\n"
        "from my_environment import Obedient\n"
        "class Asking(Obedient):\n"
        "    async def rollout(self, prompt, policy):\n"
        "        async with policy.endpoint() as endpoint:\n"
        "            return Outcome(float(endpoint.url == 'http://10.0.0.1/v1' and endpoint.key == 'secret'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    class Served(Script):
        def endpoint(self) -> Any:
            stack = AsyncExitStack()
            stack.push_async_callback(asyncio.sleep, 0)
            served = PolicyEndpoint("http://10.0.0.1/v1", "secret")

            class Context:
                async def __aenter__(self) -> PolicyEndpoint:
                    return served

                async def __aexit__(self, *error: object) -> None:
                    closed.append(True)

            return Context()

    closed: list[bool] = []
    async with WorkerLab(tmp_path, 1, [{**MINE, "factory": "asking_environment:Asking"}]) as lab:
        (asking,) = lab.environments
        await lab.until_up(0)
        outcome = await asking.rollout(await prompt_of(asking, "train", 0), Served())
        assert outcome.reward == 1.0
        assert closed == [True]


def fading_environment(directory: Path, monkeypatch: pytest.MonkeyPatch, flag: Path) -> dict[str, Any]:
    """An environment that cannot be made while ``flag`` is there."""
    (directory / "fading_environment.py").write_text(
        "import os\nfrom my_environment import Obedient\nclass Fading(Obedient):\n    def __init__(self, flag):\n"
        "        super().__init__()\n        if os.path.exists(flag):\n"
        "            raise OSError('the license is gone')\n"
    )
    monkeypatch.syspath_prepend(directory)
    return {**MINE, "factory": "fading_environment:Fading", "args": {"flag": str(flag)}}


async def test_a_worker_makes_an_environment_again_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one it refuses the orchestrator, which then asks for none."""
    flag = tmp_path / "broken"
    async with WorkerLab(tmp_path, 1, [fading_environment(tmp_path, monkeypatch, flag)]) as lab:
        await lab.until_up(0)
        flag.touch()
        with pytest.raises(EnvironmentLostError, match="SIGKILL"):
            await roll_out(lab.environments[0], "die")
        await lab.until(lambda: "the license is gone" in lab.log.read_text())
        flag.unlink()
        async with asyncio.timeout(30.0 * patience()):
            while True:
                async with lab.http.get(f"{lab.urls[0]}/watch") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.1)


async def test_a_connection_that_cannot_be_had_keeps_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Child:
        killed, running = 0, True

        async def connect(self) -> Any:
            raise OSError("too many open files")

        def kill(self) -> None:
            self.killed += 1

    made: list[Child] = []

    async def make() -> Any:
        made.append(Child())
        return made[-1]

    host = EnvironmentHost(CustomEnv.model_validate(MINE))
    monkeypatch.setattr(host, "_made", make)
    await host.prepare()
    await host.serve(SimpleNamespace())  # type: ignore[arg-type]
    await host.prepare()
    assert [child.killed for child in made] == [1, 0]
    assert host.ready


async def test_a_client_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hung:
        async def send_str(self, why: str) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(hosting, "_SAY_S", 0.05)
    async with asyncio.timeout(10.0 * patience()):
        await hosting._say(Hung(), "its process belongs to another connection now")  # type: ignore[arg-type]


async def test_a_worker_that_cannot_make_an_environment_again_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "broken"
    fading = fading_environment(tmp_path, monkeypatch, flag)
    async with WorkerLab(tmp_path, 1, [fading, WORDS]) as lab:
        mine = lab.environments[0]
        await lab.until_up(0)
        flag.touch()
        with pytest.raises(EnvironmentLostError, match="SIGKILL"):
            await roll_out(mine, "die")
        errors = []
        while lab.processes[0].poll() is None:
            try:
                await roll_out(mine, "go")
            except EnvironmentLostError as error:
                errors.append(error)
            await asyncio.sleep(0.05)
        assert "the license is gone" in str(errors[0])
        assert len({error.death for error in errors}) >= 2, "not one failure, however often it is tried"
        assert lab.processes[0].returncode == 1
        await lab.until(lambda: lab.told.lost)


async def test_a_prompt_that_a_lost_worker_was_to_make_is_made_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rollouts of a group wait for it. One that ends its process is not tried at the next worker."""
    (tmp_path / "slow_environment.py").write_text(
        "import os, time\nfrom my_environment import Obedient\nclass Slow(Obedient):\n"
        "    def __init__(self, flag):\n        super().__init__()\n        self.flag = flag\n"
        "    def prompt(self, split, index):\n"
        "        while index == 5 and not os.path.exists(self.flag):\n            time.sleep(0.05)\n"
        "        if index == 6:\n            os._exit(9)\n"
        "        return super().prompt(split, index)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flag = tmp_path / "go"
    slow = {**MINE, "factory": "slow_environment:Slow", "args": {"flag": str(flag)}}
    async with WorkerLab(tmp_path, 2, [slow]) as lab:
        (mine,) = lab.environments
        await lab.until_up(0, 1)
        asked = asyncio.create_task(prompt_of(mine, "train", 5))
        await lab.until(lambda: any(link._calls for link in lab.workers.links))
        (busy,) = [link.replica for link in lab.workers.links if link._calls]
        await lab.until(lambda: lab.workers.links[busy].load == 1)
        os.kill(lab.processes[busy].pid, signal.SIGKILL)
        flag.touch()
        assert (await asked).index == 5
        with pytest.raises(EnvironmentLostError, match="exit code 9"):
            await prompt_of(mine, "train", 6)
        assert len(lab.told.lost) == 1
