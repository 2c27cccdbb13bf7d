"""A library that keeps to DeepGEMM's contract on Hopper, in plain torch.

By github.com/deepseek-ai/DeepGEMM, commit 54e22612409371d6364144b69086735beb54e98b (2.6.1): signatures of
``csrc/apis/gemm.hpp``, checks of that file and of ``csrc/utils/layout.hpp``, the transposition of scales of
``csrc/jit_kernels/impls/smxx_layout.hpp``, and what a kernel is compiled for (``get_compiled_dim``).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from hpcrl.modeling.fp8.quantiser import Quantised

Pair = tuple[Tensor, Tensor]
HOPPER_SHARED_BYTES = 227 << 10

#: of ``m.def`` in csrc/apis/gemm.hpp at the commit above
SIGNATURES = {
    "fp8_gemm_nt": (
        "(a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='nk', disable_ue8m0_cast=False)"
    ),
    "m_grouped_fp8_gemm_nt_contiguous": (
        "(a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='nk', "
        "disable_ue8m0_cast=False, use_psum_layout=False, ensure_zero_padding=True, expected_m_for_psum_layout=None)"
    ),
    "k_grouped_fp8_gemm_nt_contiguous": (
        "(a, b, d, ks_cpu, grouped_layout, c=None, recipe=(1, 1, 128), compiled_dims='mn', use_psum_layout=False)"
    ),
}
#: the same file at the tags v2.1.0 and v2.1.1.post3
SIGNATURES_OF_2_1 = {
    "fp8_gemm_nt": "(a, b, d, c=None, recipe=None, compiled_dims='nk', disable_ue8m0_cast=False)",
    "m_grouped_fp8_gemm_nt_contiguous": (
        "(a, b, d, m_indices, recipe=None, compiled_dims='nk', disable_ue8m0_cast=False)"
    ),
    "k_grouped_fp8_gemm_nt_contiguous": "(a, b, d, ks, ks_tensor, c=None, recipe=(1, 1, 128), compiled_dims='mn')",
}


def shared_bytes(scales: Tensor) -> int:
    """Shared memory of the kernel that turns ``scales [mn, k]`` over for Hopper; 0 where none runs."""
    mn, columns = scales.shape
    if scales.stride() == (1, -(-mn // 4) * 4) or not scales.is_contiguous():
        return 0
    return 64 * (columns + (1 - columns % 2)) * 4


def signature_of(name: str) -> str:
    """As in `SIGNATURES`, of a function of `StandIn`."""
    parameters = list(inspect.signature(getattr(StandIn, name)).parameters.values())[1:]
    return str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters]))


class StandIn:
    """The module ``deep_gemm``. On the meta device it checks, and computes nothing."""

    __version__ = "2.6.1"

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.compiled: list[tuple[Any, ...]] = []
        """What each kernel was compiled for; DeepGEMM compiles once for each that is new."""
        self.turned_over = 0
        """Row scales that were not in the layout that kernels read."""

    def fp8_gemm_nt(  # noqa: PLR0917 - theirs
        self,
        a: Pair,
        b: Pair,
        d: Tensor,
        c: Tensor | None = None,
        recipe: tuple[int, int, int] | None = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
    ) -> None:
        self._told("fp8_gemm_nt", locals())
        (m, k), (n, _) = a[0].shape, b[0].shape
        assert a[0].is_contiguous()
        assert b[0].is_contiguous()
        assert b[0].shape[1] == k
        assert d.shape == (m, n)
        assert d.stride(-1) == 1
        by_rows = recipe == (1, 1, 128)
        assert by_rows or recipe is None
        self._row_scales(a[1], m, k)
        if by_rows:
            self._row_scales(b[1], n, k)
            # the kernel with scales of rows on both sides accumulates, in float32
            assert d.dtype == torch.float32
            assert c is d
        else:
            self._block_scales(b[1], n, k)
            assert d.dtype == torch.bfloat16
            assert c is None
        self._compile("fp8_gemm_nt", by_rows, {"m": m, "n": n, "k": k}, compiled_dims)
        if d.device.type != "meta":
            product = Quantised(*a).dequantised() @ Quantised(*b).dequantised().mT
            d.add_(product) if by_rows else d.copy_(product)

    def m_grouped_fp8_gemm_nt_contiguous(  # noqa: PLR0917 - theirs
        self,
        a: Pair,
        b: Pair,
        d: Tensor,
        grouped_layout: Tensor,
        recipe: Any = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
        use_psum_layout: bool = False,
        ensure_zero_padding: bool = True,
        expected_m_for_psum_layout: int | None = None,
    ) -> None:
        self._told("m_grouped_fp8_gemm_nt_contiguous", locals())
        (m, k), (groups, n, _) = a[0].shape, b[0].shape
        assert a[0].is_contiguous()
        assert b[0].is_contiguous()
        assert b[0].shape[2] == k
        assert d.shape == (m, n)
        assert d.dtype == torch.bfloat16
        assert (grouped_layout.shape, grouped_layout.dtype) == ((m,), torch.int32)
        assert grouped_layout.is_contiguous()
        self._row_scales(a[1], m, k)
        assert b[1].shape[0] == groups
        assert b[1].stride(0) == b[1][0].numel()
        self._block_scales(b[1][0], n, k)
        self._compile("m_grouped_fp8_gemm_nt_contiguous", groups, {"m": m, "n": n, "k": k}, compiled_dims)
        if d.device.type == "meta":
            return
        for expert in range(groups):
            own = grouped_layout == expert
            # a tile of 128 rows has one expert
            tiles = own.view(-1, 128)
            assert torch.equal(tiles.any(1), tiles.all(1))
            rows = Quantised(a[0].view(torch.uint8)[own].view(a[0].dtype), a[1][own])
            if len(rows.values):
                d[own] = (rows.dequantised() @ Quantised(b[0][expert], b[1][expert]).dequantised().mT).bfloat16()

    def k_grouped_fp8_gemm_nt_contiguous(  # noqa: PLR0917 - theirs
        self,
        a: Pair,
        b: Pair,
        d: Tensor,
        ks_cpu: list[int],
        grouped_layout: Tensor,
        c: Tensor | None = None,
        recipe: tuple[int, int, int] = (1, 1, 128),
        compiled_dims: str = "mn",
        use_psum_layout: bool = False,
    ) -> None:
        self._told("k_grouped_fp8_gemm_nt_contiguous", locals())
        groups, m, n = d.shape
        total = sum(ks_cpu)
        assert recipe == (1, 1, 128)
        assert len(ks_cpu) == groups
        assert not [size for size in ks_cpu if size % 128]
        assert (a[0].numel(), b[0].numel()) == (total * m, total * n)
        assert all(x.is_contiguous() for x in (a[0], b[0], d, grouped_layout))
        assert grouped_layout.shape == (groups,)
        assert grouped_layout.dtype == torch.int32
        assert d.dtype == torch.float32
        assert c is d
        self._row_scales(a[1], m, total)
        self._row_scales(b[1], n, total)
        self._compile("k_grouped_fp8_gemm_nt_contiguous", groups, {"m": m, "n": n, "k": total}, compiled_dims)
        if d.device.type == "meta":
            return
        begin = 0
        for group, size in enumerate(ks_cpu):
            if size:
                sides = [
                    Quantised(
                        values[begin * rows : (begin + size) * rows].view(rows, size),
                        scales[:, begin // 128 : (begin + size) // 128],
                    ).dequantised()
                    for (values, scales), rows in ((a, m), (b, n))
                ]
                d[group] += sides[0] @ sides[1].mT
            begin += size

    def _told(self, name: str, given: dict[str, Any]) -> None:
        self.calls.append((name, {key: value for key, value in given.items() if key != "self"}))

    def _row_scales(self, scales: Tensor, rows: int, summed: int) -> None:
        assert scales.shape == (rows, -(-summed // 128))
        assert scales.dtype == torch.float32
        if scales.stride() != (1, -(-rows // 4) * 4):
            self.turned_over += 1
        if (wanted := shared_bytes(scales)) > HOPPER_SHARED_BYTES:
            raise RuntimeError(f"CUDA driver error: invalid argument ({wanted} bytes of shared memory)")

    def _block_scales(self, scales: Tensor, rows: int, summed: int) -> None:
        assert scales.shape == (-(-rows // 128), -(-summed // 128))
        assert scales.dtype == torch.float32
        assert scales.is_contiguous() or scales.mT.is_contiguous()

    def _compile(self, name: str, kind: Any, sizes: dict[str, int], compiled_dims: str) -> None:
        self.compiled.append((name, kind, *(size if dim in compiled_dims else 0 for dim, size in sizes.items())))
