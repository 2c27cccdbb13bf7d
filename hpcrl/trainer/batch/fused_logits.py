"""Log-probabilities, entropies and gradients of logits by programs of one pass, where there is a GPU that runs them."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_BLOCK = {"normalise": 8192, "gradient": 4096}
"""Columns that a program processes at once."""
_CLOSE = 1e-3
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class LogitPrograms(NamedTuple):
    """The programs of `hpcrl.trainer.batch.triton_logits`."""

    module: Any

    def normalise(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of targets, entropies and normalisers, ``[N]`` float32, of ``[N, vocab_size]``."""
        rows, columns = logits.shape
        found = logits.new_empty(3, rows, dtype=torch.float32).unbind()
        if rows:
            self.module.normalise_rows[rows,](
                *(logits, targets, *found, columns, logits.stride(0), float(temperature)),
                BLOCK=_BLOCK["normalise"],
                num_warps=8,
            )
        return found[0], found[1], found[2]

    def put_gradient(
        self, logits: Tensor, targets: Tensor, normaliser: Tensor, slopes: Tensor, temperature: float
    ) -> None:
        """Put the gradient of a loss into the memory of ``logits``; ``slopes [N]`` are by log-probabilities."""
        rows, columns = logits.shape
        if rows:
            self.module.put_gradient_rows[rows, -(-columns // _BLOCK["gradient"])](
                *(logits, targets, normaliser, slopes.contiguous(), columns, logits.stride(0), float(temperature)),
                BLOCK=_BLOCK["gradient"],
                num_warps=8,
            )


def find_programs(logits: Tensor) -> LogitPrograms | None:
    """Return the Triton programs for such ``logits``; None if plain torch computes them."""
    if logits.dtype not in _DTYPES or logits.stride(1) != 1:
        return None
    if logits.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    return _programs_of(logits.device)


@lru_cache
def _programs_of(device: torch.device) -> LogitPrograms | None:
    """Return the programs after a test; None, with a warning, if they fail or their numbers differ from torch's."""
    try:
        programs = LogitPrograms(import_module("hpcrl.trainer.batch.triton_logits"))
        _try_programs(programs, device)
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise any type, and torch can compute it instead
        _log.warning("logits are computed by plain torch, which takes longer: %s: %s", type(error).__name__, error)
        return None
    return programs


def _try_programs(programs: LogitPrograms, device: torch.device) -> None:
    """Compare the programs with torch on random numbers (ArithmeticError if they differ)."""
    draw = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 9001, generator=draw) * 4).to(device)
    targets, slopes = torch.tensor([0, 8999, 4096], device=device), torch.tensor([-1.0, 0.5, 2.0], device=device)
    wanted = (logits / 1.5).log_softmax(1)
    entropies = -(wanted.exp() * wanted).sum(1)
    own, found, normaliser = programs.normalise(logits, targets, 1.5)
    gradient = torch.nn.functional.one_hot(targets, logits.shape[1]) - wanted.exp()
    gradient *= slopes[:, None] / 1.5
    programs.put_gradient(logits, targets, normaliser, slopes, 1.5)
    pairs = ((own, wanted.gather(1, targets[:, None])[:, 0]), (found, entropies), (logits, gradient))
    for ours, theirs in pairs:
        if not float((ours - theirs).norm()) < _CLOSE * float(theirs.norm()):
            raise ArithmeticError("they give other numbers than torch")
