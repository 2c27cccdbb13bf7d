"""How the fused quantiser starts its program and what it returns: with a program of plain loops in its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcrl.modeling.fp8 import fused_quantiser as module
from hpcrl.modeling.fp8.quantiser import PLAIN

BLOCK = 128


class Program:
    """Each place of the grid quantises its tile, and no other one; what no place has written stays NaN."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*arguments: Any, ROWS: int, BY_ROW: bool, WHOLE_ROWS: bool, **_: Any) -> None:
            x, values, scales, rows, columns, *strides, least = arguments
            assert tuple(strides) == x.stride()
            assert WHOLE_ROWS is not BY_ROW
            assert least == (module.LEAST_OF_ROW if BY_ROW else module.LEAST_OF_BLOCK)
            number, height, width = x.shape
            assert (rows, columns) == (height, width)
            assert number == values.shape[:-2].numel()
            flat_values, flat_scales = (found if found.ndim == 3 else found[None] for found in (values, scales))
            for matrix in range(grid[0]):
                for down in range(grid[1]):
                    for across in range(grid[2]):
                        tile = torch.zeros(ROWS, BLOCK)
                        part = x[matrix, down * ROWS : (down + 1) * ROWS, across * BLOCK : (across + 1) * BLOCK].float()
                        tile[: part.shape[0], : part.shape[1]] = part
                        whole = PLAIN.rows(tile) if BY_ROW else PLAIN.blocks(tile)
                        place = slice(down * ROWS, min((down + 1) * ROWS, flat_values.shape[1]))
                        kept = place.stop - place.start
                        flat_values[matrix, place, across * BLOCK : (across + 1) * BLOCK] = whole.values[:kept]
                        if BY_ROW:
                            flat_scales[matrix, place, across] = whole.scales[:kept, 0]
                        else:
                            flat_scales[matrix, down, across] = whole.scales[0, 0]

        return run


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (128, 128), (40, 300), (3, 200, 150), (2, 129, 64), (3, 0, 128), (0, 5, 128)])
def test_every_tile_has_its_place(monkeypatch: pytest.MonkeyPatch, size: tuple[int, ...], transposed: bool) -> None:
    monkeypatch.setattr(module, "import_module", lambda name: SimpleNamespace(quantise_tiles=Program()))
    fused = module.fused_quantiser()
    x = torch.randn(size, generator=torch.Generator().manual_seed(1))
    x = x.mT if transposed else x
    for own, plain in zip(fused, PLAIN, strict=True):
        found, wanted = own(x), plain(x)
        assert found.values.shape == wanted.values.shape
        assert found.values.dtype == wanted.values.dtype == torch.float8_e4m3fn
        assert torch.equal(found.values.float(), wanted.values.float())
        assert torch.equal(found.scales, wanted.scales)
        assert not x.numel() or found.scales.stride() == wanted.scales.stride()
