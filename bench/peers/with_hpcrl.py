"""One rank of hpcrl's trainer: its policy and its loss, on a micro-batch as the dock sends it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from msgspec import structs
from planning.memory_worker import batch as rollouts_of
from sizes import COMMON, MODELS, batch, case, measure, status_mib

from hpcrl.config.recipe import Recipe
from hpcrl.dock.wire import BatchShard
from hpcrl.modeling.blocks import local_part
from hpcrl.models.arch import arch_from_config
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step.policy import TrainerPolicy

#: what a peer's "low memory" has too: all layers are computed again, and logits are never whole
LOW_MEMORY = {"activation_checkpointing": "full", "lm_head_chunk_tokens": "auto"}


def recipe_of(spec: dict[str, Any]) -> Recipe:
    value = {
        "name": "peers",
        "model": {"path": "unused"},
        "environments": [{"name": "toy", "kind": "custom", "factory": "toy:Toy", "weight": 1.0}],
        "trainer": {
            "steps": 1000,
            "dtype": "float32",
            "parallelism": {"ep": spec["ep"]},
            **({"memory": LOW_MEMORY} if spec["low_memory"] else {}),
        },
    }
    return Recipe.model_validate(value)


def shard_of(ids: torch.Tensor, step: int, rank: int, ranks: int) -> BatchShard:
    """Every token but the first of each sequence is trained."""
    sequences, tokens = ids.shape
    settings = {"lengths": [tokens] * sequences, "micro_batches": 1}
    shard = rollouts_of(settings, step=step, rank=rank, world_size=ranks, vocab=MODELS[case()["model"]]["vocab_size"])
    own = structs.replace(shard.micro_batches[0], token_ids=ids.reshape(-1).numpy().astype(np.int32))
    return structs.replace(shard, micro_batches=[own])


def main() -> None:
    torch.set_num_threads(1)
    spec = case()
    recipe, arch = recipe_of(spec), arch_from_config({**MODELS[spec["model"]], **COMMON})
    with distributed(timeout_s=600, parallelism=recipe.trainer.parallelism) as parallel:
        before = status_mib("VmRSS")
        policy = TrainerPolicy(recipe, arch, parallel, model_dir=None)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                local = local_part(parameter)
                local.fill_(1.0) if parameter.dim() == 1 else local.normal_(0.0, 0.02)
            for buffer in policy.model.buffers():
                local_part(buffer).zero_()
        world = parallel.world
        ids, number = batch(spec, world.rank), 0

        def step() -> float:
            nonlocal number
            number += 1
            sums = policy.forward_backward(shard_of(ids, number, world.rank, world.size))
            policy.optimizer_step(number)
            return float(sums.reduce(world).loss)

        measure(spec, world.rank, before, step, arch.num_parameters())


if __name__ == "__main__":
    main()
