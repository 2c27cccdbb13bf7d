"""Seconds in which a rank plans what it publishes: a model of GLM-5's size, cut over many ranks, without its memory.

The plan says which bytes of which files this rank copies, sends and writes. It is made once, before the first version,
by every rank for itself. Seconds are those of a processor: other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from operator import itemgetter
from pathlib import Path

import torch
from harness import record
from torch import nn

from hpcrl.modeling.blocks import HeldBlock
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import model_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import GlmMoeDsaArch, arch_from_config
from hpcrl.models.known import find_config
from hpcrl.trainer.publish.plan import PublishPlan, plan_publication
from hpcrl.weights.format.manifest import CHUNK_BYTES

SHARD_BYTES = 4 << 30


def blocks_of(model: nn.Module, ranks: int) -> list[dict[str, HeldBlock]]:
    """What each rank holds where every tensor is cut along its first dimension, as FSDP does."""
    held: list[dict[str, HeldBlock]] = [{} for _ in range(ranks)]
    for name, tensor in model_tensors(model).items():
        shape = tuple(tensor.shape)
        if not isinstance(tensor, nn.Parameter):
            # buffers are whole everywhere
            for own in held:
                own[name] = HeldBlock((0,) * len(shape), shape)
            continue
        step = -(-shape[0] // ranks)
        for rank, own in enumerate(held):
            low = min(rank * step, shape[0])
            own[name] = HeldBlock((low, *(0 for _ in shape[1:])), (min(low + step, shape[0]), *shape[1:]))
    return held


def measure(model: Decoder, blocks: list[dict[str, HeldBlock]], *, fp8: bool) -> tuple[float, PublishPlan]:
    """Plan for rank 0: seconds, and the plan."""
    gc.collect()
    started = time.process_time()
    plan = plan_publication(
        model,
        model.adapter,
        blocks,
        0,
        torch.bfloat16,
        fp8=fp8,
        max_shard_bytes=SHARD_BYTES,
        chunk_bytes=CHUNK_BYTES,
        window_bytes=None,
    )
    return time.process_time() - started, plan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--record", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arch = arch_from_config(json.loads(find_config("GLM-5").read_text()))
    assert isinstance(arch, GlmMoeDsaArch)
    model, rows = build_model(arch), []
    print(f"{'ranks':>5} {'kind':>8} {'tensors':>8} {'files':>6} {'own units':>9} {'s':>6}")
    for ranks in arguments.ranks:
        blocks = blocks_of(model, ranks)
        for fp8 in (False, True):
            kind = "fp8" if fp8 else "bfloat16"
            seconds, plan = min((measure(model, blocks, fp8=fp8) for _ in range(5)), key=itemgetter(0))
            (window,) = plan.windows
            row = {"tensors": len(plan.tensors), "files": len(window.shards), "own_units": len(window.units)}
            rows.append({"ranks": ranks, "kind": kind, **row, "s": round(seconds, 3)})
            print(f"{ranks:5} {kind:>8} {row['tensors']:8,} {row['files']:6} {row['own_units']:9,} {seconds:6.2f}")
    sizes = {"layers": arch.num_hidden_layers, "experts": arch.n_routed_experts}
    record("handoff_plan", {**sizes, "rows": rows}, arguments.record)


if __name__ == "__main__":
    main()
