"""Reference model of a penalty on the policy's distance from it: the start model or a later version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hpcrl.config.recipe import Recipe
from hpcrl.modeling.adapters import use_adapters
from hpcrl.modeling.blocks import local_part
from hpcrl.modeling.checkpoint_io.load import load_model_dir
from hpcrl.modeling.decoder import Decoder, HeadFn
from hpcrl.modeling.hf import model_tensors
from hpcrl.trainer.batch.tensors import TokenBatch
from hpcrl.trainer.parallel.mesh import Parallel
from hpcrl.trainer.step.head import chunked_logprobs, whole_logprobs

_log = logging.getLogger(__name__)


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
            Makes a model without trained parameters, in host memory or not, uninitialised.

        Raises
        ------
        UsageError, ValueError, PeerLostError
            As `load_model_dir`, on all ranks.
        """
        self._recipe, self._adapted = recipe, recipe.trainer.lora is not None
        self._policy = self._model = policy
        self.version = 0
        """Version of the policy that is the reference; 0: the start model."""
        self._has_weights = True
        self._every: int | None = None
        if self._adapted:
            return
        kl = recipe.algorithm.kl
        assert kl is not None
        self._every = kl.reference_every_steps
        self._model = frozen_model(kl.on_host or recipe.trainer.memory.parameter_offload)
        model_dir = Path(recipe.model.path)
        read = partial(load_model_dir, self._model, self._model.adapter, model_dir)
        parallel.world.all_succeed(read, f"reading {model_dir} as the reference")

    @torch.no_grad()
    def begin_step(self, step: int) -> None:
        """Copy the policy if ``step``, the next one, is the first after a refresh. All ranks call it.

        The policy after step n is the reference of the steps n + 1 to n + ``reference_every_steps``.
        """
        now = step - 1
        if self._every is None or now == self.version or (now % self._every and self._has_weights):
            return
        source = model_tensors(self._policy)
        for name, own in model_tensors(self._model).items():
            local_part(own).copy_(local_part(source[name]))
        self.version, self._has_weights = now, True
        _log.info("the reference is the policy after step %d now", now)

    def state(self, step: int) -> dict[str, Any] | None:
        """Return what a checkpoint after ``step`` holds of the reference, in place; None where nothing is needed.

        The start model is read from its directory again, and a reference that is refreshed at once is not read at all.
        """
        if self._every is None or self.version == 0:
            return None
        held: dict[str, Any] = {"version": torch.tensor(self.version)}
        if step % self._every:
            held["weights"] = {name: own.detach() for name, own in model_tensors(self._model).items()}
        return held

    def state_to_fill(self, held: Container[str], prefix: str) -> dict[str, Any] | None:
        """Return what a checkpoint whose tensors have the names ``held`` has of the reference, to be read in place."""
        if self._every is None or f"{prefix}.version" not in held:
            return None
        state: dict[str, Any] = {"version": torch.tensor(0)}
        names = model_tensors(self._model)
        if any(f"{prefix}.weights.{name}" in held for name in names):
            state["weights"] = {name: own.detach() for name, own in names.items()}
        return state

    def restored(self, state: dict[str, Any]) -> None:
        """Take over what `state_to_fill` was filled with; without weights the next step refreshes the reference."""
        self.version, self._has_weights = int(state["version"]), "weights" in state

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return the log-probability of each trained token, ``[N]`` float32. Collective; routers choose the experts."""
        with use_adapters(self._model, "off") if self._adapted else nullcontext():
            found = logprobs_of(self._model, self._recipe, batch)
        if not self._adapted:
            # FSDP keeps the last groups unsharded for a backward pass, which does not follow
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
