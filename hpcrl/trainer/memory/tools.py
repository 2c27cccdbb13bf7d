"""Applies the memory settings of a recipe to a model."""

from __future__ import annotations

import torch

from hpcrl.config.recipe import TrainerMemoryConfig
from hpcrl.modeling.decoder import Decoder, DecoderLayer
from hpcrl.trainer.memory.offload import ActivationOffload
from hpcrl.trainer.memory.recompute import Recomputation, hold_here


def find_tools(config: TrainerMemoryConfig, device: torch.device) -> None:
    """Find what ``config`` needs on ``device`` in addition to torch.

    Raises
    ------
    UsageError
        It is not installed.
    """
    if config.compile:
        # it takes seconds to import
        from hpcrl.trainer.memory.compiled import find_compiler  # noqa: PLC0415

        find_compiler(device)


def apply_memory_tools(
    model: Decoder, config: TrainerMemoryConfig, device: torch.device, *, dtype: torch.dtype
) -> None:
    """Apply the memory settings of ``config`` to the layers of ``model``, on ``device`` in ``dtype``.

    Before or after it is sharded, and behind all else that changes parts of it.
    """
    if config.compile:
        from hpcrl.trainer.memory.compiled import compile_layers  # noqa: PLC0415

        compile_layers(model, dtype)
    if config.activation_checkpointing == "none":
        return
    bound_bytes = round(config.offload_in_flight_gib * 2**30)
    hold = ActivationOffload(device, bound_bytes=bound_bytes) if config.activation_offload else hold_here
    recomputation = Recomputation(selective=config.activation_checkpointing == "selective", hold=hold)
    for block in list(model.layers)[:: config.checkpoint_every_layers]:
        assert isinstance(block, DecoderLayer)
        block.run = recomputation
