"""Models as other programs store them: tied heads, dtypes of scales, and what lies beside the files of an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hpcrl.errors import UsageError
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import load_hf_tensors, published_tensors
from hpcrl.modeling.load import load_model_dir
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import Qwen3Arch, load_arch

HEAD, EMBEDDING, MATRIX = "lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def _arch(*, tied: bool) -> Qwen3Arch:
    return Qwen3Arch(**SIZES, tie_word_embeddings=tied)


def _tensors(arch: Qwen3Arch) -> dict[str, Tensor]:
    model = build_model(arch, device="cpu")
    model.init_weights(torch.Generator().manual_seed(0))
    return {name: tensor.clone() for name, tensor in published_tensors(model, model.adapter)}


def _stored(path: Path, arch: Qwen3Arch, **files: Mapping[str, Tensor]) -> Path:
    (path / "config.json").write_text(json.dumps(arch.to_hf_config()))
    for name, tensors in files.items():
        save_file(dict(tensors), path / f"{name}.safetensors")
    return path


def _loaded(path: Path) -> Decoder:
    model = build_model(load_arch(path), device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    load_model_dir(model, model.adapter, path)
    return model


def test_a_tied_model_may_be_stored_under_its_head_alone(tmp_path: Path) -> None:
    arch = _arch(tied=True)
    tensors = _tensors(arch)
    weight = tensors[EMBEDDING]
    own = {name: tensor for name, tensor in tensors.items() if name != EMBEDDING} | {HEAD: weight}
    model = _loaded(_stored(tmp_path, arch, model=own))
    assert torch.equal(dict(published_tensors(model, model.adapter))[EMBEDDING], weight)
    with torch.no_grad():
        model.embed_tokens.weight.fill_(7.0)
    load_hf_tensors(model, model.adapter, own.items())
    assert torch.equal(model.embed_tokens.weight, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_repeats_the_embedding_says_nothing(tmp_path: Path, dtype: torch.dtype) -> None:
    arch = _arch(tied=True)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in _tensors(arch).items()}
    tensors[HEAD] = tensors[EMBEDDING].to(dtype, copy=True)
    _loaded(_stored(tmp_path, arch, model=tensors))


def test_a_head_of_its_own_is_not_dropped_from_a_tied_model(tmp_path: Path) -> None:
    arch = _arch(tied=True)
    tensors = _tensors(arch)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 0.5
    with pytest.raises(ValueError, match=r"tie_word_embeddings is true, but.*lm_head"):
        _loaded(_stored(tmp_path, arch, model=tensors))
    model = build_model(arch, device="cpu")
    with pytest.raises(ValueError, match="tie_word_embeddings is true"):
        load_hf_tensors(model, model.adapter, tensors.items())


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float64, torch.int32, torch.uint8])
def test_scales_of_another_dtype_are_refused_before_anything_is_written(tmp_path: Path, dtype: torch.dtype) -> None:
    arch = _arch(tied=True)
    tensors = _tensors(arch)
    tensors[MATRIX] = tensors[MATRIX].to(torch.float8_e4m3fn)
    tensors[f"{MATRIX}_scale_inv"] = torch.ones(1, 1).to(dtype)
    _stored(tmp_path, arch, model=tensors)
    model = build_model(arch, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    with pytest.raises(ValueError, match=f"{MATRIX}_scale_inv.*dtype"):
        load_model_dir(model, model.adapter, tmp_path)
    assert all(bool((parameter == 7.0).all()) for parameter in model.parameters())


def test_weights_in_whole_numbers_are_not_read_as_weights(tmp_path: Path) -> None:
    arch = _arch(tied=True)
    tensors = _tensors(arch)
    tensors[MATRIX] = torch.ones_like(tensors[MATRIX]).to(torch.int32)
    with pytest.raises(ValueError, match=f"{MATRIX}.*int32"):
        _loaded(_stored(tmp_path, arch, model=tensors))


def _index(path: Path, **files: Mapping[str, Tensor]) -> None:
    named = {name: f"{file}.safetensors" for file, tensors in files.items() for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))


def _halves(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    names = sorted(tensors)
    return {name: tensors[name] for name in names[:3]}, {name: tensors[name] for name in names[3:]}


def test_only_files_of_the_index_are_the_model(tmp_path: Path) -> None:
    arch = _arch(tied=False)
    tensors = _tensors(arch)
    first, second = _halves(tensors)
    stray = {name: tensor + 1 for name, tensor in second.items()}
    _stored(tmp_path, arch, a=first, b=second, consolidated=stray, old=stray)
    _index(tmp_path, a=first, b=second)
    found = dict(published_tensors(model := _loaded(tmp_path), model.adapter))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_one_whole_file_is_the_model_where_there_is_no_index(tmp_path: Path) -> None:
    arch = _arch(tied=False)
    tensors = _tensors(arch)
    _stored(tmp_path, arch, model=tensors, consolidated={name: tensor + 1 for name, tensor in tensors.items()})
    found = dict(published_tensors(model := _loaded(tmp_path), model.adapter))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("case", ["both", "elsewhere", "absent", "lost", "no object", "outside"])
def test_an_index_that_contradicts_the_files_is_refused(tmp_path: Path, case: str) -> None:
    arch = _arch(tied=False)
    first, second = _halves(_tensors(arch))
    _stored(tmp_path, arch, a=first, b=second)
    index = tmp_path / "model.safetensors.index.json"
    match case:
        case "both":
            _index(tmp_path, a=first, b=second)
            save_file({**first, **second}, tmp_path / "model.safetensors")
        case "elsewhere":
            _index(tmp_path, a=second, b=first)
        case "absent":
            _index(tmp_path, a=first, c=second)
        case "lost":
            _index(tmp_path, a=first, b={**second, "another.weight": next(iter(second.values()))})
        case "no object":
            index.write_text('{"weight_map": 3}')
        case _:
            _index(tmp_path, **{"a": first, "../b": second})
    with pytest.raises(UsageError, match=r"model\.safetensors\.index\.json"):
        _loaded(tmp_path)
