"""Programs that speak with the policy: what they get, how they end, and what becomes of their last line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from dataset_testing import questions, write_jsonl
from harness import make_recipe
from patience import patience

from hpcrl.processes import procfs
from hpcrl.rollouts.environments import (
    EnvironmentRaisedError,
    Outcome,
    PolicyEndpoint,
    build_environments,
    hosted,
    prompt_of,
)
from hpcrl.rollouts.environments.harness.program import EndedProgram, HarnessProgramError, run_program
from hpcrl.rollouts.environments.trial import try_environment


class Endpoint:
    """A policy with an endpoint where nobody is."""

    seed = 77

    def __init__(self) -> None:
        self.open = 0

    @contextlib.asynccontextmanager
    async def endpoint(self) -> AsyncIterator[PolicyEndpoint]:
        self.open += 1
        yield PolicyEndpoint("http://127.0.0.1:9/r/x/v1", "secret", "policy")
        self.open -= 1


async def run(code: str, **changes: Any) -> EndedProgram:
    """Run a program in Python."""
    settings: dict[str, Any] = {
        "task": b'{"index": 3}',
        "environ": {"PATH": os.environ["PATH"], "GIVEN": "yes"},
        "words": {"python": sys.executable},
        "time_limit_s": 60.0 * patience(),
        "max_bytes": 4096,
    }
    return await run_program(["{python}", "-c", code, "{task}", "{directory}", "{x}"], **{**settings, **changes})


def left(mark: str) -> list[procfs.Process]:
    """Processes of programs that have ``mark`` in their environment."""
    return procfs.with_environ("MARK", mark)


async def until(condition: Any) -> None:
    async with asyncio.timeout(30 * patience()):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_program_gets_its_task_an_empty_directory_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRL_SECRET", "x")
    monkeypatch.setenv("SOME_API_KEY", "x")
    code = """
import json, os, sys
task, directory, other = sys.argv[1:]
print(json.dumps([json.load(sys.stdin), json.load(open(task)), os.listdir(), os.getcwd() == directory, other]))
print(json.dumps({k: v for k, v in os.environ.items() if k != "LC_CTYPE"}), flush=True)
print("err", file=sys.stderr)
"""
    ended = await run(code)
    about, environ = map(json.loads, ended.stdout.splitlines())
    assert about == [{"index": 3}, {"index": 3}, [], True, "{x}"]
    directory = environ["HOME"]
    assert environ == {"PATH": os.environ["PATH"], "GIVEN": "yes", "HOME": directory, "TMPDIR": directory}
    assert (ended.stderr, ended.code, ended.timed_out) == ("err\n", 0, False)
    assert not Path(directory).parent.exists()


async def test_of_much_output_the_last_is_kept() -> None:
    ended = await run("print('x' * 3_000_000); print('last')")
    assert len(ended.stdout) == 4096
    assert ended.stdout.endswith("xx\nlast\n")


async def test_output_without_reader_of_input_and_bytes_that_are_no_text() -> None:
    ended = await run("import os; os.write(1, b'\\xff\\n'); os.close(0)", task=b"x" * 2_000_000)
    assert ended.stdout == "\ufffd\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("1 / 0", "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
    ],
)
async def test_a_program_that_fails_says_why(code: str, said: str) -> None:
    with pytest.raises(HarnessProgramError, match=said):
        await run(code)


async def test_a_program_that_is_not_there() -> None:
    with pytest.raises(HarnessProgramError, match="/no/such/program: No such file"):
        await run_program(["/no/such/program"], task=b"", environ={}, words={}, time_limit_s=9, max_bytes=1024)
    with pytest.raises(HarnessProgramError, match="cannot be started: echo: embedded null byte"):
        await run_program(
            ["echo", "{prompt}"], task=b"", environ={}, words={"prompt": "a\0b"}, time_limit_s=9, max_bytes=1024
        )


FORKS = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(0)
"""


async def test_what_a_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    mark = str(tmp_path)
    ended = await run(f"{FORKS}\nprint('done')", environ={"MARK": mark})
    assert ended.stdout == "done\n"
    assert not left(mark)


async def test_a_time_limit_ends_all_of_a_program(tmp_path: Path) -> None:
    mark = str(tmp_path)
    ended = await run(f"{FORKS}\nprint('so far', flush=True)\ntime.sleep(3600)", environ={"MARK": mark}, time_limit_s=2)
    assert (ended.timed_out, ended.stdout) == (True, "so far\n")
    assert not left(mark)


async def test_a_cancelled_rollout_ends_its_program(tmp_path: Path) -> None:
    mark = str(tmp_path)
    work = asyncio.create_task(run(f"{FORKS}\ntime.sleep(3600)", environ={"MARK": mark}))
    await until(lambda: len(left(mark)) >= 2)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not left(mark)


async def test_a_program_ends_with_who_started_it(tmp_path: Path) -> None:
    """Also where that one is killed, and its group with it."""
    mark = str(tmp_path)
    code = f"""
import asyncio, sys
from hpcrl.rollouts.environments.harness.program import run_program
program = {FORKS + "time.sleep(3600)"!r}
asyncio.run(run_program([sys.executable, "-c", program], task=b"", environ={{"MARK": {mark!r}}}, words={{}},
                        time_limit_s=600, max_bytes=1024))
"""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, start_new_session=True, env={**os.environ, "TMPDIR": str(temporary)}
    )
    await until(lambda: len(left(mark)) >= 2)
    os.killpg(parent.pid, signal.SIGKILL)
    assert len(list(temporary.iterdir())) == 1
    await parent.wait()
    await until(lambda: not left(mark) and not list(temporary.iterdir()))


