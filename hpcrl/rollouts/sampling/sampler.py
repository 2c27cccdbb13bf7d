"""Settings for sampling the tokens of conversations: engines, chat format and limits."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

import msgspec

from hpcrl.config.sampling import SamplingConfig
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.environments.base import PolicyEndpoint
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling.known_rows import KnownRows
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsSettings
from hpcrl.rollouts.sampling.stops import TurnStops

if TYPE_CHECKING:
    from hpcrl.rollouts.sampling.turn_sampler import TurnSampler


class RecordedTurns(Protocol):
    """Turns that a program has sampled through the endpoint of a rollout.

    Attributes
    ----------
    failure:
        Reason that the policy could not answer; None where it always did. The rollout fails with it.
    truncated:
        The last turn was cut at a limit, or there was no room for one.
    malformed_calls, turns_ended_otherwise:
        See `hpcrl.rollouts.sampling.conversation.Conversation`.
    """

    failure: Exception | None
    truncated: bool
    malformed_calls: int
    turns_ended_otherwise: int


class EndpointServer(Protocol):
    """Serves rollouts to programs that speak OpenAI's API (`hpcrl.rollouts.gateway`)."""

    def serve(self, turns: TurnSampler) -> AbstractAsyncContextManager[tuple[PolicyEndpoint, RecordedTurns]]:
        """Serve one rollout inside the context."""
        ...


class Sampler:
    """Engines, chat format and limits of conversations. Shared by many of them."""

    def __init__(
        self,
        pool: EnginePool,
        renderer: Renderer,
        *,
        temperature: float,
        sampling: SamplingConfig,
        max_model_len: int,
        stream_interval: int = 0,
        routes: RoutedExpertsSettings | None = None,
        rows: KnownRows | None = None,
        max_branches: int = 16,
        gateway: EndpointServer | None = None,
    ) -> None:
        """Remember settings.

        Parameters
        ----------
        temperature:
            0 is greedy, for evaluations; that of ``sampling`` is not read.
        sampling:
            Everything else about how tokens are drawn.
        max_model_len:
            Longest sequence of an engine in tokens.
        stream_interval:
            Tokens of a part of an answer; 0: answers come whole.
        routes:
            Settings of routed experts; None: engines do not return them.
        rows:
            Experts of prompts that conversations share; None: each has its own alone.
        max_branches:
            Sequences that a conversation may have.
        gateway:
            Serves rollouts to foreign programs; None: rollouts have no endpoint.
        """
        self.rows, self.max_branches = rows, max_branches
        self.stream_interval = stream_interval or msgspec.UNSET
        self.pool, self.renderer, self.temperature, self.routes = pool, renderer, temperature, routes
        self.sampling, self.max_model_len, self.gateway = sampling, max_model_len, gateway
        self.stops = TurnStops(renderer, sampling)
