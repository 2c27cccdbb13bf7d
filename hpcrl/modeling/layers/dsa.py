"""DeepSeek's sparse attention (DSA) of GLM-5: latent attention over the tokens that a lightning indexer chooses.

As in DeepSeek-V3.2 (arXiv 2512.02556, section 2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcrl.modeling.attention.sparse import REFERENCE
from hpcrl.modeling.compile.opaque import opaque
from hpcrl.modeling.context import BatchContext, IndexQuery
from hpcrl.modeling.fp8.linear import effective_weight
from hpcrl.modeling.layers.mla import LatentAttention
from hpcrl.modeling.rope import RotaryTables, apply_rotary
from hpcrl.modeling.sparse_kernels.kernel import Chosen
from hpcrl.models.arch import GlmMoeDsaArch


class Indexer(nn.Module):
    """Scores every earlier token for each query with small heads of its own. No gradient goes through a choice."""

    def __init__(self, arch: GlmMoeDsaArch) -> None:
        super().__init__()
        assert arch.q_lora_rank is not None
        self.heads, self.dim = arch.index_n_heads, arch.index_head_dim
        self.wq_b = nn.Linear(arch.q_lora_rank, self.heads * self.dim, bias=False)
        self.wk = nn.Linear(arch.hidden_size, self.dim, bias=False)
        self.k_norm = nn.LayerNorm(self.dim, eps=arch.LATENT_NORM_EPS)
        self.weights_proj = nn.Linear(arch.hidden_size, self.heads, bias=False)

    @torch.no_grad()
    def forward(self, x: Tensor, queries: Tensor, rotary: RotaryTables) -> IndexQuery:
        """Compute the index query of tokens ``[T, hidden_size]`` and their compressed queries ``[T, q_lora_rank]``."""
        q = self.wq_b(queries).view(len(x), self.heads, self.dim)
        q = apply_rotary(q, rotary, interleaved=True)
        k = apply_rotary(self.k_norm(self.wk(x))[:, None], rotary, interleaved=True)[:, 0]
        weights = self.weights_proj(x).float() * (self.heads * self.dim) ** -0.5
        return IndexQuery(q, k, weights)


class SparseLatentAttention(LatentAttention):
    """Latent attention in its absorbed form: all heads attend to the chosen latents, which are keys and values.

    A layer without an indexer takes over what the last layer with one has chosen.
    """

    def __init__(self, arch: GlmMoeDsaArch, layer: int) -> None:
        super().__init__(arch, layer)
        self.top_k, self.source = arch.index_topk, arch.index_source(layer)
        self.indexer = Indexer(arch) if self.source == layer else None
        self.kernel = REFERENCE
        """Kernel of scores and attention; `hpcrl.modeling.sparse_kernels.find` finds others."""
        self.is_shared = layer + 1 < arch.num_hidden_layers and arch.index_source(layer + 1) == self.source

    def forward(self, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """Map ``[T, hidden_size]`` to the same shape."""
        tokens = x.shape[0]
        compressed = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(compressed).view(tokens, -1, self.nope_dim + self.rope_dim)
        q_pass, q_rot = torch.split(q, [self.nope_dim, self.rope_dim], dim=-1)
        latent, k_rot = torch.split(self.kv_a_proj_with_mqa(x), [self.latent_dim, self.rope_dim], dim=1)
        k_rot = apply_rotary(k_rot[:, None], rotary, interleaved=self.interleaved)[:, 0]
        keys = torch.cat((self.kv_a_layernorm(latent), k_rot), dim=1)
        # absorbed form: the expanding matrix is applied to queries and results instead of latents
        expand = effective_weight(self.kv_b_proj).view(q.shape[1], self.nope_dim + self.value_dim, self.latent_dim)
        to_key, to_value = torch.split(expand, [self.nope_dim, self.value_dim], dim=1)
        absorbed = torch.einsum("thn,hnl->thl", q_pass, to_key)
        queries = torch.cat((absorbed, apply_rotary(q_rot, rotary, interleaved=self.interleaved)), dim=-1)
        index = None if self.indexer is None else self.indexer(x, compressed, rotary)
        y = self.attend_chosen(queries, keys, index, context)
        values = torch.einsum("thl,hvl->thv", y, to_value)
        projected: Tensor = self.o_proj(values.reshape(tokens, -1))
        return projected

    @opaque
    def attend_chosen(self, queries: Tensor, keys: Tensor, index: IndexQuery | None, context: BatchContext) -> Tensor:
        """Choose, where this layer does, and attend.

        Parameters
        ----------
        queries:
            ``[T, heads, latent_dim + rotary_dim]``, absorbed.
        keys:
            ``[T, latent_dim + rotary_dim]``, of which the first ``latent_dim`` channels are the values.
        index:
            Output of this layer's indexer; None if it has none.

        Returns
        -------
        Tensor
            ``[T, heads, latent_dim]``.

        Raises
        ------
        ValueError
            The attention of ``context`` cannot choose tokens.
        """
        if context.sparse is None:
            raise ValueError("this attention cannot choose tokens, as layers with an indexer do")
        if context.gather is not None:
            keys, index_keys = context.gather(keys, None if index is None else index.k)
            if index is not None and index_keys is not None:
                index = index._replace(k=index_keys)
        # known if an earlier layer has chosen, or this one in the forward pass that is being recomputed
        chosen = context.chosen.get(self.source)
        if chosen is None:
            assert index is not None
            chosen = context.sparse.choose(self.layer, index, self.top_k, self.kernel)
            if self.is_shared:
                context.chosen[self.layer] = chosen
        inputs = Chosen(queries, keys, chosen, self.latent_dim, self.scale)
        return context.sparse.attend(self.layer, inputs, self.kernel)
