"""How often products of experts copy all rows: they are the largest tensors of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrl.modeling.fp8 import products
from hpcrl.modeling.fp8.backends import Groups, Reference
from hpcrl.modeling.fp8.quantiser import PLAIN, Quantised, Quantiser, quantise_blocks, quantise_rows
from hpcrl.modeling.fp8.scaled_mm import ScaledMm, _by_columns, _padded

COUNTS = torch.tensor([300, 0, 17, 700])
ROWS = int(COUNTS.sum())


class NewMemory(TorchDispatchMode):
    """Shapes of tensors that operators allocate, of a size that matters; views and results in place are none."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given and made.numel() >= self.least:
            self.found.append((str(func), tuple(made.shape)))
        return made


class Ready(Reference):
    """Results that are there before: what is allocated is of the products' own doing."""

    name = "ready"

    def __init__(self, product: Tensor) -> None:
        self.product = product
        self.quantiser = Quantiser(lambda x: Quantised(x, x), PLAIN.blocks)

    def multiply_groups(self, a: Quantised, b: Quantised, groups: Groups, dtype: torch.dtype) -> Tensor:
        return self.product


def test_rows_are_put_into_their_places_once() -> None:
    groups, rows = Groups.of(COUNTS, ROWS), torch.randn(ROWS, 160)
    with NewMemory(least=rows.numel()) as memory:
        spread = groups.spread(rows)
    assert len(memory.found) == 1, memory.found
    assert torch.equal(spread[groups.places], rows)
    assert float(spread.abs().sum()) == pytest.approx(float(rows.abs().sum()))


@pytest.mark.parametrize(("parts", "size"), [(1, 128), (2, 256), (2, 180), (3, 130 * 3)])
def test_parts_are_put_into_their_blocks_once(parts: int, size: int) -> None:
    groups, rows = Groups.of(COUNTS, ROWS), torch.randn(ROWS, size)
    with NewMemory(least=rows.numel()) as memory:
        spread = products._spread_apart(groups, rows, parts)
    assert len(memory.found) == 1, memory.found
    wide = -(-size // parts // 128) * 128
    assert spread.shape == (len(groups.experts), parts * wide)
    cut = spread[groups.places].view(ROWS, parts, wide)
    assert torch.equal(cut[..., : size // parts].flatten(1), rows)
    assert not cut[..., size // parts :].any()


@pytest.mark.parametrize(("parts", "out"), [(1, 256), (2, 256), (2, 180)])
def test_a_grouped_product_copies_rows_in_and_out_once(parts: int, out: int) -> None:
    groups, x = Groups.of(COUNTS, ROWS), torch.randn(ROWS, 256)
    wide = parts * -(-out // parts // 128) * 128
    backend = Ready(torch.randn(len(groups.experts), wide))
    products._IN_USE[backend.name] = backend
    weight = torch.randn(len(COUNTS), out, 256)
    least = min(ROWS * out, ROWS * 256)
    with NewMemory(least=least) as memory:
        # without the operator around it, in which no mode sees anything
        y = products._fp8_grouped_product._init_fn(x, weight, COUNTS, parts, backend.name)
    of_rows = [each for each in memory.found if each[1][0] in (ROWS, len(groups.experts))]
    assert len(of_rows) == 2, memory.found
    wanted = backend.product[groups.places].view(ROWS, parts, -1)[..., : out // parts].flatten(1)
    assert torch.equal(y, wanted)


def test_whole_blocks_are_not_copied_to_be_padded() -> None:
    x = torch.randn(256, 512)
    for make in PLAIN:
        with NewMemory(least=x.numel()) as memory:
            make(x)
        assert not [name for name, _ in memory.found if "pad" in name or "clone" in name], memory.found


@pytest.mark.parametrize("rows", [16, 48, 20, 1])
def test_torch_takes_scales_of_rows_as_they_are(rows: int) -> None:
    """cuBLASLt wants columns without a gap, of a multiple of 16 rows; only what is padded to that is copied."""
    made = quantise_rows(torch.randn(rows, 300))
    padded = _padded(made)
    whole = -(-rows // 16) * 16
    scales = _by_columns(padded.scales)
    assert scales.shape == (whole, 3)
    assert scales.stride() == (1, whole)
    assert torch.equal(scales[:rows], made.scales)
    assert (scales.data_ptr() == made.scales.data_ptr()) == (rows == whole)
    assert scales.data_ptr() == padded.scales.data_ptr()


@pytest.mark.parametrize("rows", [16, 40, 256])
@pytest.mark.parametrize("inside", [100, 128, 600])
@pytest.mark.parametrize("out", [7, 128, 300])
def test_scales_lie_as_torch_asks_for_them(monkeypatch: pytest.MonkeyPatch, rows: int, inside: int, out: int) -> None:
    """Of matrices, of rows of a group, and of columns that are summed; also where there is one block of each."""
    seen = []

    def scaled_mm(a: Tensor, b: Tensor, of_a: Tensor, _: Any, of_b: Tensor, kind: Any, *, output_dtype: Any) -> Tensor:
        blocks, wide = a.shape[1] // 128, kind == F.ScalingType.BlockWise128x128
        assert (of_a.shape, of_a.stride()) == ((len(a), blocks), (1, len(a)))
        across = -(-blocks // 4) * 4 if wide else b.shape[1]
        assert of_b.stride() == (1, across)
        assert of_b.shape == ((across, b.shape[1] // 128) if wide else (across, blocks))
        seen.append(kind)
        return torch.zeros(len(a), b.shape[1], dtype=output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    backend = ScaledMm.__new__(ScaledMm)
    made, weight = quantise_rows(torch.randn(rows, inside)), quantise_blocks(torch.randn(out, inside))
    backend.multiply(made, weight, torch.float32)
    counts = torch.tensor([rows // 2, 0, rows - rows // 2])
    groups = Groups.of(counts, rows)
    spread = quantise_rows(groups.spread(torch.randn(rows, inside)))
    stack = quantise_blocks(torch.randn(3, out, inside))
    backend.multiply_groups(spread, stack, groups, torch.float32)
    turned = [quantise_rows(groups.spread(torch.randn(rows, n)).mT) for n in (out, inside)]
    backend.multiply_rows(*turned)
    backend.multiply_within_groups(*turned, groups)
    assert len(seen) == 1 + 2 + 1 + 2
