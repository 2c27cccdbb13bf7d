"""Adapters for tests: published as an adapter trainer would, and merged by plain numpy as the expectation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from adapter_lab import ExpertAdapter, ExpertLayout, adapter_tensors, config_of, publish_adapter
from engine_helpers import random_model, tensors_of
from numpy.typing import NDArray

from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import load_hf_tensors
from hpcrl.weights import Handoff, HandoffStore, VersionCommitter

RANK, ALPHA = 4, 8
QUERY = "model.layers.0.self_attn.q_proj"
OUTPUT = "model.layers.1.self_attn.o_proj"
EXPERTS = "model.layers.1.mlp.experts"

_Array = NDArray[np.float32]


class Factors(NamedTuple):
    """An adapter as arrays, as `adapter_tensors` takes them."""

    linear: dict[str, tuple[_Array, _Array]]
    experts: dict[str, ExpertAdapter]


def dyadic(rng: np.random.Generator, *shape: int, size: float = 1 / 8) -> _Array:
    """Few-bit numbers: their products and sums are exact in float32 in any order, so results compare bit by bit."""
    return (rng.integers(-2, 3, shape) * size).astype(np.float32)


def factors(model_tensors: Mapping[str, Any], seed: int, *modules: str, size: float = 1 / 8) -> Factors:
    """Random factors for modules of a model whose experts are stored one by one."""
    rng = np.random.default_rng(seed)
    linear, experts = {}, {}
    for module in modules:
        if module.endswith(".experts"):
            count = sum(
                bool(re.fullmatch(rf"{re.escape(module)}\.\d+\.up_proj\.weight", name)) for name in model_tensors
            )
            half, hidden = model_tensors[f"{module}.0.up_proj.weight"].shape
            shapes = ((RANK, hidden), (2 * half, RANK), (RANK, half), (hidden, RANK))
            experts[module] = ExpertAdapter(*(dyadic(rng, count, *shape, size=size) for shape in shapes))
        else:
            rows, columns = model_tensors[f"{module}.weight"].shape
            linear[module] = (dyadic(rng, RANK, columns, size=size), dyadic(rng, rows, RANK, size=size))
    return Factors(linear, experts)


def changes(given: Factors, scale: float = ALPHA / RANK) -> dict[str, _Array]:
    """``alpha / r · B · A`` by name of the published tensor, expert by expert."""
    result = {f"{module}.weight": scale * (b @ a) for module, (a, b) in given.linear.items()}
    for module, adapter in given.experts.items():
        for e in range(len(adapter.down_a)):
            gate, up = np.split(scale * (adapter.gate_up_b[e] @ adapter.gate_up_a[e]), 2)
            down = scale * (adapter.down_b[e] @ adapter.down_a[e])
            for leaf, change in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                result[f"{module}.{e}.{leaf}.weight"] = change
    return result


def merged(base: Decoder, given: Factors) -> Decoder:
    """A model with the adapter in its weights."""
    delta, dtype = changes(given), next(base.parameters()).dtype
    tensors = tensors_of(base)
    assert delta.keys() <= tensors.keys()
    for name, change in delta.items():
        tensors[name] = (tensors[name].float() + torch.from_numpy(change)).to(dtype)
    result = random_model(base.arch, 0).to(dtype)
    load_hf_tensors(result, result.adapter, tensors.items())
    return result


def publish_factors(
    store: HandoffStore, version: int, base: Handoff, given: Factors, layout: ExpertLayout = "per_expert", **config: Any
) -> Handoff:
    """Publish an adapter of ``base``; ``config`` replaces entries of its configuration."""
    return publish_adapter(
        VersionCommitter.claim(store.root, 1),
        version=version,
        base=base,
        tensors=adapter_tensors(given.linear, given.experts, layout),
        dtype="float32",
        config={**config_of(list(given.linear), list(given.experts), layout, rank=RANK, alpha=ALPHA), **config},
        producer="test",
    )


def flip_last_byte(path: Path) -> None:
    """What a disk, or a writer that was killed, may leave: a file of the right size with wrong content."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
