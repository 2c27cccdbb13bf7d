"""Adapters beside training of all weights, in one run: memory, time of a step, and what a version of each costs.

One rank trains the same mixture-of-experts model on the same batches in turn, on the processor. Memory and times are
measured as in ``memory_tools.py``. A version is published to a directory, and loaded by the embedded engine's updater,
which has the model of version 0 and merges what it reads; bytes are those of the version's tensors. All times are those
of the processor, as the machine may have other work, the shortest of some.

    python bench/lora.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import record, scratch
from memory_tools import ARCH, LENGTHS, Tool
from planning import memory_worker as worker

from hpcrl.config.lora import LoraConfig
from hpcrl.config.recipe import HandoffConfig
from hpcrl.inference.embedded.weights.updates import ReaderConfig, UpdateSession
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.spec import build_model
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.publish.adapters import AdapterPublisher
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.weights.read.subscriber import ReaderSettings
from hpcrl.weights.store import HandoffStore

ADAPTERS: dict[str, LoraConfig | None] = {
    "all weights": None,
    "adapters of all": LoraConfig(rank=8, alpha=16.0),
    "experts with a common outer half": LoraConfig(rank=8, alpha=16.0, experts="shared_outer"),
    "attention alone": LoraConfig(rank=8, alpha=16.0, targets=["attention"]),
}
ROUNDS = 3


def shortest(work: Callable[[], Any], so_far: float) -> float:
    """Seconds of the processor for ``work``, or ``so_far`` where that is less."""
    started = time.process_time()
    work()
    return min(time.process_time() - started, so_far)


def versions(tool: Tool, parallel: Parallel, model_dir: Path, root: Path) -> dict[str, Any]:
    """Publish and load versions of what was trained; the first load is of version 0, and not counted."""
    policy, lora = tool.policy, tool.policy.recipe.trainer.lora
    settings: dict[str, Any] = {
        "arch": ARCH,
        "model_dir": model_dir,
        "dtype": torch.float32,
        "attempt": 1,
        "settings": HandoffConfig(overlap=True),
    }
    store = HandoffStore(root)
    publisher = Publisher(store, parallel, **settings)
    if lora is not None:
        publisher = AdapterPublisher(store, parallel, lora=lora, **settings)
    served = build_model(ARCH, device="cpu")
    updater = UpdateSession(served, ReaderConfig(root, None, ReaderSettings()))
    updater.init()

    def publish(version: int) -> None:
        publisher.publish(policy.model, version)
        publisher.wait()

    def load(version: int) -> None:
        updater.start()
        updater.update({"path": str(store.path_of(version))})
        updater.finish(exchange)

    def exchange(new: Decoder, label: str) -> Decoder:
        nonlocal served
        # the engine reads the next version into the model that it served before
        served, old = new, served
        return old

    publish(0)
    load(0)
    found = {"publish_s": float("inf"), "load_s": float("inf")}
    for version in range(1, ROUNDS + 1):
        tool.step()
        found["publish_s"] = shortest(partial(publish, version), found["publish_s"])
        found["load_s"] = shortest(partial(load, version), found["load_s"])
    return {"version_mib": round(store.open(ROUNDS).manifest.total_bytes / 2**20, 3), **found}


def main() -> None:
    """Measure, print and record."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    root = scratch("lora")
    model_dir = root / "model"
    worker.write_model(model_dir, ARCH)
    rows: list[dict[str, Any]] = []
    with distributed(timeout_s=60) as parallel:
        tools = {name: Tool({}, model_dir, parallel, lora=lora) for name, lora in ADAPTERS.items()}
        for _ in range(ROUNDS + 1):
            for tool in tools.values():
                tool.step()
        for number, (name, tool) in enumerate(tools.items()):
            trained = sum(p.numel() for p in tool.policy.model.parameters() if p.requires_grad)
            rows.append({"what": name, "trained": trained, **tool.seconds})
            rows[-1]["peak_mib"] = round(tool.peak() / 2**20, 1)
            rows[-1] |= versions(tool, parallel, model_dir, root / f"weights-{number}")
    base = rows[0]
    print(f"{'':34}{'trained':>12}{'peak':>8}{'step':>8}{'MiB a version':>15}{'publish':>9}{'load':>7}")
    for row in rows:
        row["step_s"] = row.pop("forward_backward_s") + row.pop("optimizer_s")
        for own in ("peak_mib", "step_s", "version_mib", "publish_s", "load_s"):
            row[f"{own.rpartition('_')[0]}_ratio"] = round(row[own] / base[own], 3)
            row[own] = round(row[own], 4)
        print(
            f"{row['what']:34}{row['trained']:12,}{row['peak_ratio']:8.2f}{row['step_ratio']:8.2f}"
            f"{row['version_mib']:15.2f}{row['publish_ratio']:9.2f}{row['load_ratio']:7.2f}"
        )
    record("lora", {"tokens": sum(LENGTHS), "parameters": ARCH.num_parameters(), "rank": 8, "rows": rows})


if __name__ == "__main__":
    main()
