"""Host memory of a trainer rank while it starts from a model directory: the peak beside what its shards take.

Two ranks build a model of some GiB on ``meta``, shard it, and read their shards; each writes down the high-water mark
of its resident memory (VmHWM) before and after. The published model is bfloat16, or block FP8; masters are float32.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from harness import record, scratch
from torch.distributed.tensor import DTensor

from hpcrl.modeling.checkpoint_io.load import load_model_dir
from hpcrl.modeling.hf import HfAdapter, model_tensors
from hpcrl.modeling.spec import spec_of
from hpcrl.models.arch import ModelArch, Qwen3MoeArch, load_arch
from hpcrl.storage.files import write_json
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.weights.format.layout import PublishedTensor
from hpcrl.weights.format.quantise import FP8_DTYPE, QuantisedModules, scale_tensor
from hpcrl.weights.format.shard import SAFETENSORS_DTYPES, safetensors_header

RANKS = 2
GIB = 1 << 30
_PORT = 29683


def arch_of(gib: float) -> ModelArch:
    """A mixture of experts of about ``gib`` GiB in float32."""
    sizes: dict[str, Any] = {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "moe_intermediate_size": 768,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 4096,
    }
    two, three = (Qwen3MoeArch(num_hidden_layers=n, **sizes).num_parameters() for n in (2, 3))
    layers = max(1, round((gib * GIB / 4 - (3 * two - 2 * three)) / (three - two)))
    return Qwen3MoeArch(num_hidden_layers=layers, **sizes)


def write_model(path: Path, arch: ModelArch, *, fp8: bool) -> int:
    """A directory with tensors of zeros, in files of holes where the filesystem has them; returns its bytes."""
    path.mkdir()
    write_json(path / "config.json", arch.to_hf_config("bfloat16"))
    tensors = []
    for spec in arch.tensors():
        if fp8 and QuantisedModules().has(spec.name, spec.shape):
            tensors += [PublishedTensor(spec.name, FP8_DTYPE, spec.shape), scale_tensor(spec.name, spec.shape)]
        else:
            tensors.append(PublishedTensor(spec.name, "bfloat16", spec.shape))
    total, step = 0, 400
    for number in range(0, len(tensors), step):
        part = tensors[number : number + step]
        head = safetensors_header(part, align=8)
        size = sum(SAFETENSORS_DTYPES[tensor.dtype][1] * torch.Size(tensor.shape).numel() for tensor in part)
        with (path / f"model-{number:06d}.safetensors").open("wb") as stream:
            stream.write(head)
            stream.truncate(len(head) + size)
        total += size
    return total


def peak_bytes() -> int:
    """The most resident memory that this process ever had."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel does not say VmHWM")


def start(rank: int, model_dir: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_PORT))
    with distributed(timeout_s=600) as parallel:
        arch = load_arch(model_dir)
        spec = spec_of(arch)
        before = peak_bytes()
        started = time.monotonic()
        model = spec.build(arch, device="meta")
        spec.parallelize(model, parallel.mesh, dtype=torch.float32)
        model.materialise(parallel.device)
        built_s = time.monotonic() - started
        load_model_dir(model, HfAdapter(arch), model_dir)
        local = [t.to_local() if isinstance(t, DTensor) else t for t in model_tensors(model).values()]
        shard = sum(tensor.numel() * tensor.element_size() for tensor in local)
        answers.put(
            {
                "rank": rank,
                "shard_gib": shard / GIB,
                "before_gib": before / GIB,
                "peak_gib": peak_bytes() / GIB,
                "beside_shard_gib": (peak_bytes() - shard) / GIB,
                "build_s": built_s,
                "load_s": time.monotonic() - started - built_s,
            }
        )


def measure(gib: float, *, fp8: bool) -> dict[str, Any]:
    arch = arch_of(gib)
    root = scratch("start-memory")
    try:
        size = write_model(root / "model", arch, fp8=fp8)
        context = get_context("spawn")
        answers = context.Queue()
        ranks = [context.Process(target=start, args=(rank, root / "model", answers)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        rows = sorted((answers.get(timeout=900) for _ in ranks), key=lambda row: row["rank"])
        for process in ranks:
            process.join()
    finally:
        shutil.rmtree(root)
    return {
        "stored": "block FP8" if fp8 else "bfloat16",
        "parameters": arch.num_parameters(),
        "stored_gib": size / GIB,
        "whole_float32_gib": arch.num_parameters() * 4 / GIB,
        "ranks": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=5.0, help="size of the model in float32")
    gib = parser.parse_args().gib
    results = [measure(gib, fp8=fp8) for fp8 in (False, True)]
    print(f"{'stored as':>10} {'whole':>6} {'shard':>6} {'peak':>6} {'beside':>7} {'load':>6}")
    for result in results:
        for row in result["ranks"]:
            print(
                f"{result['stored']:>10} {result['whole_float32_gib']:5.2f}G {row['shard_gib']:5.2f}G"
                f" {row['peak_gib']:5.2f}G {row['beside_shard_gib']:6.2f}G {row['load_s']:5.1f}s"
            )
    record("start_memory", {"ranks": RANKS, "models": results})


if __name__ == "__main__":
    main()
