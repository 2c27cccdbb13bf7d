"""Facts of known models against published numbers, and what follows from them against arithmetic by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hpcrl.models import ModelFacts, Part, known_models, load_arch, load_facts
from hpcrl.weights.format.quantise import FP8_DTYPE, QuantisedModules

#: parameters of the published checkpoints as Hugging Face counts them (``safetensors.total`` of its API), with the
#: modules of multi-token prediction or without, and what that count leaves out of ours
PUBLISHED = {
    "DeepSeek-V3": (684_531_386_000, "fp8", 0),
    # the checkpoint has the keys of 62 indexers in FP8, each of 56 blocks, which engines bring back to bfloat16
    "DeepSeek-V3.2": (685_396_921_376, "fp8", -62 * 56),
    "GLM-5": (753_864_139_008, "mtp", 0),
    "GLM-5.1": (753_864_139_008, "mtp", 0),
    "GLM-5.2": (753_329_940_480, "mtp", 0),
    "GLM-4.5": (358_337_791_296, "mtp", 0),
    "GLM-4.5-Air": (110_468_824_832, "mtp", 0),
    "GLM-4.6": (356_785_898_816, "mtp", 0),
    # the checkpoint has a stray buffer `rotary_emb.inv_freq` of 56 elements in each of 61 layers
    "Kimi-K2-Instruct": (1_026_408_235_864, "plain", -61 * 56),
    "Qwen3-235B-A22B": (235_093_634_560, "plain", 0),
    "Qwen3-30B-A3B": (30_532_122_624, "plain", 0),
    "Qwen3-8B": (8_190_735_360, "plain", 0),
    "Qwen3-32B": (32_762_123_264, "plain", 0),
    # the count leaves out the router biases, the only float32 tensors: 23 layers of 128, 40 + 1 of 512
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31_577_937_344, "plain", 23 * 128),
    "NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (123_611_012_096, "mtp", 41 * 512),
    # these and the rest were found in public lists and programs that repeat that API's answers, not asked of it.
    # The count of the MXFP4 checkpoint with two parameters a byte and without scales
    "gpt-oss-120b": (116_829_156_672, "plain", 0),
    "gpt-oss-20b": (20_914_757_184, "plain", 0),
    # the rest is the vision tower: tests/models/test_transformers_names.py builds it
    "Llama-4-Scout-17B-16E-Instruct": (108_641_793_536, "plain", -871_932_416),
    "Llama-4-Maverick-17B-128E-Instruct": (401_583_781_376, "plain", -871_932_416),
    "Mixtral-8x7B-Instruct-v0.1": (46_702_792_704, "plain", 0),
    "Mixtral-8x22B-Instruct-v0.1": (140_630_071_296, "plain", 0),
    "GLM-4.7": (358_337_791_296, "mtp", 0),
    "Qwen3-Next-80B-A3B-Instruct": (81_324_862_720, "mtp", 0),
    "Qwen3-Coder-Next": (79_674_391_296, "plain", 0),
    "Qwen2.5-0.5B-Instruct": (494_032_768, "plain", 0),
    "Qwen2.5-7B": (7_615_616_512, "plain", 0),
    "Qwen2.5-7B-Instruct": (7_615_616_512, "plain", 0),
    "Qwen2.5-32B": (32_763_876_352, "plain", 0),
    "Qwen2.5-32B-Instruct": (32_763_876_352, "plain", 0),
    "Llama-2-7b-hf": (6_738_415_616, "plain", 0),
    "Llama-3.1-8B-Instruct": (8_030_261_248, "plain", 0),
    "Llama-3.1-70B-Instruct": (70_553_706_496, "plain", 0),
    "Llama-3.2-1B-Instruct": (1_235_814_400, "plain", 0),
    "Llama-3.3-70B-Instruct": (70_553_706_496, "plain", 0),
    "Mistral-7B-v0.1": (7_241_732_096, "plain", 0),
    "Mistral-7B-Instruct-v0.3": (7_248_023_552, "plain", 0),
    "SmolLM2-135M-Instruct": (134_515_008, "plain", 0),
    "MiniMax-M2": (228_689_764_864, "plain", 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones(name: str) -> None:
    total, kind, left_out = PUBLISHED[name]
    facts = load_facts(name)
    specs = list(facts.tensors(mtp=kind != "plain", fp8=kind == "fp8"))
    assert sum(spec.elements for spec in specs) == total + left_out
    parameters = sum(spec.elements for spec in specs if not spec.is_scale)
    assert facts.num_parameters(mtp=kind != "plain") == parameters


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # model cards, in 10^9
        ("DeepSeek-V3", 671, 37),
        ("GLM-5", 744, 40),
        ("GLM-4.5", 355, 32),
        ("GLM-4.5-Air", 106, 12),
        ("Kimi-K2-Instruct", 1000, 32),
        ("Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen3-235B-A22B", 235, 22),
        ("GLM-4.7-Flash", 30, 3),
        ("NVIDIA-Nemotron-3-Super-120B-A12B-BF16", 120, 12),
    ],
)
def test_totals_without_mtp_are_those_of_model_cards(name: str, total: float, active: float) -> None:
    facts = load_facts(name)
    assert facts.num_parameters() / 1e9 == pytest.approx(total, rel=0.03)
    # cards differ in whether they count embeddings
    embeddings = facts.parameters_by_part()[Part.EMBEDDING]
    low, high = facts.active_parameters() - 2 * embeddings, facts.active_parameters()
    assert low / 1e9 - 0.6 <= active <= high / 1e9 + 0.6


#: total and active parameters in 10^9 with as many digits as are published, what the active ones count beside layers,
#: and where it is said
CARDS = [
    # the model card (arXiv 2508.10925), table 1: unembedding counts as active, embedding does not. Its second digits
    # and this reading were not looked up again: summaries have 5.1 and 3.6, and no other reading gives 5.13 and 3.61
    ("gpt-oss-120b", 116.83, 5.13, {"embedding": False}, 0.005),
    ("gpt-oss-20b", 20.91, 3.61, {"embedding": False}, 0.005),
    # the paper (arXiv 2401.04088): 47B and 13B, with both matrices; 12.9 in the announcement
    ("Mixtral-8x7B-Instruct-v0.1", 46.7, 12.9, {}, 0.05),
    # the announcement: 141B and 39B; it does not say which embeddings count, and both ways round to 39
    ("Mixtral-8x22B-Instruct-v0.1", 141, 39, {}, 0.5),
    # model cards, with the vision tower (0.87) in the totals; 17 holds with both matrices
    ("Llama-4-Scout-17B-16E-Instruct", 109 - 0.87, 17, {}, 0.5),
    ("Llama-4-Maverick-17B-128E-Instruct", 401.58 - 0.87, 17, {}, 0.5),
    # the model card: 80B and 3B; only without both matrices is it 3
    ("Qwen3-Next-80B-A3B-Instruct", 80, 3, {"embedding": False, "lm_head": False}, 0.5),
    # the model card: 230B and 10B; without the embedding 10.4, without both 9.8. The total is of the files, 228.7
    ("MiniMax-M2", 228.7, 10, {"embedding": False}, 0.5),
    # Megatron Bridge's page of the model: about 358B and 32B; no card that we found says it. The total of the files
    # includes multi-token prediction (5.5), and 32 holds without both matrices
    ("GLM-4.7", 358.3 - 5.54, 32, {"embedding": False, "lm_head": False}, 0.5),
]


@pytest.mark.parametrize(("name", "total", "active", "counted", "digits"), CARDS, ids=[case[0] for case in CARDS])
def test_active_parameters_are_the_published_ones(
    name: str, total: float, active: float, counted: dict[str, bool], digits: float
) -> None:
    facts = load_facts(name)
    assert facts.num_parameters() / 1e9 == pytest.approx(total, abs=max(digits, 0.05))
    assert facts.active_parameters(**counted) / 1e9 == pytest.approx(active, abs=digits)


def test_a_tied_matrix_counts_as_the_head() -> None:
    facts = load_facts("Qwen3-0.6B")
    assert facts.active_parameters(embedding=False) == facts.active_parameters() == facts.num_parameters()
    without = facts.active_parameters(embedding=False, lm_head=False)
    assert without == facts.num_parameters() - 151_936 * 1024


def test_mxfp4_checkpoint_of_gpt_oss() -> None:
    """As it is counted with scales: experts' matrices in blocks of 32 with a scale each, all else in bfloat16."""
    for name, blocks, rest in (
        ("gpt-oss-120b", 118_244_966_400, 2_167_371_072),
        ("gpt-oss-20b", 19_707_494_400, 1_804_459_584),
    ):
        facts = load_facts(name)
        matrices = sum(s.elements for s in facts.tensors() if s.part is Part.EXPERT and not s.name.endswith("_bias"))
        assert matrices + matrices // 32 == blocks
        assert facts.num_parameters() - matrices == rest
        # a byte has two numbers of four bits, and a block of 32 numbers one byte for its scale
        assert facts.stored == "mxfp4"
        assert facts.stored_bytes == matrices // 2 + matrices // 32 + 2 * rest


