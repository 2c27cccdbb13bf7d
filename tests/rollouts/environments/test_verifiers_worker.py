"""The process of verifiers, with a stand-in for its program: what it may do wrong, and how that ends."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness import make_recipe
from patience import patience

from hpcrl.errors import ConfigError
from hpcrl.processes.procfs import all_processes, is_alive
from hpcrl.rollouts.environments import build_environments, hosted, prompt_of
from hpcrl.rollouts.environments.process_calls import EnvironmentLostError, EnvironmentRaisedError
from hpcrl.rollouts.environments.trial import NullPolicy
from hpcrl.rollouts.environments.verifiers import worker_process
from hpcrl.rollouts.environments.verifiers.worker_process import WorkerLostError, WorkerProcess

FOREIGN = Path(worker_process.__file__).parent / "foreign"
#: it answers tasks with its variables, and runs by the word in their address
STAND_IN = f"""
import asyncio, importlib.util, json, os, subprocess, sys, threading, time

spec = importlib.util.spec_from_file_location("worker", {str(FOREIGN / "verifiers_worker.py")!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)


class Backend:
    notes = ["it is a stand-in"]

    def task(self, split, index):
        if index == 8:
            return {{"messages": {{1, 2}}}}
        if index == 7:
            sys.stderr.write("hung")
            time.sleep(3600)
        return {{"messages": [{{"role": "user", "content": json.dumps(dict(os.environ))}}]}}

    def serving(self):
        return _Serving()

    async def run(self, asked):
        what = asked["model"]
        if what == "block":
            time.sleep(3600)
        if what == "wait":
            await asyncio.sleep(3600)
        if what == "stay":
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    pass
        if what == "set":
            return {{"reward": {{1}}, "parts": {{}}}}
        if what == "wordless":
            raise Wordless
        if what == "exit":
            sys.exit(3)
        if what == "die":
            os.kill(os.getpid(), 9)
        if what == "garbage":
            os.write(int(sys.argv[1]), bytes([0, 0, 0, 2]) + b"{{!")
            await asyncio.sleep(3600)
        if what == "deep":
            text = b'{{"id": 0, "value": ' + b"[" * 20_000 + b"]" * 20_000 + b"}}"
            os.write(int(sys.argv[1]), len(text).to_bytes(4, "big") + text)
            await asyncio.sleep(3600)
        if what == "start":
            started = subprocess.Popen(["sleep", "3600"], start_new_session=True)
            return {{"reward": 0.0, "parts": {{"pid": started.pid}}}}
        return {{"reward": float("nan") if what == "nan" else 1.0, "parts": {{}}}}


class Wordless(Exception):
    def __str__(self):
        raise ValueError


class _Serving:
    async def __aenter__(self):
        if "SLOW" in os.environ:
            await asyncio.sleep(3600)

    async def __aexit__(self, *_):
        return None


worker.make_backend = lambda build: Backend()
worker._version = lambda: "0"
worker.main(int(sys.argv[1]), int(sys.argv[2]))
"""
Start = Callable[..., WorkerProcess]


def foreign(name: str) -> ModuleType:
    """A file of the foreign interpreter, as it imports it."""
    spec = importlib.util.spec_from_file_location(f"foreign_{name}", FOREIGN / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(worker_process, "_PROGRAM", program)
    async with AsyncExitStack() as stack:

        def made(answer_timeout_s: float = 60.0, **environ: str) -> WorkerProcess:
            worker = WorkerProcess(sys.executable, environ, answer_timeout_s=answer_timeout_s * patience())
            stack.callback(worker.close)
            assert worker.ask({}, timeout_s=60.0 * patience())["notes"] == ["it is a stand-in"]
            return worker

        yield made


def asked(what: str) -> dict[str, Any]:
    return {"model": what}


async def test_it_has_no_variables_but_its_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRL_TOKEN_FILE", "/secret")
    monkeypatch.setenv("SOME_KEY", "secret")
    worker = start(PYTHONPATH="/its/own", WORD="x")
    (message,) = worker.ask({"split": "train", "index": 0}, timeout_s=30.0)["messages"]
    found = json.loads(message["content"])
    assert found["PYTHONPATH"] == "/its/own"
    assert found["WORD"] == "x"
    assert found["HOME"] == found["TMPDIR"]
    assert not {"HPCRL_TOKEN_FILE", "SOME_KEY"} & set(found)
    assert not [name for name in found if name.startswith("HPCRL_")]
    assert Path(found["HOME"]).is_dir()
    worker.close()
    assert not Path(found["HOME"]).exists()


async def test_runs_do_not_disturb_each_other(start: Start) -> None:
    worker = start()
    waiting = asyncio.create_task(worker.run(asked("wait"), timeout_s=60.0))
    with pytest.raises(worker_process.WorkerAnsweredError, match="SystemExit: 3"):
        await worker.run(asked("exit"), timeout_s=60.0)
    assert (await worker.run(asked(""), timeout_s=60.0))["reward"] == 1.0
    with pytest.raises(TimeoutError):
        await worker.run(asked("wait"), timeout_s=0.2)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    # both have ended there
    deadline = time.monotonic() + 30.0 * patience()
    while worker._cancelled and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not worker._cancelled
    assert not worker.lost


async def test_what_json_cannot_hold_is_an_error_and_no_silence(start: Start) -> None:
    worker = start()
    for what, why in (("set", "set is not JSON serializable"), ("wordless", "its message cannot be shown")):
        with pytest.raises(worker_process.WorkerAnsweredError, match=why):
            await worker.run(asked(what), timeout_s=20.0 * patience())
    with pytest.raises(worker_process.WorkerAnsweredError, match="set is not JSON serializable"):
        worker.ask({"split": "train", "index": 8}, timeout_s=20.0 * patience())
    assert worker.ask({"split": "train", "index": 0}, timeout_s=20.0 * patience())["messages"]


async def test_servers_that_never_run_end_the_process(start: Start) -> None:
    worker = start(answer_timeout_s=1.0, SLOW="1")
    first = asyncio.create_task(worker.run(asked(""), timeout_s=60.0))
    await asyncio.sleep(0.3)
    first.cancel()
    with pytest.raises(WorkerLostError, match="its tool servers were not ready"):
        await worker.run(asked(""), timeout_s=20.0 * patience())


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("die", "it was killed by SIGKILL"),
        ("block", "its event loop was blocked"),
        ("garbage", "it sent an invalid message"),
        ("deep", "it sent an invalid message: it is nested too deeply"),
        ("stay", "did not end within"),
    ],
)
async def test_a_lost_worker_fails_all_its_runs(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str, why: str
) -> None:
    monkeypatch.setattr(worker_process, "_CANCEL_S", 0.1)
    worker = start(answer_timeout_s={"block": 1.0, "stay": 8.0}.get(what, 60.0))
    waiting = asyncio.create_task(worker.run(asked("wait"), timeout_s=600.0))
    await asyncio.sleep(0.05)
    run = asyncio.create_task(worker.run(asked(what), timeout_s=0.2 if what == "stay" else 600.0))
    with pytest.raises(WorkerLostError, match=why):
        await asyncio.wait_for(waiting, 60.0 * patience())
    with pytest.raises((WorkerLostError, TimeoutError)):
        await run
    with pytest.raises(WorkerLostError, match=why):
        await worker.run(asked(""), timeout_s=600.0)
    with pytest.raises(WorkerLostError, match=why):
        worker.ask({"split": "train", "index": 0}, timeout_s=600.0)


async def test_a_task_that_does_not_come(start: Start) -> None:
    worker = start()
    with pytest.raises(WorkerLostError, match=r"no answer within 0\.3 s"):
        worker.ask({"split": "train", "index": 7}, timeout_s=0.3)


@pytest.mark.parametrize("how", ["close", "kill"])
async def test_nothing_outlives_it(start: Start, how: str) -> None:
    worker = start()
    pid = int((await worker.run(asked("start"), timeout_s=60.0))["parts"]["pid"])
    sleeper = all_processes()[pid]
    if how == "close":
        worker.close()
    else:
        (program,) = [each for each in all_processes().values() if each.ppid == worker._guard.pid and not each.dead]
        os.kill(program.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30.0 * patience()
    while is_alive(pid, sleeper.start_ticks) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not is_alive(pid, sleeper.start_ticks)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec '{sys.executable}' -P '{tmp_path}/stand_in.py' \"$4\" \"$5\"\n")
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "stand_in.py").write_text(STAND_IN.replace('what = asked["model"]', 'what = os.environ["WHAT"]'))

    def made(**changes: Any) -> Any:
        value = {"name": "v", "kind": "verifiers", "path": str(tmp_path), "python": str(tmp_path / "python")}
        return make_recipe(tmp_path, environments=[{**value, **changes}])

    return made


async def rolled_out(recipe: Any) -> Any:
    (environment,) = build_environments(recipe)
    try:
        return await environment.rollout(await prompt_of(environment, "train", 0), NullPolicy())
    finally:
        for each in hosted([environment]):
            await each.aclose()


async def test_a_reward_without_a_value_is_refused(config: Callable[..., Any]) -> None:
    with pytest.raises(EnvironmentRaisedError, match="its reward is nan, which is not finite") as error:
        await rolled_out(config(environ={"WHAT": "nan", "PATH": os.environ["PATH"]}))
    assert error.value.cause == "unusable"


async def test_a_rollout_has_a_time_limit(config: Callable[..., Any]) -> None:
    with pytest.raises(EnvironmentRaisedError, match=r"took longer than time_limit_s, 0\.2 s"):
        await rolled_out(config(environ={"WHAT": "wait"}, time_limit_s=0.2))


async def test_a_lost_worker_is_a_lost_environment(config: Callable[..., Any]) -> None:
    """Its process ends with it, so that both are started anew and the loss counts once."""
    with pytest.raises(EnvironmentLostError, match="exit code 75"):
        await rolled_out(config(environ={"WHAT": "die"}))


def test_an_interpreter_without_verifiers(tmp_path: Path) -> None:
    value = {"name": "v", "kind": "verifiers", "package": "kuhn-poker", "python": sys.executable}
    with pytest.raises(ConfigError, match=r"environments\.v\.python: .*has no package verifiers\n +hint: set python"):
        build_environments(make_recipe(tmp_path, environments=[value]))


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    value = {"name": "v", "kind": "verifiers", "package": "kuhn-poker", "python": "/nowhere/python"}
    with pytest.raises(ConfigError, match=r"environments\.v\.python: /nowhere/python does not load it"):
        build_environments(make_recipe(tmp_path, environments=[value]))


# -- splits


def questions(*prompts: str | None, **fields: Any) -> list[dict[str, Any]]:
    return [{"idx": i, "prompt": prompt, **fields} for i, prompt in enumerate(prompts)]


def splits_of(tasks: Any, *, finite: bool = True, share: float = 0.3, held_out: Any = None) -> Any:
    made: Any = foreign("splits")
    return made.TaskSplits(tasks, lambda task: task, share=share, held_out=held_out, finite=finite)


def test_equal_questions_are_in_one_split() -> None:
    found = splits_of(questions(*[f"question {number % 40}" for number in range(200)]))
    train, held_out = ({found.task(split, i)["prompt"] for i in range(200)} for split in ("train", "heldout"))
    assert not train & held_out
    assert len(train | held_out) == 40
    assert 4 <= len(held_out) <= 20
    assert sum(found.counts().values()) == 200
    # another order, the same splits
    again = splits_of(reversed(questions(*[f"question {number}" for number in range(40)])))
    assert {again.task("heldout", i)["prompt"] for i in range(40)} == held_out


def test_tasks_that_all_ask_the_same_differ_by_their_other_fields() -> None:
    found = splits_of([{"idx": i, "name": f"{i}", "prompt": None, "seed": i % 30} for i in range(60)])
    train, held_out = ({found.task(split, i)["seed"] for i in range(60)} for split in ("train", "heldout"))
    assert not train & held_out
    assert train | held_out == set(range(30))


def test_a_stream_without_an_end_is_read_as_far_as_needed() -> None:
    read: list[int] = []

    def stream() -> Iterator[dict[str, Any]]:
        for number in count():
            read.append(number)
            yield {"prompt": f"question {number}"}

    found = splits_of(stream(), finite=False)
    assert len(read) == 64
    tasks = [found.task("heldout", index)["prompt"] for index in range(100)]
    assert len(set(tasks)) == 100
    assert 200 < len(read) < 600
    assert not set(tasks) & {found.task("train", index)["prompt"] for index in range(200)}


def test_a_stream_that_has_raised_does_not_begin_anew() -> None:
    def stream() -> Iterator[dict[str, Any]]:
        yield from questions(*map(str, range(100)))
        raise OSError("the network is away")

    found = splits_of(stream(), finite=False)
    with pytest.raises(OSError, match="the network is away"):
        found.task("train", 99)
    with pytest.raises(RuntimeError, match="cannot be read on: OSError: the network is away"):
        found.task("train", 99)
    assert found.task("train", 3)


def test_held_out_tasks_of_their_own_are_not_trained_on() -> None:
    found = splits_of(questions("a", "b", "c", "b"), held_out=questions("b", "d"))
    assert [found.task("train", i)["prompt"] for i in range(3)] == ["a", "c", "a"]
    assert [found.task("heldout", i)["prompt"] for i in range(3)] == ["b", "d", "b"]
    assert found.left_out == 2


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_few_questions_are_in_both_splits(share: float) -> None:
    """A share of three questions by a hash may be none of them, or all."""
    tasks = questions("a", "b", "c", "a", "b", "c")
    found = splits_of(tasks, share=share)
    train, held_out = ({found.task(split, i)["prompt"] for i in range(9)} for split in ("train", "heldout"))
    assert {len(train), len(held_out)} == {1, 2}
    assert train | held_out == {"a", "b", "c"}
    assert sorted(found.counts().values()) == [2, 4]
    again = splits_of(list(reversed(tasks)), share=share)
    assert {again.task("heldout", i)["prompt"] for i in range(9)} == held_out


@pytest.mark.parametrize(("tasks", "key"), [([], "held_out_share"), (questions("a"), "held_out_share")])
def test_a_split_without_a_task(tasks: list[Any], key: str) -> None:
    with pytest.raises(Exception, match=r"there is no (training|held-out) task") as error:
        splits_of(tasks)
    assert getattr(error.value, "key", None) == key
