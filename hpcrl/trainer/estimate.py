"""Memory of a forward and backward pass, from the real model under fake tensors: shapes and dtypes, no numbers.

Nothing is allocated and nothing computed, so that a model of any size is measured on any machine with torch. The
planner has formulas for the same (`hpcrl.planning.memory`), for login nodes without torch; a test holds the two
together for every family. As a program it is asked by `hpcrl.planning.memory.real_model`: JSON in, JSON out.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _State
from torch.utils.weak import WeakIdKeyDictionary

from hpcrl.config.recipe import TrainerMemoryConfig
from hpcrl.modeling.attention import sparse
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.compile.saved_ops import register_op
from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import ModelArch, arch_from_config
from hpcrl.trainer.batch import tensors
from hpcrl.trainer.memory.tools import apply_memory_tools
from hpcrl.trainer.step.head import chunked_logprobs, loss_in_pieces, whole_logprobs
from hpcrl.trainer.step.losses import PolicyLoss

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes at the highest points of a pass.

    Attributes
    ----------
    parameters:
        Memory of the model in bytes, in the dtype of the pass.
    head:
        Maximum bytes of tensors other than parameters, their gradients and the optimizer until the backward pass of
        the head is done: what layers keep, and logits.
    whole:
        The same of the whole pass; more than ``head`` where the backward pass of some layer takes more.
    """

    parameters: int
    head: int
    whole: int


