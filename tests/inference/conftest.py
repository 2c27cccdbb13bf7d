"""A tiny model for all tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import contract
import pytest
import torch
from engine_helpers import Server, write_model

from hpcrl.modeling.decoder import Decoder


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoder]:
    """A model directory and the model in it."""
    path = tmp_path_factory.mktemp("tiny-model")
    return path, write_model(path, seed=1)


@pytest.fixture(scope="session")
def contract_server(tiny: tuple[Path, Decoder], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The engine that all tests of the contract ask."""
    path, model = tiny
    running = contract.start(path, model, tmp_path_factory.mktemp("log") / "server.log")
    yield running
    running.stop()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as executor:
        yield executor
