"""What stands between orchestrator and engines: what a recipe says about it."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.base import NonNegativeFloat, PositiveInt, StrictModel

__all__ = ["RouterConfig"]


class RouterConfig(StrictModel):
    """Who chooses the engine of a request."""

    kind: Literal["auto", "direct", "vllm-router", "dynamo"] = "auto"
    """``vllm-router`` is vLLM's own router, as a role of the run: the orchestrator sends all requests to its one
    address. ``direct``: the orchestrator chooses itself, the engine with the fewest rollouts. ``dynamo``: NVIDIA
    Dynamo's KV-aware router in its place, in front of the same engines. ``auto``: ``vllm-router`` for the backend
    ``vllm`` and between ``prefill`` and ``decode``, else ``direct``."""
    policy: Literal["sticky_least_loaded", "consistent_hash", "round_robin", "random", "power_of_two"] = (
        "sticky_least_loaded"
    )
    """``vllm-router``: how it chooses. The first two keep a group of rollouts, with all of its turns, on one engine,
    where its prefix is; ``sticky_least_loaded`` spreads groups more evenly. The others ignore prefixes."""
    session_ttl_s: NonNegativeFloat = 600.0
    """``dynamo``: a group of rollouts, with all of its turns, stays with its engine until nothing came of it for so
    many seconds. 0: the engine of each request is chosen anew, by what is in its cache and by its load."""
    health_interval_s: PositiveInt = 2
    """Seconds between two questions to each engine; after two without an answer it gets none of the
    requests."""
