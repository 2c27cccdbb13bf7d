"""A rollout of several turns of the real library verifiers on a real engine, whatever that engine says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_helpers import Server
from test_gateway_engine import front

from hpcrl.config.verifiers_environment import VerifiersEnv
from hpcrl.rollouts.environments import PolicyEndpoint
from hpcrl.rollouts.environments.trial import NullPolicy
from hpcrl.rollouts.environments.verifiers.environment import VerifiersEnvironment

VERIFIERS = Path(__file__).parents[2] / ".verifiers"
TURNS = 4
needs_verifiers = pytest.mark.skipif(
    not (VERIFIERS / "hpcrl-bootstrap").is_file(), reason="verifiers is not there (tools/bootstrap.py --verifiers)"
)
PACKAGE = f"""
import verifiers.v1 as vf

__all__ = ["CountingEnv", "CountingTaskset"]


class CountingTask(vf.Task[vf.TaskData]):
    pass


class CountingTaskset(vf.Taskset[CountingTask, vf.TasksetConfig]):
    def load(self):
        return [CountingTask(vf.TaskData(prompt=f"Count to {{n}}.")) for n in range(40)]


class CountingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={{"id": "null"}})


class CountingEnv(vf.Env[CountingConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as player:
            said = [(await player.turn()).last_reply]
            for number in range({TURNS} - 1):
                said.append((await player.turn(f"{{number}}?")).last_reply)
        player.trace.record_reward("characters", float(sum(map(len, said))))
"""


class _Endpoint(NullPolicy):
    """A policy of which there is an endpoint already."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__()
        self._found = PolicyEndpoint(url=url, key=key)

    def endpoint(self) -> Any:
        return self

    async def __aenter__(self) -> PolicyEndpoint:
        return self._found

    async def __aexit__(self, *_: object) -> None:
        return None


async def check_rollout(server: Server, path: Path, *, tolerance: float) -> None:
    """Play a rollout: what is recorded is what the engine was given and has sampled, with its log-probabilities."""
    (path / "counting.py").write_text(PACKAGE)
    python = str(VERIFIERS / "bin/python")
    environment = VerifiersEnvironment(
        VerifiersEnv(name="v", kind="verifiers", path=str(path / "counting.py"), python=python)
    )
    try:
        async with front(server, max_new_tokens=8) as made:
            policy = _Endpoint(str(made.client.base_url).rstrip("/"), made.client.api_key)
            outcome = await environment.rollout(environment.prompt("train", 0), policy)
            rollout = await made.rollout()
    finally:
        environment.close()
    exchanged = made.engine.exchanged
    assert len(exchanged) == made.counters.gateway_requests == TURNS
    assert 0 <= outcome.reward <= 8 * 8 * TURNS
    ids, sampled = rollout.token_ids.tolist(), rollout.sampled.astype(bool)
    assert rollout.token_ids[sampled].tolist() == [token for _, said in exchanged for token in said]
    # one sequence, which every request was a beginning of
    assert rollout.lengths == [len(ids)]
    for given, said in exchanged:
        assert ids[: len(given) + len(said)] == [*given, *said]
    scores = server.generate(ids[:-1], max_tokens=1, temperature=1.0, prompt_logprobs=0)["prompt_logprobs"]
    places = [place for place in range(1, len(ids) - 1) if sampled[place]]
    found = [scores[place][str(ids[place])]["logprob"] for place in places]
    assert found == pytest.approx(rollout.logprobs[places].tolist(), abs=tolerance)
