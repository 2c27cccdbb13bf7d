"""Hand-offs of adapters to a real vLLM on CPUs beside those of all weights: bytes, and seconds of each part.

Small models with random weights, dense and with experts. Each version has other weights, or other adapters of rank 8 of
all matrices; the first is left out, because engines read the base of adapters with it. A version is staged while the
engine has nothing to do, and loaded in place, by the calls and in the order of the orchestrator. Of the dense model
vLLM also loads the same adapters by its own means (``--enable-lora``), which runs do not use: it computes with them
beside the weights, and of a model with experts not on processors. Writes ``bench/results/lora_vllm.json``.

    HPCRL_VLLM_PYTHON=.venv-vllm/bin/python python bench/lora_vllm.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import record, scratch
from vllm_lab import Engine, make_arch, random_model, started_engines, write_model
from vllm_pause import SIZES, update

from hpcrl.config.lora import LoraConfig
from hpcrl.config.recipe import HandoffConfig
from hpcrl.modeling.adapters import adapt, init_adapters
from hpcrl.modeling.blocks import local_part
from hpcrl.modeling.checkpoint_io.load import load_model_dir
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import adapter_parameters
from hpcrl.modeling.parallelize import parallelize_decoder
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import ModelArch, Qwen3Arch
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.publish.adapters import AdapterPublisher
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.weights import HandoffStore

LORA = LoraConfig(rank=8, alpha=16.0)
DENSE = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


def make_model(path: Path, kind: str) -> ModelArch:
    """A model directory with random weights in bfloat16."""
    arch: ModelArch = make_arch(path, **SIZES)
    if kind == "dense":
        same = {"vocab_size": arch.vocab_size, "max_position_embeddings": 4096, "eos_token_id": arch.eos_token_id}
        arch = Qwen3Arch(intermediate_size=2048, **DENSE, **same)
    write_model(path, random_model(arch, 0), torch.bfloat16)
    return arch


def changed(model: Decoder, seed: int, *, adapted: bool) -> None:
    """Other numbers where a trainer has changed some: in adapters, or in all weights."""
    draw = torch.Generator().manual_seed(seed)
    parameters = adapter_parameters(model).items() if adapted else model.named_parameters()
    with torch.no_grad():
        for name, parameter in parameters:
            if not adapted or name.endswith("lora_B"):
                part = local_part(parameter)
                part.add_(torch.randn(part.shape, generator=draw).to(part.dtype) / 64)


def published(
    root: Path, arch: ModelArch, parallel: Parallel, versions: int, *, adapted: bool
) -> Iterator[tuple[Path, float]]:
    """Directories of versions, each published when it is asked for, and the seconds of that."""
    model = build_model(arch, device="cpu")
    load_model_dir(model, model.adapter, root / "model")
    settings: dict[str, Any] = {
        "arch": arch,
        "model_dir": root / "model",
        "dtype": torch.bfloat16,
        "attempt": 1,
        "settings": HandoffConfig(),
    }
    store = HandoffStore(root / "weights")
    publisher = Publisher(store, parallel, **settings)
    if adapted:
        adapt(model, LORA)
        init_adapters(model, 0)
        publisher = AdapterPublisher(store, parallel, lora=LORA, **settings)
    parallelize_decoder(model, parallel.mesh, dtype=torch.float32)
    for version in range(versions + 1):
        if version:
            changed(model, version, adapted=adapted)
        began = time.perf_counter()
        publisher.publish(model, version)
        publisher.wait()
        yield store.path_of(version), time.perf_counter() - began


def loaded_natively(engine: Engine, path: Path, version: int) -> dict[str, float]:
    """Seconds for which a call of vLLM's own takes."""
    began = time.perf_counter()
    engine.call("/v1/load_lora_adapter", {"lora_name": str(version), "lora_path": str(path)})
    return {"load_s": time.perf_counter() - began}


def measure(kind: str, way: str, parallel: Parallel, versions: int) -> dict[str, Any]:
    """Medians over versions, without the first two: the start model, and what makes engines read a base."""
    root = scratch("lora-vllm")
    arch = make_model(root / "model", kind)
    settings = ["engine.dtype=bfloat16", "engine.replicas=1", "engine.max_model_len=256"]
    if way != "all weights":
        settings.append("trainer.lora={rank: 8}")
    if way == "adapters, by vLLM itself":
        settings += ["engine.vllm_args.enable-lora=true", "engine.vllm_args.max-lora-rank=8"]
        settings.append(f"engine.vllm_args.max-cpu-loras={versions + 1}")
    rows: list[dict[str, float]] = []
    with started_engines(root / "model", root, *settings) as (engine,):
        engine.call("/init_weight_transfer_engine", {"init_info": {}})
        for version, (path, publish_s) in enumerate(
            published(root, arch, parallel, versions, adapted=way != "all weights")
        ):
            if version == 0:
                continue
            if way == "adapters, by vLLM itself":
                row = loaded_natively(engine, path, version)
            else:
                parts = update(engine, path, version)
                row = {"staged_s": parts["staged_s"], "pause_s": parts["pause_s"]}
            rows.append({"publish_s": publish_s, **row})
            size = HandoffStore(root / "weights").open(version).manifest.total_bytes
    middle = {key: round(statistics.median(row[key] for row in rows[1:]), 4) for key in rows[0]}
    whole = round(sum(middle.values()), 4)
    return {"model": kind, "way": way, "mib": round(size / 2**20, 2), **middle, "handoff_s": whole}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    rows: list[dict[str, Any]] = []
    with distributed(timeout_s=60) as parallel:
        for kind, ways in {
            "dense": ("all weights", "adapters", "adapters, by vLLM itself"),
            "experts": ("all weights", "adapters"),
        }.items():
            for way in ways:
                row = measure(kind, way, parallel, arguments.versions)
                base = rows[-1] if way == "adapters" else row if way == "all weights" else rows[-2]
                row["bytes_ratio"] = round(base["mib"] / row["mib"], 2)
                row["seconds_ratio"] = round(base["handoff_s"] / row["handoff_s"], 2)
                rows.append(row)
                print(row, flush=True)
    record("lora_vllm", {"load_average": round(os.getloadavg()[0], 1), "rank": LORA.rank, "rows": rows})


if __name__ == "__main__":
    main()
