"""The start model beside the policy: log-probabilities that a penalty holds the policy near to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hpcrl.config.recipe import Recipe
from hpcrl.modeling.adapters import use_adapters
from hpcrl.modeling.decoder import Decoder, HeadFn
from hpcrl.modeling.load import load_model_dir
from hpcrl.trainer.batch.tensors import TokenBatch
from hpcrl.trainer.memory.head import chunked_logprobs, whole_logprobs
from hpcrl.trainer.parallel.mesh import Parallel

__all__ = ["ReferencePolicy", "logprobs_of"]


class ReferencePolicy:
    """Frozen, sharded as the policy is; where adapters are trained it is the policy without them."""

    def __init__(
        self, recipe: Recipe, parallel: Parallel, policy: Decoder, frozen_model: Callable[[bool], Decoder]
    ) -> None:
        """Read the start model. Collective.

        Parameters
        ----------
        policy:
            The model under training.
        frozen_model:
            Makes the model that nothing is trained of, with its parameters in host memory or not, uninitialised.

        Raises
        ------
        UsageError, ValueError, PeerLostError
            As `load_model_dir`, on all ranks.
        """
        self._recipe, self._adapted = recipe, recipe.trainer.lora is not None
        self._model = policy
        if self._adapted:
            return
        kl = recipe.algorithm.kl
        assert kl is not None
        self._model = frozen_model(kl.on_host or recipe.trainer.memory.parameter_offload)
        model_dir = Path(recipe.model.path)
        read = partial(load_model_dir, self._model, self._model.adapter, model_dir)
        parallel.world.all_succeed(read, f"reading {model_dir} as the reference")

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return the log-probability of each trained token, ``[N]`` float32. Collective; routers choose the experts."""
        with use_adapters(self._model, "off") if self._adapted else nullcontext():
            found = logprobs_of(self._model, self._recipe, batch)
        if not self._adapted:
            # the last groups wait for a backward pass, which does not come
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return found


@torch.no_grad()
def logprobs_of(model: Decoder, recipe: Recipe, batch: TokenBatch) -> Tensor:
    """Return the log-probability of each trained token by ``model``, ``[N]`` float32, without experts of engines."""
    chunk, temperature = recipe.trainer.memory.lm_head_chunk_tokens, recipe.rollouts.sampling.temperature
    head: HeadFn = partial(whole_logprobs, targets=batch.targets, temperature=temperature)
    if chunk is not None:
        tokens = None if chunk == "auto" else chunk
        head = partial(chunked_logprobs, targets=batch.targets, temperature=temperature, tokens=tokens)
    logprobs: Tensor = model(batch.input_ids, batch.context(), head)[0]
    return logprobs
