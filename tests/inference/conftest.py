"""A tiny model for all tests of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers import write_model

from hpcrl.modeling.qwen3_moe import Qwen3Moe


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen3Moe]:
    """A model directory and the model in it."""
    path = tmp_path_factory.mktemp("tiny-model")
    return path, write_model(path, seed=1)
