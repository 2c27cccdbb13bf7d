"""Every family from its published form through shards, a step, a checkpoint and a hand-off, and back to its readers."""

import json
from fnmatch import fnmatch

import pytest
import torch
from model_agreement import VOCAB, save_model, write_config
from safetensors.torch import load_file, save_file
from test_checkpoint import save, whole
from test_publish import PROBE, make_publisher
from trainer_testing import make_recipe, run_ranks

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.inference.embedded.weights.loading import load_model
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.hf import model_tensors
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.state.checkpoint import load_checkpoint
from hpcrl.trainer.state.export import export_checkpoint
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.store import HandoffStore

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 64,
}
SIGMOID = {
    **SIZES,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10}
DENSE = {key: value for key, value in SIZES.items() if key != "moe_intermediate_size"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "partial_rotary_factor": 0.5,
}
SHARED = {"shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen2": {**DENSE, "num_key_value_heads": 2},
    # as Llama 3.2 and SmolLM2: one matrix for embedding and head
    "llama": {**DENSE, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "mistral": {**DENSE, "sliding_window": 6},
    "qwen3": {**SIZES, "tie_word_embeddings": True, "attention_bias": True},
    "qwen3_moe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    "deepseek_v3": {**SIGMOID, **LATENT, "attention_bias": True, "head_dim": LATENT["qk_rope_head_dim"]},
    "glm_moe_dsa": {
        **SIGMOID,
        **LATENT,
        "index_n_heads": 8,
        "index_head_dim": 8,
        "index_topk": 4,
        "indexer_types": ["full", "shared"],
        "head_dim": LATENT["qk_rope_head_dim"],
    },
    "minimax_m2": {
        **{key: value for key, value in SIZES.items() if key != "moe_intermediate_size"},
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 4,
    },
    "glm4_moe": {**SIGMOID, "attention_bias": True, "use_qk_norm": True},
    "gpt_oss": {
        **{key: value for key, value in SIZES.items() if key != "moe_intermediate_size"},
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
    },
    "nemotron_h": {
        **{key: value for key, value in SIGMOID.items() if key != "first_k_dense_replace"},
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "moe_latent_size": 12,
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 6,
        "mamba_head_dim": 4,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 4,
    },
    "qwen3_next": {**SIZES, **DELTA, **SHARED, "mlp_only_layers": [1]},
    "qwen3_5_text": {**DENSE, **DELTA, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
        **DELTA,
        **SHARED,
    },
}


MTP = dict.fromkeys(("nemotron_h", "qwen3_next", "qwen3_5_moe_text"), "mtp.layers.0")
"""Names of modules of multi-token prediction that do not count on after the last layer."""
FROZEN = {"glm4_moe": "*.mlp.gate.weight", "glm_moe_dsa": "*.indexer.*"}
"""What is frozen: by the recipe, or for GLM-5 by itself."""


def add_mtp(model_dir, prefix, count="num_nextn_predict_layers"):
    """Give a model the published tensors of a module of multi-token prediction; returns their names.

    ``count`` is the key of its config that says how many there are; None: there is none.
    """
    draw = torch.Generator().manual_seed(7)
    made = {
        "eh_proj.weight": torch.randn(32, 64, generator=draw).bfloat16(),
        "enorm.weight": torch.randn(32, generator=draw).bfloat16(),
        "mlp.experts.3.down_proj.weight": torch.randn(5, 7, generator=draw).bfloat16(),
        "mlp.gate.e_score_correction_bias": torch.randn(5, generator=draw),
        "scalar": torch.randn((), generator=draw),
    }
    made = {f"{prefix}.{name}": tensor for name, tensor in made.items()}
    save_file(made, model_dir / "mtp.safetensors")
    # files that no index names are not the model's
    places = {name: path.name for path in model_dir.glob("*.safetensors") for name in load_file(path)}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    if count is not None:
        write_config(model_dir, **{count: 1})
    return set(made)


def restore_and_publish(rank, model_dir, checkpoints, weights, **trainer):
    """Everything that was restored, and the logits of this model."""
    with distributed(timeout_s=120) as parallel:
        recipe = make_recipe(model_dir, steps=9, **trainer)
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=None)
        entry = CheckpointLedger(checkpoints).newest_verified().entry
        load_checkpoint(entry, policy.model, policy.optimizer, parallel)
        publisher = make_publisher(HandoffStore(weights), parallel, model_dir)
        publisher.publish(policy.model, 2)
        publisher.wait()
        with torch.no_grad():
            logits = policy.model(PROBE, PackedAttention(torch.tensor([0, len(PROBE)])).context())
        return {n: whole(t).tolist() for n, t in model_tensors(policy.model).items()}, logits.tolist()


