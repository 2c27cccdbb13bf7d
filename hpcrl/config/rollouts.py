"""Settings of rollouts in a recipe."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.base import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel
from hpcrl.config.sampling import SamplingConfig

PAYLOAD_COPIES = 3
"""Copies of a rollout in flight in memory of the orchestrator: as received, as decoded, and as it is written."""


class AdaptiveConcurrencyConfig(StrictModel):
    """Maximum number of rollouts in flight, adapted to the load of engines during the run: increased by addition,
    decreased by multiplication. ``rollouts.max_in_flight`` and staleness stay upper bounds.
    """

    enabled: bool = False
    """Else ``rollouts.max_in_flight`` alone is the limit."""
    kv_low: Fraction = 0.8
    """Below this share of KV in use an engine gets more, where the limit is what holds rollouts back."""
    kv_high: Fraction = 0.95
    """From this share on it gets fewer; also where requests give their KV back, or queue."""
    decrease: Fraction = 0.8
    """Share of the limit that remains after a decrease."""


class WarehouseConfig(StrictModel):
    """Place in memory of the columns of finished rollouts (tokens, log-probabilities, versions, routed experts) until
    their step is trained. They are durable on the shared filesystem as well, before a rollout counts.
    """

    backend: Literal["embedded", "mooncake"] = "embedded"
    """``embedded``: files in memory of the orchestrator's node. ``mooncake``: objects in Mooncake Store, in memory of
    the orchestrator; needs the package in its environment and in the trainer's. Use it only on a trusted network:
    Mooncake does not authenticate clients."""
    directory: str | None = "/dev/shm"
    """Directory of ``embedded`` in memory of the orchestrator's node: files that other users cannot read, removed at
    the end. Ranks of that node map them, ranks of others ask a small server there; those of a context-parallel group on
    another node share what they fetch in the same directory of theirs. None: ranks read rollouts from the shared
    filesystem."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Protocol of ``mooncake`` between nodes."""
    limit_gib: PositiveFloat = 16.0
    """Memory that they may take, in GiB; the same on other nodes whose ranks share them. With routed experts a token of
    a large model takes 600 bytes: two steps of rollouts should fit. At most half of what is free is taken. Where it is
    full, no rollout starts while whole batches wait, and what finishes is read from the shared filesystem."""

    @property
    def ports(self) -> int:
        """Return the number of ports that it needs above the orchestrator's own."""
        return 2 if self.backend == "mooncake" else int(self.directory is not None)


class RolloutFailuresConfig(StrictModel):
    """Conditions under which failing rollouts end the run. A warning is given in any case when 2 % or more fail."""

    end_share: Fraction | None = 0.5
    """The run ends where more than this share of the newest rollouts of one environment failed: the newest
    ``min_rollouts`` that began, or four times ``rollouts.max_in_flight`` where that is more. Those that run count as
    good. Failures of engines do not count, and of rollouts that the death of one process ends only one does. None: no
    bound."""
    min_rollouts: PositiveInt = 128
    """Minimum number of started rollouts of an environment before a share of failures may end the run."""


class RolloutConfig(StrictModel):
    """Rollouts that are generated, and their maximum staleness."""

    rollouts_per_step: PositiveInt = 64
    """Rollouts that one optimizer step consumes; a multiple of ``group_size``."""
    group_size: PositiveInt = 8
    """Rollouts of one prompt; their rewards are compared with each other."""
    max_in_flight: PositiveInt = 128
    """Rollouts that may be running at once; at least ``group_size``."""
    routes_in_flight_gib: PositiveFloat | None = None
    """Memory of the orchestrator for routed experts of rollouts in flight, in GiB, where engines return them. Each
    counts as ``engine.max_model_len`` tokens, three times (as received, as decoded, as written). Where no more fit, no
    rollout begins; one always may. None: a quarter of the memory that is free when the orchestrator starts."""
    sandboxes_gib: PositiveFloat | None = None
    """Maximum memory of all sandboxes of a node together, in GiB. Above it the largest sandbox ends, and its rollout
    has no reward; containers wait for room before they start. Workers of environments with ``memory_gib`` have equal
    parts. None: what the plan leaves of the node, and at least the limit of one sandbox; no limit where the plan does
    not know the node's memory, or no limit of a sandbox."""
    adaptive_concurrency: AdaptiveConcurrencyConfig = AdaptiveConcurrencyConfig()
    """A lower limit where engines cannot run ``max_in_flight`` rollouts."""
    max_branches: PositiveInt = 16
    """Maximum number of sequences of a rollout. A new one begins where its history is changed, so that its earlier
    tokens are no longer the beginning of the prompt (see ``model.chat.thinking``). A rollout that would have more is
    dropped and counted. Each may have ``engine.max_model_len`` tokens."""
    max_off_policy_steps: NonNegativeInt = 4
    """Largest staleness of a consumed rollout: trainer version minus the version of its first sampled token.
    0 is synchronous: the trainer waits for rollouts of its own version."""
    ready_batches: PositiveInt = 1
    """Number of whole batches waiting for the trainer at which no further rollout starts. 1 keeps staleness low, and is
    right where rollouts take no longer than a step. Where they take several, 1 makes waves (batches pile up, then the
    trainer waits): more of them smooth these, at the price of staleness within its bound."""
    order: Literal["arrival", "deterministic"] = "arrival"
    """Order in which finished groups enter batches. ``arrival``: the oldest weights first, whichever has finished.
    ``deterministic``: as they were begun, by weights that do not depend on how long anything takes, so that a run can
    be replayed; engines wait for the last rollout that was begun before they take other weights, which are those of
    every ``(max_off_policy_steps + 1) / 2``-th step, and ``ready_batches`` has no effect."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all equal carry no gradient: ``keep`` them in the batch, or ``drop`` and replace
    them by others. Both are counted."""
    warehouse: WarehouseConfig = WarehouseConfig()
    """Memory for finished rollouts."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of tokens."""
    failures: RolloutFailuresConfig = RolloutFailuresConfig()
    """Rollouts that end without a reward."""
    request_timeout_s: PositiveFloat = 600.0
    """Longest time without an answer to one generation request, in seconds."""
    max_retries: NonNegativeInt = 3
    """Attempts after the first for a request that failed; then the rollout is dropped and counted."""
    stream_interval: NonNegativeInt = 64
    """Number of tokens after which engines send sampled tokens. If an engine is lost, its requests continue on another
    engine from the tokens that have arrived. 0: answers come whole, and an interrupted request begins again."""
