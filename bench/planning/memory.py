"""Predicted and measured memory of the trainer, for every configuration of ``cases/memory.yaml``.

Runs the project's own trainer (ranks over gloo on CPU; one rank on a GPU where there is one) on made-up batches and
compares the peak of live tensor bytes with `hpcrl.planning.memory.trainer`, asked as ``hpcrl plan`` asks it. Host
memory that a tool moves tensors to is counted as well: on a processor it is the same.

Of several ranks a peak comes out higher by what threads of gloo free unseen, another time by something else: of several
starts the smallest is nearest to the truth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import msgspec
import torch
from harness import ROOT, record, scratch

from hpcrl.config.load import load_recipe
from hpcrl.models.arch import ModelArch, arch_from_config
from hpcrl.planning.memory.fit import trainer_memory
from hpcrl.planning.memory.trainer import trainer_moments
from planning import memory_worker
from planning.case_files import read_cases

PHASES = {
    "loading": ("loading",),
    "forward and backward": ("logits", "backward", "reduction"),
    "optimizer": ("optimizer",),
    "publishing": ("publishing",),
}


class RowFailedError(Exception):
    """The trainer of a configuration did not come to its end."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One configuration."""

    dtype: str = "float32"
    ranks: int = 1
    lengths: tuple[int, ...] = (240,) * 4
    micro_batches: int = 1
    sizes: dict[str, Any] = {}
    settings: tuple[str, ...] = ()
    family: str = "qwen3_moe"
    degrees: dict[str, int | str] = {}
    saves: bool = False

    @property
    def arch(self) -> ModelArch:
        """The model."""
        return arch_from_config({"model_type": self.family, **FAMILIES[self.family], **self.sizes})

    @property
    def recipe_settings(self) -> list[str]:
        """What the recipe differs from the quickstart in."""
        parallel = [f"trainer.parallelism.{name}={value}" for name, value in self.degrees.items()]
        ranks = [f"trainer.ranks={self.ranks}", f"trainer.dtype={self.dtype}"]
        return [*ranks, *parallel, *self.settings]


CASES = read_cases("memory")
FAMILIES: dict[str, dict[str, Any]] = CASES["families"]
ROWS = msgspec.convert(CASES["rows"], dict[str, Row])


def predicted(row: Row) -> dict[str, int]:
    """The largest moment of each phase."""
    tokens = sum(row.lengths)
    recipe = load_recipe("quickstart", row.recipe_settings).value
    memory = replace(
        trainer_memory(recipe, device="cpu"),
        micro_batch_tokens=tokens,
        trained_tokens=tokens - len(row.lengths),
        accumulates=row.micro_batches > 1,
        saves_aside=row.saves,
        # random weights deal tokens out evenly
        expert_imbalance=1.0,
    )
    moments = trainer_moments(row.arch.facts, memory)
    return {phase: max(m.total for m in moments if m.name.startswith(names)) for phase, names in PHASES.items()}


def measured(row: Row) -> dict[str, int]:
    """The smallest peak over ranks of each phase (see `memory_worker.AllocatedBytes`)."""
    root = scratch("planner-memory")
    memory_worker.write_model(root / "model", row.arch)
    settings = {
        "model": str(root / "model"),
        "out": str(root),
        "recipe": "quickstart",
        "set": row.recipe_settings,
        "lengths": row.lengths,
        "micro_batches": row.micro_batches,
        "saves": row.saves,
    }
    (root / "settings.json").write_text(json.dumps(settings))
    launch = ["hpcrl.trainer.launcher", "--ranks", str(row.ranks)] if row.ranks > 1 else []
    command = [sys.executable, "-m", *launch, memory_worker.__name__, str(root / "settings.json")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RowFailedError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    peaks = [json.loads((root / f"rank-{rank}.json").read_text()) for rank in range(row.ranks)]
    return {phase: min(peak[phase] for peak in peaks) for phase in PHASES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what this part takes."""
    parser.add_argument("names", nargs="*", help="configurations; without any, all", metavar="NAME")
    parser.add_argument("--starts", type=int, default=1, metavar="N", help="of each with several ranks")


def run(arguments: argparse.Namespace) -> None:
    """Compare, print and record."""
    names = arguments.names
    if unknown := set(names) - ROWS.keys():
        sys.exit(f"there is no configuration {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    on_gpu = torch.cuda.is_available()
    rows, failed, worst = [], list[str](), 0.0
    print(f"{'configuration':34}{'peak in':24}{'predicted':>12}{'measured':>12}{'off by':>8}")
    for name, row in ROWS.items():
        if (names and name not in names) or (on_gpu and row.ranks > 1):
            continue
        started = time.monotonic()
        ours = predicted(row)
        try:
            starts = [measured(row) for _ in range(arguments.starts if row.ranks > 1 else 1)]
        except RowFailedError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        theirs = {phase: min(start[phase] for start in starts) for phase in PHASES}
        found = compare(name, theirs)
        where, peak, off = max(theirs, key=lambda phase: theirs[phase]), max(theirs.values()), found["off_by"]
        worst = max(worst, abs(off))
        print(f"{name:34}{where:24}{max(ours.values()) / 1e6:9.1f} MB{peak / 1e6:9.1f} MB{off:8.1%}", flush=True)
        rows.append(found | {"seconds": round(time.monotonic() - started, 1)})
        # at once: a run is long
        save(rows, torch.cuda.get_device_name() if on_gpu else "cpu")
    print(f"worst of these: {worst:.1%}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def compare(name: str, theirs: dict[str, int]) -> dict[str, Any]:
    """What is recorded of a configuration whose phases were measured."""
    ours = predicted(ROWS[name])
    phases = {phase: {"predicted": ours[phase], "measured": theirs[phase]} for phase in PHASES}
    return {"name": name, "off_by": round(max(ours.values()) / max(theirs.values()) - 1, 4), "phases": phases}


def save(rows: list[dict[str, Any]], device: str) -> None:
    """Record rows; those of other configurations that were measured before stay, beside what is predicted now."""
    name = "planner_memory" if device == "cpu" else "planner_memory_gpu"
    path = ROOT / "bench/results" / f"{name}.json"
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    known = {row["name"]: row for row in (*old, *rows)}
    merged = []
    for key in ROWS:
        if key in known:
            theirs = {phase: figures["measured"] for phase, figures in known[key]["phases"].items()}
            merged.append(known[key] | compare(key, theirs))
    what = "largest bytes of live tensors on a rank: the allocator's report by torch's profiler"
    worst = max(abs(row["off_by"]) for row in merged)
    record(name, {"measure": what, "device": device, "worst_off_by": worst, "rows": merged})
