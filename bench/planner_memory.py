"""Predicted and measured memory of the trainer, for every configuration it has.

Runs the project's own trainer (ranks over gloo on CPU; one rank on a GPU where there is one) on made-up batches and
compares the peak of live tensor bytes with `hpcrl.planning.memory.trainer`, asked as ``hpcrl plan`` asks it. A later
feature of the trainer joins by a row in `ROWS`: settings of the recipe. Host memory that a tool moves tensors to is
counted as well: on a processor it is the same.

    python bench/planner_memory.py [ROW ...] [--starts N]

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
from dataclasses import dataclass, field, replace
from typing import Any

import planner_memory_worker
import torch
from harness import ROOT, record, scratch

from hpcrl.config.load import load_recipe
from hpcrl.models.arch import ModelArch, arch_from_config
from hpcrl.planning.memory.fit import trainer_memory
from hpcrl.planning.memory.trainer import trainer_moments

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 4, "head_dim": 32}
SIGMOID: dict[str, Any] = {
    "intermediate_size": 768,
    "moe_intermediate_size": 288,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    **SIZES,
    **SIGMOID,
    "q_lora_rank": 128,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**GROUPED, "moe_intermediate_size": 288, "num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT,
    "glm_moe_dsa": {**LATENT, "index_n_heads": 8, "index_head_dim": 32, "index_topk": 64},
    "gpt_oss": {
        **GROUPED,
        "intermediate_size": 288,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
    "minimax_m2": {
        **GROUPED,
        "intermediate_size": 288,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "qk_norm_type": "per_layer",
    },
}
HEAVY = {"vocab_size": 512, "moe_intermediate_size": 544, "num_hidden_layers": 10}
FULL = "trainer.memory.activation_checkpointing=full"
HOST_OPTIMIZER = "trainer.memory.optimizer_offload=true"
PIECES = "trainer.memory.lm_head_chunk_tokens=256"
GATHER: dict[str, int | str] = {"cp": 2, "cp_scheme": "gather"}
#: with a bound of 1 MiB, the input of a layer of 1,000 tokens
OFFLOAD = (FULL, "trainer.memory.activation_offload=true", "trainer.memory.offload_in_flight_gib=0.001")
PHASES = {
    "loading": ("loading",),
    "forward and backward": ("logits", "backward", "reduction"),
    "optimizer": ("optimizer",),
    "publishing": ("publishing",),
}


class RowFailedError(Exception):
    """The trainer of a configuration did not come to its end."""


@dataclass(frozen=True)
class Row:
    """One configuration."""

    dtype: str = "float32"
    ranks: int = 1
    lengths: tuple[int, ...] = (240,) * 4
    micro_batches: int = 1
    sizes: dict[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    family: str = "qwen3_moe"
    degrees: dict[str, int | str] = field(default_factory=dict)
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
    "checkpoint beside": Row("bfloat16", 2, sizes=HEAVY, saves=True),
    "checkpoint beside, float32": Row(saves=True),
    "fp8 hand-off": Row("bfloat16", sizes=HEAVY, settings=("handoff.kind=fp8",)),
    "bfloat16 hand-off": Row(settings=("handoff.dtype=bfloat16",)),
    "deltas": Row("bfloat16", 2, sizes=HEAVY, settings=("handoff.delta_chain=4",)),
    "parameters": Row("bfloat16", 2, lengths=(240,), sizes=HEAVY),
    "parameters, float32": Row(lengths=(240,), sizes=HEAVY),
    "parameters, 4 ranks": Row("float32", 4, lengths=(240,), sizes=HEAVY),
    "ep 2": Row(ranks=2, degrees={"ep": 2}),
    "ep 2, 4 ranks": Row(ranks=4, degrees={"ep": 2}),
    "cp 2": Row(ranks=2, lengths=(480,) * 4, degrees={"cp": 2}),
    "cp 2, ring": Row(ranks=2, lengths=(480,) * 4, degrees={"cp": 2, "cp_scheme": "ring"}),
    "ep 2, cp 2": Row(ranks=2, lengths=(480,) * 4, degrees={"ep": 2, "cp": 2}),
    "2 copies": Row(ranks=2, degrees={"dp_replicate": 2}),
    "2 copies of 2 ranks": Row(ranks=4, degrees={"dp_replicate": 2}),
    "full checkpointing": Row(settings=(FULL,)),
    "inputs on the host": Row(settings=OFFLOAD),
    "optimizer on the host": Row(settings=(HOST_OPTIMIZER,)),
    "both on the host, 2 ranks": Row(ranks=2, settings=(*OFFLOAD, HOST_OPTIMIZER)),
    "head in pieces": Row(lengths=(480,) * 4, sizes={"vocab_size": 16384}, settings=(PIECES,)),
    "DeepSeek-V3": Row(family="deepseek_v3"),
    "DeepSeek-V3, ep 2": Row(ranks=2, family="deepseek_v3", degrees={"ep": 2}),
    "DeepSeek-V3, latents gathered": Row(ranks=2, lengths=(480,) * 4, family="deepseek_v3", degrees=GATHER),
    "GLM-5": Row(family="glm_moe_dsa"),
    "GLM-5, full checkpointing, ep 2": Row(ranks=2, family="glm_moe_dsa", settings=(FULL,), degrees={"ep": 2}),
    "gpt-oss": Row(family="gpt_oss"),
    "gpt-oss, ep 2": Row(ranks=2, family="gpt_oss", degrees={"ep": 2}),
    "MiniMax-M2": Row(family="minimax_m2"),
}


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
    """The smallest peak over ranks of each phase (see `planner_memory_worker.AllocatedBytes`)."""
    root = scratch("planner-memory")
    planner_memory_worker.write_model(root / "model", row.arch)
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
    command = [sys.executable, "-m", *launch, planner_memory_worker.__name__, str(root / "settings.json")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RowFailedError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    peaks = [json.loads((root / f"rank-{rank}.json").read_text()) for rank in range(row.ranks)]
    return {phase: min(peak[phase] for peak in peaks) for phase in PHASES}


def main() -> None:
    """Compare, print and record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="configurations; without any, all", metavar="NAME")
    parser.add_argument("--starts", type=int, default=1, metavar="N", help="of each with several ranks")
    arguments = parser.parse_args()
    names = arguments.names
    if unknown := set(names) - ROWS.keys():
        parser.error(f"there is no configuration {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
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


if __name__ == "__main__":
    main()
