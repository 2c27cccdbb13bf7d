"""Models of some size, and publishers of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpcrl.config.recipe import HandoffConfig
from hpcrl.models.arch import ModelArch, Qwen3MoeArch
from hpcrl.storage.files import write_json
from hpcrl.trainer.parallel.mesh import Parallel
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.weights import HandoffStore


def arch_of(layers: int, **changes: int) -> ModelArch:
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "vocab_size": 16384, **changes}
    return Qwen3MoeArch(
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts_per_tok=4,
        max_position_embeddings=4096,
        **sizes,
    )


def make_model_dir(path: Path, arch: ModelArch) -> Path:
    path.mkdir()
    write_json(path / "config.json", arch.to_hf_config())
    return path


def publisher_of(root: Path, parallel: Parallel, model_dir: Path, arch: ModelArch, **settings: Any) -> Publisher:
    return Publisher(
        HandoffStore(root),
        parallel,
        arch=arch,
        model_dir=model_dir,
        dtype=torch.bfloat16,
        attempt=1,
        settings=HandoffConfig(**settings),
        acknowledged=HandoffStore(root).newest,
    )
