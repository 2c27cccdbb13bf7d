"""What it takes to hand weights to an engine on the trainer's own devices.

Two ranks (FSDP2) hold a model and its optimizer, an embedded engine waits in a process of its own. Memory stands for
that of the devices: weights and optimizer state of the trainer, weights and KV of the engine, and what lies between,
counted as it is taken and given back. ``layer by layer`` is `hpcrl.trainer.publish.swap_sync`: seconds of a hand-over
with the way of the trainer's tensors to the host, and of taking the devices back. ``naive`` gathers all weights on each
rank, hands them over whole and loads them, while the trainer stays where it is. Both in turn in one run, the median of
some.

Then both schedules, synchronous and one step behind, train the quickstart, one after the other: as it is, and with a
long tail of late answers. Medians of steps, by part. The device is idle where neither computes: while it changes hands,
and in the engine's turn while its batch is empty, which is looked at twenty times a second. Writes
``bench/results/colocated.json``.

    python bench/colocated.py
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from colocated_schedules import schedules
from harness import ROOT, record, scratch
from torch import Tensor
from vllm_lab import write_model

from hpcrl.config.load import load_recipe
from hpcrl.modeling.blocks import is_sharded
from hpcrl.modeling.hf import model_tensors
from hpcrl.modeling.memory.arena import memory_of
from hpcrl.modeling.memory.shared import view_of
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import Qwen3MoeArch, load_arch
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.publish.colocated_engines import ColocatedEngines
from hpcrl.trainer.publish.swap_sync import SwapSync
from hpcrl.trainer.step.phases import PhaseClock
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.handover import HandoverLayer, SharedMemory, SharedTensor

ARCH = Qwen3MoeArch(
    vocab_size=8192,
    hidden_size=384,
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    moe_intermediate_size=256,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=1024,
)
ROUNDS = 3
RANKS = 2
KV_BYTES = 64 << 20
START_S = 120.0
MIB = 1 << 20


def train_without_batch(policy: TrainerPolicy) -> None:
    """An optimizer step by random gradients."""
    for parameter in policy.model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-4
    policy.optimizer.step()
    policy.optimizer.zero_grad()


def trainer_bytes(policy: TrainerPolicy, parallel: Parallel) -> int:
    """What weights and optimizer state of all ranks take."""
    state = [value for own in policy.optimizer.state.values() for value in own.values() if isinstance(value, Tensor)]
    own = sum(memory.size for memory in memory_of([*model_tensors(policy.model).values(), *state]))
    return sum(parallel.world.gather(own))


def naive(policy: TrainerPolicy, parallel: Parallel, engines: ColocatedEngines) -> dict[str, float]:
    """Gather all, hand it over whole, load it."""
    started = time.monotonic()
    gathered = {
        name: tensor.full_tensor() if is_sharded(tensor) else tensor
        for name, tensor in model_tensors(policy.model).items()
    }
    copies = sum(parallel.world.gather(sum(tensor.nbytes for tensor in gathered.values())))

    def load() -> int:
        whole = SharedMemory.create(sum(tensor.nbytes + 64 for tensor in gathered.values()))
        offset, tensors = 0, []
        for name, tensor in gathered.items():
            tensors.append(SharedTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
            with torch.no_grad():
                view_of(whole, tensors[-1]).copy_(tensor)
            offset += tensor.nbytes + -tensor.nbytes % 64
        engines.load(HandoverLayer(whole.path, tensors))
        held = engines.wake(1) + len(whole.data)
        whole.close()
        return held

    engine = parallel.world.on_leader(load, "loading")
    peak = trainer_bytes(policy, parallel) + copies + engine
    seconds = time.monotonic() - started
    parallel.world.on_leader(engines.sleep, "sleeping")
    return {"hand_over_s": seconds, "device_peak_mib": peak / MIB}


def ranks(directory: Path, url: str) -> None:
    """One rank of the first part; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    settings = (f"model.path={directory / 'model'}", "engine.dtype=float32")
    recipe = load_recipe("quickstart_colocated", settings).value
    events: list[dict[str, Any]] = []
    with distributed(timeout_s=300) as parallel:
        policy = TrainerPolicy(recipe, load_arch(directory / "model"), parallel, model_dir=directory / "model")
        engines = ColocatedEngines([url], {}, timeout_s=60.0, start_timeout_s=START_S, on_wait=lambda: None)
        sync = SwapSync(parallel, engines, dtype=torch.float32, emit=lambda kind, **data: events.append(data))
        train_without_batch(policy)
        found: dict[str, list[dict[str, float]]] = {"layer by layer": [], "naive": []}
        parallel.world.on_leader(engines.wait_reachable, "waiting")
        for _ in range(ROUNDS):
            parallel.world.on_leader(engines.sleep, "sleeping")
            found["naive"].append(naive(policy, parallel, engines))
            sync.publish(policy, 1, lambda version: None)
            sync.end_step(PhaseClock())
            started = time.monotonic()
            sync.begin_step(PhaseClock())
            back_s = time.monotonic() - started
            if parallel.world.rank == 0:
                last = events[-1]
                found["layer by layer"].append(
                    {
                        "hand_over_s": last["seconds"],
                        "device_peak_mib": last["device_peak_bytes"] / MIB,
                        "host_mib": last["host_bytes"] / MIB,
                        "back_s": back_s,
                    }
                )
        trainer = trainer_bytes(policy, parallel)
        sync.close()
        if parallel.world.rank == 0:
            medians = {
                way: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
                for way, rows in found.items()
            }
            result = {"trainer_mib": trainer / MIB, "weights_mib": ARCH.num_parameters() * 4 / MIB, "ways": medians}
            (directory / "result.json").write_text(json.dumps(result))


