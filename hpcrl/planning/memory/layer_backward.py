"""Stages of a layer's backward pass: what exists of its kept tensors and of gradients. Pure arithmetic on shapes.

They follow in the order of autograd, the last computed first: shared experts, the sum over routed experts, the last
matrix of these, their gate, their first matrices, attention. Tensors that a module kept are free after its own backward
pass, while gradients of its matrices stay until those of the whole layer are reduced. docs/planning-memory.md has the
sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpcrl.models.layers import DenseMlp, Layer, Moe
from hpcrl.planning.ledger import Term
from hpcrl.planning.memory.activations import (
    ActivationShape,
    dense_bytes,
    has_clamped_gates,
    hidden_size_of,
    kept_products,
    saved_bytes,
)
from hpcrl.planning.memory.attention_backward import AttentionMemory, attention_memory, indexer_bytes

_BLOCK = 128
"""Channels of an activation that share a float32 scale in FP8; rows of an expert begin at multiples of it."""
_FP8 = 1 + 4 / _BLOCK
"""Bytes of a quantised number with its share of a scale."""
_GRADIENTS = {
    "sum over experts": "b (T k D + 2 T D)",
    "last matrices of experts": "b (T k (D + F) + 2 T D)",
    "gate of experts": "b (2 T k F + 2 T D)",
    "first matrices of experts": "b (T k (2 F + D) + 2 T D)",
    "last matrix": "b T (F + D)",
    "gate": "b T (2 F + D)",
    "gate of shared experts": "b T (2 F + D)",
    "first matrices": "b T (2 F + 2 D)",
    "indexer": "b T D",
    "recurrence": "8 b T D",
}
"""Formulas of gradients of activations by stage, of gated blocks with shared experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardStage:
    """Memory of a rank at a moment of a layer's backward pass.

    Attributes
    ----------
    name:
        What is computed.
    saved:
        Bytes of what the layer kept (`hpcrl.planning.memory.activations.saved_bytes`) that still exist.
    gradients:
        Bytes of the gradients of activations.
    made, ready:
        Parameters whose gradients are computed in this stage, and before it.
    copies:
        Bytes of quantised copies, and what else a product in FP8 needs.
    attention:
        Memory of attention's backward pass, where that is what is computed.
    indexer:
        Bytes of an indexer that chooses.
    """

    name: str
    saved: float
    gradients: float
    made: float = 0.0
    ready: float = 0.0
    copies: float = 0.0
    attention: AttentionMemory | None = None
    indexer: int = 0

    def total(self, gradient_bytes: int) -> float:
        """Return the bytes of all, with ``gradient_bytes`` for the gradient of a parameter (0: none is trained)."""
        own = self.saved + self.gradients + self.copies + self.indexer + gradient_bytes * (self.made + self.ready)
        return own + (0 if self.attention is None else self.attention.value)


def backward_stages(
    layer: Layer, shape: ActivationShape, parameters: int, *, ep: int = 1, fp8: bool = False, context: int = 0
) -> Iterator[BackwardStage]:
    """Yield the stages of a layer with ``parameters`` on this rank, the layer computed again just before.

    Experts are divided over ``ep`` ranks. ``context`` is the number of tokens of all context-parallel ranks.
    """
    b, t, d = shape.element_bytes, shape.tokens, hidden_size_of(layer)
    if isinstance(layer.mlp, Moe):
        yield from _sparse(layer, layer.mlp, shape, ep, fp8=fp8)
    elif layer.mlp is not None:
        yield from _dense(layer, layer.mlp, shape, fp8=fp8)
    if layer.mixer is None:
        return
    mixer = saved_bytes(replace(layer, mlp=None), shape)
    if indexer := indexer_bytes(layer, shape, context):
        # in the forward pass that comes before; of gradients there is that of the layer's output
        yield BackwardStage(name="indexer", saved=mixer, gradients=b * t * d, indexer=indexer)
    attention = attention_memory(layer, shape)
    # the residual's and the one that the mixer's output has; of a recurrence what its steps make is unknown
    widths = 2 if attention is not None else 8
    yield BackwardStage(
        name="attention" if attention is not None else "recurrence",
        saved=mixer,
        gradients=b * t * widths * d,
        ready=parameters,
        attention=attention,
    )


def stage_terms(stage: BackwardStage, recomputed: int | None) -> Iterator[Term]:
    """Yield the terms of a stage but for parameters and their gradients.

    ``recomputed`` is what the layer computes again, less what is free of it; None where it kept everything.
    """
    if recomputed is not None:
        yield Term("recomputed layer", recomputed, "a_l without checkpointing - b T D - what is free", {})
    gradients: dict[str, float | str] = {"stage": stage.name}
    yield Term("gradients of activations", round(stage.gradients), _GRADIENTS.get(stage.name, "2 b T D"), gradients)
    if stage.copies:
        yield Term("FP8 copies", round(stage.copies), "of the product of this stage", gradients)
    if stage.indexer:
        yield Term("indexer", stage.indexer, "b T H_i d_i + b T CP d_i + min(1 GiB, 4 T · T CP)", {})
    if stage.attention is None:
        return
    kind, value = stage.attention
    if kind == "ring":
        yield Term("keys and values in a ring", value, "T (kv (3 b + 8) + 4 q) + b T H v + a", {})
    elif kind == "gathered latents":
        formula = "b T H (2 nope + 3 qk + 5 v) + (4 + b) T CP row + a"
        yield Term("keys and values of gathered latents", value, formula, {})
    else:
        yield Term("backward pass of attention", value, "gradients of queries, keys, values and output + a", {})


