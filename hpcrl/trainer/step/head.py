"""From hidden states to a loss, or to log-probabilities and entropies, without the logits of all tokens.

`loss_in_pieces` makes the logits of some tokens once: where the loss of a token needs no other tokens, it is known with
these, and the gradient of head and hidden states is added up before the next tokens come (as fused linear
cross-entropies do, https://arxiv.org/abs/2410.10989).

`chunked_logprobs` is for losses that want all log-probabilities first. A piece is some tokens times a part of the
vocabulary. The forward pass goes over the pieces with a running maximum, sum of exponentials and their mean logit (the
online softmax of https://arxiv.org/abs/1805.02867, extended by the entropy) and keeps one normaliser a token; the
backward pass makes each piece of logits again.

Numbers are those of `hpcrl.trainer.batch.tensors.token_logprobs` but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.trainer.batch.tensors import normalise, put_gradient, token_logprobs
from hpcrl.trainer.step.losses import PolicyLoss

AUTO_TOKENS = 4096
"""Tokens of a piece where the recipe leaves them open: with fewer the gradient of the head, which is added up in
float32, is read and written too often (on an H200 at the sizes of GLM-5 pieces of 1,024 take 18 % longer)."""
AUTO_ROWS = 1024
"""The same if a piece is a part of the vocabulary, too: enough for matrix products at full speed."""
PIECE_BYTES = 32 << 20
"""Bytes of a piece's logits in float32 if a piece is a part of the vocabulary, too; about four tensors of that size
exist at once."""

LossOfTokens = Callable[[Tensor, slice], PolicyLoss]
"""Loss from log-probabilities with gradient, of a slice of the trained tokens."""


def whole_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the result of `chunked_logprobs`, from all logits ``[N, vocab_size]`` at once, in the dtype of the model.

    Arguments are those of `chunked_logprobs`.
    """
    return token_logprobs(F.linear(hidden[: len(targets)], weight), targets, temperature)


