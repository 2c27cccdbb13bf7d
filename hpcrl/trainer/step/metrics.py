"""Sums over trained tokens that become the measurements of a step.

Ranks and micro-batches add up sums and counts, never means, so that a token weighs the same wherever it was
trained. All sums are float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.trainer.batch.routed_experts import RoutedExpertsComparison
from hpcrl.trainer.batch.tensors import TokenBatch
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.step.losses import PolicyLoss

__all__ = ["TokenMetrics", "TokenSums"]

_TOKEN_SCALARS = ("tokens", "loss", "entropy", "mismatch_kl", "masked", "ratio", "squared_ratio")
_ROUTE_SCALARS = ("compared", "differing", "known")
_SCALARS = (*_TOKEN_SCALARS, *_ROUTE_SCALARS)
_MAX_LOG_RATIO = 300.0
"""Squares of ratios, added up, are still numbers in float64: ``metrics.jsonl`` has no infinity."""


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
    routing_mismatch: float | None
    routing_mismatch_by_lag: dict[str, float]
    routed_tokens: int


class _Lags(NamedTuple):
    """Counts and sums over one micro-batch, both ``[largest lag + 2]``: first mixed tokens, then by version lag.

    Of trained tokens and their k3, or of pairs of token and layer and those whose experts differ.
    """

    counts: Tensor
    sums: Tensor


class TokenSums:
    """Collects micro-batches of one step."""

    def __init__(self, trainer_version: int) -> None:
        """Start a step that is computed with policy version ``trainer_version``."""
        self._version = trainer_version
        self._scalars = torch.zeros(len(_SCALARS), dtype=torch.float64)
        self._lags: list[_Lags] = []
        self._route_lags: list[_Lags] = []

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
        log_ratio = loss.log_ratio.double()
        ratio = log_ratio.clamp(max=_MAX_LOG_RATIO).exp()
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
        self._add_scalars(0, sums)
        if not len(versions):
            return
        self._lags.append(_by_lag(self._buckets(versions, context_versions), torch.ones_like(k3), k3))

    def add_routes(self, comparison: RoutedExpertsComparison, batch: TokenBatch) -> None:
        """Add the experts of a micro-batch: over all tokens that engines spoke of, and by lag over trained ones.

        The row that decides over a trained token is that of the token before it.
        """
        known, layers = comparison.known, comparison.layers
        self._add_scalars(len(_TOKEN_SCALARS), (known.sum() * layers, comparison.differing.sum(), known.sum()))
        if batch.num_trained:
            rows = batch.select
            bucket = self._buckets(batch.versions, batch.context_versions)
            self._route_lags.append(_by_lag(bucket, known[rows].double() * layers, comparison.differing[rows].double()))

    def _add_scalars(self, first: int, values: Sequence[Tensor]) -> None:
        added = torch.stack([value.to("cpu", torch.float64) for value in values])
        self._scalars[first : first + len(values)] += added

    def _buckets(self, versions: Tensor, context_versions: Tensor) -> Tensor:
        if int(versions.max()) > self._version:
            raise ValueError(f"a token was sampled by version {int(versions.max())}, the trainer is at {self._version}")
        return torch.where(versions == context_versions, self._version - versions + 1, 0)

    def reduce(self, ranks: Ranks) -> TokenMetrics:
        """Means over all ranks (a collective). Where nothing was trained all values are 0."""
        kinds = (self._lags, self._route_lags)
        longest = ranks.max(max((len(lags.counts) for kind in kinds for lags in kind), default=0))
        by_lag = torch.zeros(len(kinds), 2, longest, dtype=torch.float64)
        for sums, kind in zip(by_lag, kinds, strict=True):
            for lags in kind:
                sums[0, : len(lags.counts)] += lags.counts
                sums[1, : len(lags.counts)] += lags.sums
        total = ranks.sum(torch.cat((self._scalars, by_lag.flatten())))
        return _means(total[: len(_SCALARS)], *total[len(_SCALARS) :].view_as(by_lag))


def _by_lag(bucket: Tensor, counts: Tensor, sums: Tensor) -> _Lags:
    return _Lags(torch.bincount(bucket, weights=counts).cpu(), torch.bincount(bucket, weights=sums).cpu())


def _shares(by_lag: Tensor) -> dict[str, float]:
    """Sum over count of ``[2, buckets]``, by the name of the bucket."""
    return {
        str(bucket - 1) if bucket else "mixed": total / count
        for bucket, (count, total) in enumerate(by_lag.T.tolist())
        if count
    }


def _means(scalars: Tensor, kl_by_lag: Tensor, routes_by_lag: Tensor) -> TokenMetrics:
    sums = dict(zip(_SCALARS, scalars.tolist(), strict=True))
    tokens = sums["tokens"]
    share = 1.0 / max(tokens, 1.0)
    return TokenMetrics(
        tokens=int(tokens),
        # every micro-batch contributed its share of the batch's token mean
        loss=sums["loss"],
        entropy=sums["entropy"] * share,
        mismatch_kl=sums["mismatch_kl"] * share,
        mismatch_kl_by_lag=_shares(kl_by_lag),
        masked_share=sums["masked"] * share,
        ess=sums["ratio"] ** 2 * share / sums["squared_ratio"] if tokens else 0.0,
        routing_mismatch=sums["differing"] / sums["compared"] if sums["compared"] else None,
        routing_mismatch_by_lag=_shares(routes_by_lag),
        routed_tokens=int(sums["known"]),
    )
