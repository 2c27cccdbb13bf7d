"""What each memory tool of the trainer saves and costs, beside training without, in one run.

One rank trains the same model on the same batches with every tool in turn, on the processor; then two ranks do so with
the dimensions of a mesh that save memory, beside two that share parameters alone; and two with a model of latent
attention and one long sequence, by each way of context parallelism that it has. Memory is the most bytes of live
tensors in a step, as torch's profiler records each allocation; what a tool keeps in host memory is left out (its
buffers are made by numpy here, which the profiler does not see). Times are those of the processor, as the machine may
have other work, the shortest of some steps, for each token; tools take turns.

    python bench/memory_tools.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import ROOT, record, scratch
from planning import memory_worker as worker

from hpcrl.config.load import load_recipe
from hpcrl.config.recipe import TrainerMemoryConfig, TrainerParallelismConfig
from hpcrl.modeling.blocks import local_part
from hpcrl.modeling.memory import host_memory
from hpcrl.models.arch import DeepseekV3Arch, ModelArch, Qwen3MoeArch, load_arch
from hpcrl.planning.memory.fit import trainer_memory
from hpcrl.planning.memory.trainer import trainer_peak
from hpcrl.trainer.memory import copies, optimizer
from hpcrl.trainer.parallel.mesh import Parallel, distributed, parallel_of
from hpcrl.trainer.step.policy import TrainerPolicy

ARCH = Qwen3MoeArch(
    vocab_size=8192,
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    moe_intermediate_size=192,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=4096,
)
LATENT = DeepseekV3Arch(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=8,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    intermediate_size=768,
    moe_intermediate_size=192,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.0,
    first_k_dense_replace=0,
    max_position_embeddings=4096,
)
LENGTHS = (256,) * 4
LONG = (2048,)
FULL = {"activation_checkpointing": "full"}
OFFLOAD: dict[str, Any] = {**FULL, "activation_offload": True, "offload_in_flight_gib": 2 / 1024}


@dataclass(frozen=True)
class Tool:
    """Settings of a trainer: of its memory, and of its mesh."""

    memory: dict[str, Any] = field(default_factory=dict)
    degrees: dict[str, Any] = field(default_factory=dict)


#: on the processor ``parameter_offload`` moves nothing: host and device are one
TOOLS = {
    "none": Tool(),
    "selective checkpointing": Tool({"activation_checkpointing": "selective"}),
    "full checkpointing": Tool(FULL),
    "full, every second layer": Tool({**FULL, "checkpoint_every_layers": 2}),
    "full, inputs on the host": Tool(OFFLOAD),
    "head in pieces": Tool({"lm_head_chunk_tokens": "auto"}),
    "optimizer on the host": Tool({"optimizer_offload": True}),
    "layers compiled": Tool({"compile": True}),
    "full checkpointing, compiled": Tool({**FULL, "compile": True}),
    "all together": Tool({**OFFLOAD, "lm_head_chunk_tokens": "auto", "optimizer_offload": True}),
}
#: of two ranks
SHARED = {
    "two ranks, none": Tool(),
    "two ranks, `ep` 2": Tool(degrees={"ep": 2}),
    "two ranks, `cp` 2": Tool(degrees={"cp": 2}),
    "two ranks, `ep` 2 and `cp` 2": Tool(degrees={"ep": 2, "cp": 2}),
}
WAYS = {
    "latents, one long sequence, none": Tool(),
    **{
        f"latents, `cp` 2, `{scheme}`": Tool(degrees={"cp": 2, "cp_scheme": scheme})
        for scheme in ("ulysses", "ring", "gather")
    },
}


@dataclass(frozen=True)
class Group:
    """Tools of which the first is what the others are compared with."""

    arch: ModelArch
    lengths: tuple[int, ...]
    tools: dict[str, Tool]
    ranks: int = 1


GROUPS = {
    "one": Group(ARCH, LENGTHS, TOOLS),
    "shared": Group(ARCH, LENGTHS, SHARED, ranks=2),
    "latents": Group(LATENT, LONG, WAYS, ranks=2),
}
NO_FIGURE = "layers are counted as they are written: what a compiler fuses, and so no longer keeps, it does not know"
ROUNDS, BUCKET_BYTES = 3, 4 << 20


def unseen(size: int, device: torch.device) -> torch.Tensor:
    """As `hpcrl.modeling.memory.host_memory.pinned_bytes`, but not of torch's allocator."""
    return torch.from_numpy(np.empty(size, np.uint8))


