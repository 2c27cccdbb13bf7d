"""What `test_triton_programs` runs in a process of its own: ``triton_checks.py interpret|train|compile``."""

from __future__ import annotations

import sys
from typing import NamedTuple
from unittest.mock import patch

import torch
from model_agreement import TOLERANCE, loss_of, packed_logits, token_ids

from hpcrl.config.recipe import TrainerConfig
from hpcrl.modeling.attention.sparse import choose_tokens
from hpcrl.modeling.fp8.fused_quantiser import fused_quantiser, try_quantiser
from hpcrl.modeling.fp8.quantiser import Quantised, Quantiser
from hpcrl.modeling.kernels.kernel import Attended
from hpcrl.modeling.sparse_kernels import by_triton
from hpcrl.modeling.sparse_kernels.by_triton import TritonKernel
from hpcrl.modeling.sparse_kernels.find import try_kernel
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseShape
from hpcrl.modeling.sparse_kernels.reference import ReferenceKernel
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import GlmMoeDsaArch
from hpcrl.trainer.batch import tensors
from hpcrl.trainer.kernels import apply_kernels, find_kernels

CPU = torch.device("cpu")


def shape(heads: int, dim: int, value_dim: int, width: int, dtype: torch.dtype) -> SparseShape:
    return SparseShape(heads, dim, value_dim, width, 3, 20, dtype)


#: heads, keys and values that are no powers of 2; keys without rotary channels; more heads than a program takes
SHAPES = (
    shape(3, 24, 20, 9, torch.float32),
    shape(65, 40, 40, 70, torch.float32),
    shape(5, 40, 32, 37, torch.float16),
)


def rounded(found: Quantised) -> Quantised:
    """Triton's interpreter does not round to FP8 as devices and torch do."""
    return found._replace(values=found.values.to(torch.float8_e4m3fn))


def interpret() -> None:
    """Programs against the reference; the queries of a pass in parts; keys that are chosen often or never."""
    for each in SHAPES:
        for blocks in (by_triton.HOPPER, by_triton.SMALL):
            made = TritonKernel(CPU, each)
            made._blocks = blocks
            try_kernel(made, CPU, each)
    made, made._blocks = TritonKernel(CPU, SHAPES[-1]), by_triton.SMALL
    with patch.object(by_triton, "_MOST_NARROW", 0):
        try_kernel(made, CPU, SHAPES[-1])
    kernel, own = TritonKernel(CPU, SHAPES[0]), ReferenceKernel()
    draw = torch.Generator().manual_seed(1)
    q, rows = torch.randn(7, 2, 12, generator=draw), torch.randn(30, 12, generator=draw)
    # key 3 by all, those from 20 on by none; the last query sees nothing
    chosen = torch.stack([torch.randperm(20, generator=draw)[:6] for _ in range(7)]).int()
    chosen[~(chosen == 3).any(1), 0] = 3
    chosen[-1] = -1
    inputs, grad = Chosen(q, rows, chosen, 8, 0.3), torch.randn(7, 2, 8, generator=draw)
    by_triton._SCRATCH_BYTES = 1
    attended = kernel.forward(inputs)
    assert not attended.out[-1].any()
    assert (attended.lse[-1] == float("-inf")).all()
    of_q, of_rows = kernel.backward(grad, inputs, attended)
    assert not of_rows[20:].any()
    assert not of_q[-1].any()
    some = inputs._replace(q=q[:-1], chosen=chosen[:-1])
    wanted = own.backward(grad[:-1], some, Attended(*own.forward(some)))
    torch.testing.assert_close((of_q[:-1], of_rows), wanted, rtol=1e-5, atol=1e-6)
    weights, visible = torch.randn(7, 2, generator=draw), torch.tensor([1, 2, 5, 9, 20, 30, 30])
    found = [choose_tokens(q, rows, weights, visible, 5, kernel=each) for each in (kernel, own)]
    assert torch.equal(*found)
    # one query a product, and of two heads 32; programs and products without a query, runs of keys that none sees
    for queries, heads in ((20, 33), (300, 2)):
        q, k, weights = (
            torch.randn(*size, generator=draw) for size in ((queries, heads, 8), (600, 8), (queries, heads))
        )
        visible = torch.linspace(1, 400, queries).long()
        found = [each.index_scores(q, k, weights, visible) for each in (kernel, own)]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
        assert found[0].isinf().sum(1).tolist() == (600 - visible).tolist()
    unrounded = fused_quantiser(torch.float32)
    try_quantiser(Quantiser(*(lambda x, one=one: rounded(one(x)) for one in unrounded)), CPU)
    print(f"{12 + logits()} cases agree")