def test_fp8_checkpoint_of_minimax() -> None:
    """MiniMax-M2.5 is published with 228,703,644,928 elements: those of M2, and a scale for each block."""
    assert sum(spec.elements for spec in load_facts("MiniMax-M2").tensors(fp8=True)) == 228_703_644_928


def test_fp8_checkpoint_of_deepseek_by_dtype() -> None:
    """Hugging Face lists elements by dtype for this checkpoint."""
    count = Counter[str]()
    for spec in load_facts("DeepSeek-V3").tensors(mtp=True, fp8=True):
        count[spec.dtype] += spec.elements
    assert count == {"bfloat16": 3_918_786_560, "float8_e4m3fn": 680_571_043_840, "float32": 41_555_600}


def test_fp8_scales_of_glm5() -> None:
    """GLM-5-FP8 is published with 753,910,024,032 elements: what GLM-5 has, and a scale for each block.

    It has the keys of 79 indexers in FP8, each of 48 blocks, which engines bring back to bfloat16.
    """
    specs = load_facts("GLM-5-FP8").tensors(mtp=True, fp8=True)
    assert sum(spec.elements for spec in specs) == 753_910_024_032 - 79 * 48


@pytest.mark.parametrize("name", [name for name in known_models() if "Next" not in name])
def test_plans_trainer_and_versions_have_one_list_of_what_is_in_fp8(name: str) -> None:
    """Of all known models that a trainer runs; experts that are one tensor are in no version in FP8."""
    chosen = QuantisedModules()
    for spec in load_facts(name).tensors(mtp=True, fp8=True):
        if not spec.is_scale and len(spec.shape) == 2:
            assert (spec.dtype == FP8_DTYPE) is chosen.has(spec.name, spec.shape), spec.name


