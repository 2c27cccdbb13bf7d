"""Compares the engine's routed experts with the trainer's own.

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

UNKNOWN_KINDS = ("last", "sampled", "context")
"""Kinds of tokens without a row: the last of a sequence, which never went into an engine; other sampled ones; prompts
and results of tools."""
_CHUNK_TOKENS = 4096
"""Rows that are checked at a time, so that they stay in the caches of a CPU."""


def engine_experts(batch: MicroBatch, arch: ModelArch) -> ReplayedExperts | None:
    """Return the routed experts of a micro-batch as the engines reported them, on the host; None if they reported none.

    Engines report all layers by number. Only sparse layers are kept, so the device holds no rows of the others.

    Raises
    ------
    ValueError
        The report does not match the tokens or the model: another number of tokens, layers or experts per token, an
        unknown expert, or one expert twice for a token (as in a buffer that was never written to).
    """
    routes = batch.routed_experts
    if routes is None:
        return None
    tokens = len(batch.token_ids)
    if routes.shape[0] != tokens:
        raise ValueError(f"micro-batch of {tokens} tokens has {routes.shape[0]} rows of routed experts")
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
    """Return a mask ``[T, layers]`` of the rows of ``said [T, layers, k]`` with an unknown or a repeated expert."""
    # an expert of all rows after another: an order of magnitude faster than sorting rows of a few bytes
    columns = np.ascontiguousarray(said.reshape(-1, said.shape[-1]).T)
    wrong: NDArray[np.bool_] = columns.max(0) >= experts
    for one, other in combinations(columns, 2):
        wrong |= one == other
    return wrong.reshape(said.shape[:2])


def _what_is_wrong(batch: MicroBatch, token: int, layer: int, said: NDArray[Any], experts: int) -> str:
    place = int(np.searchsorted(batch.cu_seqlens, token, side="right")) - 1
    group, member = batch.rollouts[place] if batch.rollouts else ("?", place)
    sequence = f"sequence {batch.sequences[place]} of " if batch.sequences else ""
    what = f"the model has {experts}" if said.max() >= experts else "an expert occurs twice"
    return (
        f"experts {said.tolist()} of token {token - int(batch.cu_seqlens[place])} in layer {layer} of "
        f"{sequence}rollout {member} of group {group}: {what}\n"
        "    hint: the engine's record of experts is broken; trainer.router_replay and engine.return_routed_experts: "
        "false train without it"
    )


def cut_experts(experts: ReplayedExperts, own: Tensor, wanting: int) -> ReplayedExperts:
    """Return the experts of the tokens ``own [n]`` int64, out of the ``T`` of ``experts`` and ``wanting`` more.

    The additional tokens have the numbers from ``T`` on; their experts are unknown.
    """
    rows = torch.cat((experts.experts, experts.experts.new_zeros(wanting, *experts.experts.shape[1:])))
    known = torch.cat((experts.known, experts.known.new_zeros(wanting)))
    return ReplayedExperts(rows[own], known[own], experts.columns)


def unknown_rows(batches: Sequence[MicroBatch]) -> dict[str, int]:
    """Count the tokens of micro-batches whose experts no engine reported, by `UNKNOWN_KINDS`."""
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
        Number of compared tokens.
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
        other = experts.sort(1).values != self._experts.of(layer).sort(1).values
        self.differing += other.any(1) & self.known
