"""Sums over trained tokens that become the measurements of a step.

Ranks and micro-batches add up sums and counts, never means, so that a token weighs the same wherever it was
trained. All sums are float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.trainer.losses import PolicyLoss
from hpcrl.trainer.parallel import Parallel

__all__ = ["TokenMetrics", "TokenSums"]

_SCALARS = ("tokens", "loss", "entropy", "mismatch_kl", "masked", "ratio", "squared_ratio")


@dataclass(frozen=True, slots=True)
class TokenMetrics:
    """Token means of a step over all ranks; field meanings as in `hpcrl.runs.metrics.StepRecord`."""

    tokens: int
    loss: float
    entropy: float
    mismatch_kl: float
    mismatch_kl_by_lag: dict[str, float]
    masked_share: float
    ess: float


class _Lags(NamedTuple):
    """Tokens and k3 sums of one micro-batch, both ``[largest lag + 2]``: first mixed tokens, then by version lag."""

    tokens: Tensor
    mismatch_kl: Tensor


class TokenSums:
    """Collects micro-batches of one step."""

    def __init__(self, trainer_version: int) -> None:
        """Start a step that is computed with policy version ``trainer_version``."""
        self._version = trainer_version
        self._scalars = torch.zeros(len(_SCALARS), dtype=torch.float64)
        self._lags: list[_Lags] = []

    def add(self, loss: PolicyLoss, entropies: Tensor, versions: Tensor, context_versions: Tensor) -> None:
        """Add the N trained tokens of a micro-batch.

        Parameters
        ----------
        loss:
            Of the micro-batch; its scalar is already a share of the batch's token mean.
        entropies:
            ``[N]`` in nats.
        versions:
            ``[N]`` int64 policy version that sampled each token.
        context_versions:
            ``[N]`` int64 oldest version that its context was computed with.

        Raises
        ------
        ValueError
            A token is of a version that the trainer has not made yet.
        """
        lag = self._version - versions
        log_ratio = loss.log_ratio.double()
        ratio = log_ratio.exp()
        k3 = ratio - 1.0 - log_ratio
        sums = (
            torch.tensor(float(len(versions))),
            loss.loss.detach().double(),
            entropies.double().sum(),
            k3.sum(),
            loss.masked.double().sum(),
            ratio.sum(),
            ratio.square().sum(),
        )
        self._scalars += torch.stack([value.to("cpu", torch.float64) for value in sums])
        if not len(lag):
            return
        if int(lag.min()) < 0:
            raise ValueError(f"a token was sampled by version {int(versions.max())}, the trainer is at {self._version}")
        bucket = torch.where(versions == context_versions, lag + 1, 0)
        self._lags.append(_Lags(torch.bincount(bucket).double().cpu(), torch.bincount(bucket, weights=k3).cpu()))

    def reduce(self, parallel: Parallel) -> TokenMetrics:
        """Means over all ranks (a collective). Where nothing was trained all values are 0."""
        longest = parallel.max(max((len(lags.tokens) for lags in self._lags), default=0))
        by_lag = torch.zeros(2, longest, dtype=torch.float64)
        for lags in self._lags:
            by_lag[0, : len(lags.tokens)] += lags.tokens
            by_lag[1, : len(lags.tokens)] += lags.mismatch_kl
        total = parallel.sum(torch.cat((self._scalars, by_lag.flatten())))
        return _means(total[: len(_SCALARS)], total[len(_SCALARS) :].view(2, longest))


def _means(scalars: Tensor, by_lag: Tensor) -> TokenMetrics:
    sums = dict(zip(_SCALARS, scalars.tolist(), strict=True))
    tokens = sums["tokens"]
    share = 1.0 / max(tokens, 1.0)
    return TokenMetrics(
        tokens=int(tokens),
        # every micro-batch contributed its share of the batch's token mean
        loss=sums["loss"],
        entropy=sums["entropy"] * share,
        mismatch_kl=sums["mismatch_kl"] * share,
        mismatch_kl_by_lag={
            str(bucket - 1) if bucket else "mixed": kl / count
            for bucket, (count, kl) in enumerate(by_lag.T.tolist())
            if count
        },
        masked_share=sums["masked"] * share,
        ess=sums["ratio"] ** 2 * share / sums["squared_ratio"] if tokens else 0.0,
    )
