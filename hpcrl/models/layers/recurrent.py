"""Mixers with a state of fixed size in place of a cache: Mamba-2 and the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.models.layers.common import kv_element_bytes, linear
from hpcrl.models.tensors import DTYPE_BYTES, Part, Weight


class _Recurrent:
    """Common base of mixers whose state stands for all tokens before."""

    __slots__ = ()
    chunk_size: int

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return 0: no memory grows with the sequence."""
        kv_element_bytes(dtype)
        return 0

    @property
    def limit(self) -> int | None:
        """Return the chunk size, within which kernels work as attention does; the state stands for tokens before."""
        return self.chunk_size

    def kept_tokens(self, length: int) -> int:
        """Return 0: no token is kept."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(_Recurrent):
    """A Mamba-2 mixer: a state of fixed size in place of a cache that grows."""

    hidden_size: int
    num_heads: int
    head_dim: int
    n_groups: int
    state_size: int
    conv_kernel: int
    chunk_size: int
    conv_bias: bool = True
    proj_bias: bool = False

    @property
    def inner_size(self) -> int:
        """Return the width inside the mixer."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Return the channels of the short convolution: the input and two state projections a group."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    @property
    def weights(self) -> tuple[Weight, ...]:
        part, inner = Part.MAMBA, self.inner_size
        conv_bias = (Weight("conv1d.bias", (self.conv_dim,), part, tp_dim=0),) if self.conv_bias else ()
        return (
            Weight("dt_bias", (self.num_heads,), part, tp_dim=0),
            Weight("A_log", (self.num_heads,), part, tp_dim=0),
            Weight("D", (self.num_heads,), part, tp_dim=0),
            Weight("conv1d.weight", (self.conv_dim, 1, self.conv_kernel), part, tp_dim=0),
            *conv_bias,
            *linear(
                "in_proj", inner + self.conv_dim + self.num_heads, self.hidden_size, part, tp=0, bias=self.proj_bias
            ),
            Weight("norm.weight", (inner,), part, tp_dim=0),
            *linear("out_proj", self.hidden_size, inner, part, tp=1, bias=self.proj_bias),
        )

    def state_bytes_per_sequence(self, dtype: str) -> int:
        """Return the bytes of the convolution's last ``conv_kernel - 1`` inputs in ``dtype``, and the float32 state."""
        conv = self.conv_dim * (self.conv_kernel - 1) * max(2, kv_element_bytes(dtype))
        return conv + self.num_heads * self.head_dim * self.state_size * 4

    @property
    def projection_flops(self) -> int:
        """Return the FLOPs of both projections and the convolution: ``2 · weights`` a token."""
        matrices = sum(w.elements for w in self.weights if len(w.shape) == 2)
        return 2 * (matrices + self.conv_dim * self.conv_kernel)

    def score_flops(self, context: float, *, absorbed: bool = False) -> float:
        """Return the FLOPs of the chunked scan: within a chunk as attention does, and into and out of the state.

        ``absorbed`` (decode) is the recurrence alone: ``6 · heads · head_dim · state``.
        """
        state = 6.0 * self.num_heads * self.head_dim * self.state_size
        if absorbed:
            return state
        inside = min(context, self.chunk_size) * (self.n_groups * self.state_size + self.num_heads * self.head_dim)
        return state + 2.0 * inside


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet(_Recurrent):
    """Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5): a matrix a value head in place of a cache."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    chunk_size: int = 64
    """Chunk size of the kernels of training and prefill; no config has it."""
    state_dtype: str | None = None
    """In which engines keep the state; None: in that of the model, as vLLM does where the config says nothing."""
    interleaved: bool = True
    """Projections are published in two matrices, by key heads (Qwen3-Next), and not in four (Qwen3.5)."""

    @property
    def key_size(self) -> int:
        """Return the width of all queries, and of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def inner_size(self) -> int:
        """Return the width of all values, of the gate and of the output."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Return the channels of the short convolution: queries, keys and values."""
        return 2 * self.key_size + self.inner_size

    @property
    def weights(self) -> tuple[Weight, ...]:
        part, d, heads = Part.LINEAR_ATTENTION, self.hidden_size, self.num_value_heads
        return (
            Weight("dt_bias", (heads,), part, tp_dim=0),
            Weight("A_log", (heads,), part, tp_dim=0),
            Weight("conv1d.weight", (self.conv_dim, 1, self.conv_kernel), part, tp_dim=0),
            *self._projections,
            Weight("norm.weight", (self.value_head_dim,), part),
            *linear("out_proj", d, self.inner_size, part, tp=1),
        )

    @property
    def _projections(self) -> tuple[Weight, ...]:
        """Return the weights of queries, keys, values and the gate, and of strength and decay of the update.

        Strength and decay, one a value head, stay out of FP8.
        """
        part, d, heads = Part.LINEAR_ATTENTION, self.hidden_size, self.num_value_heads
        if self.interleaved:
            return (
                *linear("in_proj_qkvz", self.conv_dim + self.inner_size, d, part, tp=0),
                Weight("in_proj_ba.weight", (2 * heads, d), part, tp_dim=0),
            )
        return (
            *linear("in_proj_qkv", self.conv_dim, d, part, tp=0),
            *linear("in_proj_z", self.inner_size, d, part, tp=0),
            *(Weight(f"in_proj_{name}.weight", (heads, d), part, tp_dim=0) for name in ("b", "a")),
        )

    def state_bytes_per_sequence(self, dtype: str) -> int:
        """Return the bytes of the last ``conv_kernel - 1`` inputs of the convolution, and of the value heads' matrices.

        Each value head has a matrix ``key_dim × value_dim``. Both are in ``dtype`` (16 bits at least), the matrices in
        ``state_dtype`` where it is given.
        """
        own = max(2, kv_element_bytes(dtype))
        state = own if self.state_dtype is None else DTYPE_BYTES[self.state_dtype]
        conv = self.conv_dim * (self.conv_kernel - 1) * own
        return conv + self.num_value_heads * self.key_head_dim * self.value_head_dim * state

    @property
    def projection_flops(self) -> int:
        """Return the FLOPs of the projections and the convolution: ``2 · weights`` a token."""
        matrices = sum(w.elements for w in self.weights if len(w.shape) == 2)
        return 2 * (matrices + self.conv_dim * self.conv_kernel)

    def score_flops(self, context: float, *, absorbed: bool = False) -> float:
        """Return the FLOPs of the delta rule: the state's value of the key, its correction, its value of the query.

        These are ``6 · heads · key_dim · value_dim``; ``absorbed`` (decode) is this recurrence alone. In chunks,
        products of keys with keys and of queries with keys are applied to values, over at most ``chunk_size`` tokens.
        """
        state = 6.0 * self.num_value_heads * self.key_head_dim * self.value_head_dim
        if absorbed:
            return state
        return state + 4.0 * min(context, self.chunk_size) * self.num_value_heads * (
            self.key_head_dim + self.value_head_dim
        )
