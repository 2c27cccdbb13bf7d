"""The trainer beside its peers on the same tiny models: torchtitan's own trainer, and transformers under FSDP2.

    python bench/trainer_peers.py --torchtitan PYTHON

All train the same sequences on two gloo ranks, one thread each, in float32, with AdamW and clipping: plain, and with
what saves memory (every layer computed again; logits in chunks, where the trainer has that). Trainers take turns,
several rounds, and the median counts; memory is measured in rounds of its own, in which malloc returns what is freed,
as the peak of resident memory beside what the process had before it built the model. torchtitan wants an interpreter
of its own: ``pip install torch==2.13.0 torchtitan==0.3.0 triton``; without one it is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from harness import ROOT, record, scratch

RANKS = 2
SEQUENCES, TOKENS = 4, 512
MODELS = ("qwen3", "qwen3_moe", "deepseek_v3")
#: model, ranks that share experts (a peer that cannot is left out), low memory
CASES = [(model, 1, low) for model in MODELS for low in (False, True)] + [
    ("qwen3_moe", 2, True),
    ("deepseek_v3", 2, True),
]
#: freed memory goes back at once, so that the peak is what was alive
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def run(python: Path, script: str, case: dict[str, Any], environment: dict[str, str]) -> dict[str, float]:
    """One start of a trainer; returns seconds a step of the slowest rank, CPU seconds of all, peak of the largest."""
    out = scratch("peers") / "rank"
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", script]
    env = {**os.environ, **environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    env["HPCRL_BENCH_CASE"] = json.dumps({**case, "out": str(out)})
    done = subprocess.run(
        command, check=False, cwd=ROOT / "bench/peers", env=env, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        sys.exit(f"{script} failed:\n{done.stderr[-4000:]}")
    ranks = [json.loads(out.with_name(f"rank.{rank}").read_text()) for rank in range(RANKS)]
    return {
        "step_s": max(rank["step_s"] for rank in ranks),
        "cpu_s": sum(rank["cpu_s"] for rank in ranks),
        "peak_mib": max(rank["peak_mib"] for rank in ranks),
        "parameters": ranks[0]["parameters"],
    }


def measure(peers: dict[str, Path], case: dict[str, Any], rounds: int) -> dict[str, dict[str, float]]:
    """Each trainer's medians."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in peers}
    for number in range(rounds + 1):
        # the order turns, so that none is always the first
        names = list(peers)[number % len(peers) :] + list(peers)[: number % len(peers)]
        for name in names:
            got = run(peers[name], f"with_{name}.py", case, RETURN_FREED if number == rounds else {})
            keys = ("peak_mib", "parameters") if number == rounds else ("step_s", "cpu_s")
            for key in keys:
                found[name][key].append(got[key])
    return {name: {key: statistics.median(values) for key, values in rows.items()} for name, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torchtitan", type=Path, metavar="PYTHON", help="an interpreter that has torchtitan")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of time, in which trainers take turns")
    parser.add_argument("--steps", type=int, default=5, help="steps of a round")
    arguments = parser.parse_args()
    rows = []
    for model, ep, low_memory in CASES:
        peers = {"hpcrl": Path(sys.executable)}
        if ep == 1:
            peers["transformers"] = Path(sys.executable)
        if arguments.torchtitan:
            peers["torchtitan"] = arguments.torchtitan
        sizes = {"sequences": SEQUENCES, "tokens": TOKENS, "steps": arguments.steps}
        found = measure(peers, {"model": model, "ep": ep, "low_memory": low_memory, **sizes}, arguments.rounds)
        own = found["hpcrl"]
        for name, got in found.items():
            row = {"model": model, "ep": ep, "low_memory": low_memory, "trainer": name, **got}
            row["tokens_s"] = RANKS * SEQUENCES * TOKENS / got["step_s"]
            row["hpcrl_speed"] = got["step_s"] / own["step_s"]
            row["hpcrl_cpu_speed"] = got["cpu_s"] / own["cpu_s"]
            row["hpcrl_memory"] = own["peak_mib"] / got["peak_mib"]
            rows.append(row)
            print(
                f"{model:12} ep {ep} {'low' if low_memory else 'plain':5} {name:12} {row['tokens_s']:7.0f} tokens/s"
                f" {got['cpu_s']:6.2f} CPU s/step {got['peak_mib']:6.0f} MiB   hpcrl: {row['hpcrl_speed']:.2f} x speed"
                f" ({row['hpcrl_cpu_speed']:.2f} by CPU time), {row['hpcrl_memory']:.2f} x memory",
                flush=True,
            )
    record("trainer_peers", {"ranks": RANKS, "sequences": SEQUENCES, "tokens": TOKENS, "rows": rows})


if __name__ == "__main__":
    main()
