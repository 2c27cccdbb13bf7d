"""What a recipe says of memory, put to work in a model."""

from __future__ import annotations

import torch

from hpcrl.config.recipe import TrainerMemoryConfig
from hpcrl.modeling.decoder import Decoder, DecoderLayer
from hpcrl.trainer.memory.offload import ActivationOffload
from hpcrl.trainer.memory.recompute import Recomputation, hold_here

__all__ = ["apply_memory_tools"]


def apply_memory_tools(model: Decoder, config: TrainerMemoryConfig, device: torch.device) -> None:
    """Let the layers of ``model`` be computed on ``device`` as ``config`` says; before or after it is sharded."""
    if config.activation_checkpointing == "none":
        return
    bound_bytes = round(config.offload_in_flight_gib * 2**30)
    hold = ActivationOffload(device, bound_bytes=bound_bytes) if config.activation_offload else hold_here
    recomputation = Recomputation(selective=config.activation_checkpointing == "selective", hold=hold)
    for block in list(model.layers)[:: config.checkpoint_every_layers]:
        assert isinstance(block, DecoderLayer)
        block.run = recomputation
