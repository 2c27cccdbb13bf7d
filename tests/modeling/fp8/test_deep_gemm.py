"""The adapter to DeepGEMM over a library that keeps to its contract: layouts, kernels, and how it is refused."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deep_gemm_stand_in import HOPPER_SHARED_BYTES, SIGNATURES, SIGNATURES_OF_2_1, StandIn, shared_bytes, signature_of

from hpcrl.errors import UsageError
from hpcrl.modeling.fp8 import deep_gemm, find_fp8
from hpcrl.modeling.fp8.backends import Groups, Reference
from hpcrl.modeling.fp8.find_fp8 import find_backend, long_counts_for, try_backend
from hpcrl.modeling.fp8.products import grouped_product, linear_product
from hpcrl.modeling.fp8.quantiser import PLAIN, Quantised

CPU, GPU = torch.device("cpu"), torch.device("cuda")
#: of GLM-5: 131,072 tokens on 4 ranks of `cp`, each for 8 of 256 experts on 8 ranks of `ep`, padded
SUMMED = 2064 * 128


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setitem(sys.modules, "deep_gemm", found)
    return found


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a GPU before a library is loaded; nothing is computed there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(deep_gemm, "find_quantiser", lambda device: PLAIN)


@pytest.fixture
def backend(library: StandIn, hopper: None) -> deep_gemm.DeepGemm:
    return deep_gemm.DeepGemm(GPU)


def empty_rows(rows: int, columns: int) -> Quantised:
    return PLAIN.rows(torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"))


def train(backend: Any, tokens: int, counts: list[int]) -> list[torch.Tensor]:
    """A linear layer and experts, forward and backward."""
    draw = torch.Generator().manual_seed(sum(counts))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw).bfloat16().requires_grad_()

    x, weight = normal(tokens, 160), normal(200, 160)
    y = linear_product(x, weight, backend)
    y.backward(torch.ones_like(y))
    rows, matrices = normal(sum(counts), 160), normal(len(counts), 2 * 90, 160)
    z = grouped_product(rows, matrices, torch.tensor(counts), backend, parts=2)
    z.backward(torch.ones_like(z))
    return [y, z, *(leaf.grad for leaf in (x, weight, rows, matrices) if leaf.grad is not None)]


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_stand_in_has_the_signatures_of_the_library(name: str) -> None:
    assert signature_of(name) == SIGNATURES[name]


def test_libraries_since_2_1_take_the_calls(
    backend: deep_gemm.DeepGemm, library: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments that are given by position have changed their names since then."""
    bound = []

    def spy(name: str) -> None:
        function = getattr(library, name)
        # the tables are of functions in C++
        tables = [
            inspect.signature(eval(f"lambda {each[name][1:-1]}: None")) for each in (SIGNATURES, SIGNATURES_OF_2_1)
        ]

        def call(*args: Any, **kwargs: Any) -> None:
            bound.append((name, *(list(table.bind(*args, **kwargs).arguments.values()) for table in tables)))
            function(*args, **kwargs)

        monkeypatch.setattr(library, name, call)

    for name in SIGNATURES:
        spy(name)
    train(backend, 70, [130, 0, 70])
    assert [name for name, *_ in bound] == [name for name, _ in library.calls]
    assert {name for name, *_ in bound} == set(SIGNATURES)
    for _, own, older in bound:
        assert all(new is old for new, old in zip(own, older, strict=True))


def test_training_by_it_is_training_by_the_reference(backend: deep_gemm.DeepGemm, library: StandIn) -> None:
    found, wanted = train(backend, 131, [130, 0, 70, 1]), train(Reference(), 131, [130, 0, 70, 1])
    assert len(found) == len(wanted) == 6
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=0.01, atol=0.01)
    assert len(library.calls) == 6


def test_scales_of_rows_are_taken_as_they_are(backend: deep_gemm.DeepGemm, library: StandIn) -> None:
    """No kernel turns them over, in any product, whatever the number of rows."""
    for tokens, counts in ((1, [1]), (131, [130, 0, 70]), (70, [0, 0, 3])):
        train(backend, tokens, counts)
    assert library.calls
    assert library.turned_over == 0


