"""The real library verifiers on a real vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import contract
import pytest
from engine_helpers import Server
from family_lab import needs_templates
from published_environments import SETTINGS, needs_published
from published_rollouts import CONTEXT, check_published, write_talking_model
from test_vllm_cpu import ENVIRONMENT, FLAGS, start_server
from verifiers_rollouts import check_rollout, needs_verifiers
from vllm_environment import VLLM_PYTHON

from hpcrl.modeling.decoder import Decoder

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2400), needs_verifiers]


@pytest.fixture(scope="module")
def vllm(tiny: tuple[Path, Decoder], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", *FLAGS]
    log = tmp_path_factory.mktemp("log") / "server.log"
    running = start_server(command, *tiny, log, kind="vllm", ready_s=1500, environment=ENVIRONMENT)
    running.timeout_s = 300.0
    contract.label(running, "0")
    yield running
    running.stop()


async def test_a_rollout_of_several_turns(vllm: Server, tmp_path: Path) -> None:
    await check_rollout(vllm, tmp_path, tolerance=2e-3)


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("model")
    made = write_talking_model(model)
    # a dense model has no experts to return
    flags = [flag for flag in FLAGS if flag != "--enable-return-routed-experts"]
    flags[flags.index("--max-model-len") + 1] = str(CONTEXT)
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", *flags]
    log = tmp_path_factory.mktemp("log") / "server.log"
    running = start_server(command, model, made, log, kind="vllm", ready_s=1500, environment=ENVIRONMENT)
    running.timeout_s = 300.0
    contract.label(running, "0")
    yield running
    running.stop()


@needs_published
@needs_templates
@pytest.mark.parametrize("name", SETTINGS)
async def test_published_environments(talking: Server, name: str) -> None:
    await check_published(talking, name, tolerance=2e-3)