def environments_of(path: Path, program: str, **changes: Any) -> Any:
    write_jsonl(path / "tasks.jsonl", questions(20))
    (path / "agent.py").write_text(program)
    config = {
        "name": "agents",
        "kind": "harness",
        "path": str(path / "tasks.jsonl"),
        "held_out_share": 0.3,
        "command": ["{python}", str(path / "agent.py"), "{task}"],
        **changes,
    }
    return build_environments(make_recipe(path, environments=[config]))


@contextlib.asynccontextmanager
async def harness(path: Path, program: str, **changes: Any) -> AsyncIterator[Any]:
    (environment,) = environments_of(path, program, **changes)
    try:
        yield environment
    finally:
        for each in hosted([environment]):
            await each.aclose()


async def outcome_of(environment: Any, policy: Any = None) -> Outcome:
    prompt = await prompt_of(environment, "train", 0)
    found: Outcome = await environment.rollout(prompt, policy or Endpoint())
    return found


async def test_the_last_line_is_the_reward(tmp_path: Path) -> None:
    program = """
import json, os, sys
task = json.load(sys.stdin)
assert os.environ["OPENAI_BASE_URL"] == os.environ["OPENAI_API_BASE"] == "http://127.0.0.1:9/r/x/v1"
assert (os.environ["OPENAI_API_KEY"], os.environ["OPENAI_MODEL"], os.environ["MORE"]) == ("secret", "policy", "1")
assert not [name for name in os.environ if name.startswith("HPCRL") or name == "OTHER"]
assert task["row"]["prompt"] == task["prompt"] == task["messages"][-1]["content"]
assert (task["seed"], task["split"], "answer" in task["row"]) == (77, "train", True)
print("hello")
print(json.dumps({"reward": 0.25, "parts": {"tests": 0.5}}))
print()
"""
    async with harness(tmp_path, program, environ={"MORE": "1"}) as environment:
        policy = Endpoint()
        outcome = await outcome_of(environment, policy)
        assert (outcome.reward, outcome.parts) == (0.25, {"tests": 0.5, "timed_out": 0.0})
        assert policy.open == 0


async def test_checkers_judge_what_a_program_prints_and_hide_the_answer(tmp_path: Path) -> None:
    program = """
import json, sys
task = json.load(sys.stdin)
assert "answer" not in task["row"], task
print("so it is", int(task["prompt"].split()[2]) + 1)
"""
    async with harness(tmp_path, program, rewards=[{"kind": "numeric"}]) as environment:
        outcome = await outcome_of(environment)
        assert (outcome.reward, outcome.parts) == (1.0, {"numeric": 1.0, "unfinished": 0.0, "timed_out": 0.0})


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('no reward')", "last line of the program is not a reward: 'no reward'"),
        ("print('{\"reward\": NaN}')", "is not a reward"),
        ('print(\'{"reward": "1"}\')', "is not a reward"),
        ("print('{\"reward\": 1e300}')", "too large"),
        ("print('{\"reward\": 1}'); raise SystemExit(1)", "exit code 1"),
        ("", "is not a reward: ''"),
    ],
)
async def test_a_program_without_a_reward_fails_its_rollout(program: str, said: str, tmp_path: Path) -> None:
    async with harness(tmp_path, program) as environment:
        with pytest.raises(EnvironmentRaisedError, match=said):
            await outcome_of(environment)


async def test_a_program_that_is_ended_at_its_limit_is_judged_as_it_stands(tmp_path: Path) -> None:
    endless = "import time\nprint({!r}, flush=True)\ntime.sleep(3600)"
    early = endless.format('{"reward": 0.5}')
    async with harness(tmp_path, early, time_limit_s=2.0) as environment:
        outcome = await outcome_of(environment)
        assert (outcome.reward, outcome.parts) == (0.5, {"timed_out": 1.0})
    async with harness(tmp_path, endless.format("x"), time_limit_s=2.0) as environment:
        with pytest.raises(
            EnvironmentRaisedError, match=r"when it was ended after time_limit_s, 2 s is not a reward: 'x'"
        ):
            await outcome_of(environment)
    async with harness(tmp_path, endless.format("x"), time_limit_s=2.0, time_limit_reward=-1.0) as environment:
        outcome = await outcome_of(environment)
        assert (outcome.reward, outcome.parts) == (-1.0, {"timed_out": 1.0})


async def test_nothing_of_a_program_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    await run("open('x', 'w').write('x')")
    with pytest.raises(HarnessProgramError):
        await run("open('x', 'w').write('x'); 1 / 0")
    assert list((tmp_path / "tmp").iterdir()) == []


PLAYER = """
import json, os, sys, urllib.request
task, messages = json.load(sys.stdin), [{"role": "user", "content": "Say one."}]
for turn in range(2):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "stream": bool(turn)}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        text = answer.read().decode()
    assert ("[DONE]" in text) == bool(turn), text
    messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": f"Turn {turn}."}]
print(json.dumps({"reward": 0.5}))
"""


def test_a_program_is_tried_without_a_model(tmp_path: Path) -> None:
    """As `hpcrl env try` does it."""
    write_jsonl(tmp_path / "tasks.jsonl", questions(20))
    (tmp_path / "agent.py").write_text(PLAYER)
    config = {"name": "agents", "kind": "harness", "path": str(tmp_path / "tasks.jsonl"), "held_out_share": 0.3}
    config |= {"command": ["{python}", str(tmp_path / "agent.py")]}
    found = try_environment(make_recipe(tmp_path, environments=[config]), "agents", 0)
    assert (found["errors"], found["reward"], found["demonstration"]) == ([], 0.5, None)
    said = [(message["role"], message["content"]) for message in found["conversation"]]
    assert said == [("user", "Say one."), ("assistant", ""), ("user", "Turn 0."), ("assistant", "")]
