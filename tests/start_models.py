"""Start models, made once for all workers of a test run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from hpcrl.models.arch import arch_from_config
from hpcrl.models.character_tokenizer import write_character_tokenizer

ROOT = Path(__file__).resolve().parent.parent
#: the `config.json` of a model that is as small as one can be
TINY_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 103,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "hidden_act": "silu",
}
BYTES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float8_e4m3fn": ("F8_E4M3", 1)}
SMALL_MODEL = ("model.warmup.steps=60", "model.warmup.num_experts=4")


def write_tiny_model(path: Path, config: Mapping[str, Any] = TINY_CONFIG, *, fp8: bool = False) -> Path:
    """Write a whole start model whose weights are zeros, without torch: its head is written by hand."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    write_character_tokenizer(path)
    head, data = {}, 0
    for spec in arch_from_config(config).facts.tensors(fp8=fp8):
        name, width = BYTES[spec.dtype]
        size = math.prod(spec.shape) * width
        head[spec.name] = {"dtype": name, "shape": list(spec.shape), "data_offsets": [data, data + size]}
        data += size
    write_safetensors(path / "model.safetensors", head, data)
    return path


def write_safetensors(path: Path, head: Mapping[str, Any], data: int) -> None:
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    # zeros that take no room: also of a model of hundreds of gigabytes
    os.truncate(path, 8 + len(text) + data)


def start_model(
    tmp_path_factory: pytest.TempPathFactory, name: str, recipe: str = "quickstart", settings: Sequence[str] = ()
) -> Path:
    """The start model ``name`` of a recipe; who comes first makes it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    path = root / "start-models" / name
    path.parent.mkdir(exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=900):
        if not path.exists():
            sets = [part for setting in settings for part in ("--set", setting)]
            command = [Path(sys.executable).parent / "hpcrl", "warmup", recipe, "--output", path, *sets]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return path


def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the quickstart that was warmed up for seconds."""
    return start_model(tmp_path_factory, "small", settings=SMALL_MODEL)


def taught_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's own start model, from which it learns in a few steps: a minute of warm-up, unless
    ``HPCRL_TEST_TAUGHT_MODEL`` names one that is there already, as `make test` does."""
    if given := os.environ.get("HPCRL_TEST_TAUGHT_MODEL"):
        return Path(given)
    return start_model(tmp_path_factory, "taught")


def exercises_model(tmp_path_factory: pytest.TempPathFactory, tasks: Path) -> Path:
    """The start model of the recipe `swe_exercises`: a minute of warm-up on its tasks, unless
    ``HPCRL_TEST_EXERCISES_MODEL`` names one that is there already."""
    if given := os.environ.get("HPCRL_TEST_EXERCISES_MODEL"):
        return Path(given)
    return start_model(tmp_path_factory, "swe_exercises", "swe_exercises", [f"environments.0.tasks={tasks}"])
