"""The part of a GPU's memory that the trainer may have where an engine has the rest."""

from __future__ import annotations

import torch

from hpcrl.config.recipe import Recipe


def keep_to_share(device: torch.device, recipe: Recipe) -> None:
    """Limit torch's allocator to what engines on the same GPUs leave.

    Without a limit a trainer that needs more than was planned would take memory that an engine asks for later, and the
    engine would fail in its place.

    Parameters
    ----------
    device:
        Device of this rank; a limit exists on CUDA devices alone.
    """
    engine = recipe.engine
    on_gpus = engine.backend == "vllm" and engine.device == "auto"
    if device.type != "cuda" or not engine.shares_gpus or not on_gpus or recipe.sft is not None:
        return
    torch.cuda.set_per_process_memory_fraction(1.0 - engine.memory.gpu_memory_utilization, device)