class Trainer:
    """A trainer with one set of tools."""

    def __init__(self, group: Group, tool: Tool, model_dir: Path, parallel: Parallel) -> None:
        self.group = group
        recipe = load_recipe("quickstart", [f"model.path={model_dir}", "trainer.micro_batch_tokens=2048"]).value
        parallelism = TrainerParallelismConfig(**tool.degrees)
        memory = TrainerMemoryConfig(**tool.memory)
        changed = {"ranks": parallel.world.size, "memory": memory, "parallelism": parallelism}
        self.recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update=changed)})
        own = parallel_of(parallelism, parallel.device)
        self.policy = TrainerPolicy(self.recipe, load_arch(model_dir), own, model_dir=model_dir)
        self.seconds: dict[str, float] = {}
        self.steps = 0

    def step(self) -> None:
        """One step; keeps the shortest time of each phase, for each token of all ranks."""
        self.steps += 1
        data = self.policy.parallel.data
        settings = {"lengths": self.group.lengths, "micro_batches": 1}
        vocab = self.group.arch.vocab_size
        shard = worker.batch(settings, step=self.steps, rank=data.rank, world_size=data.size, vocab=vocab)
        for name, work in (
            ("forward_backward_s", lambda: self.policy.forward_backward(shard)),
            ("optimizer_s", lambda: self.policy.optimizer_step(self.steps)),
        ):
            started = time.process_time()
            work()
            seconds = (time.process_time() - started) / data.size
            self.seconds[name] = min(seconds, self.seconds.get(name, seconds))

    def peak(self) -> int:
        """Most bytes on the device in a step: what lives between steps, and the rise over it.

        The smallest of some steps: what threads of gloo free escapes the profiler (`worker.AllocatedBytes`).
        """
        counter = worker.AllocatedBytes()
        with counter.counting():
            for _ in range(ROUNDS):
                with counter.phase("step"):
                    self.step()
        lasting = [local_part(parameter) for parameter in self.policy.model.parameters()]
        if not self.recipe.trainer.memory.optimizer_offload:
            lasting += [local_part(t) for state in self.policy.optimizer.state.values() for t in state.values()]
        return counter.rises["step"] + sum(t.numel() * t.element_size() for t in lasting)

    def predicted(self) -> int:
        """By the planner, without a version that is published: nothing is here."""
        tokens = sum(self.group.lengths)
        memory = replace(
            trainer_memory(self.recipe, device="cpu"),
            micro_batch_tokens=tokens,
            trained_tokens=tokens - len(self.group.lengths),
            accumulates=False,
            saves_aside=False,
            images=0,
            host_is_apart=True,
            optimizer_bucket_bytes=BUCKET_BYTES,
            # random weights deal tokens out evenly
            expert_imbalance=1.0,
        )
        return trainer_peak(self.group.arch.facts, memory).total


def rows_of(group: Group, model_dir: Path, parallel: Parallel) -> list[dict[str, Any]]:
    """What is measured of each, beside the first."""
    trainers = {name: Trainer(group, tool, model_dir, parallel) for name, tool in group.tools.items()}
    for _ in range(1 + ROUNDS):
        for trainer in trainers.values():
            trainer.step()
    seconds = {name: dict(trainer.seconds) for name, trainer in trainers.items()}
    rows: list[dict[str, Any]] = []
    for name, trainer in trainers.items():
        peaks: list[float] = parallel.world.gather(float(trainer.peak()))
        ours, peak = trainer.predicted(), min(peaks)
        counted = not trainer.recipe.trainer.memory.compile
        says = {"planner_off_by": round(ours / peak - 1, 3)} if counted else {"planner": NO_FIGURE}
        rows.append({"tool": name, "peak_mib": round(peak / 2**20, 1), **seconds[name], **says})
    base = rows[0]
    whole = base["forward_backward_s"] + base["optimizer_s"]
    for row in rows:
        row["memory_ratio"] = round(row["peak_mib"] / base["peak_mib"], 3)
        row["time_ratio"] = round((row["forward_backward_s"] + row["optimizer_s"]) / whole, 3)
        row |= {name: round(row[name], 3) for name in ("forward_backward_s", "optimizer_s")}
    return rows


def measure(group: Group, model_dir: Path) -> list[dict[str, Any]]:
    """The rows of one rank, or of each that a launcher has started."""
    torch.set_num_threads(1)
    copies.pinned_bytes = host_memory.pinned_bytes = unseen
    kept = optimizer.HostAdamW.__init__.__kwdefaults__
    assert kept is not None
    kept["bucket_bytes"] = BUCKET_BYTES
    with distributed(timeout_s=240) as parallel:
        return rows_of(group, model_dir, parallel)


def of_group(name: str, root: Path) -> list[dict[str, Any]]:
    """The rows of a group, by processes of their own."""
    group, directory = GROUPS[name], root / name
    directory.mkdir()
    worker.write_model(directory / "model", group.arch)
    launch = ["hpcrl.trainer.launcher", "--ranks", str(group.ranks)] if group.ranks > 1 else []
    command = [sys.executable, "-m", *launch, "memory_tools", "--ranks-of", str(directory)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    subprocess.run(command, check=True, env=env, timeout=900)
    found: list[dict[str, Any]] = json.loads((directory / "rows.json").read_text())
    return found


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks-of", type=Path, help=argparse.SUPPRESS)
    directory: Path | None = parser.parse_args().ranks_of
    if directory is not None:
        rows = measure(GROUPS[directory.name], directory / "model")
        if os.environ.get("RANK", "0") == "0":
            (directory / "rows.json").write_text(json.dumps(rows))
        return
    root = scratch("memory-tools")
    rows = [row for name in GROUPS for row in of_group(name, root)]
    print(f"{'tool':36}{'peak MiB':>10}{'memory':>8}{'time':>8}{'planner':>9}")
    for row in rows:
        says = f"{row['planner_off_by']:+9.1%}" if "planner_off_by" in row else f"{'none':>9}"
        print(f"{row['tool']:36}{row['peak_mib']:10.1f}{row['memory_ratio']:8.2f}{row['time_ratio']:8.2f}{says}")
    record("memory_tools", {"tokens": sum(LENGTHS), "parameters": ARCH.num_parameters(), "rows": rows})


if __name__ == "__main__":
    main()
