"""Sparse attention in plain torch: what defines the results of kernels, and what CPUs compute.

Queries go through in chunks of bounded memory: no tensor has a score for every pair of tokens, and no key is copied for
a query that did not choose it. Memory is linear in tokens times chosen tokens. The backward pass adds in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.modeling.kernels.kernel import Attended
from hpcrl.modeling.sparse_kernels.kernel import Chosen
from hpcrl.modeling.sums import add_rows

_CHUNK_BYTES = 64 << 20
"""Approximate bytes of temporary memory for a chunk of queries."""


class ReferenceKernel:
    """See `hpcrl.modeling.sparse_kernels.kernel.SparseKernel`."""

    name = "reference"
    deterministic = True

    def rows_at_once(self, heads: int, keys: int) -> int:
        """See `SparseKernel`."""
        return max(1, _CHUNK_BYTES // (2 * heads * keys * 4 or 1))

    def forward(self, inputs: Chosen) -> Attended:
        """See `SparseKernel`."""
        q = inputs.q
        out = q.new_empty(*q.shape[:2], inputs.value_dim)
        sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for part in _chunks(inputs):
            keys, scores = _scores(inputs, part)
            sums[part] = scores.logsumexp(-1)
            weights = (scores - sums[part][..., None]).exp_().to(q.dtype)
            out[part] = torch.bmm(weights, keys[..., : inputs.value_dim])
        return Attended(out, sums)

    def backward(self, grad: Tensor, inputs: Chosen, attended: Attended) -> tuple[Tensor, Tensor]:
        """See `SparseKernel`; the weights of each chunk are computed again."""
        q, rows, chosen = inputs.tensors
        value_dim = inputs.value_dim
        grad_q = torch.empty_like(q)
        grad_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for part in _chunks(inputs):
            keys, scores = _scores(inputs, part)
            weights = (scores - attended.lse[part][..., None]).exp_()
            grad_out = grad[part]
            inner = (grad_out.float() * attended.out[part].float()).sum(-1, keepdim=True)
            grad_weights = torch.bmm(grad_out, keys[..., :value_dim].transpose(1, 2)).float()
            grad_scores = ((grad_weights - inner) * weights * inputs.scale).to(q.dtype)
            grad_q[part] = torch.bmm(grad_scores, keys)
            grad_keys = torch.bmm(grad_scores.transpose(1, 2), q[part])
            grad_keys[..., :value_dim] += torch.bmm(weights.to(q.dtype).transpose(1, 2), grad_out)
            add_rows(grad_rows, chosen[part].clamp(min=0).flatten().long(), grad_keys.flatten(0, 1).float())
        return grad_q, grad_rows.to(rows.dtype)

    def index_scores(self, q: Tensor, k: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
        """See `SparseKernel`."""
        tokens, heads, _ = q.shape
        each = (q.flatten(0, 1).float() @ k.float().T).relu_().view(tokens, heads, -1)
        scores = torch.bmm(weights[:, None].float(), each)[:, 0]
        return scores.masked_fill_(torch.arange(len(k), device=k.device) >= visible[:, None], float("-inf"))


def _chunks(inputs: Chosen) -> list[slice]:
    """Return the ranges of queries that are computed together."""
    (tokens, heads, dim), width = inputs.q.shape, inputs.chosen.shape[1]
    step = max(1, _CHUNK_BYTES // (width * (3 * dim + 3 * heads) * 4))
    return [slice(begin, min(begin + step, tokens)) for begin in range(0, tokens, step)]


def _scores(inputs: Chosen, part: slice) -> tuple[Tensor, Tensor]:
    """Return the chosen keys ``[C, width, dim]`` and the scores ``[C, heads, width]`` in float32."""
    q, rows, chosen = inputs.q[part], inputs.rows, inputs.chosen[part]
    keys = rows.index_select(0, chosen.clamp(min=0).flatten()).view(*chosen.shape, -1)
    scores = torch.bmm(q, keys.transpose(1, 2)).float() * inputs.scale
    return keys, scores.masked_fill_((chosen < 0)[:, None], float("-inf"))
