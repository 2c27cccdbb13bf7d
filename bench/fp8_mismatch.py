"""What block FP8 does to the distance between engine and trainer: neither in FP8, the engine alone, both.

Everything else is in bfloat16. An engine in FP8 multiplies as vLLM's does, weights with a scale for each 128 x 128
block and inputs with one for each 128 numbers, by the reference of ``hpcrl.modeling.fp8``. ``mismatch_kl`` and ``ess``
are the metrics of these names of a run, over rollouts that the engine of the same row sampled; nothing is replayed.
Seconds are of one processor and of FP8 that is emulated: they say nothing of a GPU. Writes
``bench/results/fp8_mismatch.json``.

    python bench/fp8_mismatch.py
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from harness import record, scratch
from router_replay import PROMPT, SAID, SIZES, archs, sampled, served, shard_of, trained_model

from hpcrl.config.load import load_recipe
from hpcrl.dock.wire import BatchShard
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.fp8.find_fp8 import find_backend
from hpcrl.modeling.fp8_layers import use_fp8
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.format.quantise import QuantisedModules

ROWS = {"bf16": (False, False), "fp8_engine": (True, False), "fp8_both": (True, True)}
"""Whether the engine is in FP8, and whether the trainer is."""


def engine_model(model: Decoder, *, fp8: bool) -> Decoder:
    """The model as the engine has it."""
    other = served(model, noise=0.0)
    if fp8:
        use_fp8(other, QuantisedModules(), find_backend("reference", torch.device("cpu")))
    return other


def measure(path: Path, model: Decoder, shard: BatchShard, parallel: Parallel, *, fp8: bool) -> dict[str, Any]:
    """Metrics of one forward and backward pass."""
    settings = [f"model.path={path}", "trainer.dtype=bfloat16", *(["trainer.precision.fp8={}"] if fp8 else [])]
    policy = TrainerPolicy(load_recipe("quickstart", settings).value, model.arch, parallel, model_dir=path)
    began = time.process_time()
    metrics = policy.forward_backward(shard).reduce(parallel.world)
    cpu_s = time.process_time() - began
    found = {"mismatch_kl": float(f"{metrics.mismatch_kl:.3g}"), "ess": round(metrics.ess, 4)}
    if metrics.routing_mismatch is not None:
        found["routing_mismatch"] = float(f"{metrics.routing_mismatch:.3g}")
    return found | {"pass_cpu_s": round(cpu_s, 2)}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4, help="an even number")
    args = parser.parse_args()
    root, found = scratch("fp8-mismatch"), {}
    torch.set_num_threads(1)
    with distributed(timeout_s=600) as parallel:
        for family, arch in archs(root).items():
            model = trained_model(path := root / family, arch, torch.bfloat16)
            rows: dict[str, Any] = {}
            for name, (engine_fp8, trainer_fp8) in ROWS.items():
                rollouts = sampled(engine_model(model, fp8=engine_fp8), args.rollouts)
                shard = shard_of(rollouts, arch.vocab_size)
                rows[name] = measure(path, model, shard, parallel, fp8=trainer_fp8)
                print(family, name, rows[name], flush=True)
            kl = {name: row["mismatch_kl"] for name, row in rows.items()}
            found[family] = rows | {"kl_fp8_both_over_engine_alone": round(kl["fp8_both"] / kl["fp8_engine"], 4)}
    sizes = {"rollouts": args.rollouts, "tokens_of_a_rollout": PROMPT + SAID, **SIZES}
    record("fp8_mismatch", {"load_average": round(os.getloadavg()[0], 1), **sizes, **found})


if __name__ == "__main__":
    main()
