"""Adapters of sparse attention to libraries, over functions that keep to their contracts; and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.errors import UsageError
from hpcrl.modeling.kernels.kernel import Attended
from hpcrl.modeling.sparse_kernels.cudnn_dsa import FlashMlaCudnn
from hpcrl.modeling.sparse_kernels.find import find_sparse_kernel, try_kernel
from hpcrl.modeling.sparse_kernels.flash_mla import FlashMla
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseShape
from hpcrl.modeling.sparse_kernels.reference import ReferenceKernel

CPU = torch.device("cpu")


def sparse_fwd(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int) -> tuple[Tensor, Tensor, Tensor]:
    """By the checks of ``csrc/api/sparse_fwd.h`` and the formulas of ``tests/ref.py`` in FlashMLA."""
    (queries, heads, dim), (keys, one, kv_dim) = q.shape, kv.shape
    assert (q.dtype, kv.dtype, indices.dtype) == (torch.bfloat16, torch.bfloat16, torch.int32)
    assert heads in (64, 128)
    assert dim == kv_dim
    assert dim in (512, 576)
    assert (one, d_v) == (1, 512)
    assert indices.shape[:2] == (queries, 1)
    assert indices.shape[2] > 0
    assert indices.shape[2] % 128 == 0
    assert all(x.stride(-1) == 1 for x in (q, kv, indices))
    known = ((indices >= 0) & (indices < keys))[:, 0]
    rows = kv[:, 0].float()[indices[:, 0].clamp(0, keys - 1).long()]
    scores = torch.einsum("thd,tsd->ths", q.float(), rows) * sm_scale
    scores = scores.masked_fill(~known[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    out = (scores - lse[..., None]).exp() @ rows[..., :d_v]
    return out.bfloat16(), scores.amax(-1), lse


def sparse_backward(  # noqa: PLR0917 - theirs
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, lse: Tensor, sink: Tensor, indices: Tensor, **settings: Any
) -> dict[str, Tensor]:
    """By ``SparseAttentionBackward.check_support`` of cudnn-frontend 1.32.0, and what its kernel for Hopper skips."""
    (queries, heads, dim), scale = q.shape, settings["softmax_scale"]
    assert {x.dtype for x in (q, kv, out, dout)} == {torch.bfloat16}
    assert (lse.dtype, sink.dtype, indices.dtype) == (torch.float32, torch.float32, torch.int32)
    assert dim in (512, 576)
    assert kv.shape[1:] == (dim,)
    assert out.shape == dout.shape == (queries, heads, 512)
    assert lse.shape == (queries, heads)
    assert sink.shape == (heads,)
    assert indices.shape[:1] == (queries,)
    assert all(x.is_contiguous() for x in (q, kv, out, dout, lse, sink, indices))
    assert not sink.exp().any()
    known = (indices >= 0) & (indices < len(kv))
    at = indices.clamp(0).long()
    rows = kv.float()[at]
    weights = (torch.einsum("thd,tsd->ths", q.float(), rows) * scale - lse[..., None]).exp() * known[:, None]
    inner = (dout.float() * out.float()).sum(-1, keepdim=True)
    slopes = weights * (torch.einsum("thv,tsv->ths", dout.float(), rows[..., :512]) - inner) * scale
    of_rows = torch.einsum("ths,thd->tsd", slopes, q.float())
    of_rows[..., :512] += torch.einsum("ths,thv->tsv", weights, dout.float())
    dkv = torch.zeros_like(kv, dtype=torch.float32).index_add_(0, at.flatten(), of_rows.flatten(0, 1))
    return {"dq": (slopes @ rows).bfloat16(), "dkv": dkv.bfloat16(), "d_sink": torch.zeros_like(sink)}


class ScoresOfReference(ReferenceKernel):
    """What libraries leave to programs in Triton, in plain torch."""


class OverFlashMla(ScoresOfReference):
    """The adapter's forward pass."""

    _sparse_fwd = staticmethod(sparse_fwd)
    forward = FlashMla.forward


class OverCudnn(OverFlashMla):
    """The adapter's backward pass, too."""

    _backward = staticmethod(sparse_backward)
    backward = FlashMlaCudnn.backward


def shape(heads: int, dim: int, width: int = 140) -> SparseShape:
    return SparseShape(heads, dim, 512, width, 2, 16, torch.bfloat16)


@pytest.mark.parametrize("kernel", [OverFlashMla(), OverCudnn()])
@pytest.mark.parametrize("sizes", [(64, 576, 128), (20, 576, 140), (100, 512, 5)])
def test_adapters_give_what_the_reference_gives(kernel: Any, sizes: tuple[int, int, int]) -> None:
    try_kernel(kernel, CPU, shape(*sizes))


def test_a_query_that_sees_nothing_has_no_part_in_any_gradient() -> None:
    draw = torch.Generator().manual_seed(0)
    q, rows, grad = (torch.randn(size, generator=draw).bfloat16() for size in ((3, 64, 576), (9, 576), (3, 64, 512)))
    chosen = torch.tensor([[4, 2], [-1, -1], [8, -1]], dtype=torch.int32)
    inputs, kernel = Chosen(q, rows, chosen, 512, 0.04), OverCudnn()
    attended = kernel.forward(inputs)
    assert (attended.lse[1] == float("-inf")).all()
    assert not attended.out[1].any()
    of_q, of_rows = kernel.backward(grad, inputs, attended)
    assert not of_q[1].any()
    assert of_rows.isfinite().all()
    assert of_rows.any(1).tolist() == [row in {2, 4, 8} for row in range(9)]


