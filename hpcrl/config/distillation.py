"""A teacher whose log-probabilities the policy learns from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpcrl.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, StrictModel


class TeacherConfig(StrictModel):
    """A server with vLLM's HTTP API that scores sampled tokens: vLLM, or hpcrl's embedded engine.

    It is not started by the run and receives no credentials; its tokenizer must be that of the policy, which is
    compared before the first rollout.
    """

    url: Annotated[str, Field(pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$")]
    """Its address, for example ``http://node7:8000``: below it are ``/v1/models`` and ``/v1/completions``."""
    model: str | None = None
    """Name of the model at the server. None: the first that it serves."""
    timeout_s: PositiveFloat = 120.0
    """Maximum seconds of one request."""
    deadline_s: PositiveFloat = 600.0
    """Maximum seconds that a finished rollout waits for its log-probabilities, repeated requests included; then it is
    dropped."""
    max_requests: PositiveInt = 64
    """Requests at once."""


class DistillationConfig(StrictModel):
    """On-policy distillation: how much likelier a teacher finds each sampled token is part of the token's advantage."""

    teacher: TeacherConfig
    """The teacher."""
    coefficient: NonNegativeFloat = 1.0
    """Weight of the teacher's log-probability minus the policy's. 0 for a loss of your own that ``needs`` the teacher
    and computes with it by itself."""
    reward_weight: NonNegativeFloat = 1.0
    """Weight of the advantage of the reward; 0: the teacher alone is learned from."""
