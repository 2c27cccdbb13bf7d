"""Published environments of verifiers on the embedded engine, which says anything: the tokens on record are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_helpers import Server, embedded_command, start_server
from family_lab import needs_templates
from published_environments import SETTINGS, needs_published
from published_rollouts import CONTEXT, check_published, write_talking_model

pytestmark = [pytest.mark.slow, needs_published, needs_templates]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("model")
    made = write_talking_model(model)
    command = embedded_command("--max-model-len", str(CONTEXT), "--max-num-seqs", "8", "--weight-version", "0")
    running = start_server(command, model, made, tmp_path_factory.mktemp("log") / "server.log")
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize("name", SETTINGS)
async def test_an_engine_that_says_anything(embedded: Server, name: str) -> None:
    await check_published(embedded, name, tolerance=2e-3)