def estimate_model(
    arch: ModelArch,
    lengths: Sequence[int],
    *,
    dtype: torch.dtype,
    memory: TrainerMemoryConfig | None = None,
    loss_of_rollouts: bool = False,
) -> PassMemory:
    """Extrapolate `estimate_pass` to a model of many layers, from two models of a few.

    A layer takes about half a second. Where all layers behind the first ones are equal, each adds the same.
    """
    layers = arch.facts.layers[: arch.num_hidden_layers]
    first = len(layers)
    while first > 0 and layers[first - 1] == layers[-1]:
        first -= 1
    # period of the layers: one layer, or as many as one checkpoint spans
    every = 1 if memory is None else memory.checkpoint_every_layers
    few = first + 2 + (len(layers) - first - 2) % every
    estimate = partial(estimate_pass, lengths=lengths, dtype=dtype, memory=memory, loss_of_rollouts=loss_of_rollouts)
    if few + every >= len(layers):
        return estimate(arch)
    less, more = (estimate(_with_layers(arch, n)) for n in (few, few + every))

    def continued(name: str) -> int:
        at_few, at_more = getattr(less, name), getattr(more, name)
        return int(at_few + (len(layers) - few) // every * (at_more - at_few))

    return PassMemory(continued("parameters"), continued("head"), continued("whole"))


def _with_layers(arch: ModelArch, count: int) -> ModelArch:
    """Return ``arch`` with its first ``count`` layers; per-layer settings of the config are cut, too."""
    named = {field.name: getattr(arch, field.name) for field in fields(arch)}
    each: dict[str, Any] = {
        k: v[:count] for k, v in named.items() if isinstance(v, tuple) and len(v) == arch.num_hidden_layers
    }
    return replace(arch, num_hidden_layers=count, **each)


def estimate_pass(
    arch: ModelArch,
    lengths: Sequence[int],
    *,
    dtype: torch.dtype,
    memory: TrainerMemoryConfig | None = None,
    loss_of_rollouts: bool = False,
) -> PassMemory:
    """Estimate the memory peaks of one micro-batch on the CPU, without sharding: each rank holds these activations.

    Parameters
    ----------
    lengths:
        Tokens of the sequences of the micro-batch; all but the first token of each are trained.
    dtype:
        Dtype of parameters and activations.
    memory:
        Settings that save memory; None for none.
    loss_of_rollouts:
        Whether the loss needs all log-probabilities first, as ``gspo`` does: logits in pieces are then computed twice.
    """
    memory = memory or TrainerMemoryConfig()
    ends = torch.tensor([0, *lengths]).cumsum(0)
    attention = PackedAttention(ends)
    tokens, trained = int(ends[-1]), int(ends[-1]) - len(lengths)
    model = build_model(arch, dtype=dtype)
    # fake tensors of a processor: on `meta`, attention would take its plain form, which keeps every score
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    opaque = memory.activation_checkpointing == "selective"
    # each piece of logits takes time here, whatever its size: a few hundred at most, unless they are as on a GPU then
    piece_bytes = max(tensors.PIECE_BYTES["cpu"], min(64 << 20, 4 * trained * arch.vocab_size // 256))
    with fake, _known_without_numbers(piece_bytes, opaque=opaque), warnings.catch_warnings():
        # torch warns about gradients that are None, which is intended here
        warnings.filterwarnings("ignore", message="Expected a tensor or a traceable wrapper-subclass")
        model.materialise(_CPU)
        # of layers that are compiled the kernels are not known
        apply_memory_tools(model, memory.model_copy(update={"compile": False}), _CPU, dtype=dtype)
        for name, value in vars(attention).items():
            if isinstance(value, Tensor):
                setattr(attention, name, fake.from_tensor(value))
        ids, select = torch.zeros(tokens, dtype=torch.long), torch.zeros(trained, dtype=torch.long)
        for parameter in model.parameters():
            # as with sharding: a layer's gradients are freed once they are reduced
            parameter.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
        tracker, at_head = _Tracker(), []
        model.norm.register_full_backward_hook(lambda *_: at_head.append(_beside_weights(tracker)))
        tracker.track_external(model)
        with tracker:
            chunk = memory.lm_head_chunk_tokens
            loss = _loss(model, ids, attention.context(select), chunk, loss_of_rollouts=loss_of_rollouts)
            loss.backward()  # type: ignore[no-untyped-call]
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return PassMemory(parameters, at_head[0], _beside_weights(tracker))


class _Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """Tracker without the peaks of each module, which are not used and take as long to find as everything else."""

    def _update_peak_stats(self, peak_state: _State) -> None:
        modules, self.memory_tracking = self.memory_tracking, WeakIdKeyDictionary()
        super()._update_peak_stats(peak_state)
        self.memory_tracking = modules


def _loss(
    model: Decoder, ids: Tensor, context: BatchContext, chunk: int | str | None, *, loss_of_rollouts: bool
) -> Tensor:
    """Return a sum over tokens that is computed in the same way as the loss."""
    assert context.select is not None
    targets = torch.zeros(len(context.select), dtype=torch.long)
    tokens = chunk if isinstance(chunk, int) else None
    if chunk is None or loss_of_rollouts:
        make = whole_logprobs if chunk is None else partial(chunked_logprobs, tokens=tokens)
        logprobs, _ = model(ids, context, partial(make, targets=targets, temperature=1.0))
        return logprobs.sum()  # type: ignore[no-any-return]

    def of_tokens(logprobs: Tensor, _: slice) -> PolicyLoss:
        return PolicyLoss(logprobs.sum(), torch.zeros_like(logprobs, dtype=torch.bool), logprobs.detach())

    head = partial(loss_in_pieces, targets=targets, loss=of_tokens, temperature=1.0, tokens=tokens)
    loss: Tensor = model(ids, context, head)[0]
    return loss


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _beside_weights(tracker: MemTracker) -> int:
    """Return the peak bytes of activations and temporary tensors so far, including those of backward passes."""
    peak = tracker.get_tracker_snapshot("peak")[_CPU]
    return sum(size for kind, size in peak.items() if getattr(kind, "name", "") in ("ACT", "TEMP"))


@contextmanager
def _known_without_numbers(piece_bytes: int, *, opaque: bool = False) -> Iterator[None]:
    """Patch operators whose output shapes depend on values, or that have no fake kernels for a dtype.

    Logits are worked on in pieces of ``piece_bytes``. With ``opaque`` sparse attention is one operator, as selective
    checkpointing wants it; else what its pieces hold for a moment is counted too.
    """

    def grouped_mm(x: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
        # like the product with one matrix: the shapes and what is kept for the backward pass are equal
        return _GroupedProduct.apply(x, weights, offs)  # type: ignore[no-any-return, no-untyped-call]

    def largest(scores: Tensor, visible: Tensor, width: int) -> Tensor:
        return scores.topk(width, dim=-1).indices

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(tensors.PIECE_BYTES, cpu=piece_bytes))
        stack.enter_context(mock.patch.object(F, "grouped_mm", grouped_mm))
        stack.enter_context(mock.patch.object(sparse, "_largest", largest))
        for name in ("_choose", "_attend"):
            operator = getattr(sparse, name)
            plain = operator._init_fn
            if opaque:
                operator.register_fake(plain)
            else:
                stack.enter_context(mock.patch.object(sparse, name, plain))
        yield


@register_op("(Tensor x, Tensor weights) -> Tensor")
def _product(x: Tensor, weights: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[2])


_product.register_fake(_product._init_fn)  # type: ignore[attr-defined]


class _GroupedProduct(torch.autograd.Function):
    """``grouped_mm`` of shapes alone; torch itself knows those of bfloat16 only."""

    @staticmethod
    def forward(context: Any, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        context.save_for_backward(x, weights, ends)
        return _product(x, weights)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights, _ = context.saved_tensors
        return torch.empty_like(x), torch.empty_like(weights), None


def main() -> None:
    """Read ``config`` (a ``config.json``) and other arguments of `estimate_model`; write a `PassMemory`."""
    asked = json.load(sys.stdin)
    found = estimate_model(
        arch_from_config(asked["config"]),
        asked["lengths"],
        dtype=getattr(torch, asked["dtype"]),
        memory=TrainerMemoryConfig(**asked["memory"]),
        loss_of_rollouts=asked["loss_of_rollouts"],
    )
    json.dump(asdict(found), sys.stdout)


if __name__ == "__main__":
    main()