def published(directory):
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_goes_all_the_way(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    model_dir = tmp_path / "model"
    assert int(PROBE.max()) < VOCAB
    save_model(model_dir, {"model_type": family, **FAMILIES[family]})
    sigmoid = "n_routed_experts" in FAMILIES[family]
    mtp = MTP.get(family, f"model.layers.{SIZES['num_hidden_layers']}")
    kept = set()
    if sigmoid or family in MTP:
        # configs of Qwen3-Next do not say that there is a module
        count = {"qwen3_next": None, "qwen3_5_moe_text": "mtp_num_hidden_layers"}
        kept = add_mtp(model_dir, mtp, count.get(family, "num_nextn_predict_layers"))
    trainer = {"freeze": [FROZEN[family]]} if family == "glm4_moe" else {}
    start = published(model_dir)
    # saved by two ranks with half of the experts each, restored by ranks with all of them, or with shards of all
    dealt = {"parallelism": {"ep": 2}} if load_arch(model_dir).routed_experts else {}
    run_ranks(2, save, model_dir, tmp_path / "checkpoints", timeout_s=240.0, **trainer, **dealt)
    one = restore_and_publish(0, model_dir, tmp_path / "checkpoints", tmp_path / "one", **trainer)
    two = run_ranks(
        2, restore_and_publish, model_dir, tmp_path / "checkpoints", tmp_path / "two", timeout_s=240.0, **trainer
    )
    assert two[0][0] == two[1][0] == one[0]
    # the same bytes from one rank and from two
    versions = [published(tmp_path / ranks / "v000002") for ranks in ("one", "two")]
    assert versions[0].keys() == versions[1].keys() == start.keys()
    assert all(torch.equal(versions[0][name], versions[1][name]) for name in start)
    moved = {name for name in start if not torch.equal(start[name], versions[0][name])}
    # gradients reach all but what only chooses, and what is frozen; an expert that no token visits decays all the same
    kept |= {name for name in start if name.endswith("e_score_correction_bias")}
    kept |= {name for name in start if fnmatch(name, FROZEN.get(family, ""))}
    assert start.keys() - moved == kept
    assert bool(kept) == (sigmoid or family in MTP or family == "minimax_m2")
    assert all(versions[0][name].dtype == start[name].dtype for name in start)

    logits = torch.tensor(one[1])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two/v000002", attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(logits, theirs(PROBE[None]).logits[0].float(), rtol=2e-4, atol=2e-5)
        engine = load_model(tmp_path / "two/v000002", "auto")
        served = engine(PROBE, PackedAttention(torch.tensor([0, len(PROBE)])).context())
    assert torch.equal(served, logits)
    entry = CheckpointLedger(tmp_path / "checkpoints").newest_verified().entry
    export_checkpoint(entry, model_dir, tmp_path / "export", dtype="float32")
    exported = published(tmp_path / "export")
    assert exported.keys() == start.keys()
    assert all(torch.equal(exported[name], versions[0][name]) for name in start)
    _, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    # transformers runs no multi-token prediction; of some families it says so
    assert all(name.startswith(f"{mtp}.") for name in report["unexpected_keys"])
