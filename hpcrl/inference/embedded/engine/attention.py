"""Paged attention over the KV cache, as the attention that `Decoder` is called with.

Sequences of a step are attended to in groups of equal shape: all those with one new token in one call (a step
of decoding is one call a layer), short prefill chunks padded into one, long chunks one by one. Within a group
keys and values are gathered by block, padded to the longest sequence, and masked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hpcrl.inference.embedded.engine.rows import Rows
from hpcrl.inference.embedded.engine.scheduler import Step
from hpcrl.modeling.attention.sparse import attend_chosen, choose_tokens
from hpcrl.modeling.context import IndexQuery
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseKernel
from hpcrl.models.arch import ModelArch

#: chunks up to this many tokens share one padded call
_SHORT_CHUNK = 64


class KVCache:
    """Keys, values and chosen experts of every cached token, by block and slot.

    Attributes
    ----------
    keys, values:
        ``[num_blocks, block_size * heads * key_dim]`` (or ``value_dim``) of each layer that keeps something: a block is
        one row, so gathering copies whole blocks.
    experts:
        ``[num_blocks * block_size, layers, num_experts_per_tok]``; they are stored with the KV so that a prefix found
        in the cache has its routed experts, too.
    """

    def __init__(self, arch: ModelArch, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.arch, self.num_blocks, self.block_size = arch, num_blocks, block_size
        heads, key_dim, value_dim = arch.kv
        # zeros, not empty: masked slots are multiplied by zero, and zero times NaN is NaN
        self.dtype = dtype
        self.keys, self.values = (
            {layer: torch.zeros(num_blocks, block_size * heads * dim, dtype=dtype) for layer in arch.kv_layers}
            for dim in (key_dim, value_dim)
        )
        code: type[np.generic] = np.uint8 if arch.routed_experts <= 256 else np.uint16
        self.experts: NDArray[np.generic] = np.zeros(
            (num_blocks * block_size, arch.num_hidden_layers, arch.experts_per_token), code
        )

    @staticmethod
    def bytes_per_block(arch: ModelArch, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of keys and values of one block over all layers."""
        heads, key_dim, value_dim = arch.kv
        return len(arch.kv_layers) * heads * (key_dim + value_dim) * block_size * dtype.itemsize


@dataclass(slots=True)
class _Group:
    """Sequences that are attended to in one call.

    ``query`` is ``[sequences, width]`` indices into the flat tokens (padded with the first), ``real`` the flat
    positions in it that are no padding (None where all are), ``blocks`` ``[sequences * blocks]``, ``mask``
    ``[sequences, 1, heads_per_kv_head * width, keys]``, ``last`` ``[sequences, 1, heads_per_kv_head * width, 1]`` the
    last key that each query sees.
    """

    query: Tensor
    target: Tensor
    real: Tensor | None
    blocks: Tensor
    mask: Tensor
    last: Tensor
    _windows: dict[int, Tensor] = field(default_factory=dict)

    def within(self, window: int) -> Tensor:
        """Return the mask of queries that see only their last ``window`` tokens; computed once per step."""
        if window not in self._windows:
            early = torch.arange(self.mask.shape[-1]) <= self.last - window
            self._windows[window] = self.mask.masked_fill(early, -torch.inf)
        return self._windows[window]


