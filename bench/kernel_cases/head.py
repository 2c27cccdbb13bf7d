"""The loss of GLM-5's head over 131,072 tokens, forward and backward, beside two libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpcrl.trainer.step.head import chunked_logprobs, loss_in_pieces, whole_logprobs
from hpcrl.trainer.step.losses import PolicyLoss
from kernel_cases.attention import drawn
from kernel_cases.case import Case, Make, NotHere, library


def head(device: torch.device, tiny: bool) -> Iterator[Case]:
    """A mean of log-probabilities; ours has entropies and the ratio to the engine as well."""
    tokens, vocab, hidden = (32, 50, 16) if tiny else (131_072, 154_880, 6_144)
    normal = drawn(device, torch.float32 if tiny else torch.bfloat16)
    x, weight = normal(tokens, hidden).requires_grad_(), (normal(vocab, hidden) * 0.02).detach().requires_grad_()
    targets = torch.randint(vocab, (tokens,), device=device)

    def pieces(n: int | None) -> Callable[[], Any]:
        def loss_of(logprobs: Tensor, rows: slice) -> PolicyLoss:
            nothing = torch.zeros_like(logprobs, dtype=torch.bool)
            return PolicyLoss(-logprobs.sum() / tokens, nothing, logprobs.detach())

        return again(lambda: loss_in_pieces(x, weight, targets, loss_of, temperature=1.0, tokens=n)[0])

    def logprobs(make: Callable[..., tuple[Tensor, Tensor]], **settings: Any) -> Callable[[], Any]:
        return again(lambda: -make(x, weight, targets, temperature=1.0, **settings)[0].mean())

    def again(loss: Callable[[], Tensor]) -> Callable[[], Any]:
        def run() -> None:
            x.grad = weight.grad = None
            loss().backward()

        return run

    def liger() -> Callable[[], Any]:
        if device.type != "cuda":
            raise NotHere("its programs are for GPUs")
        made = library("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        return again(lambda: made(weight, x, targets))

    def cut(kind: str) -> Callable[[], Any]:
        if device.type != "cuda":
            raise NotHere("its programs are for GPUs")
        made = library("cut_cross_entropy").linear_cross_entropy
        return again(lambda: made(x, weight, targets, impl=kind))

    candidates: dict[str, Make] = {
        "hpcrl, pieces": partial(pieces, None),
        "hpcrl, pieces of 4096": partial(pieces, 4096),
        "hpcrl, log-probabilities": partial(logprobs, chunked_logprobs, tokens=None),
        "liger": liger,
        # cce leaves out gradients that bfloat16 would round away; cce_exact does not
        "cut-cross-entropy": partial(cut, "cce"),
        "cut-cross-entropy, exact": partial(cut, "cce_exact"),
    }
    if tiny:
        candidates["all logits"] = partial(logprobs, whole_logprobs)
    yield Case(
        "head both", {"tokens": tokens, "vocab": vocab, "hidden": hidden}, 6.0 * tokens * vocab * hidden, candidates
    )
