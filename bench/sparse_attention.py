"""Memory and time of a layer of GLM-5's sparse attention, beside the same with a mask over all pairs of tokens.

One sequence goes through a layer forward and backward in a process of its own, which writes down the high-water mark of
its resident memory (VmHWM) before and after. The layer is GLM-5's, 16 times smaller: shares of memory count, not times.
"""

from __future__ import annotations

import argparse
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from harness import record
from torch import Tensor

from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.context import BatchContext, IndexQuery
from hpcrl.modeling.layers.dsa import SparseLatentAttention
from hpcrl.modeling.rope import rotary_tables
from hpcrl.models.arch import GlmMoeDsaArch

MIB = 1 << 20
TOP_K = 256
ARCH = GlmMoeDsaArch(
    vocab_size=128,
    hidden_size=384,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=128,
    moe_intermediate_size=128,
    n_routed_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=1 << 20,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=32,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=TOP_K,
)


class Masked:
    """The same attention with scores of all pairs of tokens, as plain implementations have it."""

    def choose(self, layer: int, index: IndexQuery, top_k: int) -> Tensor:
        scores = torch.einsum("qhd,kd->qhk", index.q, index.k).relu_()
        scores = torch.einsum("qhk,qh->qk", scores, index.weights)
        scores += torch.full_like(scores, float("-inf")).triu_(1)
        return scores.topk(min(top_k, len(scores)), dim=-1).indices

    def attend(self, layer: int, q: Tensor, keys: Tensor, chosen: Tensor, *, value_dim: int, scale: float) -> Tensor:
        mask = torch.full((len(q), len(q)), float("-inf")).scatter_(1, chosen, 0.0)
        mask += torch.full_like(mask, float("-inf")).triu_(1)
        weights = (torch.einsum("qhd,kd->hqk", q, keys) * scale + mask).softmax(-1)
        return torch.einsum("hqk,kd->qhd", weights, keys[:, :value_dim])


def peak_bytes() -> int:
    """The most resident memory that this process ever had."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("the kernel does not say VmHWM")


def measure(tokens: int, masked: bool, answers: Any) -> None:
    """One layer, forward and backward."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = SparseLatentAttention(ARCH, 0)
    attention = PackedAttention(torch.tensor([0, tokens]))
    context = BatchContext(attention.positions, attention, sparse=Masked() if masked else attention)
    rotary = rotary_tables(ARCH, attention.positions)
    x = torch.randn(tokens, ARCH.hidden_size, requires_grad=True)
    before, started = peak_bytes(), time.monotonic()
    layer(x, rotary, context).sum().backward()
    answers.put((peak_bytes() - before, time.monotonic() - started))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--masked-up-to", type=int, default=8192)
    arguments = parser.parse_args()
    spawn, rows = get_context("spawn"), []
    print(f"{'tokens':>8} {'chosen':>12} {'peak MiB':>9} {'MiB/ktoken':>11} {'s':>7} {'masked MiB':>11} {'s':>7}")
    for tokens in arguments.tokens:
        found: dict[str, Any] = {"tokens": tokens, "top_k": TOP_K}
        for name, masked in (("chosen", False), ("masked", True)):
            if masked and tokens > arguments.masked_up_to:
                continue
            answers = spawn.Queue()
            process = spawn.Process(target=measure, args=(tokens, masked, answers))
            process.start()
            size, seconds = answers.get(timeout=600)
            process.join()
            found |= {f"{name}_peak_mib": round(size / MIB, 1), f"{name}_s": round(seconds, 2)}
        rows.append(found)
        masked_text = f"{found['masked_peak_mib']:11.0f} {found['masked_s']:7.1f}" if "masked_s" in found else ""
        print(
            f"{tokens:8} {tokens * TOP_K:12,} {found['chosen_peak_mib']:9.0f} "
            f"{found['chosen_peak_mib'] / tokens * 1024:11.1f} {found['chosen_s']:7.1f} {masked_text}"
        )
    record("sparse_attention", {"rows": rows})


if __name__ == "__main__":
    main()