def loss_in_pieces(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss: LossOfTokens, *, temperature: float, tokens: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute a loss that is a sum over tokens together with its gradient, so that logits are made only once.

    Parameters
    ----------
    hidden, weight, targets, temperature:
        See `chunked_logprobs`.
    loss:
        Loss of some of the tokens; no returned number may depend on other tokens.
    tokens:
        Number of tokens of a piece, whose logits are all in memory in the dtype of the model; None: `AUTO_TOKENS`.

    Returns
    -------
    tuple
        The loss, a scalar with gradient, float32; ``masked`` and ``log_ratio`` as in `PolicyLoss`, ``[N]``; and
        entropies in nats, ``[N]`` float32. A second backward pass through the loss is an error.
    """
    settings = _LossSettings(loss, temperature, tokens or AUTO_TOKENS)
    return _LossInPieces.apply(hidden, weight, targets, settings)  # type: ignore[no-any-return, no-untyped-call]


class _LossSettings(NamedTuple):
    """``rows`` tokens are a piece."""

    loss: LossOfTokens
    temperature: float
    rows: int


class _LossInPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: _LossSettings
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if of_hidden else None
        # a sum over pieces, in float32: bfloat16 would lose small addends
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        total = hidden.new_zeros((), dtype=torch.float32)
        log_ratio, entropies = (hidden.new_empty(targets.shape, dtype=torch.float32) for _ in range(2))
        masked = hidden.new_empty(targets.shape, dtype=torch.bool)
        for part in _slices(len(targets), settings.rows):
            logits = F.linear(hidden[part], weight)
            logprobs, entropies[part], normaliser = normalise(logits, targets[part], settings.temperature)
            with torch.enable_grad():
                found = settings.loss(logprobs.requires_grad_(), part)
                (slopes,) = torch.autograd.grad(found.loss, logprobs)
            total += found.loss.detach()
            masked[part], log_ratio[part] = found.masked, found.log_ratio
            put_gradient(logits, targets[part], normaliser, slopes, settings.temperature)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, logits, hidden[part])
            # or they would be held until the next piece has its own
            del logits
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(masked, log_ratio, entropies)
        return total, masked, log_ratio, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if x is None else x.mul_(gradients[0]).to(ctx.dtype) for x in ctx.saved_tensors]
        return *scaled, None, None


def _add_product(total: Tensor, logits: Tensor, hidden: Tensor) -> None:
    """Add ``logits.T @ hidden`` to ``total`` ``[vocab_size, hidden_size]`` in float32."""
    if logits.dtype == total.dtype:
        total.addmm_(logits.T, hidden)
        return
    if total.device.type == "cuda":
        # neither rounded nor written before it is added
        torch.ops.aten.addmm.dtype_out(total, logits.T, hidden, total.dtype, out=total)
        return
    for columns in _slices(len(total), max(1, PIECE_BYTES // (4 * len(logits)))):
        total[columns] += logits[:, columns].T @ hidden


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, tokens: int | None
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, and each distribution's entropy, after the temperature.

    Parameters
    ----------
    hidden:
        ``[rows, hidden_size]`` with gradient: what goes into the head.
    weight:
        ``[vocab_size, hidden_size]`` of the head, in the same dtype; with gradient unless it is frozen.
    targets:
        ``[N]`` int64, of the first N rows of ``hidden``; the others have no part in it. N may be 0.
    temperature:
        Divides the logits, as the engine does.
    tokens:
        Rows of a piece; None: `AUTO_ROWS`. Its part of the vocabulary follows from `PIECE_BYTES`.

    Returns
    -------
    tuple
        ``[N]`` log-probabilities with gradient and ``[N]`` entropies in nats without, both float32.
    """
    hidden = hidden[: len(targets)]
    rows = max(1, min(tokens or AUTO_ROWS, len(hidden)))
    columns = max(1, PIECE_BYTES // (4 * rows))
    settings = _Settings(temperature, rows, columns)
    found: tuple[Tensor, Tensor] = _ChunkedHead.apply(hidden, weight, targets, settings)  # type: ignore[no-untyped-call]
    return found


class _Settings(NamedTuple):
    """``rows`` tokens and ``columns`` of the vocabulary are a piece."""

    temperature: float
    rows: int
    columns: int


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        largest = hidden.new_full(hidden.shape[:1], float("-inf"), dtype=torch.float32)
        # exp(logit - largest) summed over the vocabulary; the same times logit; the logit of the target
        total, weighted, own = (torch.zeros_like(largest) for _ in range(3))
        for columns in _slices(len(weight), settings.columns):
            for rows in _slices(len(hidden), settings.rows):
                logits = _logits(hidden[rows], weight[columns], settings.temperature)
                highest = torch.maximum(largest[rows], logits.amax(1))
                rescale = (largest[rows] - highest).exp_()
                exponentials = (logits - highest[:, None]).exp_()
                total[rows] = total[rows] * rescale + exponentials.sum(1)
                weighted[rows] = weighted[rows] * rescale + exponentials.mul_(logits).sum(1)
                largest[rows] = highest
                here, at = _places(targets[rows], columns)
                own[rows] += logits.gather(1, at)[:, 0] * here
                # or they would be held until the next piece has its own
                del logits, exponentials
        normaliser = largest + total.log()
        entropies = normaliser - weighted / total
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.settings = settings
        ctx.mark_non_differentiable(entropies)
        return own - normaliser, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, normaliser = ctx.saved_tensors
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        settings: _Settings = ctx.settings
        scale = gradients[0] / settings.temperature
        # sums over pieces in float32: bfloat16 would lose small addends
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if of_hidden else None
        grad_weight = torch.empty_like(weight) if of_weight else None
        for columns in _slices(len(weight), settings.columns):
            part = torch.zeros_like(weight[columns], dtype=torch.float32) if of_weight else None
            for rows in _slices(len(hidden), settings.rows):
                grad = _logits(hidden[rows], weight[columns], settings.temperature)
                # of a log-probability: one at its target, less all probabilities
                grad.sub_(normaliser[rows, None]).exp_().neg_()
                here, at = _places(targets[rows], columns)
                grad.scatter_add_(1, at, here[:, None])
                grad = grad.mul_(scale[rows, None]).to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] += grad @ weight[columns]
                if part is not None:
                    part += grad.T @ hidden[rows]
                del grad
            if grad_weight is not None and part is not None:
                grad_weight[columns] = part
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None


def _slices(length: int, step: int) -> Iterator[slice]:
    for begin in range(0, length, step):
        yield slice(begin, min(begin + step, length))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return logits in float32, first rounded to the dtype of the model as those that the engine samples from."""
    logits = F.linear(hidden, weight).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def _places(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return a float32 mask ``[n]`` of the targets in a part of the vocabulary, and their index there, ``[n, 1]``.

    The index of other targets is 0.
    """
    here = (targets >= columns.start) & (targets < columns.stop)
    return here.float(), torch.where(here, targets - columns.start, 0)[:, None]
