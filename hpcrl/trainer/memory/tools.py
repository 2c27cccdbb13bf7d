"""What a recipe says of memory, put to work in a model."""

from __future__ import annotations

from hpcrl.config.recipe import TrainerMemoryConfig
from hpcrl.modeling.decoder import Decoder, DecoderLayer
from hpcrl.trainer.memory.recompute import Recomputation

__all__ = ["apply_memory_tools"]


def apply_memory_tools(model: Decoder, config: TrainerMemoryConfig) -> None:
    """Let the layers of ``model`` be computed as ``config`` says; before or after it is sharded."""
    if config.activation_checkpointing != "none":
        recomputation = Recomputation(selective=config.activation_checkpointing == "selective")
        for block in list(model.layers)[:: config.checkpoint_every_layers]:
            assert isinstance(block, DecoderLayer)
            block.run = recomputation