def test_fp8_scales_of_experts_in_one_tensor_are_those_of_each() -> None:
    specs = load_facts("Llama-4-Scout-17B-16E-Instruct").tensors(fp8=True)
    prefix = "language_model.model.layers.0.feed_forward.experts."
    scales = {spec.name: spec.shape for spec in specs if spec.is_scale and spec.name.startswith(prefix)}
    assert scales == {f"{prefix}gate_up_proj_scale_inv": (16, 40, 128), f"{prefix}down_proj_scale_inv": (16, 64, 40)}


def test_byte_tables_agree_with_tensors() -> None:
    for name in ("GLM-5.2", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-0.6B", "gpt-oss-20b"):
        facts = load_facts(name)
        for fp8 in (False, True):
            by_part = Counter[Part]()
            for spec in facts.tensors(fp8=fp8):
                by_part[spec.part] += spec.nbytes
            assert facts.weight_bytes(fp8=fp8) == by_part


def test_kv_bytes_per_token() -> None:
    # 61 layers of 512 latents and 64 rotary: 70.272 kB, the figure of the DeepSeek-V3 paper's successor (2505.09343)
    assert load_facts("DeepSeek-V3").kv_bytes_per_token() == 61 * (512 + 64) * 2 == 70_272
    # 656 bytes a layer in vLLM's fp8_ds_mla layout, and 132 of the indexer
    assert load_facts("GLM-5").kv_bytes_per_token("fp8") == 78 * (656 + 132)
    assert load_facts("GLM-5.2").kv_bytes_per_token("fp8") == 78 * 656 + 21 * 132
    # 2 (K and V) x 48 layers x 4 heads x 128 x 2 bytes
    assert load_facts("Qwen3-30B-A3B").kv_bytes_per_token() == 98_304
    with pytest.raises(ValueError, match="must be one of"):
        load_facts("GLM-5").kv_bytes_per_token("int4")


def test_hybrid_has_state_and_little_cache() -> None:
    facts = load_facts("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    assert Counter(facts.attention_kinds) == {"mamba2": 23, "gqa": 6, "none": 23}
    assert facts.kv_bytes_per_token() == 6 * 2 * 2 * 128 * 2
    # per mamba layer: 6144 channels x 3 inputs x 2 bytes, and 64 heads x 64 x 128 in float32
    assert facts.state_bytes_per_sequence() == 23 * (6144 * 3 * 2 + 64 * 64 * 128 * 4)


def _kv_bytes(facts: ModelFacts, length: int, dtype: str = "bfloat16") -> int:
    """Of a sequence of ``length`` tokens, each layer with the tokens that it must keep."""
    mixers = [layer.mixer for layer in facts.layers if layer.mixer is not None]
    return sum(mixer.kept_tokens(length) * mixer.kv_bytes_per_token(dtype) for mixer in mixers)


def test_windows_and_chunks_keep_and_see_a_limited_number_of_tokens() -> None:
    facts = load_facts("gpt-oss-120b")
    assert Counter(facts.attention_kinds) == {"gqa+window": 18, "gqa": 18}
    token = 2 * 8 * 64 * 2
    assert facts.kv_bytes_per_token() == 36 * token
    assert _kv_bytes(facts, 100) == 100 * 36 * token
    assert _kv_bytes(facts, 10_000) == 18 * (10_000 + 128) * token
    score = 4 * 64 * 64
    assert facts.flops_per_token(10_000).attention_scores == 18 * score * (10_000 + 128)

    facts = load_facts("Llama-4-Scout-17B-16E-Instruct")
    assert Counter(facts.attention_kinds) == {"gqa+chunk": 36, "gqa": 12}
    token = 2 * 8 * 128 * 2
    assert _kv_bytes(facts, 8192) == 48 * 8192 * token
    assert _kv_bytes(facts, 100_000) == (12 * 100_000 + 36 * 8192) * token
    # each position by hand: those of chunked layers start anew at every chunk
    score, length = 4 * 40 * 128, 2 * 8192 + 1000
    seen = sum(12 * p + 36 * ((p - 1) % 8192 + 1) for p in range(1, length + 1))
    assert facts.sequence_flops(length).attention_scores == score * seen
    # sizes of known models without such layers are as they were: linear in the length
    for name in ("GLM-5", "DeepSeek-V3", "Qwen3-30B-A3B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"):
        plain = load_facts(name)
        assert _kv_bytes(plain, 131_072, "fp8") == 131_072 * plain.kv_bytes_per_token("fp8")


def test_linear_attention_has_a_state_of_fixed_size() -> None:
    facts = load_facts("Qwen3-Next-80B-A3B-Instruct")
    assert Counter(facts.attention_kinds) == {"gated_delta_net": 36, "gqa": 12}
    assert _kv_bytes(facts, 1000) == 1000 * facts.kv_bytes_per_token() == 1000 * 12 * 2 * 2 * 256 * 2
    # of each of 36 layers: 8192 channels x 3 inputs, and 32 heads x 128 x 128, in bfloat16
    assert facts.state_bytes_per_sequence() == 36 * 2 * (8192 * 3 + 32 * 128 * 128)
    near, far = facts.flops_per_token(1024), facts.flops_per_token(131_072)
    assert far.linear_attention == near.linear_attention > 0
    assert far.attention_scores == 128 * near.attention_scores


def test_kinds() -> None:
    facts = load_facts("GLM-5.2")
    assert set(facts.attention_kinds) == {"mla+dsa"}
    assert (len(facts.layers), len(facts.moe_layers)) == (78, 75)
    assert (facts.num_experts, facts.num_experts_per_tok) == (256, 8)
    assert sum(bool(getattr(layer.mixer, "indexer", None)) for layer in facts.layers) == 21


def test_flops_of_matrices_are_two_an_active_parameter() -> None:
    facts = load_facts("Qwen3-8B")
    flops = facts.flops_per_token(0)
    parts = facts.parameters_by_part()
    norms = parts[Part.NORM] + sum(2 * 128 for _ in facts.layers)
    assert flops.total == 2 * (facts.num_parameters() - parts[Part.EMBEDDING] - norms)
    assert facts.sequence_flops(7, backward=True).total == 2 * facts.sequence_flops(7).total


@pytest.mark.parametrize(
    "name",
    ["GLM-5.2", "Qwen3-30B-A3B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "gpt-oss-20b", "Qwen3-Next-80B-A3B-Instruct"],
)
def test_sequence_flops_are_the_sum_over_positions(name: str) -> None:
    facts, length = load_facts(name), 2500
    summed = sum(facts.flops_per_token(position).total for position in range(1, length + 1))
    assert facts.sequence_flops(length).total == pytest.approx(summed, rel=1e-9)


def test_sparse_attention_stops_growing_but_its_indexer_does_not() -> None:
    facts = load_facts("GLM-5")
    near, far = facts.flops_per_token(2048), facts.flops_per_token(131072)
    assert far.attention_scores == near.attention_scores
    assert far.indexer > 10 * near.indexer
    # 64 heads x (192 + 64 + 256) a key, or 64 x (512 + 64 + 512) absorbed
    assert near.attention_scores == 78 * 2 * 64 * 512 * 2048
    assert facts.flops_per_token(2048, absorbed=True).attention_scores == 78 * 2 * 64 * 1088 * 2048
    assert facts.sequence_flops(4096, backward=True).indexer == 0


def test_names_and_paths(tmp_path: Path) -> None:
    assert load_facts("zai-org/glm-5") is load_facts("models/GLM-5")
    with pytest.raises(FileNotFoundError, match=r"did you mean GLM-5"):
        load_facts("GLM5")
    config = {**json.loads(_shipped("Qwen3-0.6B")), "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        assert len(load_facts(path).layers) == 2
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(ValueError, match=r"config\.json: model_type is 'mamba'; known are"):
        load_facts(tmp_path)
    del config["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json lacks num_attention_heads"):
        load_facts(tmp_path)


def test_every_known_model_says_where_it_is_from() -> None:
    for name in known_models():
        assert json.loads(_shipped(name))["_source"]


def test_arch_is_built_on_facts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(_shipped("Qwen3-30B-A3B"))
    assert load_arch(tmp_path).num_parameters() == load_facts("Qwen3-30B-A3B").num_parameters()


def _shipped(name: str) -> str:
    from hpcrl.models import known

    return (Path(known.__file__).parent / "configs" / f"{name}.json").read_text()
