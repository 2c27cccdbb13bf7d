"""gpt-oss as it is published, with experts in MXFP4: read as transformers reads it, and refused where it is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_agreement import load_ours, packed_logits, save_model, token_ids, write_config
from safetensors.torch import load_file, save_file
from start_models import write_tiny_model

from hpcrl.errors import UsageError
from hpcrl.inference.embedded.weights.loading import load_model
from hpcrl.jobplan.start_model import _weight_problems
from hpcrl.modeling.blocks import HeldBlock
from hpcrl.modeling.checkpoint_io import load
from hpcrl.modeling.checkpoint_io.dequantise import write_dequantised
from hpcrl.modeling.checkpoint_io.load import load_model_dir, read_whole
from hpcrl.modeling.checkpoint_io.mxfp4 import dequantise_mxfp4, read_mxfp4
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import load_arch
from hpcrl.weights.format.mxfp4 import MXFP4_DTYPE, MXFP4_MAX_SCALE
from hpcrl.weights.read.model_files import ModelFiles

GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "max_position_embeddings": 64,
}
FILE = "model.safetensors"
EXPERTS = "model.layers.0.mlp.experts."
GATES = EXPERTS + "gate_up_proj"
Tensors = dict[str, torch.Tensor]


def theirs(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales)


def packed(path: Path, change: Callable[[Tensors], object] = lambda t: None) -> tuple[Path, Tensors]:
    """Write a small gpt-oss with random experts in MXFP4; return its directory and its tensors in bfloat16."""
    save_model(path, dict(GPT_OSS))
    tensors, whole = {}, {}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in load_file(path / FILE).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = whole[name] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        # weights of the order of a tenth
        scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole[name] = theirs(blocks, scales)
    change(tensors)
    save_file(tensors, path / FILE)
    write_config(path, dtype="bfloat16", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    return path, whole


def preflight(path: Path) -> list[str]:
    return [what for what, _ in _weight_problems(load_arch(path), path)]


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_every_number_with_every_scale_is_that_of_transformers() -> None:
    scales = torch.arange(MXFP4_MAX_SCALE + 1, dtype=torch.uint8)
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(len(scales), 1, 1)
    scales = scales.unsqueeze(-1).repeat(1, 16)
    ours = dequantise_mxfp4(blocks, scales)
    assert ours.dtype == torch.bfloat16
    assert ours.isfinite().all()
    # theirs has experts and rows before the blocks, and returns rows last; signs of zeros are compared as well
    wanted = theirs(blocks.unsqueeze(1), scales.unsqueeze(1))[..., 0]
    assert torch.equal(ours.view(torch.int16), wanted.view(torch.int16))
    # bfloat16 has lost nothing: 6 * 2 ** (k - 127), and the sign of the number
    largest = ours.double().view(len(scales), -1).amax(-1)
    assert largest.tolist() == [6.0 * 2.0 ** (k - 127) for k in range(MXFP4_MAX_SCALE + 1)]


@pytest.mark.parametrize("high", [(6, 64, 64), (1, 1, 1)])
@pytest.mark.parametrize("low", [(0, 0, 0), (0, 31, 5), (2, 33, 63), (5, 32, 0)])
def test_any_part_is_that_of_the_whole(tmp_path: Path, low: tuple[int, ...], high: tuple[int, ...]) -> None:
    path, whole = packed(tmp_path)
    if high == (1, 1, 1):
        high = tuple(begin + 1 for begin in low)
    with ModelFiles(path) as files:
        part = read_mxfp4(files, GATES, HeldBlock(low, high))
    wanted = whole[GATES][tuple(slice(begin, end) for begin, end in zip(low, high, strict=True))]
    assert torch.equal(part, wanted)


# -- models -----------------------------------------------------------------------------------------------------------


def test_a_weight_is_found_by_its_own_name_in_its_own_shape(tmp_path: Path) -> None:
    """It lies where its blocks lie; a number of it has no bytes of its own."""
    path, whole = packed(tmp_path)
    with ModelFiles(path) as files:
        found, blocks = files.tensors[GATES], files.tensors[f"{GATES}_blocks"]
    assert (found.file, found.offset, found.dtype) == (blocks.file, blocks.offset, MXFP4_DTYPE)
    assert (found.shape, found.width, found.nbytes) == (tuple(whole[GATES].shape), 0, 0)


def test_a_published_gpt_oss_is_that_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: trainer, embedded engine, a single tensor for an export; and in portions of any size."""
    path, whole = packed(tmp_path / "packed")
    save_model(tmp_path / "whole", dict(GPT_OSS))
    save_file(whole, tmp_path / "whole" / FILE)
    wanted = dict(load_ours(tmp_path / "whole").state_dict())
    for portion in (None, 1):
        if portion is not None:
            monkeypatch.setattr(load, "_PORTION_BYTES", portion)
        ours = dict(load_ours(path).state_dict())
        assert ours.keys() == wanted.keys()
        assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert preflight(path) == []
    engine = load_model(path, "auto")
    assert engine.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(engine.layers[1].mlp.experts.down_proj, wanted["layers.1.mlp.experts.down_proj"].bfloat16())
    with ModelFiles(path) as files:
        target = torch.empty(GPT_OSS["num_local_experts"], 64, 64)
        read_whole(files, engine.adapter, "layers.0.mlp.experts.gate_up_proj", target)
    assert torch.equal(target, wanted["layers.0.mlp.experts.gate_up_proj"])


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_reads_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, rank: int, dim: int) -> None:
    """Experts, inputs or outputs that three ranks share, with blocks of 32 inputs that lie on both sides of a cut."""
    path, _ = packed(tmp_path)
    wanted = {name: tensor.detach() for name, tensor in load_ours(path).named_parameters()}

    def block_of(tensor: torch.Tensor) -> HeldBlock:
        low, high = [0] * tensor.dim(), list(tensor.shape)
        if dim < tensor.dim():
            each = -(-tensor.shape[dim] // 3)
            low[dim], high[dim] = (min(end * each, tensor.shape[dim]) for end in (rank, rank + 1))
        return HeldBlock(tuple(low), tuple(high))

    def part_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[tuple(slice(*sides) for sides in zip(*block_of(tensor), strict=True))]

    monkeypatch.setattr(load, "local_block", block_of)
    monkeypatch.setattr(load, "local_part", part_of)
    model = build_model(load_arch(path), device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    load_model_dir(model, model.adapter, path)
    for name, parameter in model.named_parameters():
        expected = torch.full_like(parameter, 7.0)
        part_of(expected).copy_(part_of(wanted[name]))
        assert torch.equal(parameter, expected), name


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """transformers dequantises where there are no GPUs."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    path, _ = packed(tmp_path)
    asked = Mxfp4Config(dequantize=True)
    other = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=asked, dtype=torch.bfloat16, attn_implementation="eager"
    ).float()
    with torch.no_grad():
        wanted = torch.cat([other(input_ids=ids[None]).logits[0] for ids in token_ids()])
        torch.testing.assert_close(packed_logits(load_ours(path), token_ids()), wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("file_bytes", [1, 1 << 30])
def test_a_copy_in_bfloat16_is_the_same_model(tmp_path: Path, file_bytes: int) -> None:
    from transformers import AutoModelForCausalLM

    path, whole = packed(tmp_path / "packed")
    (path / "tokenizer_config.json").write_text("{}")
    assert write_dequantised(path, tmp_path / "copy", file_bytes=file_bytes) == 4
    written: Tensors = {}
    for file in sorted((tmp_path / "copy").glob("*.safetensors")):
        written |= load_file(file)
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) == (len(whole) if file_bytes == 1 else 1)
    assert written.keys() == whole.keys()
    assert all(torch.equal(written[name], whole[name]) and written[name].dtype == whole[name].dtype for name in whole)
    config = json.loads((tmp_path / "copy/config.json").read_text())
    assert "quantization_config" not in config
    assert (tmp_path / "copy/tokenizer_config.json").is_file()
    assert preflight(tmp_path / "copy") == []
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with pytest.raises(UsageError, match="is quantised: use it unchanged"):
        write_dequantised(tmp_path / "copy", tmp_path / "again")
    with pytest.raises(UsageError, match="exists already"):
        write_dequantised(path, tmp_path / "copy")


def test_a_copy_of_a_model_in_fp8_has_no_scales(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "fp8", fp8=True)
    assert write_dequantised(path, tmp_path / "copy") > 0
    (file,) = (tmp_path / "copy").glob("*.safetensors")
    written = load_file(file)
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16, torch.float32}
    assert not [name for name in written if name.endswith("_scale_inv")]
    assert preflight(tmp_path / "copy") == []


def test_what_cannot_be_read_leaves_no_copy(tmp_path: Path) -> None:
    path, _ = packed(tmp_path / "packed", no_scales)
    with pytest.raises(UsageError, match="but its scales"):
        write_dequantised(path, tmp_path / "copy")
    assert [each.name for each in tmp_path.iterdir()] == ["packed"]


# -- damage -----------------------------------------------------------------------------------------------------------


def no_scales(tensors: Tensors) -> None:
    del tensors[GATES + "_scales"]


def no_blocks(tensors: Tensors) -> None:
    del tensors[GATES + "_blocks"]


def fewer_scales(tensors: Tensors) -> None:
    tensors[GATES + "_scales"] = tensors[GATES + "_scales"][:, 1:].contiguous()


def scales_of_a_float(tensors: Tensors) -> None:
    tensors[GATES + "_scales"] = tensors[GATES + "_scales"].float()


def smaller_blocks(tensors: Tensors) -> None:
    blocks = tensors[GATES + "_blocks"]
    tensors[GATES + "_blocks"] = blocks.view(*blocks.shape[:2], 4, 8)


def fewer_experts(tensors: Tensors) -> None:
    for part in ("_blocks", "_scales"):
        tensors[GATES + part] = tensors[GATES + part][1:].contiguous()


def twice(tensors: Tensors) -> None:
    tensors[GATES] = torch.zeros(6, 64, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (no_scales, "is in MXFP4, but its scales, 'model.layers.0.mlp.experts.gate_up_proj_scales', are missing"),
        (no_blocks, "the first is 'model.layers.0.mlp.experts.gate_up_proj'"),
        (fewer_scales, "gate_up_proj_scales' has shape (6, 63, 2), not (6, 64, 2): one a block"),
        (scales_of_a_float, "gate_up_proj_scales' has dtype float32; scales of MXFP4 are read in uint8 and"),
        (smaller_blocks, "gate_up_proj_blocks' has blocks of 8 bytes, not of 16"),
        (fewer_experts, "gate_up_proj' has shape"),
        (twice, "is not part of this model"),
    ],
)
def test_what_is_not_whole_is_refused_by_all(tmp_path: Path, change: Callable[[Tensors], None], says: str) -> None:
    path, _ = packed(tmp_path, change)
    found = preflight(path)
    assert any(says in what for what in found), found
    with pytest.raises(ValueError, match="model"):
        load_model_dir(model := build_model(load_arch(path), device="cpu"), model.adapter, path)
    with pytest.raises(UsageError) as caught:
        load_model(path, "bfloat16")
    assert says in str(caught.value)


@pytest.mark.parametrize(("scale", "says"), [(255, "the scale no number"), (253, "the scale 2 ** 126")])
def test_a_scale_without_finite_numbers_is_refused(tmp_path: Path, scale: int, says: str) -> None:
    def change(tensors: Tensors) -> None:
        tensors[GATES + "_scales"][5, 63, 1] = scale

    path, _ = packed(tmp_path, change)
    model = build_model(load_arch(path), device="cpu")
    with torch.no_grad():
        model.embed_tokens.weight.fill_(7.0)
    with pytest.raises(ValueError, match="gate_up_proj_scales") as caught:
        load_model_dir(model, model.adapter, path)
    assert says in str(caught.value)
    assert bool((model.embed_tokens.weight == 7.0).all())
