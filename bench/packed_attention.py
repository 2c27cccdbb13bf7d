"""Attention of one long rollout beside many short ones: packed in place, and padded to the longest.

Each way goes forward and backward in a process of its own, which writes down the high-water mark of its resident memory
(VmHWM) before and after. The padded way is what the trainer did before it had kernels for packed sequences: rows of the
longest rollout, torch's fused kernel. It is only tried where one head of it fits; the mix of the issue is packed alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import record
from torch import Tensor

from hpcrl.modeling.attention.packed import PackedAttention

MIB = 1 << 20
HEADS, DIM = 1, 32
MIXES = {
    "1 x 10,000 + 31 x 100": (10_000, *(100,) * 31),
    "1 x 100,000 + 31 x 1,000": (100_000, *(1_000,) * 31),
    "64 x 500": (500,) * 64,
}
PADDED_UP_TO = 400_000
"""Tokens with padding."""


def padded(lengths: Sequence[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Each sequence a row of the longest."""
    longest, sizes = max(lengths), torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    starts = sizes.cumsum(0) - sizes
    places = sequence * longest + torch.arange(len(sequence)) - starts[sequence]

    def pad(x: Tensor) -> Tensor:
        rows = x.new_zeros(len(sizes) * longest, *x.shape[1:]).index_copy(0, places, x)
        return rows.view(len(sizes), longest, *x.shape[1:]).transpose(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), is_causal=True)
        return y.transpose(1, 2).reshape(-1, *q.shape[1:])[places]

    return attend


def packed(lengths: Sequence[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    attention = PackedAttention(torch.tensor([0, *lengths]).cumsum(0))
    return lambda q, k, v: attention(0, q, k, v)


def peak_bytes() -> int:
    """The most resident memory that this process ever had."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("the kernel does not say VmHWM")


def measure(way: str, lengths: Sequence[int], answers: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = [torch.randn(sum(lengths), HEADS, DIM, requires_grad=True) for _ in range(3)]
    attend = {"packed": packed, "padded": padded}[way](lengths)
    before, started = peak_bytes(), time.monotonic()
    y = attend(*inputs)
    y.square().sum().backward()
    seconds = time.monotonic() - started
    gradients = [float(x.grad.double().square().sum()) for x in inputs if x.grad is not None]
    answers.put({"peak_mib": round((peak_bytes() - before) / MIB, 1), "s": round(seconds, 2), "gradients": gradients})


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    spawn, rows = get_context("spawn"), []
    print(f"{'mix':>26} {'way':>7} {'tokens':>10} {'peak MiB':>9} {'s':>8}")
    for mix, lengths in MIXES.items():
        found: dict[str, Any] = {}
        for way, tokens in (("packed", sum(lengths)), ("padded", len(lengths) * max(lengths))):
            if way == "padded" and tokens > PADDED_UP_TO:
                print(f"{mix:>26} {way:>7} {tokens:10,} not tried")
                rows.append({"mix": mix, "way": way, "tokens": tokens})
                continue
            answers = spawn.Queue()
            process = spawn.Process(target=measure, args=(way, lengths, answers))
            process.start()
            found[way] = answers.get(timeout=1800)
            process.join()
            rows.append({"mix": mix, "way": way, "tokens": tokens, **found[way]})
            print(f"{mix:>26} {way:>7} {tokens:10,} {found[way]['peak_mib']:9.1f} {found[way]['s']:8.2f}")
        if len(found) == 2:
            for ours, theirs in zip(found["packed"]["gradients"], found["padded"]["gradients"], strict=True):
                assert abs(ours / theirs - 1.0) < 1e-4, (mix, ours, theirs)
    record("packed_attention", {"heads": HEADS, "channels": DIM, "rows": rows})


if __name__ == "__main__":
    main()
