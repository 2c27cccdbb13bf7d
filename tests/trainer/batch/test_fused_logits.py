"""When logits are left to programs of one pass, what these are given, and what becomes of programs that err."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.trainer.batch import fused_logits
from hpcrl.trainer.batch.fused_logits import find_programs


class Launched:
    """A program of Triton as it is called, ``program[grid](…)``: here the grid is noted, and torch computes."""

    def __init__(self, compute: Callable[..., None]) -> None:
        self._compute, self.grids = compute, list[tuple[int, ...]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return self._compute


def rows_of(logits: Tensor, columns: int, stride: int) -> Tensor:
    """What a program sees of memory that begins with ``logits``."""
    return logits.as_strided((len(logits), columns), (stride, 1))


class Programs:
    """Stands in for the module of programs: right, but for ``spoil``."""

    def __init__(self, spoil: str = "") -> None:
        self.spoil = spoil
        self.normalise_rows = Launched(self._normalise)
        self.put_gradient_rows = Launched(self._gradient)

    def _normalise(self, logits: Any, targets: Any, *others: Any, BLOCK: int, num_warps: int) -> None:
        *found, columns, stride, temperature = others
        assert BLOCK & (BLOCK - 1) == 0
        scaled = rows_of(logits, columns, stride).float() / temperature
        logprobs = scaled.log_softmax(-1)
        made = {
            "own": logprobs.gather(1, targets[:, None])[:, 0],
            "entropy": -(logprobs.exp() * logprobs).sum(-1),
            "normaliser": scaled.logsumexp(-1),
        }
        if self.spoil in made:
            made[self.spoil] = made[self.spoil] * 1.01
        for into, values in zip(found, made.values(), strict=True):
            into.copy_(values)

    def _gradient(self, logits: Any, targets: Any, normaliser: Any, *others: Any, BLOCK: int, num_warps: int) -> None:
        slopes, columns, stride, temperature = others
        assert slopes.is_contiguous()
        seen = rows_of(logits, columns, stride)
        # a program computes as many blocks as it was started for
        seen = seen[:, : self.put_gradient_rows.grids[-1][1] * BLOCK]
        probabilities = (seen.float() / temperature - normaliser[:, None]).exp()
        wanted = -probabilities * slopes[:, None] / temperature
        inside = targets < seen.shape[1]
        wanted[inside, targets[inside]] += slopes[inside] / temperature
        seen.copy_(wanted if self.spoil != "gradient" else wanted * 1.01)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    """Programs that this processor runs."""
    programs = Programs()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fused_logits, "import_module", lambda name: programs)
    fused_logits._programs_of.cache_clear()
    yield programs
    fused_logits._programs_of.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_such_dtypes_have_programs(module: Programs, dtype: torch.dtype) -> None:
    assert find_programs(torch.zeros(3, 5, dtype=dtype)) is not None
    assert find_programs(torch.zeros(3, 9, dtype=dtype)[:, :5]) is not None  # rows of a larger matrix
    assert find_programs(torch.zeros(0, 5, dtype=dtype)) is not None


def test_other_logits_have_none(module: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_programs(torch.zeros(3, 5, dtype=torch.float64)) is None
    assert find_programs(torch.zeros(5, 3).mT) is None  # columns lie apart
    assert find_programs(torch.zeros(3, 10)[:, ::2]) is None
    for value in ("0", ""):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert find_programs(torch.zeros(3, 5)) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert find_programs(torch.zeros(3, 5)) is None


def test_programs_are_tried_once(module: Programs) -> None:
    for _ in range(3):
        assert find_programs(torch.zeros(3, 5)) is not None
    assert len(module.normalise_rows.grids) == len(module.put_gradient_rows.grids) == 1


@pytest.mark.parametrize("spoil", ["own", "entropy", "gradient", "normaliser"])
def test_programs_that_give_other_numbers_are_left_out_with_a_warning(
    module: Programs, caplog: pytest.LogCaptureFixture, spoil: str
) -> None:
    module.spoil = spoil
    assert find_programs(torch.zeros(3, 5)) is None
    assert "plain torch, which takes longer: ArithmeticError: they give other numbers than torch" in caplog.text


def test_programs_that_give_no_numbers_are_left_out(module: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "normalise_rows", Launched(lambda *arguments, **how: [x.fill_(torch.nan) for x in arguments[2:5]])
    )
    assert find_programs(torch.zeros(3, 5)) is None


def test_programs_that_do_not_compile_are_left_out_with_a_warning(
    module: Programs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(name: str) -> Any:
        assert name == "hpcrl.trainer.batch.triton_logits"
        raise ImportError("no compiler")

    monkeypatch.setattr(fused_logits, "import_module", fails)
    assert find_programs(torch.zeros(3, 5)) is None
    assert "ImportError: no compiler" in caplog.text


@pytest.mark.parametrize("columns", [5, 4096, 4097, 12288])
def test_every_column_of_a_row_is_computed(module: Programs, columns: int) -> None:
    """Rows lie apart in a larger matrix, whose other columns stay."""
    draw = torch.Generator().manual_seed(0)
    memory = torch.randn(4, columns + 3, generator=draw)
    before, logits = memory.clone(), memory[:, :columns]
    targets, slopes = torch.tensor([0, columns - 1, 2, columns // 2]), torch.randn(8, generator=draw)[::2]
    programs = find_programs(logits)
    assert programs is not None
    leaf = before[:, :columns].clone().requires_grad_()
    logprobs = (leaf / 0.7).log_softmax(-1)
    own = logprobs.gather(1, targets[:, None])[:, 0]
    (own * slopes).sum().backward()
    found = programs.normalise(logits, targets, 0.7)
    assert [each.dtype for each in found] == [torch.float32] * 3
    wanted = (own, -(logprobs.exp() * logprobs).sum(-1), (leaf / 0.7).logsumexp(-1))
    torch.testing.assert_close(found, tuple(each.detach() for each in wanted))
    assert module.normalise_rows.grids[-1] == (4,)
    programs.put_gradient(logits, targets, found[2], slopes, 0.7)
    assert module.put_gradient_rows.grids[-1] == (4, math.ceil(columns / 4096))
    assert leaf.grad is not None
    torch.testing.assert_close(memory[:, :columns], leaf.grad)
    assert torch.equal(memory[:, columns:], before[:, columns:])


def test_without_rows_nothing_is_launched(module: Programs) -> None:
    """A grid without programs is an error of the driver."""
    logits, none = torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)
    programs = find_programs(logits)
    assert programs is not None
    tried = len(module.normalise_rows.grids), len(module.put_gradient_rows.grids)
    found = programs.normalise(logits, none, 1.0)
    programs.put_gradient(logits, none, found[2], torch.zeros(0), 1.0)
    assert [len(each) for each in found] == [0, 0, 0]
    assert (len(module.normalise_rows.grids), len(module.put_gradient_rows.grids)) == tried


def test_a_device_is_asked_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU programs need no interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(fused_logits, "_programs_of", lambda device: f"of {device.type}")
    on_gpu = SimpleNamespace(dtype=torch.float32, stride=lambda dim: 1, device=torch.device("cuda", 0))
    found: Any = find_programs(on_gpu)  # type: ignore[arg-type]
    assert found == "of cuda"
