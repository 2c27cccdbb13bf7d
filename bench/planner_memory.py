"""Predicted and measured memory of the trainer, for every configuration it has.

Runs the project's own trainer (ranks over gloo on CPU; one rank on a GPU where there is one) on made-up batches and
compares the peak of live tensor bytes with `hpcrl.planning.memory.trainer`. A later feature of the trainer joins by
a row in `ROWS`: a setting of the recipe, and the field of `TrainerMemory` that it is planned with.

    python bench/planner_memory.py [ROW ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import planner_memory_worker
import torch
from harness import ROOT, record, scratch

from hpcrl.models.arch import ModelArch, Qwen3MoeArch
from hpcrl.planning.memory.settings import TrainerMemory
from hpcrl.planning.memory.trainer import trainer_moments

BASE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "moe_intermediate_size": 288,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
}
HEAVY = {"vocab_size": 512, "moe_intermediate_size": 544, "num_hidden_layers": 10}
PHASES = {
    "loading": ("loading",),
    "forward and backward": ("logits", "backward", "reduction"),
    "optimizer": ("optimizer",),
    "publishing": ("publishing",),
}


@dataclass(frozen=True)
class Row:
    """One configuration."""

    dtype: str = "float32"
    ranks: int = 1
    lengths: tuple[int, ...] = (240,) * 4
    micro_batches: int = 1
    sizes: dict[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    memory: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "float32": Row(),
    "bfloat16": Row("bfloat16"),
    "2 ranks": Row("bfloat16", 2),
    "4 ranks": Row("bfloat16", 4),
    "float32, 2 ranks": Row("float32", 2),
    "float32, 4 ranks": Row("float32", 4),
    "3 micro-batches": Row("bfloat16", 2, micro_batches=3),
    "3 micro-batches, float32": Row(micro_batches=3),
    "long sequence": Row("bfloat16", lengths=(2048,)),
    "twice the tokens": Row("bfloat16", 2, lengths=(240,) * 8),
    "uneven lengths": Row("float32", 2, lengths=(700, 100, 60, 100)),
    "large vocabulary": Row("bfloat16", 2, sizes={"vocab_size": 16384}),
    "top 4 of 16": Row("bfloat16", sizes={"num_experts": 16, "num_experts_per_tok": 4}),
    "tied embeddings": Row(sizes={"tie_word_embeddings": True}),
    "checkpoint beside": Row("bfloat16", 2, sizes=HEAVY, memory={"saves_aside": True}),
    "checkpoint beside, float32": Row(memory={"saves_aside": True}),
    "fp8 hand-off": Row("bfloat16", sizes=HEAVY, settings=("handoff.kind=fp8",), memory={"handoff_dtype": "fp8"}),
    "bfloat16 hand-off": Row(settings=("handoff.dtype=bfloat16",), memory={"handoff_dtype": "bfloat16"}),
    "deltas": Row("bfloat16", 2, sizes=HEAVY, settings=("handoff.delta_chain=4",), memory={"images": 2}),
    "parameters": Row("bfloat16", 2, lengths=(240,), sizes=HEAVY),
    "parameters, float32": Row(lengths=(240,), sizes=HEAVY),
    "parameters, 4 ranks": Row("float32", 4, lengths=(240,), sizes=HEAVY),
}


def predicted(row: Row, arch: ModelArch) -> dict[str, int]:
    """The largest moment of each phase."""
    tokens = sum(row.lengths)
    memory = TrainerMemory(
        ranks=row.ranks,
        micro_batch_tokens=tokens,
        trained_tokens=tokens - len(row.lengths),
        dtype=row.dtype,
        accumulates=row.micro_batches > 1,
        device="cpu",
        eager=True,
        **row.memory,
    )
    moments = trainer_moments(arch.facts, memory)
    return {phase: max(m.total for m in moments if m.name.startswith(names)) for phase, names in PHASES.items()}


def measured(row: Row, arch: ModelArch) -> dict[str, int]:
    """The smallest peak over ranks of each phase (see `planner_memory_worker.AllocatedBytes`)."""
    root = scratch("planner-memory")
    planner_memory_worker.write_model(root / "model", arch)
    settings = {
        "model": str(root / "model"),
        "out": str(root),
        "recipe": "quickstart",
        "set": [f"trainer.dtype={row.dtype}", *row.settings],
        "lengths": row.lengths,
        "micro_batches": row.micro_batches,
        "saves": row.memory.get("saves_aside", False),
    }
    (root / "settings.json").write_text(json.dumps(settings))
    launch = ["hpcrl.trainer.launcher", "--ranks", str(row.ranks)] if row.ranks > 1 else []
    command = [sys.executable, "-m", *launch, planner_memory_worker.__name__, str(root / "settings.json")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    peaks = [json.loads((root / f"rank-{rank}.json").read_text()) for rank in range(row.ranks)]
    return {phase: min(peak[phase] for peak in peaks) for phase in PHASES}


def main() -> None:
    """Compare, print and record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="configurations; without any, all", metavar="NAME")
    names = parser.parse_args().names
    if unknown := set(names) - ROWS.keys():
        parser.error(f"there is no configuration {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    on_gpu = torch.cuda.is_available()
    rows, worst = [], 0.0
    print(f"{'configuration':26}{'peak in':24}{'predicted':>12}{'measured':>12}{'off by':>8}")
    for name, row in ROWS.items():
        if (names and name not in names) or (on_gpu and row.ranks > 1):
            continue
        arch = Qwen3MoeArch(**{**BASE, **row.sizes})
        started = time.monotonic()
        ours, theirs = predicted(row, arch), measured(row, arch)
        where, peak = max(theirs, key=lambda phase: theirs[phase]), max(theirs.values())
        off = max(ours.values()) / peak - 1
        worst = max(worst, abs(off))
        print(f"{name:26}{where:24}{max(ours.values()) / 1e6:9.1f} MB{peak / 1e6:9.1f} MB{off:8.1%}", flush=True)
        by_phase = {phase: {"predicted": ours[phase], "measured": theirs[phase]} for phase in PHASES}
        seconds = round(time.monotonic() - started, 1)
        rows.append({"name": name, "off_by": round(off, 4), "phases": by_phase, "seconds": seconds})
        # at once: a row that fails must not lose the others
        save(rows, torch.cuda.get_device_name() if on_gpu else "cpu")
    print(f"worst of these: {worst:.1%}")


def save(rows: list[dict[str, Any]], device: str) -> None:
    """Record rows; those of other configurations that were measured before stay."""
    name = "planner_memory" if device == "cpu" else "planner_memory_gpu"
    path = ROOT / "bench/results" / f"{name}.json"
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    known = {row["name"]: row for row in (*old, *rows)}
    merged = [known[key] for key in ROWS if key in known]
    what = "largest bytes of live tensors on a rank: the allocator's report by torch's profiler"
    worst = max(abs(row["off_by"]) for row in merged)
    record(name, {"measure": what, "device": device, "worst_off_by": worst, "rows": merged})


if __name__ == "__main__":
    main()