def hand_over() -> dict[str, Any]:
    """The first part, in processes of its own."""
    directory = scratch("colocated")
    (directory / "model").mkdir()
    model = build_model(ARCH, device="cpu")
    model.init_weights(torch.Generator().manual_seed(0), std=0.02)
    write_model(directory / "model", model, torch.float32)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "hpcrl.inference.embedded.server", "--model", directory / "model", "--colocated"]
    command += f"--port {port} --dtype float32 --kv-cache-memory-bytes {KV_BYTES} --max-num-seqs 16".split()
    engine = subprocess.Popen([*map(str, command)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        launch = ["-m", "hpcrl.trainer.launcher", "--ranks", str(RANKS), "colocated"]
        own = ["--ranks", str(directory), f"http://127.0.0.1:{port}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
        subprocess.run([sys.executable, *launch, *own], check=True, cwd=ROOT, env=env)
    finally:
        engine.terminate()
        engine.wait(30)
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs=2, metavar=("DIRECTORY", "URL"), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    parser.add_argument("--skip", type=int, default=4, help="first steps that are not measured")
    parser.add_argument("--model", type=Path, help="start model of the quickstart; by default one is made")
    parser.add_argument("--output", type=Path, help="where to write, if not bench/results/colocated.json")
    given = parser.parse_args()
    if given.steps < given.skip + 2:
        parser.error(f"--steps {given.steps} leaves nothing behind the first {given.skip} and before the last")
    if given.ranks:
        ranks(Path(given.ranks[0]), given.ranks[1])
        return
    result = hand_over()
    print(f"weights {result['weights_mib']:.0f} MiB, trainer {result['trainer_mib']:.0f} MiB on {RANKS} ranks")
    for way, row in result["ways"].items():
        print(f"{way:16}" + "".join(f"  {name} {value:.2f}" for name, value in row.items()))
    result["schedules"] = schedules(given.steps, given.skip, given.model)
    print("| answers | schedule | a step | generate | train | hand over, take back | nothing to compute | staleness |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for workload, by_schedule in result["schedules"].items():
        for schedule, row in by_schedule.items():
            seconds = " | ".join(f"{row[f'{part}_s']:.2f} s" for part in ("step", "generate", "train"))
            swap, late = f"{row['hand_over_s']:.2f}, {row['take_back_s']:.2f} s", f"{row['staleness_mean']:.1f}"
            late += f", at most {row['staleness_max']:.0f}"
            print(f"| {workload} | {schedule} | {seconds} | {swap} | {row['idle_share']:.0%} | {late} |")
    record("colocated", result, given.output)


if __name__ == "__main__":
    main()