def test_row_major_scales_have_no_room_from_116097_tokens_on() -> None:
    """What column-major ones are for: the kernel that turns over has the columns of 64 rows in shared memory."""

    def room(tokens: int) -> int:
        return shared_bytes(torch.empty(6144, -(-tokens // 128), device="meta"))

    assert room(116_096) <= HOPPER_SHARED_BYTES < room(116_097)
    assert room(SUMMED) == 64 * 2065 * 4 > HOPPER_SHARED_BYTES
    assert shared_bytes(empty_rows(6144, SUMMED).scales) == 0


@pytest.mark.parametrize("tokens", [116_097, 131_072, SUMMED])
def test_gradients_of_weights_have_room_for_the_tokens_of_a_large_run(
    tokens: int, backend: deep_gemm.DeepGemm, library: StandIn
) -> None:
    product = backend.multiply_rows(empty_rows(4096, tokens), empty_rows(6144, tokens))
    assert product.shape == (4096, 6144)
    assert library.turned_over == 0


def test_gradients_of_experts_have_room_for_the_tokens_of_a_large_run(
    backend: deep_gemm.DeepGemm, library: StandIn
) -> None:
    counts = torch.tensor([SUMMED // 32] * 30 + [0, SUMMED // 16])
    sizes = (counts + 127) // 128 * 128
    groups = Groups(torch.empty(0), torch.empty(0), sizes)
    # more places than tokens: a device is not asked for their number
    spread = int(sizes.sum()) + 512
    product = backend.multiply_within_groups(empty_rows(4096, spread), empty_rows(6144, spread), groups)
    assert product.shape == (32, 4096, 6144)
    assert library.turned_over == 0


def test_no_kernel_is_compiled_for_a_number_of_tokens(backend: deep_gemm.DeepGemm, library: StandIn) -> None:
    """One compiler run a weight's shape, not one a micro-batch's length, in all three products of both kinds."""
    kernels = []
    for tokens, counts in ((131, [130, 0, 70]), (700, [3, 140, 500])):
        library.compiled.clear()
        train(backend, tokens, counts)
        kernels.append(list(library.compiled))
    assert kernels[0] == kernels[1]
    assert len(kernels[0]) == 6
    # the sizes of weights are compiled in: 0 stands for what is not
    assert [key[2:].count(0) for key in kernels[0]] == [1] * 6


def test_it_is_tried_over_the_tokens_of_a_large_run_on_a_gpu(
    library: StandIn, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert long_counts_for(CPU) is None
    on_gpu = long_counts_for(GPU)
    assert on_gpu is not None
    # as many as a rank of the reference run has, and more than row-major scales have room for
    assert sum(on_gpu) >= 131_072 * 8 // 4
    assert 0 in on_gpu
    monkeypatch.setattr(find_fp8, "long_counts_for", lambda device: (900, 0, 30, 300))
    own = deep_gemm.DeepGemm(GPU)
    try_backend(own, CPU)
    take = library._row_scales

    def small(scales: torch.Tensor, rows: int, summed: int) -> None:
        if summed > 1000:
            raise RuntimeError("invalid argument")
        take(scales, rows, summed)

    monkeypatch.setattr(library, "_row_scales", small)
    with pytest.raises(LookupError, match=r"2\.6\.1 fails on cpu: RuntimeError: invalid argument"):
        try_backend(own, CPU)


@pytest.mark.parametrize(
    "program",
    [
        "assert None is not None, 'no CUDA_HOME'",
        "raise ImportError('undefined symbol')",
        "raise KeyError('CUDA_PATH')",
        "raise RuntimeError('no driver')",
        "import subprocess; subprocess.check_output(['false'])",
        "1 / 0",
    ],
)
def test_a_library_that_does_not_load_is_a_usage_error(
    program: str, hopper: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepGEMM looks for CUDA while it is imported, and asserts that it is there."""
    (tmp_path / "deep_gemm.py").write_text(program + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    with pytest.raises(UsageError) as caught:
        find_backend("deep_gemm", GPU)
    said = str(caught.value)
    assert said.startswith("trainer.precision.fp8.backend: deep_gemm: deep_gemm is not installed where the trainer")
    assert "or does not load: " in said
    assert "\n    hint: set it to reference" in said


def test_a_library_without_a_product_is_refused_by_name(
    library: StandIn, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(StandIn, "k_grouped_fp8_gemm_nt_contiguous")
    with pytest.raises(UsageError, match=r"2\.6\.1 is too old or too new: it has no k_grouped_fp8_gemm_nt_contiguous"):
        find_backend("deep_gemm", GPU)
