"""The decoder of all families, shared by the trainer and the embedded engine; families say what its layers are.

Tokens are laid out flat, ``[tokens]``: several sequences lie one behind the other, and the attention of the batch
context knows where each begins. So the trainer runs packed batches and the engine runs prefill and decode
of many requests through the same weights and the same arithmetic, which is what keeps their log-probabilities equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from hpcrl.modeling.blocks import is_sharded
from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.hf import HfAdapter
from hpcrl.modeling.layers.moe import SparseMLP
from hpcrl.modeling.layers.norm import ZeroCentredRMSNorm, norm_of
from hpcrl.modeling.memory.host_memory import empty_in_host_memory
from hpcrl.modeling.rope import RotaryTables, rotary_tables
from hpcrl.models.arch import ModelArch

BlockFn = Callable[[Tensor, RotaryTables, BatchContext], Tensor]
"""Maps ``[T, hidden_size]`` to the same shape."""

HeadFn = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""Computes results from hidden states ``[selected, hidden_size]`` and the weight of the head, without all logits."""


class RunBlock(Protocol):
    """Computes a layer in a way of its own: a memory tool of the trainer."""

    def __call__(self, block: BlockFn, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """Return the result of ``block(x, rotary, context)``."""
        ...


class DecoderLayer(nn.Module):
    """A layer of any family; what it computes is `compute`."""

    def __init__(self) -> None:
        super().__init__()
        self.run: RunBlock | None = None
        """Runs the layer inside FSDP2's hooks, so that parameters are gathered as without it."""

    def forward(self, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """Map ``[T, hidden_size]`` to the same shape."""
        return self.compute(x, rotary, context) if self.run is None else self.run(self.compute, x, rotary, context)

    def compute(self, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """Map ``[T, hidden_size]`` to the same shape."""
        raise NotImplementedError


class Block(DecoderLayer):
    """One decoder layer: a mixer of tokens, then a feed-forward block, each behind a norm and with a residual."""

    def __init__(self, arch: ModelArch, mixer: nn.Module, mlp: nn.Module, *, name: str = "self_attn") -> None:
        """Put the parts together; ``name`` is that of the mixer."""
        super().__init__()
        self.input_layernorm = norm_of(arch, arch.hidden_size)
        self.mixer_name = name
        self.add_module(name, mixer)
        self.post_attention_layernorm = norm_of(arch, arch.hidden_size)
        self.mlp = mlp

    def compute(self, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """See `DecoderLayer`."""
        x = x + self.get_submodule(self.mixer_name)(self.input_layernorm(x), rotary, context)
        normed = self.post_attention_layernorm(x)
        x = x + (self.mlp(normed, context) if isinstance(self.mlp, SparseMLP) else self.mlp(normed))
        return x  # noqa: RET504 - gives the sum its type


class Head(nn.Linear):
    """Logits of hidden states; what makes something else of them is called by it, so that FSDP2 gathers the weight."""

    def __init__(self, arch: ModelArch) -> None:
        super().__init__(arch.hidden_size, arch.vocab_size, bias=False)

    def forward(self, x: Tensor, head: HeadFn | None = None) -> Tensor | tuple[Tensor, ...]:  # type: ignore[override]
        """Map ``[N, hidden_size]`` to ``[N, vocab_size]`` in float32, or to the result of ``head``."""
        return super().forward(x).float() if head is None else head(x, self.weight)


class Decoder(nn.Module):
    """Embedding, layers, norm and head. Made by `hpcrl.modeling.spec.ModelSpec.build`.

    Weights are uninitialised until `init_weights` or a load.
    """

    def __init__(self, arch: ModelArch, adapter: HfAdapter, block: Callable[[int], nn.Module]) -> None:
        """Make the modules.

        Parameters
        ----------
        adapter:
            Names of the published model.
        block:
            Makes the layer of a number; called with ``x``, rotary tables and context.
        """
        super().__init__()
        self.arch, self.adapter = arch, adapter
        # with weights that are there: to draw some on `meta` imports torch.compile, a second of an engine's start
        embeddings = torch.empty(arch.vocab_size, arch.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings, freeze=False)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList(block(i) for i in range(arch.num_hidden_layers))
        self.norm = norm_of(arch, arch.hidden_size)
        self.lm_head = Head(arch)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embeddings one parameter, where the model has them tied."""
        if self.arch.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def materialise(self, device: torch.device | str, *, on_host: bool = False) -> None:
        """Give a model that was built on ``meta`` memory on ``device``, uninitialised; sharded or not.

        Parameters
        ----------
        on_host:
            Its parameters are in pinned memory of the host, from which they come to ``device``. FSDP2 would pin each by
            torch's allocator, which rounds sizes up to powers of two.
        """

        def empty(tensor: Tensor) -> Tensor:
            if on_host:
                return empty_in_host_memory(tensor, torch.device(device))
            if is_sharded(tensor):
                return torch.empty_like(tensor, device=device)
            # `empty_like` of a tensor on `meta` imports sympy, a quarter of a second
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        self._apply(empty)  # type: ignore[no-untyped-call]
        if on_host:
            for module in self.modules():
                for name, buffer in list(module.named_buffers(recurse=False)):
                    module.register_buffer(name, torch.empty_like(buffer, device=device))
        # it made a parameter of its own for each name
        self.tie_weights()

    def forward(
        self, input_ids: Tensor, context: BatchContext, head: HeadFn | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return logits ``[selected, vocab_size]`` float32 of the flat tokens ``[T]`` that ``context.select`` names.

        With ``head`` what that makes of their hidden states, without logits.
        """
        rotary = rotary_tables(self.arch, context.positions)
        x = self.embed_tokens(input_ids)
        for block in self.layers:
            x = block(x, rotary, context)
        x = self.norm(x)
        if context.select is not None:
            x = x[context.select]
        found: Tensor | tuple[Tensor, ...] = self.lm_head(x, head)
        return found

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Initialise weights from a normal distribution of ``std``, biases to 0 and norms to 1.

        Projections back into the residual stream are scaled by depth.
        """
        residual_std = std / (2 * self.arch.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                back = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight"))
                parameter.normal_(0.0, residual_std if back else std, generator=generator)
        for module in self.modules():
            if isinstance(module, ZeroCentredRMSNorm):
                module.weight.zero_()
        for buffer in self.buffers():
            buffer.zero_()
