"""How long a weight update freezes a vLLM engine, against the bare copy of the same bytes in memory.

One engine on CPUs with requests in flight. Each version is staged while the engine generates; then requests are frozen
(keep), the version is loaded in place, and they go on: the calls and their order are those of the orchestrator. By
turns with that, one thread of this process copies tensors of the same sizes, which is the least that a load in place
has to do. Writes ``bench/results/vllm_pause.json``.

    HPCRL_VLLM_PYTHON=.venv-vllm/bin/python python bench/vllm_pause.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from harness import record, scratch
from vllm_lab import Engine, make_arch, publish, random_model, started_engines, write_model

from hpcrl.weights import HandoffStore

SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
IN_FLIGHT = 4


def copy_s(sizes: list[int]) -> float:
    """Seconds to copy tensors of ``sizes`` bytes one by one, memory of both sides touched before."""
    source = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    target = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    began = time.perf_counter()
    for to, given in zip(target, source, strict=True):
        to.copy_(given)
    return time.perf_counter() - began


def update(engine: Engine, path: Path, version: int) -> dict[str, float]:
    """Seconds of the parts of one update."""
    info: dict[str, Any] = {"path": str(path)}
    began = time.perf_counter()
    engine.call("/start_weight_update")
    engine.call("/update_weights", {"update_info": {**info, "stage": True}})
    staged = {"method": "staged_handoff", "args": [str(path)]}
    while engine.call("/collective_rpc", staged)["results"] != ["True"]:
        time.sleep(0.02)
    marks = [time.perf_counter()]
    for call, body in (
        ("/pause?mode=keep&clear_cache=false", {}),
        ("/update_weights", {"update_info": info}),
        ("/finish_weight_update", {"weight_version": str(version)}),
        ("/resume", {}),
    ):
        engine.call(call, body)
        marks.append(time.perf_counter())
    names = ("freeze_s", "load_s", "finish_s", "resume_s")
    parts = {name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)}
    return {"staged_s": marks[0] - began, **parts, "pause_s": marks[-1] - marks[0]}


def measure(dtype_name: str, versions: int) -> dict[str, float]:
    """Medians over versions, the first left out."""
    root, dtype = scratch("vllm-pause"), getattr(torch, dtype_name)
    arch = make_arch(root / "model", **SIZES)
    write_model(root / "model", random_model(arch, 0), dtype)
    store = HandoffStore(root / "weights")
    rows: list[dict[str, float]] = []
    settings = (f"engine.dtype={dtype_name}", "engine.replicas=1", "engine.max_model_len=2048")
    with started_engines(root / "model", root, *settings) as (engine,), ThreadPoolExecutor(IN_FLIGHT) as pool:
        engine.call("/init_weight_transfer_engine", {"init_info": {}})
        for version in range(1, versions + 1):
            handoff = publish(store, version, root / "model", random_model(arch, version), dtype)
            sizes = [tensor.bytes for tensor in handoff.manifest.tensors.values()]
            names = [f"{version}-{i}" for i in range(IN_FLIGHT)]
            flying = [pool.submit(engine.generate, [7] * 64, name=n, max_tokens=1800, ignore_eos=True) for n in names]
            while engine.metrics()["vllm:num_requests_running"] < IN_FLIGHT:
                time.sleep(0.05)
            row = update(engine, handoff.path, version)
            time.sleep(0.5)
            engine.call("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{n}" for n in names]})
            spans = [future.result()["weight_versions"] for future in flying]
            assert all(len(s) == 2 and s[1]["version"] == str(version) for s in spans), "requests did not go on"
            # nobody generates now: the copy has the machine as the frozen engine had it
            row["copy_s"] = statistics.median(copy_s(sizes) for _ in range(3))
            rows.append(row)
            print(dtype_name, version, {key: round(value, 4) for key, value in row.items()}, flush=True)
    middle = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    total = sum(sizes)
    return {
        "mib": round(total / (1 << 20), 1),
        "tensors": len(sizes),
        **{key: round(value, 4) for key, value in middle.items()},
        "pause_over_copy": round(middle["pause_s"] / middle["copy_s"], 2),
        "load_and_finish_over_copy": round((middle["load_s"] + middle["finish_s"]) / middle["copy_s"], 2),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--versions", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"load_average": round(os.getloadavg()[0], 1), "in_flight": IN_FLIGHT}
    for dtype in ("float32", "bfloat16"):
        figures[dtype] = measure(dtype, arguments.versions)
    print(figures)
    record("vllm_pause", figures)


if __name__ == "__main__":
    main()
