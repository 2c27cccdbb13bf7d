"""Published environments of verifiers: one rollout through the gateway.

They are in no package of an index: ``HPCRL_TEST_VERIFIERS_ENVIRONMENTS`` names the directory ``environments`` of a
checkout of https://github.com/PrimeIntellect-ai/verifiers. Packages of the same forms are in docs/examples/verifiers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hpcrl.config.sampling import SamplingConfig
from hpcrl.config.verifiers_environment import VerifiersEnv
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Rollout
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.environments import Outcome
from hpcrl.rollouts.environments.verifiers.environment import VerifiersEnvironment
from hpcrl.rollouts.gateway import Gateway
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling.conversation import Conversation
from hpcrl.rollouts.sampling.sampler import Sampler

WHERE = os.environ.get("HPCRL_TEST_VERIFIERS_ENVIRONMENTS")
PYTHON = Path(__file__).parents[1] / ".verifiers/bin/python"
needs_published = pytest.mark.skipif(
    not (WHERE and PYTHON.is_file()), reason="HPCRL_TEST_VERIFIERS_ENVIRONMENTS names no directory"
)
#: two seats of one policy; two attempts that are compared; a tool server
SETTINGS: dict[str, dict[str, Any]] = {"kuhn_poker": {"agent": "*"}, "code_golf": {}, "scratchpad": {}}


@contextlib.asynccontextmanager
async def played(name: str, url: str, model: Path, *, max_new_tokens: int) -> AsyncIterator[tuple[Outcome, Rollout]]:
    """Play one rollout of an environment against an engine."""
    assert WHERE is not None
    environment = VerifiersEnvironment(
        VerifiersEnv(
            name="v",
            kind="verifiers",
            path=str(Path(WHERE) / name),
            python=str(PYTHON),
            time_limit_s=120.0,
            **SETTINGS[name],
        )
    )
    counters = Counters()
    gateway = Gateway(counters)
    try:
        async with aiohttp.ClientSession() as http:
            pool = EnginePool(
                [EngineClient(http, name="engine-0", url=url)],
                counters=counters,
                request_timeout_s=60.0,
                max_retries=0,
            )
            pool.engines[0].serve(0, proved_s=0.0)
            pool.engines[0].end_exchange()
            sampler = Sampler(
                pool,
                Renderer.of_model(model),
                temperature=1.0,
                sampling=SamplingConfig(max_new_tokens=max_new_tokens),
                max_model_len=4000,
                gateway=gateway,
            )
            conversation = Conversation(sampler, pool.session("group-0"), seed=5)
            outcome = await environment.rollout(environment.prompt("train", 0), conversation)
            rollout = await conversation.rollout(0, outcome, seconds=1.0)
            assert rollout is not None
            yield outcome, rollout
    finally:
        await gateway.aclose()
        environment.close()
