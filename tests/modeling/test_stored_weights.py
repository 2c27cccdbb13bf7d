"""Files of a model directory that say more or other than its configuration: loaded as transformers does, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_agreement import VOCAB, load_ours, packed_logits, save_model, token_ids, write_config
from safetensors.torch import load_file, save_file

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.inference.embedded.weights.loading import load_model
from hpcrl.jobplan.start_model import _weight_problems
from hpcrl.modeling.checkpoint_io.carried import find_mtp_tensors
from hpcrl.modeling.checkpoint_io.load import load_model_dir, read_whole
from hpcrl.modeling.hf import load_hf_tensors, published_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import load_arch
from hpcrl.weights.read.model_files import ModelFiles

Tensors = dict[str, torch.Tensor]
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def model(path: Path, change: Callable[[Tensors], object] = lambda t: None, **changes: Any) -> Path:
    """Save a small Qwen3 as transformers does, then write its tensors again after ``change``."""
    save_model(path, {**QWEN3, **changes})
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE)
    return path


def theirs(path: Path, sequences: list[torch.Tensor]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return torch.cat([loaded(input_ids=s[None]).logits[0] for s in sequences])


def refusals(path: Path) -> list[str]:
    """What the three loaders and the check before a submit say of a directory that none of them takes.

    Each has to leave a model of sevens as it is.
    """
    said = []
    for load in (load_model_dir, lambda m, a, p: load_by_name(m, p)):
        sevens = build_model(load_arch(path), device="cpu")
        with torch.no_grad():
            for parameter in sevens.parameters():
                parameter.fill_(7.0)
        with pytest.raises((ValueError, UsageError)) as caught:
            load(sevens, sevens.adapter, path)
        said.append(str(caught.value))
        assert all(bool((parameter == 7.0).all()) for parameter in sevens.parameters())
    with pytest.raises(UsageError) as engine:
        load_model(path, "float32")
    return [*said, str(engine.value)]


def load_by_name(own: Any, path: Path) -> None:
    """As merged exports read the start model: the two tensors that the tests change, into copies."""
    found = {}
    with ModelFiles(path) as files:
        tensors = dict(own.named_parameters())
        for name in ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight"):
            found[name] = torch.empty(tensors[name].shape)
            read_whole(files, own.adapter, name, found[name])
    with torch.no_grad():
        for name, tensor in found.items():
            tensors[name].copy_(tensor)


def preflight(path: Path) -> list[str]:
    return [what for what, _ in _weight_problems(load_arch(path), path)]


# -- tied heads -------------------------------------------------------------------------------------------------------


def head_alone(tensors: Tensors) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def head_too(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def rounded_head_too(tensors: Tensors) -> None:
    tensors[EMBEDDING] = tensors[EMBEDDING].bfloat16()
    tensors[HEAD] = tensors[EMBEDDING].float()


@pytest.mark.parametrize("change", [head_alone, head_too, rounded_head_too])
def test_a_tied_head_loads_by_either_name_as_in_transformers(tmp_path: Path, change: Callable[[Tensors], None]) -> None:
    path = model(tmp_path / "model", change, tie_word_embeddings=True)
    sequences = token_ids()
    ours = load_ours(path)
    with torch.no_grad():
        torch.testing.assert_close(packed_logits(ours, sequences), theirs(path, sequences), rtol=2e-4, atol=2e-5)
    assert ours.lm_head.weight is ours.embed_tokens.weight
    whole = torch.empty(ours.embed_tokens.weight.shape)
    with ModelFiles(path) as files:
        read_whole(files, ours.adapter, "embed_tokens.weight", whole)
    assert torch.equal(whole, ours.embed_tokens.weight)
    assert preflight(path) == []
    again = build_model(load_arch(path), device="cpu")
    load_hf_tensors(again, again.adapter, load_file(path / FILE).items())
    assert torch.equal(again.lm_head.weight, ours.lm_head.weight)


@pytest.mark.parametrize("row", [0, VOCAB - 1])
def test_a_tied_head_of_other_values_is_refused(tmp_path: Path, row: int) -> None:
    """transformers keeps both and vLLM drops one; a difference in one row is enough."""

    def change(tensors: Tensors) -> None:
        head_too(tensors)
        tensors[HEAD][row] += 0.25

    path = model(tmp_path / "model", change, tie_word_embeddings=True)
    assert all("stored with different values" in what for what in refusals(path))
    assert ["stored with different values" in what for what in preflight(path)] == [True]
    whole = build_model(load_arch(path), device="cpu")
    with pytest.raises(ValueError, match="stored with different values"):
        load_hf_tensors(whole, whole.adapter, load_file(path / FILE).items())
    # what the message says works, and gives what transformers makes of the directory as it was
    expected = theirs(path, token_ids())
    write_config(path, tie_word_embeddings=False)
    with torch.no_grad():
        torch.testing.assert_close(packed_logits(load_ours(path), token_ids()), expected, rtol=2e-4, atol=2e-5)
    assert preflight(path) == []


def test_a_tied_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    def longer(tensors: Tensors) -> None:
        tensors[HEAD] = torch.ones(VOCAB + 1, 32)

    path = model(tmp_path / "model", longer, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=rf"'{HEAD}' has shape \({VOCAB + 1}, 32\), not \({VOCAB}, 32\)"):
        load_ours(path)
    assert f"'{HEAD}' has shape {VOCAB + 1} x 32" in preflight(path)[0]


def test_an_untied_model_needs_both(tmp_path: Path) -> None:
    path = model(tmp_path / "model", head_alone, tie_word_embeddings=False)
    assert all(f"1 tensors are missing, the first is '{EMBEDDING}'" in what for what in preflight(path))
    with pytest.raises(ValueError, match=f"the first is '{EMBEDDING}'"):
        load_ours(path)


# -- scales of FP8 ----------------------------------------------------------------------------------------------------


def with_scale(scale: torch.Tensor) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[QUERY] = tensors[QUERY].to(torch.float8_e4m3fn)
        tensors[f"{QUERY}_scale_inv"] = scale

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("exponent", [-3, 0, 1])
def test_scales_of_each_dtype_are_multiplied(tmp_path: Path, dtype: torch.dtype, exponent: int) -> None:
    path = model(tmp_path / "model", with_scale(torch.full((1, 1), 2.0**exponent).to(dtype)))
    expected = load_file(path / FILE)[QUERY].float() * 2.0**exponent
    assert torch.equal(load_ours(path).layers[0].self_attn.q_proj.weight, expected)
    assert preflight(path) == []


@pytest.mark.parametrize(
    "scale",
    [
        torch.ones(1, 1, dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.int32),
        torch.ones(1, 1, dtype=torch.int64),
        torch.ones(1, 1, dtype=torch.uint8),
        torch.ones(1, 1, dtype=torch.bool),
        torch.ones(1, 1).to(torch.float8_e4m3fn),
        torch.ones(1, 1).to(torch.float8_e5m2),
        torch.ones(1),
        torch.ones(()),
        torch.ones(1, 2),
        torch.ones(32, 1),
    ],
    ids=lambda scale: f"{scale.dtype}-{tuple(scale.shape)}",
)
def test_scales_that_cannot_be_read_are_refused(tmp_path: Path, scale: torch.Tensor) -> None:
    path = model(tmp_path / "model", with_scale(scale))
    assert all(f"{QUERY}_scale_inv" in what for what in (*refusals(path), *preflight(path)))
    assert len(preflight(path)) == 1


def head_in_fp8_too(tensors: Tensors) -> None:
    tensors[EMBEDDING] = tensors[EMBEDDING].to(torch.float8_e4m3fn)
    tensors[f"{EMBEDDING}_scale_inv"] = torch.full((1, 1), 0.5)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[f"{HEAD}_scale_inv"] = tensors[f"{EMBEDDING}_scale_inv"].clone()


def test_a_tied_head_may_be_stored_twice_in_fp8(tmp_path: Path) -> None:
    """The scales of the second copy are part of it."""
    path = model(tmp_path / "model", head_in_fp8_too, tie_word_embeddings=True)
    expected = load_file(path / FILE)[EMBEDDING].float() * 0.5
    ours = load_ours(path)
    assert torch.equal(ours.embed_tokens.weight, expected)
    assert ours.lm_head.weight is ours.embed_tokens.weight
    # scales of a matrix that is not a part of this model are none
    path = model(tmp_path / "other", lambda tensors: tensors.update({"model.other.weight_scale_inv": torch.ones(1, 1)}))
    with pytest.raises(ValueError, match=r"model\.other\.weight_scale_inv' of .* is not part of this model"):
        load_ours(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 0.0])
def test_scales_that_are_no_positive_numbers_are_refused(tmp_path: Path, value: float) -> None:
    path = model(tmp_path / "model", with_scale(torch.full((1, 1), value)))
    assert all(f"'{QUERY}_scale_inv' has the scale {value:g}"[:-2] in what for what in refusals(path))


def test_a_not_a_number_of_powers_of_two_is_refused(tmp_path: Path) -> None:
    path = model(tmp_path / "model", with_scale(torch.full((1, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)))
    assert all("has the scale nan" in what for what in refusals(path))


def test_a_block_of_zeros_may_have_the_scale_zero(tmp_path: Path) -> None:
    def zeros(tensors: Tensors) -> None:
        tensors[QUERY].zero_()
        with_scale(torch.zeros(1, 1))(tensors)

    assert not load_ours(model(tmp_path / "model", zeros)).layers[0].self_attn.q_proj.weight.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.int64, torch.uint8, torch.float8_e8m0fnu])
def test_weights_that_are_no_numbers_of_a_weight_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    path = model(tmp_path / "model", lambda t: t.update({QUERY: t[QUERY].abs().to(dtype)}))
    assert all(f"tensor '{QUERY}' has dtype" in what for what in (*refusals(path), *preflight(path)))


def test_carried_tensors_with_such_scales_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shape = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    deepseek = {**QWEN3, **shape, **experts, "model_type": "deepseek_v3", "topk_group": 1, "first_k_dense_replace": 0}
    save_model(path, {**deepseek, "num_key_value_heads": 4})
    write_config(path, num_nextn_predict_layers=1)
    name = "model.layers.1.shared_head.head.weight"
    tensors = load_file(path / FILE)
    tensors[name] = torch.ones(VOCAB, 32).to(torch.float8_e4m3fn)
    for scale in (None, torch.ones(1, 1).int(), torch.ones(1, 2)):
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1) if scale is None else scale
        save_file(tensors, path / FILE)
        adapter = build_model(load_arch(path), device="meta").adapter
        if scale is None:
            assert [(t.name, t.dtype) for t in find_mtp_tensors(path, adapter)] == [(name, "bfloat16")]
            continue
        with pytest.raises(UsageError, match=f"'{name}_scale_inv'"):
            find_mtp_tensors(path, adapter)
        # tensors that are left out are not looked at
        assert len(find_mtp_tensors(path, adapter, checked=False)) == 1


# -- files beside the model -------------------------------------------------------------------------------------------


def sharded(path: Path) -> Path:
    """Split a model into two files and an index."""
    tensors = load_file(model(path) / FILE)
    (path / FILE).unlink()
    names, places = sorted(tensors), {}
    for number, own in enumerate((names[:5], names[5:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in own}, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(own, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def published(path: Path) -> Tensors:
    own = load_ours(path)
    return {name: tensor.clone() for name, tensor in published_tensors(own, own.adapter)}


def test_the_index_decides_what_is_read(tmp_path: Path) -> None:
    path = sharded(tmp_path / "model")
    expected = published(path)
    wrong = {name: tensor + 1 for name, tensor in expected.items()}
    for file in ("model-00003-of-00003.safetensors", "consolidated.safetensors", "old.safetensors"):
        save_file(wrong, path / file)
    (path / "pytorch_model.bin").write_bytes(b"\x80")
    (path / "torn.safetensors").write_bytes(b"<html>")
    found = published(path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.testing.assert_close(
        packed_logits(load_ours(path), token_ids()), theirs(path, token_ids()), rtol=2e-4, atol=2e-5
    )
    assert preflight(path) == []
    with ModelFiles(path) as files:
        assert "old.safetensors" in files.ignored
        assert "pytorch_model.bin" in files.ignored
        assert len(files.ignored) == 5


def test_without_an_index_files_of_other_formats_are_left_out(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    expected = published(path)
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, path / "consolidated.safetensors")
    save_file({"base_model.model.lora_A.weight": torch.ones(2)}, path / "adapter_model.safetensors")
    found = published(path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.testing.assert_close(
        packed_logits(load_ours(path), token_ids()), theirs(path, token_ids()), rtol=2e-4, atol=2e-5
    )


def change_index(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def second_copy(path: Path) -> None:
    file = path / "model-00002-of-00002.safetensors"
    save_file({**load_file(file), EMBEDDING: torch.zeros(VOCAB, 32)}, file)


CONTRADICTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "single": (lambda p: save_file({"x": torch.ones(1)}, p / FILE), "that does not name it"),
    "outside": (lambda p: change_index(p, lambda m: m.update({QUERY: "../x.safetensors"})), "'../x.safetensors'"),
    "absolute": (lambda p: change_index(p, lambda m: m.update({QUERY: "/x.safetensors"})), "'/x.safetensors'"),
    "no-file": (lambda p: change_index(p, lambda m: m.update({QUERY: "gone.safetensors"})), "lacks gone.safetensors"),
    "bin": (lambda p: change_index(p, lambda m: m.update({QUERY: "pytorch_model.bin"})), "'pytorch_model.bin'"),
    "number": (lambda p: change_index(p, lambda m: m.update({QUERY: 1})), "has no weight_map"),
    "empty": (lambda p: (p / INDEX).write_text('{"weight_map": {}}'), "has no weight_map"),
    "torn": (lambda p: (p / INDEX).write_text('{"weight_map": {'), "cannot be read"),
    "list": (lambda p: (p / INDEX).write_text("[]"), "has no weight_map"),
    "two-shards": (second_copy, f"has tensor '{EMBEDDING}', and so has"),
    "no-tensor": (
        lambda p: change_index(p, lambda m: m.update({"model.x": "model-00001-of-00002.safetensors"})),
        "has no tensor 'model.x'",
    ),
    "other-file": (
        lambda p: change_index(p, lambda m: m.update({EMBEDDING: "model-00002-of-00002.safetensors"})),
        f"has tensor '{EMBEDDING}', and by",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused(tmp_path: Path, case: str) -> None:
    change, said = CONTRADICTIONS[case]
    path = sharded(tmp_path / "model")
    change(path)
    with pytest.raises(HpcrlError) as caught:
        load_ours(path)
    assert said in str(caught.value)
    assert [said in what for what in preflight(path)] == [True]


def test_a_file_of_other_tensors_without_an_index_is_refused(tmp_path: Path) -> None:
    """vLLM would read it, and transformers would not."""
    path = model(tmp_path / "model")
    save_file({"v_head.weight": torch.ones(2)}, path / "value_head.safetensors")
    said = "tensor 'v_head.weight' of value_head.safetensors is not part of this model"
    with pytest.raises(ValueError, match=said):
        load_ours(path)
    assert [said in what for what in preflight(path)] == [True]


def test_a_second_model_without_an_index_is_refused(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    save_file({EMBEDDING: torch.zeros(VOCAB, 32)}, path / "model-00001-of-00002.safetensors")
    with pytest.raises(UsageError, match=f"has tensor '{EMBEDDING}', and so has"):
        load_ours(path)


def test_a_directory_of_other_formats_alone_is_named(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    (path / FILE).rename(path / "consolidated.safetensors")
    (path / "pytorch_model.bin").touch()
    with pytest.raises(UsageError, match=r"there is consolidated.safetensors, pytorch_model.bin, which hpcrl does not"):
        load_ours(path)


# -- shared experts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 2])
def test_the_key_of_shared_experts_is_named(tmp_path: Path, count: int) -> None:
    """transformers has one shared expert in Nemotron 3, whatever ``n_shared_experts`` says."""
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    path = tmp_path / "model"
    nemotron = {**QWEN3, **mamba, **experts, "model_type": "nemotron_h", "layers_block_type": ["moe", "mamba"]}
    save_model(path, {**nemotron, "moe_shared_expert_intermediate_size": 24, "n_shared_experts": count})
    with pytest.raises(ValueError, match=rf"\(n_shared_experts is {count} in config.json\)"):
        load_ours(path)
    assert f"(n_shared_experts is {count} in config.json)" in preflight(path)[0]