@dataclass(slots=True)
class StepInputs:
    """Flat tensors of one step: ``input_ids``, ``positions`` and ``slots`` are ``[tokens]``.

    ``broken`` are flat tokens whose keys or values were not finite, found while the step is computed.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    starts: NDArray[np.int64]
    groups: list[_Group]
    broken: set[int] = field(default_factory=set)

    def finite(self, x: Tensor) -> Tensor:
        """Return ``x [tokens, ...]`` with zeros for what is not finite, and note the tokens.

        A slot of the cache that is masked is multiplied by zero, and zero times NaN is NaN: what one sequence leaves
        there must not become a part of another one.
        """
        if bool(torch.isfinite(x.sum(dtype=torch.float32))):
            return x
        good = torch.isfinite(x)
        self.broken.update(torch.nonzero(~good.flatten(1).all(1))[:, 0].tolist())
        return torch.where(good, x, 0.0)


class PagedAttention:
    """Writes new keys and values into the cache, then attends. One object a step."""

    def __init__(self, cache: KVCache, inputs: StepInputs) -> None:
        self._cache, self._inputs = cache, inputs
        self._kv_heads, self._key_dim, self._value_dim = cache.arch.kv
        self._per_kv_head = cache.arch.num_attention_heads // self._kv_heads

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `hpcrl.modeling.context.AttentionFn`."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        slots, heads = self._inputs.slots, self._kv_heads
        k, v = self._inputs.finite(k), self._inputs.finite(v)
        keys.view(-1, heads * self._key_dim).index_copy_(0, slots, k.reshape(-1, heads * self._key_dim))
        values.view(-1, heads * self._value_dim).index_copy_(0, slots, v.reshape(-1, heads * self._value_dim))
        groups = self._inputs.groups
        if len(groups) == 1 and groups[0].real is None:
            return self._attend(groups[0], q, (keys, values), scale=scale, window=window, sinks=sinks)
        out = q.new_empty(q.shape[0], q.shape[1], self._value_dim)
        for group in groups:
            own = q[group.query.view(-1)]
            attended = self._attend(group, own, (keys, values), scale=scale, window=window, sinks=sinks)
            out.index_copy_(0, group.target, attended if group.real is None else attended[group.real])
        return out

    def choose(self, layer: int, index: IndexQuery, top_k: int, kernel: SparseKernel) -> Tensor:
        """See `hpcrl.modeling.context.SparseAttentionFn`: ``[tokens, width]`` positions in the sequence of each token.

        Keys of the indexer lie in the cache where other families have their values.
        """
        inputs, width = self._inputs, self._value_dim
        cached = self._cache.values[layer]
        cached.view(-1, width).index_copy_(0, inputs.slots, inputs.finite(index.k))
        keys = [cached.index_select(0, group.blocks).view(len(group.query), -1, width) for group in inputs.groups]
        longest = min(top_k, max(k.shape[1] for k in keys))
        chosen = inputs.slots.new_full((len(inputs.positions), longest), -1, dtype=torch.int32)
        visible = inputs.positions + 1
        for group, own in zip(inputs.groups, keys, strict=True):
            for tokens, k in zip(group.query, own, strict=True):
                best = choose_tokens(index.q[tokens], k, index.weights[tokens], visible[tokens], top_k, kernel=kernel)
                # a group is padded with its first token, which chooses the same each time
                chosen[tokens, : best.shape[1]] = best
        return chosen

    def attend(self, layer: int, inputs: Chosen, kernel: SparseKernel) -> Tensor:
        """See `hpcrl.modeling.context.SparseAttentionFn`."""
        q, keys, chosen = inputs.tensors
        cached, width = self._cache.keys[layer], self._key_dim
        cached.view(-1, width).index_copy_(0, self._inputs.slots, self._inputs.finite(keys))
        out = q.new_empty(*q.shape[:2], inputs.value_dim)
        for group in self._inputs.groups:
            n, tokens = len(group.query), group.query.view(-1)
            rows = cached.index_select(0, group.blocks).view(-1, width)
            first = torch.arange(0, len(rows), len(rows) // n, dtype=torch.int32)
            own = chosen[tokens].view(n, -1)
            own = torch.where(own < 0, own, own + first[:, None]).view(len(tokens), -1)
            attended = attend_chosen(inputs._replace(q=q[tokens], rows=rows, chosen=own), kernel)
            out.index_copy_(0, group.target, attended if group.real is None else attended[group.real])
        return out

    def _attend(
        self,
        group: _Group,
        q: Tensor,
        cached: tuple[Tensor, Tensor],
        *,
        scale: float | None,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute attention of one group: queries ``[sequences * width, heads, key_dim]`` to as many ``value_dim``."""
        n, width = group.query.shape
        h, g, d, e = self._kv_heads, self._per_kv_head, self._key_dim, self._value_dim
        # the query heads that share a key head become further queries of it: no key is copied for them
        query = q.view(n, width, h, g, d).permute(0, 2, 3, 1, 4).reshape(n, h, g * width, d)
        k, v = (
            x.index_select(0, group.blocks).view(n, -1, h, s).transpose(1, 2)
            for x, s in zip(cached, (d, e), strict=True)
        )
        mask = group.mask if window is None else group.within(window)
        if sinks is not None:
            # a zero key whose score is the sink, and a zero value
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            score = sinks.to(mask.dtype).view(1, h, g, 1).expand(n, h, g, width).reshape(n, h, g * width, 1)
            mask = torch.cat((mask.expand(-1, h, -1, -1), score), dim=-1)
        y = F.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale)
        return y.view(n, h, g, width, e).permute(0, 3, 1, 2, 4).reshape(n * width, h * g, e)


def prepare_inputs(step: Step, rows: Rows, cache: KVCache) -> StepInputs:
    """Flatten the tokens of a step and group its sequences."""
    size, single = cache.block_size, step.num_single
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(step.counts)))
    row_of = np.repeat(step.rows, step.counts)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - rows.num_computed[step.rows], step.counts)
    slots = rows.block_table[row_of, positions // size] * size + positions % size
    groups: list[_Group] = []
    if single:
        groups.append(_group(np.arange(single), step, starts, rows, cache))
    short = single + np.flatnonzero(step.counts[single:] <= _SHORT_CHUNK)
    if len(short):
        groups.append(_group(short, step, starts, rows, cache))
    for i in (single + np.flatnonzero(step.counts[single:] > _SHORT_CHUNK)).tolist():
        groups.append(_group(np.asarray([i]), step, starts, rows, cache))
    return StepInputs(
        input_ids=torch.from_numpy(rows.tokens[row_of, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        starts=starts,
        groups=groups,
    )


def _group(members: NDArray[np.int64], step: Step, starts: NDArray[np.int64], rows: Rows, cache: KVCache) -> _Group:
    """Group sequences ``members`` (indices into the step)."""
    member_rows, counts = step.rows[members], step.counts[members]
    computed = rows.num_computed[member_rows]
    width, blocks = int(counts.max()), -(-int((computed + counts).max()) // cache.block_size)
    offsets = np.arange(width)
    valid = offsets[None, :] < counts[:, None]
    query = np.where(valid, starts[members][:, None] + offsets[None, :], starts[members][:, None])
    # a padded query sees the keys of a real one, so that its softmax row is not empty
    last_key = computed[:, None] + np.minimum(offsets[None, :], counts[:, None] - 1)
    visible = torch.from_numpy(np.arange(blocks * cache.block_size)[None, None, :] <= last_key[:, :, None])
    mask = torch.zeros(visible.shape, dtype=cache.dtype).masked_fill_(~visible, -torch.inf)
    repeat = cache.arch.num_attention_heads // cache.arch.kv.heads
    padded = not valid.all()
    return _Group(
        query=torch.from_numpy(query),
        target=torch.from_numpy(query[valid]),
        real=torch.from_numpy(np.flatnonzero(valid)) if padded else None,
        blocks=torch.from_numpy(rows.block_table[member_rows, :blocks].reshape(-1)),
        mask=mask.repeat(1, repeat, 1)[:, None],
        last=torch.from_numpy(last_key).repeat(1, repeat)[:, None, :, None],
    )
