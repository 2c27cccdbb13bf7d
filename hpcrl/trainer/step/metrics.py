"""Sums over trained tokens that become the measurements of a step.

Ranks and micro-batches add up sums and counts, never means, so that a token weighs the same wherever it was
trained. All sums are float64. They are kept where the model computes and fetched once a step: nothing here waits for
the device while micro-batches run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcrl.dock.ledger.digest import digest_of_parts, digest_parts
from hpcrl.dock.wire import BatchShard
from hpcrl.trainer.batch.routed_experts import UNKNOWN_KINDS, RoutedExpertsComparison, unknown_rows
from hpcrl.trainer.batch.tensors import TokenBatch
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.step.losses import PolicyLoss

_TOKEN_SCALARS = (
    *("tokens", "nonfinite", "loss", "entropy", "mismatch_kl", "masked", "masked_low", "masked_high"),
    *("ratio", "squared_ratio"),
)
_ROUTE_SCALARS = ("compared", "differing", "known")
_PROBE_SCALARS = ("probed", "replayed_kl", "unreplayed_kl")
_REFERENCE_SCALARS = ("referred", "reference_kl")
_SCALARS = (*_TOKEN_SCALARS, *_ROUTE_SCALARS, *_PROBE_SCALARS, *_REFERENCE_SCALARS)
_NO_UNKNOWN = dict.fromkeys(UNKNOWN_KINDS, 0)
_MAX_LOG_RATIO = 300.0
"""Maximum log-ratio: sums of squared ratios stay finite in float64, as ``metrics.jsonl`` has no infinity."""


@dataclass(frozen=True, slots=True)
class TokenMetrics:
    """Token means of a step over all ranks; field meanings as in `hpcrl.runs.metrics.StepRecord`."""

    tokens: int
    nonfinite_tokens: int
    loss: float
    entropy: float
    mismatch_kl: float
    mismatch_kl_by_lag: dict[str, float]
    masked_share: float
    masked_low_share: float
    masked_high_share: float
    entropy_by_env: dict[str, float]
    mismatch_kl_by_env: dict[str, float]
    ess: float
    routing_mismatch: float | None
    routing_mismatch_by_lag: dict[str, float]
    routed_tokens: int
    routes_bytes: int
    unreplayed_mismatch_kl: float | None
    replayed_mismatch_kl: float | None
    replayed_share: float | None
    reference_kl: float | None
    loss_metrics: dict[str, float]
    unknown_routing: dict[str, float]
    rollouts_digest: str


class TokenSums:
    """Collects micro-batches of one step."""

    def __init__(
        self,
        trainer_version: int,
        *,
        longest_lag: int = 0,
        device: torch.device | None = None,
        unknown: Mapping[str, int] = _NO_UNKNOWN,
        rollouts: Iterable[tuple[int, int]] = (),
        routes_bytes: int = 0,
        replay: bool = False,
        loss_metrics: Sequence[str] = (),
        environments: Sequence[str] = (),
    ) -> None:
        """Start a step that is computed with policy version ``trainer_version``.

        Parameters
        ----------
        longest_lag:
            The largest version lag of a trained token.
        device:
            Device of the tokens; None for the CPU.
        unknown:
            Tokens of this rank without a row of experts, by `UNKNOWN_KINDS`.
        rollouts:
            Those whose first sequence this rank has, by group and member.
        routes_bytes:
            Bytes of rows of routed experts that came with them.
        replay:
            Whether tokens with a row take the experts of it.
        loss_metrics:
            Names of what the loss measures of each token.
        environments:
            Names of the environments of the batch, by their numbers; the same on all ranks.
        """
        self._version, self._replay = trainer_version, replay
        self._unknown = torch.tensor([unknown[kind] for kind in UNKNOWN_KINDS], dtype=torch.float64)
        self._routes_bytes = torch.tensor([routes_bytes], dtype=torch.float64)
        self._rollouts = torch.tensor(digest_parts(rollouts), dtype=torch.float64)
        self._scalars = torch.zeros(len(_SCALARS), dtype=torch.float64, device=device)
        self._loss_names = tuple(loss_metrics)
        # of what the loss measures: tokens at which it is finite, and sums over them
        self._loss_metrics = torch.zeros(2, len(self._loss_names), dtype=torch.float64, device=device)
        # of each environment: tokens, and sums of their entropies and of their k3
        self._environments = tuple(environments)
        self._by_env = torch.zeros(3, len(self._environments), dtype=torch.float64, device=device)
        self._env_numbers = torch.arange(len(self._environments), device=device)[:, None]
        # of trained tokens and their k3, and of pairs of token and layer and those whose experts differ: counts and
        # sums, first of mixed tokens, then by version lag
        self._lags = torch.zeros(2, 2, longest_lag + 2, dtype=torch.float64, device=device)
        self._lag_numbers = torch.arange(longest_lag + 2, device=device)[:, None]

    @classmethod
    def of_shard(
        cls,
        shard: BatchShard,
        device: torch.device,
        *,
        counts: bool = True,
        replay: bool = False,
        loss_metrics: Sequence[str] = (),
    ) -> TokenSums:
        """Make the sums for the micro-batches of ``shard``.

        Parameters
        ----------
        counts:
            Whether this rank counts rollouts and tokens without a row of experts, or another one that has the same
            shard.
        replay, loss_metrics:
            See `TokenSums`.

        Raises
        ------
        ValueError
            A token is of a version that the trainer has not made yet.
        """
        version, longest = shard.step - 1, 0
        for micro_batch in shard.micro_batches:
            sampled = micro_batch.versions[micro_batch.loss_mask != 0]
            if len(sampled):
                if (newest := int(sampled.max())) > version:
                    raise ValueError(f"a token was sampled by version {newest}, the trainer is at {version}")
                longest = max(longest, version - int(sampled.min()))
        counted = shard.micro_batches if counts else []
        return cls(
            version,
            longest_lag=longest,
            device=device,
            unknown=unknown_rows(counted),
            rollouts=(rollout for micro_batch in counted for rollout in micro_batch.begun_rollouts),
            routes_bytes=sum(each.routed_experts.data.nbytes for each in counted if each.routed_experts is not None),
            replay=replay,
            loss_metrics=loss_metrics,
            environments=tuple(shard.stats.environments),
        )

    def add(
        self,
        loss: PolicyLoss,
        entropies: Tensor,
        versions: Tensor,
        context_versions: Tensor,
        environments: Tensor | None = None,
    ) -> None:
        """Add the N trained tokens of a micro-batch. Of what is not finite only the number of tokens is counted.

        Parameters
        ----------
        loss:
            Loss of the micro-batch; its scalar is already a share of the batch's token mean.
        entropies:
            ``[N]`` in nats.
        versions:
            ``[N]`` int64 policy version that sampled each token.
        context_versions:
            ``[N]`` int64 oldest version that its context was computed with.
        environments:
            ``[N]`` int64 number of the environment of each token, -1 where it is unknown; None where all are.
        """
        finite = loss.log_ratio.isfinite() & entropies.isfinite()
        log_ratio = torch.where(finite, loss.log_ratio, 0.0).double()
        ones = finite.double()
        ratio = log_ratio.clamp(max=_MAX_LOG_RATIO).exp() * ones
        k3 = ratio - ones - log_ratio
        masked, entropy = loss.masked & finite, torch.where(finite, entropies, 0.0).double()
        sums = (
            ones.sum(),
            (1.0 - ones).sum(),
            loss.loss.detach().double().nan_to_num(0.0, 0.0, 0.0),
            entropy.sum(),
            k3.sum(),
            masked.double().sum(),
            (masked & (log_ratio < 0)).double().sum(),
            (masked & (log_ratio > 0)).double().sum(),
            ratio.sum(),
            ratio.square().sum(),
        )
        self._add_scalars(0, sums)
        self._add_lags(0, self._buckets(versions, context_versions), ones, k3)
        if environments is not None and self._environments:
            mine = environments == self._env_numbers
            self._by_env += torch.stack([torch.where(mine, each, 0.0).sum(1) for each in (ones, entropy, k3)])
        if loss.metrics is not None:
            known = loss.metrics.isfinite()
            self._loss_metrics[0] += known.double().sum(1)
            self._loss_metrics[1] += torch.where(known, loss.metrics, 0.0).double().sum(1)

    def add_routes(self, comparison: RoutedExpertsComparison, batch: TokenBatch) -> None:
        """Add the experts of a micro-batch: over all tokens that engines spoke of, and by lag over trained ones.

        The row that decides over a trained token is that of the token before it.
        """
        known, layers = comparison.known, comparison.layers
        self._add_scalars(len(_TOKEN_SCALARS), (known.sum() * layers, comparison.differing.sum(), known.sum()))
        if batch.num_trained:
            rows = batch.select
            bucket = self._buckets(batch.versions, batch.context_versions)
            self._add_lags(1, bucket, known[rows].double() * layers, comparison.differing[rows].double())

    def add_probe(self, loss: PolicyLoss, unreplayed: Tensor) -> None:
        """Compare log-probabilities of a micro-batch with replay and without.

        Parameters
        ----------
        loss:
            Log-ratios of its tokens, with replay.
        unreplayed:
            ``[N]``: what ``loss.log_ratio`` is without.
        """
        both = loss.log_ratio.isfinite() & unreplayed.isfinite()
        kls = [_k3(torch.where(both, ratios, 0.0).double(), both).sum() for ratios in (loss.log_ratio, unreplayed)]
        self._add_scalars(len(_TOKEN_SCALARS) + len(_ROUTE_SCALARS), (both.sum(), *kls))

    def add_reference(self, away: Tensor) -> None:
        """Add the distance from the start model of a micro-batch.

        Parameters
        ----------
        away:
            ``[N]``, detached: log-probability of the start model minus the trainer's.
        """
        known = away.isfinite()
        found = _k3(torch.where(known, away, 0.0).double(), known).sum()
        self._add_scalars(len(_SCALARS) - len(_REFERENCE_SCALARS), (known.sum(), found))

    def _add_scalars(self, first: int, values: Sequence[Tensor]) -> None:
        self._scalars[first : first + len(values)] += torch.stack([value.double() for value in values])

    def _add_lags(self, kind: int, bucket: Tensor, counts: Tensor, sums: Tensor) -> None:
        # not `bincount`: it waits for the device to learn the number of bins, and adds in any order
        mine = bucket == self._lag_numbers
        self._lags[kind] += torch.stack([torch.where(mine, values, 0.0).sum(1) for values in (counts, sums)])

    def _buckets(self, versions: Tensor, context_versions: Tensor) -> Tensor:
        return torch.where(versions == context_versions, self._version - versions + 1, 0)

    def reduce(self, ranks: Ranks) -> TokenMetrics:
        """Return means over all ranks (a collective). If nothing was trained all values are 0."""
        own = self._lags.shape[-1]
        longest = ranks.max(own)
        # fetched at once: each fetch waits for the device
        mine = (self._scalars, self._loss_metrics.flatten(), self._by_env.flatten(), self._lags.flatten())
        fetched = torch.cat(mine).cpu()
        own_scalars, own_metrics, own_envs, own_lags = torch.split(fetched, [len(each) for each in mine])
        by_lag = torch.zeros(2, 2, longest, dtype=torch.float64)
        by_lag[..., :own] = own_lags.view(2, 2, own)
        pieces = (
            own_scalars,
            own_metrics,
            own_envs,
            self._unknown,
            self._rollouts,
            self._routes_bytes,
            by_lag.flatten(),
        )
        total = ranks.sum(torch.cat(pieces))
        scalars, measured, envs, unknown, rollouts, routes_bytes, lags = torch.split(
            total, [len(piece) for piece in pieces]
        )
        digest = digest_of_parts([int(part) for part in rollouts.tolist()])
        size = int(routes_bytes.item())
        counts, sums = measured.view_as(self._loss_metrics).tolist()
        found = zip(self._loss_names, counts, sums, strict=True)
        return _means(
            scalars,
            unknown,
            *lags.view_as(by_lag),
            digest=digest,
            routes_bytes=size,
            replay=self._replay,
            loss_metrics={name: total / count for name, count, total in found if count},
            by_env=dict(zip(self._environments, envs.view_as(self._by_env).T.tolist(), strict=True)),
        )


def _shares(by_lag: Tensor) -> dict[str, float]:
    """Sum over count of ``[2, buckets]``, by the name of the bucket."""
    return {
        str(bucket - 1) if bucket else "mixed": total / count
        for bucket, (count, total) in enumerate(by_lag.T.tolist())
        if count
    }


def _k3(log_ratio: Tensor, counted: Tensor) -> Tensor:
    """Return ``r - 1 - log r`` of each token that counts."""
    return (log_ratio.clamp(max=_MAX_LOG_RATIO).exp() - 1.0 - log_ratio) * counted


def _means(
    scalars: Tensor,
    unknown: Tensor,
    kl_by_lag: Tensor,
    routes_by_lag: Tensor,
    *,
    digest: str,
    routes_bytes: int,
    replay: bool,
    loss_metrics: dict[str, float],
    by_env: Mapping[str, tuple[float, float, float]],
) -> TokenMetrics:
    sums = dict(zip(_SCALARS, scalars.tolist(), strict=True))
    tokens = sums["tokens"]
    share = 1.0 / max(tokens, 1.0)
    rows = sums["known"] + float(unknown.sum())
    unknown_shares: dict[str, float] = {}
    if replay or sums["known"]:
        counts = zip(UNKNOWN_KINDS, unknown.tolist(), strict=True)
        unknown_shares = {kind: count / rows for kind, count in counts if count}
    return TokenMetrics(
        tokens=int(tokens),
        nonfinite_tokens=int(sums["nonfinite"]),
        # every micro-batch contributed its share of the batch's token mean
        loss=sums["loss"],
        entropy=sums["entropy"] * share,
        mismatch_kl=sums["mismatch_kl"] * share,
        mismatch_kl_by_lag=_shares(kl_by_lag),
        masked_share=sums["masked"] * share,
        masked_low_share=sums["masked_low"] * share,
        masked_high_share=sums["masked_high"] * share,
        entropy_by_env={name: entropy / count for name, (count, entropy, _) in by_env.items() if count},
        mismatch_kl_by_env={name: k3 / count for name, (count, _, k3) in by_env.items() if count},
        ess=sums["ratio"] ** 2 * share / sums["squared_ratio"] if tokens else 0.0,
        routing_mismatch=sums["differing"] / sums["compared"] if sums["compared"] else None,
        routing_mismatch_by_lag=_shares(routes_by_lag),
        routed_tokens=int(sums["known"]),
        routes_bytes=routes_bytes,
        unreplayed_mismatch_kl=sums["unreplayed_kl"] / sums["probed"] if sums["probed"] else None,
        replayed_mismatch_kl=sums["replayed_kl"] / sums["probed"] if sums["probed"] else None,
        replayed_share=sums["known"] / rows if replay and rows else None,
        reference_kl=sums["reference_kl"] / sums["referred"] if sums["referred"] else None,
        loss_metrics=loss_metrics,
        unknown_routing=unknown_shares,
        rollouts_digest=digest,
    )
