"""mini-swe-agent, as it is on PyPI, in an environment of its own: fifty turns, of which it drops one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from gateway_testing import gateway_bench, sequences
from patience import patience

from hpcrl.rollouts.environments.harness.program import run_program

MINI = Path(__file__).parents[3] / ".mini-swe"
TURNS = 50
BROKEN = 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MINI / "hpcrl-bootstrap").is_file(),
        reason="mini-swe-agent is not there (tools/bootstrap.py --mini-swe)",
    ),
]


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call><|im_end|>'


def script(number: int) -> str:
    """What the policy says in a turn."""
    if number == BROKEN:
        return f"Look. {call('ls')}".replace("}}", "")
    last = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    return f"<think>Hm.</think>Step {number}.{call(last if number == TURNS - 1 else f'echo {number} >> log')}"


async def test_mini_swe_agent_is_recorded_token_by_token(tmp_path: Path) -> None:
    async with gateway_bench(tmp_path / "model", max_model_len=60_000) as bench:
        bench.said = [script(number) for number in range(TURNS)]
        environ = {
            "PATH": f"{MINI}/bin:{os.environ['PATH']}",
            "OPENAI_BASE_URL": bench.endpoint.url,
            "OPENAI_API_BASE": bench.endpoint.url,
            "OPENAI_API_KEY": bench.endpoint.key,
            # no network is asked for prices, and there is no terminal to ask at
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_CONFIGURED": "true",
            "COLUMNS": "200",
        }
        command = "mini -m openai/policy -t 'Write numbers.' -y --exit-immediately -o trajectory.json && cat log"
        ended = await run_program(
            ["sh", "-c", command],
            task=b"",
            environ=environ,
            words={},
            time_limit_s=300 * patience(),
            max_bytes=1 << 20,
        )
        written = ended.stdout.split()[-(TURNS - 2) :]
        assert written == [str(number) for number in range(TURNS - 1) if number != BROKEN], ended.stdout[-3000:]

        assert len(bench.stub.requests) == bench.counters.gateway_requests == TURNS
        turns = [bench.tokenizer.encode(text) for text in bench.said]
        rollout = await bench.rollout()
        trained: list[Any] = [
            [token for token, flag in zip(ids, sampled, strict=True) if flag] for ids, sampled in sequences(rollout)
        ]
        # what was sampled is what is trained on, once; the turn that was dropped is the end of a branch
        parts = turns[: BROKEN + 1], turns[BROKEN + 1 :]
        assert trained == [[token for turn in part for token in turn] for part in parts]
        ((one, _), (two, _)) = sequences(rollout)
        for number, prompt in enumerate(bench.prompts()):
            assert (one if number <= BROKEN else two)[: len(prompt)] == prompt
        shared = len(bench.prompts()[BROKEN - 1]) + len(turns[BROKEN - 1])
        assert one[:shared] == two[:shared]
        assert bench.recorder.malformed_calls == 1