def logits() -> int:
    """What is known of rows of logits, and their gradient, against plain torch; returns the number of cases."""
    draw = torch.Generator().manual_seed(2)
    cases = [
        # a part of a block, one block, and a block with one more; rows of a larger matrix
        (torch.float32, 5, 1.0),
        (torch.float32, 8192, 0.7),
        (torch.float16, 8193, 1.3),
    ]
    for dtype, columns, temperature in cases:
        given = (torch.randn(4, columns + 3, generator=draw) * 5).to(dtype)[:, :columns]
        given[1] = 2.5
        given[2, 0] = 60.0
        targets = torch.tensor([0, columns - 1, 1, columns // 2])
        slopes = torch.randn(8, generator=draw)[::2]
        found = []
        for programs in (tensors.find_programs, lambda logits: None):
            with patch.object(tensors, "find_programs", programs):
                own = given.clone()
                known = tensors.normalise(own, targets, temperature)
                tensors.put_gradient(own, targets, known.normaliser, slopes, temperature)
                found.append((*known, own))
        torch.testing.assert_close(*found, rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-6)
        assert tensors.find_programs(given) is not None
    assert tensors.find_programs(given.double()) is None
    assert tensors.find_programs(given.mT) is None
    return len(cases)


def train() -> None:
    """A whole GLM-5 of four layers, chosen and set as a trainer does it: loss and all gradients are the reference's."""
    arch = GlmMoeDsaArch(
        vocab_size=103,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        max_position_embeddings=64,
        q_lora_rank=20,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=6,
        v_head_dim=10,
        index_n_heads=16,
        index_head_dim=10,
        index_topk=4,
        indexer_types=("full", "shared", "full", "shared"),
        eos_token_id=2,
    )
    model = build_model(arch, device="cpu")
    model.init_weights(torch.Generator().manual_seed(0), std=0.3)
    found = {}
    for name in ("reference", "triton"):
        config = TrainerConfig.model_validate({"steps": 1, "kernels": {"sparse_attention": name}})
        kernels = find_kernels(config, arch, CPU)
        assert kernels.names == {"sparse_attention": name}
        apply_kernels(model, kernels)
        model.zero_grad()
        loss = loss_of(packed_logits(model, token_ids()))
        loss.backward()
        found[name] = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert len(found["triton"]) > 40
    torch.testing.assert_close(found["triton"], found["reference"], **TOLERANCE)
    assert any(not torch.equal(*both) for both in zip(*found.values(), strict=True)), "one kernel computed both"
    print(f"loss and {len(found['triton']) - 1} gradients agree")


class Bounds(NamedTuple):
    """What a program may take: spilled bytes a thread, shared KiB; and whether it has Hopper's instruction."""

    spilled: int
    shared: int
    wgmma: bool


def compile_for_hopper() -> None:
    """For the shapes of GLM-5; prints what each program takes."""
    from hopper import SHARED_BYTES, compiled

    from hpcrl.modeling.fp8.triton_programs import quantise_tiles
    from hpcrl.modeling.sparse_kernels import triton_programs as programs
    from hpcrl.trainer.batch.triton_logits import normalise_rows, put_gradient_rows

    glm5 = Chosen(torch.empty(1, 64, 576, dtype=torch.bfloat16), torch.empty(0), torch.empty(0), 512, 1.0)
    types = {"chosen": "*i32", "order": "*i64", "ends": "*i64", "visible": "*i64", "scale": "fp32"}
    types |= dict.fromkeys(("lse", "inner", "target", "scores", "weights"), "*fp32")
    types |= dict.fromkeys(("heads", "width", "keys", "tokens"), "i32")
    tiled = {"values": "*fp8e4nv", "scales": "*fp32", "least": "fp32"}
    tiled |= dict.fromkeys(("rows", "columns", "stride_matrix", "stride_row", "stride_column"), "i32")
    rows = dict.fromkeys(("logprobs", "entropies", "normalisers", "slopes"), "*fp32") | {"targets": "*i64"}
    rows |= {"columns": "i32", "stride": "i32", "temperature": "fp32"}
    tiles = {"BLOCK": 128, "BY_ROW": True, "ROWS": 32, "WHOLE_ROWS": False, "num_warps": 4}
    forward, queries = programs.attend_forward, programs.attend_queries
    scores = by_triton.index_sizes(torch.empty(1, 32, 128, dtype=torch.bfloat16))
    plain = Bounds(0, SHARED_BYTES >> 10, wgmma=False)
    cases = [
        (quantise_tiles, tiles, plain),
        (quantise_tiles, tiles | {"BY_ROW": False, "ROWS": 128, "WHOLE_ROWS": True, "num_warps": 8}, plain),
        (forward, by_triton.attention_sizes(glm5, by_triton.HOPPER.forward), Bounds(0, 217, wgmma=True)),
        (queries, by_triton.attention_sizes(glm5, by_triton.HOPPER.backward), Bounds(16, 213, wgmma=True)),
        (forward, by_triton.attention_sizes(glm5, by_triton.SMALL.forward), Bounds(0, 113, wgmma=False)),
        (queries, by_triton.attention_sizes(glm5, by_triton.SMALL.backward), Bounds(0, 107, wgmma=False)),
        (programs.sum_rows, {"DIM": 576, "BLOCK_N": 16, "BLOCK_D": 128, "num_warps": 4}, plain),
        (programs.index_scores, scores, Bounds(0, 113, wgmma=True)),
        (normalise_rows, {"BLOCK": 8192, "num_warps": 8}, plain),
        (put_gradient_rows, {"BLOCK": 4096, "num_warps": 8}, plain),
    ]
    own_types = {quantise_tiles: tiled, normalise_rows: rows, put_gradient_rows: rows}
    for program, sizes, bounds in cases:
        made = compiled(program, sizes, own_types.get(program, types))
        own = (program.__name__, made._replace(ptx=""), bounds)
        assert made.shared <= bounds.shared << 10, own
        assert made.spilled <= bounds.spilled, own
        # instructions of both kinds in one program: a product that is not on the fast way
        assert (made.wgmma > 0) == bounds.wgmma, own
        assert not (made.wgmma and made.mma), own
        if program is quantise_tiles:
            # quotients as IEEE has them, and FP8 rounded to the nearest: so bits are those of torch
            assert "div.rn.f32" in made.ptx
            assert "cvt.rn.satfinite.e4m3x2.f32" in made.ptx
        print(program.__name__, *(f"{name} {value}" for name, value in zip(made._fields[1:], made[1:], strict=True)))
    print(f"{len(cases)} programs fit")


if __name__ == "__main__":
    {"interpret": interpret, "train": train, "compile": compile_for_hopper}[sys.argv[1]]()
