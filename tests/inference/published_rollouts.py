"""Published environments of verifiers on a real engine, whatever that engine says."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_helpers import Server, random_model, tensors_of
from family_lab import FAMILIES, write_family
from published_environments import played
from safetensors.torch import save_file

from hpcrl.modeling.decoder import Decoder
from hpcrl.models.arch import arch_from_config
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.storage.files import write_json

CONTEXT = 4000
"""Tokens of a conversation: byte by byte, a prompt with tools has two thousand."""


def write_talking_model(directory: Path) -> Decoder:
    """Write a small random model with a published chat template."""
    model = write_family(directory, FAMILIES["Qwen3"])
    arch = arch_from_config(
        {
            "model_type": "qwen3",
            "vocab_size": max(ChatTokenizer(model).tokens_from(0)) + 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": CONTEXT,
        }
    )
    made = random_model(arch, seed=3)
    save_file(tensors_of(made), model / "model.safetensors")
    write_json(model / "config.json", arch.to_hf_config())
    return made


async def check_published(server: Server, name: str, *, tolerance: float) -> None:
    """Play a rollout: tokens and log-probabilities on record are those of the engine."""
    async with played(name, server.url, server.model_dir, max_new_tokens=12) as (outcome, rollout):
        assert -2 <= outcome.reward <= 2
        assert 0 < int(rollout.sampled.sum()) <= 12 * 8
        scores = server.generate(rollout.sequences[0].tolist(), max_tokens=1, temperature=1.0, prompt_logprobs=0)
        own = rollout.sequences[0]
        sampled = rollout.sampled[: len(own)].astype(bool)
        found = [
            scores["prompt_logprobs"][place][str(own[place])]["logprob"]
            for place in range(1, len(own))
            if sampled[place]
        ]
        assert found == pytest.approx(rollout.logprobs[: len(own)][sampled].tolist(), abs=tolerance)
