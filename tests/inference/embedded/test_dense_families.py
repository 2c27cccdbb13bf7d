"""The embedded engine generates what transformers generates, token by token, of models that transformers has saved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_client import Client
from model_agreement import VOCAB, save_model

from hpcrl.inference.embedded.engine.config import EngineSettings
from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.weights.loading import load_model
from hpcrl.inference.metrics import EngineMetrics, Registry

SIZES: dict[str, Any] = {
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {**SIZES},
    "llama": {**SIZES, "attention_bias": True, "rope_parameters": LLAMA3},
    # shorter than prompts and what follows them
    "mistral": {**SIZES, "sliding_window": 7},
}
GENERATED = 40


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = save_model(tmp_path, {"model_type": family, **FAMILIES[family]}).eval()
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 5, 20, 33)]
    # prompts are computed in several pieces, and caches lie in blocks of four tokens
    settings = EngineSettings(
        max_num_seqs=4, max_model_len=128, max_num_batched_tokens=16, block_size=4, num_blocks=256
    )
    engine = Engine(load_model(tmp_path, "float32"), settings, EngineMetrics(Registry({})))
    client = Client(engine)
    engine.start(client.deliver)
    try:
        outputs = client.run(prompts, max_tokens=GENERATED, temperature=0.0)
    finally:
        engine.stop()
    assert engine.failure is None
    distinct = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            wanted = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=GENERATED, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(prompt) :].tolist()
        assert output.token_ids == wanted
        distinct += len(set(wanted))
    # not one token over and over, which any model might say
    assert distinct > 20
