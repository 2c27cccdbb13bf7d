"""Canaries for engines that load an adapter: log-probabilities of a prompt, with it and without, to compare."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcrl.config.recipe import Recipe
from hpcrl.dock.wire import MicroBatch
from hpcrl.modeling.adapters import use_adapters
from hpcrl.models.arch import ModelArch
from hpcrl.trainer.batch.tensors import TokenBatch
from hpcrl.trainer.parallel.mesh import Parallel
from hpcrl.trainer.step.head import whole_logprobs
from hpcrl.weights.format.canary import Canary

_TOKENS = 64


class CanaryMaker:
    """Makes the `hpcrl.weights.format.canary.Canary` of versions. All ranks call it together."""

    def __init__(self, recipe: Recipe, arch: ModelArch, parallel: Parallel) -> None:
        """Choose the prompt: random tokens, the same in every run of a model."""
        self._parallel, self._scheme = parallel, recipe.trainer.parallelism.cp_scheme
        length = min(_TOKENS, recipe.engine.max_model_len - 1)
        self._token_ids = np.random.default_rng(0).integers(0, arch.vocab_size, length)
        self._plain: Tensor | None = None

    def __call__(self, model: nn.Module, version: int) -> bytes:
        """Return the canary of the current adapters, encoded as JSON.

        Every version has a canary, which costs a forward pass over few tokens: an engine may restart at any time, and
        the first version that it loads is compared.
        """
        if self._plain is None:
            with use_adapters(model, "off"):
                self._plain = self._logprobs(model)
        with use_adapters(model, "merged"):
            adapted = self._logprobs(model)
        canary = Canary(self._token_ids.tolist(), self._plain.tolist(), adapted.tolist())
        return msgspec.json.encode(canary)

    @torch.no_grad()
    def _logprobs(self, model: nn.Module) -> Tensor:
        """Return ``[tokens - 1]`` float32 on the host. All ranks call it; data-parallel ranks compute the same."""
        length = len(self._token_ids)
        mask = np.ones(length, np.uint8)
        mask[0] = 0
        zeros = np.zeros(length, np.float32)
        micro_batch = MicroBatch(
            token_ids=self._token_ids.astype(np.int32),
            cu_seqlens=np.array([0, length], np.int32),
            loss_mask=mask,
            logprobs=zeros,
            # positions instead of versions: they identify the tokens that a context-parallel rank has
            versions=np.arange(length, dtype=np.int32),
            advantages=zeros,
        )
        batch = TokenBatch.from_wire(micro_batch)
        context = self._parallel.mesh.get_optional_mesh("cp")
        if context is not None:
            batch = batch.cut(context.get_group(), self._scheme)
        batch = batch.to(self._parallel.device)
        head = partial(whole_logprobs, targets=batch.targets, temperature=1.0)
        found: Tensor = model(batch.input_ids, batch.context(), head)[0]
        whole = torch.zeros(length, device=self._parallel.device)
        whole[batch.versions] = found
        if context is not None:
            dist.all_reduce(whole, group=context.get_group())
        return whole[1:].cpu()
