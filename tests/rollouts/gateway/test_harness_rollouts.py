"""Programs as environments of a running orchestrator: their rollouts are trained, verified, dropped and restored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Loop, make_run, running
from stub_engine import EOS, StubEngine, decode, encode

from hpcrl.runs.rollout_failures import read_failures
from hpcrl.runs.views.rollouts import verify_rollouts

AGENT = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
messages = [{"role": "user", "content": task["prompt"]}]


def ask():
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    body = json.dumps({"model": "policy", "messages": messages, "temperature": 0.3}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


for turn in range(3):
    said = ask()
    if "bad" not in said:  # what it cannot use is left out
        messages.append({"role": "assistant", "content": said})
    messages.append({"role": "user", "content": f"turn {turn}"})
print(json.dumps({"reward": float(task["seed"] % 2), "parts": {"length": len(messages)}}))
"""


def environments(path: Path, program: str, **changes: Any) -> list[dict[str, Any]]:
    path.mkdir(exist_ok=True)
    (path / "agent.py").write_text(program)
    rows = [{"prompt": f"task {number}"} for number in range(40)]
    (path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["{python}", str(path / "agent.py")]
    made = {"name": "agents", "kind": "harness", "path": str(path / "tasks.jsonl"), "held_out_share": 0.3}
    return [{**made, "command": command, **changes}]


def saying(token_ids: list[int], seed: int) -> list[int]:
    """A turn that the program leaves out, in some of the rollouts."""
    text = (
        "bad" if "turn 0" in decode(token_ids) and "turn 1" not in decode(token_ids) and seed % 2 else f"ok{seed % 90}"
    )
    return [*encode(text), EOS]


SMALL: dict[str, Any] = {
    "rollouts": {"rollouts_per_step": 8, "group_size": 4, "max_in_flight": 8, "sampling": {"max_new_tokens": 32}},
    "evaluation": {"every_steps": 0, "prompts": 2},
    "engine": {"max_model_len": 256},
}


def prompts_of(stub: StubEngine) -> list[list[int]]:
    return [request["token_ids"] for request in stub.requests if request["sampling_params"]["temperature"]]


async def test_rollouts_of_programs_are_trained_and_verified(tmp_path: Path) -> None:
    stub = StubEngine(answer=saying)
    run = make_run(tmp_path, environments=environments(tmp_path / "tasks", AGENT), **SMALL)
    async with running(run, stub) as loop:
        found = []
        for step in (1, 2):
            shard = await loop.batch(step)
            assert set(shard.stats.reward_parts) == {"agents/length", "agents/timed_out"}
            found += loop.last_rollouts()
            await loop.publish(step)
        counters = loop.parts.counters
        assert counters.gateway_requests == counters.gateway_overrides >= 3 * 16
    assert {rollout.reward for rollout in found} == {0.0, 1.0}
    given = {tuple(prompt) for prompt in prompts_of(stub)}
    branched = 0
    for rollout in found:
        starts = [0] if rollout.starts is None else rollout.starts.tolist()
        branched += len(starts) > 1
        for start, length in zip(starts, rollout.lengths, strict=True):
            ids = rollout.token_ids[start : start + length].tolist()
            # each sequence is what an engine was given, and what it said to that
            assert any(tuple(ids[:end]) in given for end in range(1, length))
        text = decode(rollout.token_ids[rollout.sampled.astype(bool)].tolist())
        assert text.count("|") == 3
    assert 0 < branched < len(found)
    verdict = verify_rollouts(run)
    assert not verdict.problems
    assert verdict.trained == 16


async def test_a_program_that_fails_is_told_with_its_error(tmp_path: Path) -> None:
    program = AGENT.replace("for turn", "if task['seed'] % 4 == 0:\n    raise OSError('no disk')\nfor turn")
    run = make_run(
        tmp_path,
        environments=environments(tmp_path / "tasks", program),
        **{**SMALL, "rollouts": {**SMALL["rollouts"], "failures": {"end_share": None}}},
    )
    async with running(run, StubEngine(answer=saying)) as loop:
        await loop.batch(1)
    (found,) = read_failures(run)
    assert found.failed.keys() == {"raised"}
    assert "OSError: no disk" in found.first["raised"].what
    assert not verify_rollouts(run).problems


async def test_a_program_that_asks_nothing_fails(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        environments=environments(tmp_path / "tasks", "print('{\"reward\": 1}')"),
        **{**SMALL, "evaluation": {"every_steps": 0, "prompts": 2}},
    )
    async with running(run, StubEngine(answer=saying), publish=None) as loop:
        error = await failure_of(loop)
    assert "ended before it asked the policy for a turn" in str(error)


async def failure_of(loop: Loop) -> BaseException:
    """What ends the orchestrator."""
    assert loop.work is not None
    try:
        await loop.publish(0)
        await loop.work
    except BaseException as error:  # noqa: BLE001 - what it is, is looked at
        return error
    raise AssertionError("nothing has failed")


async def test_an_interrupted_rollout_goes_on_with_its_turns(tmp_path: Path) -> None:
    """The program begins again, and gets the turns that were sampled before as long as it says the same."""
    run = make_run(tmp_path, environments=environments(tmp_path / "tasks", AGENT), **SMALL)
    first = StubEngine(answer=lambda token_ids, seed: [*encode("ok"), EOS])
    async with running(run, first) as loop:
        await loop.until(lambda: loop.parts.scheduler.in_flight == 8, timeout_s=60)
        # the third turn is not answered
        first.request_s = lambda number: 3600.0 if "turn 1" in decode(first.requests[-1]["token_ids"]) else 0.0
        await loop.until(lambda: first.in_flight == 8, timeout_s=60)
        begun = {group for running in loop.parts.scheduler._running.values() for group in [running.task.index]}
    assert len(begun) == 2
    run.start_attempt()
    second = StubEngine(answer=lambda token_ids, seed: [*encode("ok"), EOS])
    async with running(run, second) as loop:
        await loop.batch(1)
        assert loop.parts.counters.turns_recalled == 2 * 8
        assert loop.parts.counters.turns_given_up == 0
        assert {group.index for group in loop.last_groups()} == begun
    assert not verify_rollouts(run).problems


@pytest.mark.slow
async def test_the_example_of_the_docs(tmp_path: Path) -> None:
    """A program of twenty lines, with OpenAI's client, unchanged."""
    root = Path(__file__).parents[3]
    (made,) = yaml.safe_load((root / "docs/examples/harness/recipe.yaml").read_text())["environments"]
    made = {**made, "path": str(root / made["path"]), "command": ["{python}", str(root / made["command"][1])]}
    program = (root / "docs/examples/harness/agent.py").read_text()
    shown = (root / "docs/environments.md").read_text()
    assert program[program.index("task = json") :] in shown

    def guess(token_ids: list[int], seed: int) -> list[int]:
        """Halve what is left of the numbers."""
        low, high = 1, 100
        for number, answer in re.findall(r"(\d+)\.?\|+(higher|lower)", decode(token_ids)):
            low, high = (int(number) + 1, high) if answer == "higher" else (low, int(number) - 1)
        return [*encode(f"{(low + high) // 2}."), EOS]

    changes = {**SMALL, "rollouts": {**SMALL["rollouts"], "max_in_flight": 4, "rollouts_per_step": 4}}
    run = make_run(tmp_path, environments=[made], **{**changes, "engine": {"max_model_len": 512}})
    async with running(run, StubEngine(answer=guess)) as loop:
        shard = await loop.batch(1)
        assert shard.stats.reward_parts["guess/right"] == 1.0
        assert 0.4 <= shard.stats.reward_mean <= 1.0
    assert not verify_rollouts(run).problems
