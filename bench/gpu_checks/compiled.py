"""How many programs each step compiles: graphs of torch.compile, programs of Triton, products of DeepGEMM.

From the second step on a trainer should compile nothing, also where lengths of sequences differ: each program takes
seconds, on every rank.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch._dynamo.utils import counters

from gpu_checks.check import Row


class CompileCounter:
    """Counts of this process, from its making on.

    Programs that workers of torch.compile compile for a graph count as that graph. Programs of Triton are those that
    `triton.compile` makes (Triton 3.4 and later), and apart from them those that it takes from its cache on disk.
    Products of DeepGEMM are directories in its cache.
    """

    def __init__(self) -> None:
        self._triton = Counter[str]()
        self._steps: list[dict[str, int]] = []
        self._watch_triton()
        self._before = self._counts()

    def end_step(self) -> dict[str, int]:
        """Return what was compiled since the last call, by kind; the order of calls is that of steps."""
        now = self._counts()
        made = {kind: now[kind] - self._before[kind] for kind in now}
        self._before = now
        self._steps.append(made)
        return made

    def summary(self) -> Row:
        """Return the programs compiled in the first step, in the second, and in all later ones."""
        totals = [sum(n for kind, n in step.items() if kind != "triton_from_disk") for step in self._steps]
        return {
            "compiled_first_step": sum(totals[:1]),
            "compiled_second_step": sum(totals[1:2]),
            "compiled_later": sum(totals[2:]),
        }

    def _counts(self) -> dict[str, int]:
        return {
            "graphs": counters["stats"]["unique_graphs"],
            "triton": self._triton["compiled"],
            "triton_from_disk": self._triton["from disk"],
            "deep_gemm": deep_gemm_programs(),
        }

    def _watch_triton(self) -> None:
        if find_spec("triton") is None:
            return
        # importing it takes a second
        from triton import knobs  # noqa: PLC0415

        before = knobs.compilation.listener

        def compiled(**of: Any) -> None:
            self._triton["from disk" if of["cache_hit"] else "compiled"] += 1
            if before is not None:
                before(**of)

        knobs.compilation.listener = compiled


def deep_gemm_programs() -> int:
    """Return the number of programs in the cache of DeepGEMM, each of which has a directory."""
    root = Path(os.environ.get("DG_JIT_CACHE_DIR") or Path.home() / ".deep_gemm")
    return sum(path.is_dir() for path in root.glob("cache/kernel.*"))
