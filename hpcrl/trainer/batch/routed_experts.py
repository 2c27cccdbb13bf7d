"""The engine's choice of experts beside the trainer's own.

A mixture of experts is two models where engine and trainer disagree about the experts of a token, however well their
weights agree. `RoutedExpertsComparison` counts where they do; `trainer.router_replay` lets the forward pass take the
engine's choice (`hpcrl.modeling.context.ReplayedExperts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcrl.dock.wire import MicroBatch
from hpcrl.modeling.context import ReplayedExperts
from hpcrl.models.arch import ModelArch

__all__ = ["UNKNOWN_KINDS", "RoutedExpertsComparison", "cut_experts", "engine_experts", "unknown_rows"]

UNKNOWN_KINDS = ("last", "sampled", "context")
"""What tokens without a row are: the last of a rollout, which never went into an engine; other sampled ones; prompts
and what tools said."""
_CHUNK_TOKENS = 4096
"""Rows of so many tokens are looked at at once: they stay in the caches of a processor."""


def engine_experts(batch: MicroBatch, arch: ModelArch) -> ReplayedExperts | None:
    """What engines said of the tokens of a micro-batch, on the host; None where they said nothing.

    Engines report all layers by their number. Only sparse ones are kept, so the device has no rows of the others.

    Raises
    ------
    ValueError
        It is not of these tokens, or not of this model: another number of layers or experts a token, an expert that the
        model does not have, or one twice for a token, as a buffer has that was never written to.
    """
    routes = batch.routed_experts
    if routes is None:
        return None
    tokens = len(batch.token_ids)
    if routes.shape[0] != tokens:
        raise ValueError(f"micro-batch of {tokens} tokens has {routes.shape[0]} rows of experts")
    layers, width = arch.num_hidden_layers, arch.experts_per_token
    if routes.shape[1:] != (layers, width):
        raise ValueError(
            f"engines report {routes.shape[2]} experts a token in {routes.shape[1]} layers; "
            f"the trainer's model has {width} in {layers}\n"
            "    hint: engines and trainer must serve and train the same model (model.path)"
        )
    sparse = [layer for layer in range(layers) if arch.is_sparse(layer)]
    kind = np.uint8 if arch.routed_experts <= 256 else np.int16 if arch.routed_experts <= 2**15 else np.int32
    kept, known = np.empty((tokens, len(sparse), width), kind), routes.known.copy()
    for start in range(0, tokens, _CHUNK_TOKENS):
        chunk = slice(start, start + _CHUNK_TOKENS)
        said = routes.experts[chunk][:, sparse]
        wrong = _impossible(said, arch.routed_experts) & known[chunk, None]
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise ValueError(_what_is_wrong(batch, start + row, sparse[column], said[row, column], arch.routed_experts))
        kept[chunk] = said
    return ReplayedExperts(
        experts=torch.from_numpy(kept),
        known=torch.from_numpy(known),
        columns={layer: column for column, layer in enumerate(sparse)},
    )


def _impossible(said: NDArray[Any], experts: int) -> NDArray[np.bool_]:
    """Where ``said``, ``[T, layers, k]``, has an expert that is none of ``experts``, or one twice: ``[T, layers]``."""
    # an expert of all rows after another: an order of magnitude faster than sorting rows of a few bytes
    columns = np.ascontiguousarray(said.reshape(-1, said.shape[-1]).T)
    wrong: NDArray[np.bool_] = columns.max(0) >= experts
    for one, other in combinations(columns, 2):
        wrong |= one == other
    return wrong.reshape(said.shape[:2])


def _what_is_wrong(batch: MicroBatch, token: int, layer: int, said: NDArray[Any], experts: int) -> str:
    rollout = int(np.searchsorted(batch.cu_seqlens, token, side="right")) - 1
    group, member = batch.rollouts[rollout] if batch.rollouts else ("?", rollout)
    what = f"the model has {experts}" if said.max() >= experts else "an expert stands there twice"
    return (
        f"experts {said.tolist()} of token {token - int(batch.cu_seqlens[rollout])} in layer {layer} of rollout "
        f"{member} of group {group}: {what}\n"
        "    hint: the engine's record of experts is broken; trainer.router_replay and engine.return_routed_experts: "
        "false train without it"
    )


def cut_experts(experts: ReplayedExperts, own: Tensor, wanting: int) -> ReplayedExperts:
    """Those of the tokens that ``own [n]`` int64 names, of the ``T`` that ``experts`` has and ``wanting`` more.

    Of what is wanting nothing is known: it has the numbers from ``T`` on.
    """
    rows = torch.cat((experts.experts, experts.experts.new_zeros(wanting, *experts.experts.shape[1:])))
    known = torch.cat((experts.known, experts.known.new_zeros(wanting)))
    return ReplayedExperts(rows[own], known[own], experts.columns)


def unknown_rows(batches: Sequence[MicroBatch]) -> dict[str, int]:
    """Tokens of micro-batches of which no engine said its experts, by `UNKNOWN_KINDS`."""
    found = dict.fromkeys(UNKNOWN_KINDS, 0)
    for batch in batches:
        unknown = np.ones(len(batch.token_ids), np.bool_)
        if batch.routed_experts is not None:
            unknown &= ~batch.routed_experts.known
        last = np.zeros_like(unknown)
        last[batch.cu_seqlens[1:] - 1] = True
        sampled = batch.loss_mask != 0
        for kind, tokens in zip(UNKNOWN_KINDS, (last, ~last & sampled, ~last & ~sampled), strict=True):
            found[kind] += int((unknown & tokens).sum())
    return found


class RoutedExpertsComparison:
    """A `hpcrl.modeling.context.RoutedExpertsRecorder` that compares sets: the order of experts does not matter.

    Attributes
    ----------
    known:
        ``[T]`` bool.
    differing:
        ``[T]`` int64: layers in which a known token's experts are others than the trainer's router would choose; 0
        where it is not known.
    layers:
        How many are compared.
    """

    def __init__(self, experts: ReplayedExperts) -> None:
        """Begin before a forward pass of the same tokens."""
        self._experts = experts
        self.known, self.layers = experts.known, len(experts.columns)
        self.differing = torch.zeros_like(experts.known, dtype=torch.int64)

    @torch.no_grad()
    def __call__(self, layer: int, experts: Tensor) -> None:
        """See `RoutedExpertsRecorder`."""
        # a layer at a time: sorting also makes indices of eight bytes each
        other = experts.sort(-1).values != self._experts.of(layer).sort(-1).values
        self.differing += other.any(-1) & self.known