class OtherBase(ReferenceKernel):
    """With a normaliser of base 2, as a library might return one."""

    def forward(self, inputs: Chosen) -> Attended:
        attended = super().forward(inputs)
        return attended._replace(lse=attended.lse / torch.log(torch.tensor(2.0)))


class Restless(ReferenceKernel):
    def backward(self, grad: Tensor, inputs: Chosen, attended: Attended) -> tuple[Tensor, Tensor]:
        of_q, of_rows = super().backward(grad, inputs, attended)
        return of_q, of_rows * (1 + 5e-5 * torch.rand(1))


class OtherRows(ReferenceKernel):
    def backward(self, grad: Tensor, inputs: Chosen, attended: Attended) -> tuple[Tensor, Tensor]:
        of_q, of_rows = super().backward(grad, inputs, attended)
        return of_q, of_rows * 2


class Broken(ReferenceKernel):
    def index_scores(self, q: Tensor, k: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
        raise RuntimeError("out of resources: shared memory")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (OtherBase(), "differs from the reference when tried: normaliser by"),
        (OtherRows(), r"differs from the reference when tried: of rows by 100\.0%"),
        (Restless(), r"gives other numbers each time that it is tried \(of rows\)"),
        (Broken(), "fails on cpu: RuntimeError: out of resources: shared memory"),
    ],
)
def test_a_kernel_that_computes_something_else_is_found_by_its_trial(kernel: Any, message: str) -> None:
    with pytest.raises(LookupError, match=message):
        try_kernel(kernel, CPU, SparseShape(4, 24, 16, 20, 2, 16, torch.float32))


def test_the_reference_computes_queries_in_chunks_of_64_mib() -> None:
    """Scores of all heads and keys, and what becomes of them, are float32."""
    kernel = ReferenceKernel()
    assert kernel.rows_at_once(32, 131_072) == 2
    assert kernel.rows_at_once(4, 1024) == 2048
    assert kernel.rows_at_once(64, 1 << 20) == 1
    assert kernel.rows_at_once(4, 0) >= 1


@pytest.mark.parametrize("name", ["triton", "flash_mla", "flash_mla_cudnn"])
def test_kernels_of_gpus_are_refused_on_processors(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_sparse_kernel(name, CPU, shape(64, 576))
    assert str(caught.value).startswith(f"trainer.kernels.sparse_attention: {name} is for GPUs of NVIDIA")
    assert "\n    hint: set it to reference" in str(caught.value)


def test_what_processors_compute_with_is_the_reference() -> None:
    other = torch.device("xpu")
    assert find_sparse_kernel("auto", other, shape(64, 576)).name == "reference"
    assert find_sparse_kernel("auto", CPU, shape(64, 576)).name == "reference"
    assert find_sparse_kernel("reference", CPU, shape(64, 576)).name == "reference"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 640}, "takes latents of 512 channels"),
        ({"heads": 129}, "takes 128 heads at most, and this model has 129"),
        ({"dtype": torch.float16}, "computes in bfloat16"),
    ],
)
def test_shapes_that_a_library_does_not_take_are_refused(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(UsageError, match=f"flash_mla {message}"):
        find_sparse_kernel("flash_mla", torch.device("cuda"), shape(64, 576)._replace(**change))


def test_a_library_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(UsageError, match="flash_mla is not installed where the trainer runs"):
        find_sparse_kernel("flash_mla", torch.device("cuda"), shape(64, 576))


@pytest.mark.parametrize("name", ["flash_mla", "flash_mla_cudnn", "triton"])
@pytest.mark.parametrize(
    "program",
    ["assert None is not None", "raise KeyError('CUDA_PATH')", "raise ImportError('undefined symbol')", "1 / 0"],
)
def test_a_library_that_does_not_load_is_a_usage_error(
    name: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such libraries look for CUDA and compilers while they are imported, and raise what they like."""
    fails = {"flash_mla": "flash_mla", "flash_mla_cudnn": "cudnn", "triton": "triton"}[name]
    for module in ("flash_mla", "cudnn"):
        (tmp_path / f"{module}.py").write_text("flash_mla_sparse_fwd = None\n", encoding="utf-8")
    (tmp_path / f"{fails}.py").write_text(f"{program}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    # with a name that is imported nowhere, for Triton by its own programs
    for module in ("flash_mla", "cudnn", "triton", "hpcrl.modeling.sparse_kernels.triton_programs"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if name == "flash_mla_cudnn":
        monkeypatch.setattr(FlashMla, "__init__", lambda self, device, shape: None)
    with pytest.raises(UsageError) as caught:
        find_sparse_kernel(name, torch.device("cuda"), shape(64, 576))
    said = str(caught.value)
    assert said.startswith(f"trainer.kernels.sparse_attention: {name} ")
    assert "does not load" in said
    assert "\n    hint: set it to reference" in said


def test_a_cudnn_that_fails_when_it_is_asked_for_sparse_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports its compiler then."""

    class Cudnn:
        @property
        def DSA(self) -> Any:
            raise AssertionError("no nvidia-cutlass-dsl")

    monkeypatch.setitem(sys.modules, "cudnn", Cudnn())  # type: ignore[arg-type]
    monkeypatch.setattr(FlashMla, "__init__", lambda self, device, shape: None)
    with pytest.raises(UsageError, match="does not load here: AssertionError: no nvidia-cutlass-dsl"):
        find_sparse_kernel("flash_mla_cudnn", torch.device("cuda"), shape(64, 576))
