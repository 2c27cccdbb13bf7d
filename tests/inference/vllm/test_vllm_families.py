"""What the trainer publishes of other families than Qwen3-MoE: a real vLLM loads it and computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import random_model, start_server, tensors_of
from safetensors.torch import save_file
from test_vllm_cpu import ENVIRONMENT, FLAGS, TOLERANCE, prompt_of
from vllm_environment import VLLM_PYTHON

from hpcrl.config.recipe import HandoffConfig, Recipe
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.decoder import Decoder
from hpcrl.models.arch import arch_from_config, load_arch
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.storage.files import write_json
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.store import HandoffStore

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

LAYERS = 2
#: what stands in ``config.json``; heads of 32, the smallest that vLLM has on every kind of CPU
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
SPARSE: dict[str, Any] = {
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**COMMON, "intermediate_size": 128},
    # its heads have no size of their own: hidden size / heads
    "qwen2": {**COMMON, "hidden_size": 128, "intermediate_size": 128},
    "llama": {
        **COMMON,
        "intermediate_size": 128,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    # shorter than prompts
    "mistral": {**COMMON, "intermediate_size": 128, "sliding_window": 24},
    "glm4_moe": {**COMMON, **SPARSE},
    "deepseek_v3": {
        **{name: value for name, value in COMMON.items() if name not in {"head_dim", "num_key_value_heads"}},
        **SPARSE,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {
        **COMMON,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
    "qwen3_next": {
        **COMMON,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "num_nextn_predict_layers": 0,
    },
}
#: families that vLLM computes in bfloat16 alone on processors: how far log-probabilities are off then, in the mean and
#: at most. A router that rounds may choose another expert for a token, and processors round differently
IN_BFLOAT16 = {"qwen3_next": (0.05, 0.5)}
#: latent attention is computed in its expanded form
VARIABLES: dict[str, dict[str, str]] = {"deepseek_v3": {"VLLM_MLA_DISABLE": "1"}}


def mtp_tensors(hidden: int) -> dict[str, torch.Tensor]:
    """Some of a module of multi-token prediction, by their published names."""
    draw = torch.Generator().manual_seed(7)
    shapes = {"eh_proj.weight": (hidden, 2 * hidden), "enorm.weight": (hidden,), "hnorm.weight": (hidden,)}
    shapes |= {"mlp.experts.3.down_proj.weight": (hidden, hidden), "shared_head.norm.weight": (hidden,)}
    return {f"model.layers.{LAYERS}.{name}": torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def published_by_trainer(directory: Path, config: Mapping[str, Any]) -> tuple[Path, Decoder]:
    """Version 0 of a random model, with multi-token prediction where its config says so, and the model without."""
    start = directory / "start"
    vocab_size, eos = write_character_tokenizer(start)
    arch = arch_from_config({**config, "vocab_size": vocab_size, "eos_token_id": eos})
    model = random_model(arch, seed=5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(6))
    beside = mtp_tensors(arch.hidden_size) if arch.num_nextn_predict_layers else {}
    save_file(tensors_of(model) | beside, start / "model.safetensors")
    write_json(start / "config.json", arch.to_hf_config())
    task = {"name": "reverse", "kind": "words", "task": "reverse"}
    recipe = Recipe.model_validate(
        {"name": "toy", "model": {"path": str(start)}, "environments": [task], "trainer": {"steps": 1}}
    )
    with distributed(timeout_s=60) as parallel:
        policy = TrainerPolicy(recipe, load_arch(start), parallel, model_dir=start)
        store = HandoffStore(directory / "weights")
        publisher = Publisher(
            store,
            parallel,
            arch=arch,
            model_dir=start,
            dtype=torch.float32,
            attempt=1,
            settings=HandoffConfig(),
        )
        publisher.publish(policy.model, 0)
        publisher.wait()
    return store.path_of(0), model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_version_is_loaded_and_agrees(family: str, tmp_path: Path) -> None:
    config = {"model_type": family, **FAMILIES[family]}
    path, model = published_by_trainer(tmp_path, config)
    published = HandoffStore(path.parent).open(0).manifest.tensors
    if model.arch.num_nextn_predict_layers:
        assert published.keys() >= mtp_tensors(config["hidden_size"]).keys()
    flags = [flag for flag in FLAGS if flag != "--enable-return-routed-experts"]
    if family in IN_BFLOAT16:
        flags = ["bfloat16" if flag == "float32" else flag for flag in flags]
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", *flags]
    environment = ENVIRONMENT | VARIABLES.get(family, {})
    log = tmp_path / "server.log"
    server = start_server(command, path, model, log, kind="vllm", ready_s=1500, environment=environment)
    try:
        server.timeout_s = 300.0
        for seed in (11, 12):
            prompt = prompt_of(40, seed)
            choice = server.generate(prompt, max_tokens=20, logprobs=0, seed=1, ignore_eos=True)["choices"][0]
            found = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
            ids = torch.tensor([*prompt, *choice["token_ids"]])
            with torch.no_grad():
                wanted = model(ids, PackedAttention(torch.tensor([0, len(ids)])).context()).log_softmax(-1)
            rows = wanted[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]
            mean, most = IN_BFLOAT16.get(family, (TOLERANCE, TOLERANCE))
            off = (rows - found).abs()
            assert float(off.mean()) < mean
            assert float(off.max()) < most
    finally:
        server.stop()
