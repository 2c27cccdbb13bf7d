"""Published environments of verifiers on the embedded engine, which says anything: the tokens on record are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_helpers import Server, embedded_command, random_model, start_server, tensors_of
from family_lab import FAMILIES, needs_templates, write_family
from published_environments import SETTINGS, needs_published, played
from safetensors.torch import save_file

from hpcrl.models.arch import arch_from_config
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.storage.files import write_json

pytestmark = [pytest.mark.slow, needs_published, needs_templates]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("model")
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
            "max_position_embeddings": 4096,
        }
    )
    made = random_model(arch, seed=3)
    save_file(tensors_of(made), model / "model.safetensors")
    write_json(model / "config.json", arch.to_hf_config())
    command = embedded_command("--max-model-len", "4000", "--max-num-seqs", "8", "--weight-version", "0")
    running = start_server(command, model, made, tmp_path_factory.mktemp("log") / "server.log")
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize("name", SETTINGS)
async def test_an_engine_that_says_anything(embedded: Server, name: str) -> None:
    async with played(name, embedded.url, embedded.model_dir, max_new_tokens=12) as (outcome, rollout):
        assert -2 <= outcome.reward <= 2
        assert 0 < int(rollout.sampled.sum()) <= 12 * 8
        scores = embedded.generate(rollout.sequences[0].tolist(), max_tokens=1, temperature=1.0, prompt_logprobs=0)
        own = rollout.sequences[0]
        sampled = rollout.sampled[: len(own)].astype(bool)
        found = [
            scores["prompt_logprobs"][place][str(own[place])]["logprob"]
            for place in range(1, len(own))
            if sampled[place]
        ]
        assert found == pytest.approx(rollout.logprobs[: len(own)][sampled].tolist(), abs=2e-3)
