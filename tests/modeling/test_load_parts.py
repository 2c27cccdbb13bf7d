"""The bytes of a model directory in the tensors of a rank, in portions of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_agreement import VOCAB, load_ours, save_model, write_config
from safetensors.torch import load_file, save_file

from hpcrl.modeling.blocks import HeldBlock, local_block, overlap
from hpcrl.modeling.checkpoint_io import load
from hpcrl.modeling.checkpoint_io.carried import carry, find_mtp_tensors
from hpcrl.modeling.checkpoint_io.load import load_model_dir, read_whole
from hpcrl.modeling.hf import published_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import load_arch
from hpcrl.weights.read.model_files import ModelFiles

FILE = "model.safetensors"
#: the matrices of attention are 160 by 136: two blocks of 128 each way, of which the last ones are smaller
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 136,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 20,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
SPARSE: dict[str, Any] = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "moe_intermediate_size": 6,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}
QUERY = "model.layers.0.self_attn.q_proj.weight"


def in_fp8(path: Path) -> torch.Tensor:
    """Store one matrix in block FP8, each block with a scale of its own; returns what it stands for."""
    tensors = load_file(path / FILE)
    values = (tensors[QUERY] * 20).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 2.0], [4.0, 0.25]])
    tensors |= {QUERY: values, f"{QUERY}_scale_inv": scales}
    save_file(tensors, path / FILE)
    rows, columns = values.shape
    return values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]


@pytest.mark.parametrize("portion_bytes", [1, 3 * 136 * 4, 1 << 26])
@pytest.mark.parametrize("kind", ["dense", "sparse", "fp8"])
def test_portions_of_any_size_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, portion_bytes: int
) -> None:
    monkeypatch.setattr(load, "_PORTION_BYTES", portion_bytes)
    save_model(tmp_path, dict(SPARSE if kind == "sparse" else QWEN3))
    meant = {QUERY: in_fp8(tmp_path)} if kind == "fp8" else {}
    expected = {n: t for n, t in load_file(tmp_path / FILE).items() if not n.endswith("scale_inv")} | meant
    model = load_ours(tmp_path)
    found = dict(published_tensors(model, model.adapter))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_memory_in_addition_to_the_model_is_that_of_a_portion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_PORTION_BYTES", 10 * 136 * 4)
    save_model(tmp_path, dict(QWEN3))
    read: list[int] = []
    real = ModelFiles.read

    def counted(files: ModelFiles, name: str, low: Any, high: Any) -> Any:
        found = real(files, name, low, high)
        read.append(len(memoryview(found).cast("B")))
        return found

    monkeypatch.setattr(ModelFiles, "read", counted)
    model = load_ours(tmp_path)
    assert max(read) == 10 * 136 * 4
    # and not one row after the other
    assert len(read) < sum(p.numel() for p in model.parameters()) / (4 * 136)


def third(size: int, rank: int) -> tuple[int, int]:
    """What one of three ranks has of a dimension, as FSDP2 cuts it: the last may have little or nothing."""
    each = -(-size // 3)
    return min(rank * each, size), min((rank + 1) * each, size)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("kind", ["sparse", "fp8"])
def test_a_rank_fills_its_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, kind: str, rank: int, dim: int
) -> None:
    """Experts, rows or columns that ranks do not share evenly, in blocks of FP8 that lie on both sides of a cut."""
    save_model(tmp_path, dict(SPARSE if kind == "sparse" else QWEN3))
    if kind == "fp8":
        in_fp8(tmp_path)
    whole = {name: tensor.detach() for name, tensor in load_ours(tmp_path).named_parameters()}

    def block_of(tensor: torch.Tensor) -> HeldBlock:
        low, high = [0] * tensor.dim(), list(tensor.shape)
        if dim < tensor.dim():
            low[dim], high[dim] = third(tensor.shape[dim], rank)
        return HeldBlock(tuple(low), tuple(high))

    def part_of(tensor: torch.Tensor) -> torch.Tensor:
        block = block_of(tensor)
        return tensor[tuple(slice(*sides) for sides in zip(*block, strict=True))]

    monkeypatch.setattr(load, "local_block", block_of)
    monkeypatch.setattr(load, "local_part", part_of)
    model = build_model(load_arch(tmp_path), device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    load_model_dir(model, model.adapter, tmp_path)
    for name, parameter in model.named_parameters():
        expected = torch.full_like(parameter, 7.0)
        part_of(expected).copy_(part_of(whole[name]))
        assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("column", [0, 1])
def test_a_block_of_zeros_alone_may_have_the_scale_zero(tmp_path: Path, row: int, column: int) -> None:
    save_model(tmp_path, dict(QWEN3))
    expected, block = in_fp8(tmp_path), (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
    tensors = load_file(tmp_path / FILE)
    tensors[f"{QUERY}_scale_inv"][row, column] = 0.0
    values = tensors[QUERY].float()
    values[block] = 0.0
    expected[block] = 0.0
    save_file(tensors | {QUERY: values.to(torch.float8_e4m3fn)}, tmp_path / FILE)
    assert torch.equal(dict(published_tensors(own := load_ours(tmp_path), own.adapter))[QUERY], expected)
    # in its last element
    values[block][-1, -1] = 1.0
    save_file(tensors | {QUERY: values.to(torch.float8_e4m3fn)}, tmp_path / FILE)
    with pytest.raises(ValueError, match="has the scale 0 for a block that is not zero"):
        load_ours(tmp_path)


def test_a_tensor_is_read_whole_into_another_dtype(tmp_path: Path) -> None:
    save_model(tmp_path, dict(QWEN3))
    expected = in_fp8(tmp_path).to(torch.bfloat16)
    adapter = build_model(load_arch(tmp_path), device="meta").adapter
    target = torch.empty(160, 136, dtype=torch.bfloat16)
    with ModelFiles(tmp_path) as files:
        read_whole(files, adapter, "layers.0.self_attn.q_proj.weight", target)
        assert torch.equal(target, expected)
        with pytest.raises(ValueError, match=r"'model\.layers\.3\.mlp\.up_proj\.weight' is missing"):
            read_whole(files, adapter, "layers.3.mlp.up_proj.weight", target)
        with pytest.raises(ValueError, match=r"q_proj\.weight' has shape \(160, 136\), not \(136, 160\)"):
            read_whole(files, adapter, "layers.0.self_attn.q_proj.weight", target.T.contiguous())


def test_a_single_number_is_carried(tmp_path: Path) -> None:
    """As some published modules of multi-token prediction have them; and a row of numbers beside it."""
    save_model(
        tmp_path,
        {
            **QWEN3,
            "model_type": "deepseek_v3",
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
        },
    )
    write_config(tmp_path, num_nextn_predict_layers=1)
    extra = {"model.layers.1.scale": torch.tensor(3.5), "model.layers.1.enorm.weight": torch.arange(16.0)}
    save_file({**load_file(tmp_path / FILE), **extra}, tmp_path / FILE)
    model = build_model(load_arch(tmp_path), device="cpu")
    found = find_mtp_tensors(tmp_path, model.adapter)
    assert [(each.name, each.shape) for each in found] == [
        ("model.layers.1.enorm.weight", (16,)),
        ("model.layers.1.scale", ()),
    ]
    carry(model, found, lambda tensor: torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype)))
    load_model_dir(model, model.adapter, tmp_path)
    published = dict(published_tensors(model, model.adapter))
    assert all(torch.equal(published[name], tensor) for name, tensor in extra.items())
    assert published["lm_head.weight"].shape == (VOCAB, 16)


# -- blocks


@pytest.mark.parametrize(
    ("block", "low", "shape", "expected"),
    [
        # all, one side, the other side, and between
        (((0, 0), (4, 6)), (0, 0), (4, 6), ((0, 0), (4, 6))),
        (((0, 0), (2, 6)), (1, 0), (3, 6), ((0, 0), (1, 6))),
        (((2, 0), (4, 6)), (1, 0), (3, 6), ((1, 0), (3, 6))),
        (((1, 2), (3, 4)), (0, 1), (4, 4), ((1, 1), (3, 3))),
        # beside it
        (((0, 0), (2, 6)), (2, 0), (2, 6), ((0, 0), (0, 0))),
        (((2, 0), (4, 6)), (0, 0), (2, 6), ((0, 0), (0, 0))),
        # of an expert that is here, first and last, or is not
        (((2, 0, 0), (5, 4, 6)), (2, 1, 0), (3, 6), ((0, 0), (3, 6))),
        (((2, 0, 0), (5, 4, 6)), (4, 1, 0), (3, 6), ((0, 0), (3, 6))),
        (((2, 0, 0), (5, 4, 6)), (1, 1, 0), (3, 6), ((0, 0), (0, 0))),
        (((2, 0, 0), (5, 4, 6)), (5, 1, 0), (3, 6), ((0, 0), (0, 0))),
        (((2, 2, 0), (5, 4, 6)), (3, 1, 0), (3, 6), ((1, 0), (3, 6))),
    ],
)
def test_what_a_block_holds_of_a_region(block: Any, low: Any, shape: Any, expected: Any) -> None:
    assert overlap(HeldBlock(*block), low, shape) == HeldBlock(*expected)


def test_a_block_is_empty_where_any_side_is() -> None:
    assert not HeldBlock((0, 3), (1, 4)).is_empty
    assert HeldBlock((0, 3), (1, 3)).is_empty
    assert HeldBlock((2, 0), (1, 4)).is_empty
    assert not HeldBlock((), ()).is_empty
    assert local_block(torch.empty(3, 0)) == HeldBlock((0, 0), (3, 0))
