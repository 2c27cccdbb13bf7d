"""What `test_triton_programs` runs in a process of its own: ``triton_checks.py interpret`` or ``compile``."""

from __future__ import annotations

import sys

import torch

from hpcrl.modeling.fp8.fused_quantiser import fused_quantiser, try_quantiser
from hpcrl.modeling.fp8.quantiser import Quantised, Quantiser
from hpcrl.modeling.kernels.kernel import Attended
from hpcrl.modeling.sparse_attention import choose_tokens
from hpcrl.modeling.sparse_kernels import by_triton
from hpcrl.modeling.sparse_kernels.by_triton import TritonKernel
from hpcrl.modeling.sparse_kernels.find import try_kernel
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseShape
from hpcrl.modeling.sparse_kernels.reference import ReferenceKernel

CPU = torch.device("cpu")
#: of a streaming multiprocessor of Hopper, for one program
HOPPER_SHARED_BYTES = 227 << 10


def shape(heads: int, dim: int, value_dim: int, width: int, dtype: torch.dtype) -> SparseShape:
    return SparseShape(heads, dim, value_dim, width, 3, 20, dtype)


#: heads, keys and values that are no powers of 2; keys without rotary channels; more heads than a program takes
SHAPES = (
    shape(3, 24, 20, 9, torch.float32),
    shape(33, 40, 40, 70, torch.float32),
    shape(5, 40, 32, 37, torch.float16),
)


def rounded(found: Quantised) -> Quantised:
    """Triton's interpreter does not round to FP8 as devices and torch do."""
    return found._replace(values=found.values.to(torch.float8_e4m3fn))


def interpret() -> None:
    """Programs against the reference; the queries of a pass in parts; keys that are chosen often or never."""
    for each in SHAPES:
        try_kernel(TritonKernel(CPU, each), CPU, each)
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
    unrounded = fused_quantiser(torch.float32)
    try_quantiser(Quantiser(*(lambda x, one=one: rounded(one(x)) for one in unrounded)), CPU)
    print("6 cases agree")


def compile_for_hopper() -> None:
    """For the shapes of GLM-5; prints what each program takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hpcrl.modeling.fp8.triton_programs import quantise_tiles
    from hpcrl.modeling.sparse_kernels import triton_programs as programs

    glm5 = Chosen(torch.empty(1, 64, 576, dtype=torch.bfloat16), torch.empty(0), torch.empty(0), 512, 1.0)
    integers = {"heads", "width", "keys"}
    pointers = {"chosen": "*i32", "order": "*i64", "ends": "*i64", "scale": "fp32"} | dict.fromkeys(
        ("lse", "inner", "target", "scores", "weights"), "*fp32"
    )
    integers |= {"rows", "columns", "stride_matrix", "stride_row", "stride_column"}
    tiles = {"BLOCK": 128, "BY_ROW": True, "ROWS": 32, "WHOLE_ROWS": False, "num_warps": 4}
    cases = [
        (quantise_tiles, dict(tiles)),
        (quantise_tiles, tiles | {"BY_ROW": False, "ROWS": 128, "WHOLE_ROWS": True, "num_warps": 8}),
        (programs.attend_forward, by_triton._sizes(glm5, by_triton.FORWARD)),
        (programs.attend_queries, by_triton._sizes(glm5, by_triton.BACKWARD)),
        (programs.sum_rows, {"DIM": 576, "BLOCK_N": 16, "BLOCK_D": 128, "num_warps": 4}),
        (programs.index_scores, by_triton.index_sizes(torch.empty(1, 32, 128, dtype=torch.bfloat16))),
    ]
    for program, sizes in cases:
        options = {name: sizes.pop(name) for name in ("num_warps", "num_stages") if name in sizes}
        own = pointers | ({"values": "*fp8e4nv", "least": "fp32"} if program is quantise_tiles else {"rows": "*bf16"})
        signature = {
            name: "constexpr" if name in sizes else own.get(name, "i32" if name in integers else "*bf16")
            for name in program.arg_names
        }
        source = ASTSource(fn=program, signature=signature, constexprs=sizes)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= HOPPER_SHARED_BYTES, (program.__name__, made.metadata.shared)
        if program is quantise_tiles:
            # quotients as IEEE has them, and FP8 rounded to the nearest: so bits are those of torch
            assert "div.rn.f32" in made.asm["ptx"]
            assert "cvt.rn.satfinite.e4m3x2.f32" in made.asm["ptx"]
        print(program.__name__, made.metadata.shared)


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_hopper}[sys.argv[1]]()
