"""What each memory tool of the trainer saves and costs, beside training without, in one run.

One rank trains the same model on the same batches with every tool in turn, on the processor. Memory is the most bytes
of live tensors in a step, as torch's profiler records each allocation; what a tool keeps in host memory is left
out (its buffers are made by numpy here, which the profiler does not see). Times are those of the processor, as the
machine may have other work, the shortest of some steps; tools take turns.

    python bench/memory_tools.py
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import planner_memory_worker as worker
import torch
from harness import record, scratch
from torch import Tensor

from hpcrl.config.load import load_recipe
from hpcrl.models.arch import Qwen3MoeArch, load_arch
from hpcrl.planning.memory.settings import TrainerMemory
from hpcrl.planning.memory.trainer import trainer_peak
from hpcrl.trainer.memory import offload, optimizer
from hpcrl.trainer.parallel.mesh import Parallel, distributed
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
LENGTHS = (256,) * 4
FULL = {"activation_checkpointing": "full"}
#: on the processor ``parameter_offload`` moves nothing: host and device are one
TOOLS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "full checkpointing": FULL,
    "full, every second layer": {**FULL, "checkpoint_every_layers": 2},
    "full, inputs on the host": {**FULL, "activation_offload": True, "offload_in_flight_gib": 2 / 1024},
    "head in pieces": {"lm_head_chunk_tokens": "auto"},
    "optimizer on the host": {"optimizer_offload": True},
    "layers compiled": {"compile": True},
    "full checkpointing, compiled": {**FULL, "compile": True},
    "all together": {
        **FULL,
        "activation_offload": True,
        "offload_in_flight_gib": 2 / 1024,
        "lm_head_chunk_tokens": "auto",
        "optimizer_offload": True,
    },
}
ROUNDS, BUCKET_BYTES = 3, 4 << 20


def unseen(tensor: Tensor, device: torch.device) -> Tensor:
    """As `hpcrl.trainer.memory.copies.host_like`, but not of torch's allocator."""
    assert tensor.dtype == torch.float32
    return torch.from_numpy(np.empty(tensor.shape, np.float32))


class Tool:
    """A trainer with one set of tools."""

    def __init__(self, settings: dict[str, Any], model_dir: Any, parallel: Parallel, **trainer: Any) -> None:
        recipe = load_recipe("quickstart", [f"model.path={model_dir}", "trainer.micro_batch_tokens=2048"]).value
        memory = type(recipe.trainer.memory)(**settings)
        changed = recipe.trainer.model_copy(update={"memory": memory, **trainer})
        recipe = recipe.model_copy(update={"trainer": changed})
        self.policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        self.seconds: dict[str, float] = {}
        self.settings, self.steps = settings, 0

    def step(self) -> None:
        """One step; keeps the shortest time of each phase."""
        self.steps += 1
        settings = {"lengths": LENGTHS, "micro_batches": 1}
        shard = worker.batch(settings, step=self.steps, rank=0, world_size=1, vocab=ARCH.vocab_size)
        for name, work in (
            ("forward_backward_s", lambda: self.policy.forward_backward(shard)),
            ("optimizer_s", lambda: self.policy.optimizer_step(self.steps)),
        ):
            started = time.process_time()
            work()
            seconds = time.process_time() - started
            self.seconds[name] = min(seconds, self.seconds.get(name, seconds))

    def peak(self) -> int:
        """Most bytes on the device in a step: what lives between steps, and the rise over it."""
        counter = worker.AllocatedBytes()
        with counter.counting(), counter.phase("step"):
            self.step()
        moments = self.settings.get("optimizer_offload", False)
        lasting = [*self.policy.model.parameters()]
        if not moments:
            lasting += [t for state in self.policy.optimizer.state.values() for t in state.values()]
        return counter.rises["step"] + sum(t.numel() * t.element_size() for t in lasting)


def predicted(settings: dict[str, Any]) -> int:
    """By the planner, without a version that is published: nothing is here."""
    known = {
        name: settings[name] for name in ("activation_checkpointing", "checkpoint_every_layers") if name in settings
    }
    if "lm_head_chunk_tokens" in settings:
        known["lm_head_chunk_tokens"] = 1024
    tokens = sum(LENGTHS)
    memory = TrainerMemory(
        ranks=1,
        micro_batch_tokens=tokens,
        trained_tokens=tokens - len(LENGTHS),
        dtype="float32",
        accumulates=False,
        device="cpu",
        eager=True,
        images=0,
        **known,
    )
    return trainer_peak(ARCH.facts, memory).total


def main() -> None:
    """Measure, print and record."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    root = scratch("memory-tools")
    worker.write_model(root / "model", ARCH)
    optimizer.host_like = offload.host_like = unseen
    kept = optimizer.HostAdamW.__init__.__kwdefaults__
    assert kept is not None
    kept["bucket_bytes"] = BUCKET_BYTES
    rows: list[dict[str, Any]] = []
    with distributed(timeout_s=60) as parallel:
        tools = {name: Tool(settings, root / "model", parallel) for name, settings in TOOLS.items()}
        for tool in tools.values():
            tool.step()
        for _ in range(ROUNDS):
            for tool in tools.values():
                tool.step()
        seconds = {name: dict(tool.seconds) for name, tool in tools.items()}
        for name, tool in tools.items():
            rows.append({"tool": name, "peak_mib": round(tool.peak() / 2**20, 1), **seconds[name]})
    base = rows[0]
    whole = base["forward_backward_s"] + base["optimizer_s"]
    print(f"{'tool':28}{'peak MiB':>10}{'memory':>8}{'time':>8}")
    for row in rows:
        row["memory_ratio"] = round(row["peak_mib"] / base["peak_mib"], 3)
        row["time_ratio"] = round((row["forward_backward_s"] + row["optimizer_s"]) / whole, 3)
        # the planner counts layers as they are
        no_figure = any(name in TOOLS[row["tool"]] for name in ("activation_offload", "optimizer_offload", "compile"))
        ours = predicted(TOOLS[row["tool"]]) / 2**20
        row["planner_off_by"] = None if no_figure else round(ours / row["peak_mib"] - 1, 3)
        print(f"{row['tool']:28}{row['peak_mib']:10.1f}{row['memory_ratio']:8.2f}{row['time_ratio']:8.2f}")
        row |= {name: round(row[name], 3) for name in ("forward_backward_s", "optimizer_s")}
    record("memory_tools", {"tokens": sum(LENGTHS), "parameters": ARCH.num_parameters(), "rows": rows})


if __name__ == "__main__":
    main()