def _sparse(layer: Layer, mlp: Moe, shape: ActivationShape, ep: int, *, fp8: bool) -> Iterator[BackwardStage]:
    b, t, d = shape.element_bytes, shape.tokens, mlp.hidden_size
    rows = t * mlp.num_experts_per_tok * shape.imbalance
    outputs, product = b * rows * mlp.expert_width, b * rows * mlp.moe_intermediate_size
    clamped, experts = has_clamped_gates(mlp), -(-mlp.num_experts // ep)
    matrix = mlp.moe_intermediate_size * mlp.expert_width
    down, first = experts * matrix, experts * matrix * (2 if mlp.gated else 1)
    shared = 0.0 if mlp.shared is None else dense_bytes(mlp.shared, t, shape)
    shared += b * t * (d + 1) if mlp.shared_gate else 0
    shared_parameters = 0 if mlp.shared is None else kept_products(gated=mlp.gated) * d * mlp.shared.intermediate_size
    # the residual's, and that of the block's input where shared experts have made it; of latents that of their sum
    tokens = b * t * (d * (1 if mlp.shared is None else 2) + (mlp.latent_size or 0))
    if mlp.shared is not None:
        width = b * t * mlp.shared.intermediate_size
        yield BackwardStage(
            name="gate of shared experts",
            # of what routed experts kept nothing is free yet
            saved=saved_bytes(layer, shape) - width,
            gradients=b * t * d + width * _gate_widths(gated=mlp.shared.gated),
            ready=mlp.shared.intermediate_size * d,
        )
    saved = saved_bytes(layer, shape) - shared
    if shared and mlp.correction_bias and b < 4 and mlp.latent_size is None:
        # of the block's input the router has a copy in float32, and experts one sorted by expert
        saved -= b * t * d
    yield BackwardStage(name="sum over experts", saved=saved, gradients=tokens + outputs, ready=shared_parameters)
    saved -= outputs
    yield BackwardStage(
        name="last matrices of experts",
        saved=saved,
        gradients=tokens + outputs + product,
        made=down,
        ready=shared_parameters,
        copies=_grouped_fp8(rows, experts, (mlp.moe_intermediate_size, mlp.expert_width), shape) if fp8 else 0,
    )
    kept = 7 if clamped else kept_products(gated=mlp.gated)
    yield BackwardStage(
        name="gate of experts",
        saved=saved - product,
        gradients=tokens + product * _gate_widths(gated=mlp.gated, clamped=clamped),
        ready=shared_parameters + down,
    )
    # those of gate and up, which of SwiGLU are in their memory, and that of the sorted input
    both = (2 if mlp.gated else 1) * mlp.moe_intermediate_size
    yield BackwardStage(
        name="first matrices of experts",
        saved=saved - kept * product,
        gradients=tokens + b * rows * both + outputs,
        made=first,
        ready=shared_parameters + down,
        copies=_grouped_fp8(rows, experts, (mlp.expert_width, both), shape) if fp8 else 0,
    )


def _dense(layer: Layer, mlp: DenseMlp, shape: ActivationShape, *, fp8: bool) -> Iterator[BackwardStage]:
    b, t, d = shape.element_bytes, shape.tokens, mlp.hidden_size
    product, matrix = b * t * mlp.intermediate_size, mlp.intermediate_size * d
    first = 2 if mlp.gated else 1
    copies = _linear_fp8(t, d, mlp.intermediate_size, shape) if fp8 else 0
    saved = float(saved_bytes(layer, shape))
    yield BackwardStage(name="last matrix", saved=saved, gradients=b * t * d + product, made=matrix, copies=copies)
    yield BackwardStage(
        name="gate",
        saved=saved - product,
        gradients=b * t * d + product * _gate_widths(gated=mlp.gated),
        ready=matrix,
    )
    yield BackwardStage(
        name="first matrices",
        saved=saved - kept_products(gated=mlp.gated) * product,
        # of two matrices the gradient of one's output is free when the other gives the second one of the input
        gradients=max(2 * b * t * d + first * product, (1 + first) * b * t * d + product),
        made=first * matrix,
        ready=matrix,
        copies=copies,
    )


def _gate_widths(*, gated: bool, clamped: bool = False) -> int:
    """Return the tensors of the inner width that the backward pass of a block's activation holds at once.

    SwiGLU has the gradients of its output and of ``silu(gate)``; those of gate and up take the memory of these two.
    Autograd makes more for clamped gates, and for squares the power, its multiple, and two gradients.
    """
    if clamped:
        return 3
    return 2 if gated else 4


def _grouped_fp8(rows: float, experts: int, sizes: tuple[int, int], shape: ActivationShape) -> float:
    """Return the bytes of a product of experts in FP8 without its input, its gradients and that of its matrix.

    By `hpcrl.modeling.fp8.products`, for ``rows`` of all experts and ``sizes`` of input and output: the gradient of the
    output and the product, in rows that begin at multiples of 128 for each expert; the input by columns; the matrix
    turned over; and then the largest of the input in these rows, the gradient of the output by columns with the sum in
    float32, and this sum with itself in the dtype of the matrix.
    """
    inside, out = sizes
    b, matrix = shape.element_bytes, experts * inside * out
    apart = rows + (_BLOCK - 1) * min(experts, rows)
    # the last part has the gradient of the matrix, which the others do not have yet
    last = max(b * apart * inside - b * matrix, _FP8 * apart * out + (4 - b) * matrix, 4 * matrix)
    return apart * (b * (inside + out) + _FP8 * inside) + matrix + last


def _linear_fp8(rows: float, inside: int, out: int, shape: ActivationShape) -> float:
    """Return the same of a matrix that all ``rows`` are multiplied with, which have their places."""
    b, matrix = shape.element_bytes, inside * out
    return matrix + max(_FP8 * rows * (inside + out) + (4 - b) * matrix, 4 * matrix)
