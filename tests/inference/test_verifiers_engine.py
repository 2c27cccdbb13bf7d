"""The real library verifiers on the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_helpers import Server, embedded_command, start_server
from verifiers_rollouts import check_rollout, needs_verifiers

from hpcrl.modeling.decoder import Decoder

pytestmark = [pytest.mark.slow, needs_verifiers]


@pytest.fixture(scope="module")
def embedded(tiny: tuple[Path, Decoder], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = embedded_command("--max-model-len", "1000", "--max-num-seqs", "8", "--weight-version", "0")
    running = start_server(command, *tiny, tmp_path_factory.mktemp("log") / "server.log")
    yield running
    assert running.stop() == 0


async def test_a_rollout_of_several_turns(embedded: Server, tmp_path: Path) -> None:
    await check_rollout(embedded, tmp_path, tolerance=2e-3)
