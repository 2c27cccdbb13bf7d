"""A trainer that shares its GPU with an engine keeps to its part of the memory."""

from __future__ import annotations

import inspect

import pytest
import torch

from hpcrl.config.load import load_recipe
from hpcrl.trainer.memory.gpu_share import keep_to_share

SHARE = "engine.memory.gpu_memory_utilization=0.35"


def limits(monkeypatch: pytest.MonkeyPatch, device: str, *settings: str) -> list[tuple[float, torch.device]]:
    """Return the calls of torch, which a build for processors has as well."""
    found: list[tuple[float, torch.device]] = []
    real = inspect.signature(torch.cuda.set_per_process_memory_fraction)

    def record(*args: object, **kwargs: object) -> None:
        bound = real.bind(*args, **kwargs)
        found.append((bound.arguments["fraction"], bound.arguments["device"]))

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", record)
    keep_to_share(torch.device(device), load_recipe("qwen3_1b7_gsm8k", (SHARE, *settings)).value)
    return found


def test_the_rest_of_the_engines_share_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(monkeypatch, "cuda:0") == [(0.65, torch.device("cuda:0"))]


def test_a_trainer_with_its_own_device_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(monkeypatch, "cuda:0", "engine.placement=shared_node") == []
    assert limits(monkeypatch, "cpu") == []
    assert limits(monkeypatch, "cuda:0", "engine.backend=embedded") == []
    assert limits(monkeypatch, "cuda:0", "engine.device=cpu") == []
