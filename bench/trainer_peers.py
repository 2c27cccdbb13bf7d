"""The trainer beside its peers on the same tiny models: torchtitan's own trainer, and transformers under FSDP2.

    python bench/trainer_peers.py --torchtitan PYTHON [--models qwen3 …]

All train the same sequences on two gloo ranks, one thread each, in float32, with AdamW and clipping: plain, and with
what saves memory (every layer computed again; logits in chunks, where the trainer has that). Trainers take turns,
several rounds; of all steps the median counts, and their spread is recorded. CPU seconds of a step are the fair measure
where the machine has other work. Memory is the peak of resident memory in a step of a start of its own, in which malloc
returns what is freed (in one that trained before, holes of its heap are filled and never returned), beside what the
process had before it built the model. torchtitan wants an interpreter of its own:
``pip install torch==2.13.0 torchtitan==0.3.0 triton``; without one it is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import ROOT, record, scratch

RANKS = 2
SEQUENCES, TOKENS = 4, 512
MODELS = ("qwen3", "qwen3_moe", "deepseek_v3")
#: model, ranks that share experts (a peer that cannot is left out), low memory
CASES = [(model, 1, low) for low in (True, False) for model in MODELS] + [
    ("qwen3_moe", 2, True),
    ("deepseek_v3", 2, True),
]


#: so that what is freed is not resident; mmap for each tensor would make steps slower
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def run(python: Path, script: str, case: dict[str, Any]) -> dict[str, Any]:
    """Two starts of a trainer; returns seconds a step of the slowest rank, CPU seconds of all, peak of the largest."""
    timed = start(python, script, case, {})
    of_memory = start(python, script, {**case, "steps": 0}, RETURNED)
    return {
        "step_s": max(rank["step_s"] for rank in timed),
        "cpu_s": [sum(step) for step in zip(*(rank["cpu_s"] for rank in timed), strict=True)],
        "peak_mib": max(rank["peak_mib"] for rank in of_memory),
        "parameters": timed[0]["parameters"],
    }


def start(python: Path, script: str, case: dict[str, Any], environment: dict[str, str]) -> list[dict[str, Any]]:
    """What each rank measured."""
    out = scratch("peers") / "rank"
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", script]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}", **environment}
    env["HPCRL_BENCH_CASE"] = json.dumps({**case, "out": str(out)})
    done = subprocess.run(
        command, check=False, cwd=ROOT / "bench/peers", env=env, capture_output=True, text=True, timeout=1800
    )
    if done.returncode:
        sys.exit(f"{script} failed:\n{done.stderr[-4000:]}")
    return [json.loads(out.with_name(f"rank.{rank}").read_text()) for rank in range(RANKS)]


def measure(peers: dict[str, Path], case: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Each trainer's medians, and the least and most CPU seconds of a step."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    for number in range(rounds):
        # the order turns, so that none is always the first
        for name in list(peers)[number % len(peers) :] + list(peers)[: number % len(peers)]:
            found[name].append(run(peers[name], f"with_{name}.py", case))
    return {name: summary(rows) for name, rows in found.items()}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the rounds of one trainer."""
    cpu = [step for row in rows for step in row["cpu_s"]]
    medians = {key: statistics.median(row[key] for row in rows) for key in ("step_s", "peak_mib", "parameters")}
    return {**medians, "cpu_s": statistics.median(cpu), "cpu_s_range": [min(cpu), max(cpu)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torchtitan", type=Path, metavar="PYTHON", help="an interpreter that has torchtitan")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="which to train; all of them")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each trainer, which take turns")
    parser.add_argument("--steps", type=int, default=5, help="steps of a round")
    arguments = parser.parse_args()
    rows = []
    for model, ep, low_memory in CASES:
        if model not in arguments.models:
            continue
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
        # after each case: a run takes long
        settings = {"ranks": RANKS, "sequences": SEQUENCES, "tokens": TOKENS}
        record("trainer_peers", {**settings, "rounds": arguments.rounds, "steps": arguments.steps, "rows": rows})


if __name__ == "__main__":
    main()
