"""Durations: the input of a simulation, from a file, a run (`measure`) or the planner (`from_plan`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from hpcrl.config.base import Fraction, Name, NonNegativeFloat, PositiveFloat, PositiveInt, StrictModel
from hpcrl.config.explain import explain_errors
from hpcrl.config.yamltree import parse_file
from hpcrl.errors import ConfigError, UsageError
from hpcrl.planning.distributions import Constant, Distribution
from hpcrl.storage.files import atomic_write


def _seconds(value: float) -> Distribution:
    return Constant(kind="constant", value=value)


class TurnPlan(NamedTuple):
    """One request of a rollout as it will happen."""

    wait_s: float
    """Seconds of tool time before it."""
    said: int
    """Tokens appended before it: the prompt, or the answer of a tool."""
    sampled: int
    """Tokens the policy says."""
    kept: int = -1
    """Tokens of the context that ``said`` is appended to: of a branch, what it shares. -1: all that there are."""


class RecordedRollout(StrictModel):
    """A rollout of a run, to be replayed."""

    turns: Annotated[tuple[TurnPlan, ...], Field(min_length=1, strict=False)]
    """``[wait_s, said, sampled]`` of each request, in order; where the history was changed, ``kept`` behind them."""
    judge_s: NonNegativeFloat = 0.0
    """Seconds from the last reply to the reward."""

    def merged(self, turns: int, overhead_s: float) -> RecordedRollout:
        """Return the rollout with the same tokens and waits in fewer requests: ``turns`` of them as one.

        Parameters
        ----------
        overhead_s:
            Seconds of overhead of a request that is saved: they become a wait.
        """
        found, later_s = [], 0.0
        for first in range(0, len(self.turns), turns):
            part = self.turns[first : first + turns]
            said, sampled = sum(turn.said for turn in part), sum(turn.sampled for turn in part)
            # of several branches in one request the last one's context counts
            kept = next((turn.kept for turn in reversed(part) if turn.kept >= 0), -1)
            found.append(TurnPlan(part[0].wait_s + later_s, said, sampled, kept))
            # they come after the answer that they were between
            later_s = sum(turn.wait_s + overhead_s for turn in part[1:])
        return RecordedRollout(turns=tuple(found), judge_s=self.judge_s + later_s)


class EnvironmentDurations(StrictModel):
    """The rollouts of one environment: by distributions, or by a recorded trace."""

    trace: Annotated[tuple[RecordedRollout, ...], Field(strict=False)] = ()
    """Recorded rollouts, drawn at random with replacement; in place of the distributions below."""
    turns: Distribution | None = None
    """Requests of a rollout."""
    prompt_tokens: Distribution | None = None
    """Tokens of the prompt; equal for the rollouts of a group."""
    sampled_tokens: Distribution | None = None
    """Tokens the policy says in one turn."""
    said_tokens: Distribution = _seconds(0.0)
    """Tokens that a tool adds between turns."""
    tool_s: Distribution = _seconds(0.0)
    """Seconds of one tool call."""
    judge_s: Distribution = _seconds(0.0)
    """Seconds from the last reply to the reward: a test suite. The recipe's ``latency`` comes on top."""
    tool_slots: PositiveInt | None = None
    """Tool calls that can run at once; the others queue. Grows with ``--nodes``. None: any number."""

    @model_validator(mode="after")
    def _complete(self) -> EnvironmentDurations:
        missing = [name for name in ("turns", "prompt_tokens", "sampled_tokens") if getattr(self, name) is None]
        if not self.trace and missing:
            raise ValueError(f"needs {', '.join(missing)}, or a trace")
        return self


class EngineDurations(StrictModel):
    """One engine replica. A model step takes ``base + per_sequence * sequences + per_kv_token * tokens in use +
    prefill_per_token * prompt tokens in the step``."""

    ranks: PositiveInt = 1
    """Data-parallel ranks of the replica: each has ``max_num_seqs`` and ``max_num_batched_tokens`` of its own."""
    step_base_s: PositiveFloat
    """Seconds of a decode step for few sequences: reading the weights."""
    step_per_sequence_s: NonNegativeFloat = 0.0
    """More seconds for each sequence in the batch."""
    step_per_kv_token_s: NonNegativeFloat = 0.0
    """More seconds for each token of KV that the batch reads."""
    prefill_per_token_s: NonNegativeFloat = 0.0
    """Seconds for each prompt token that is computed."""
    request_overhead_s: NonNegativeFloat = 0.0
    """Seconds of a request outside of the model: network, tokenizing, queues of processes."""
    request_cpu_s: NonNegativeFloat = 0.0
    """Seconds of it in which the orchestrator works, on one request after the other; counts with ``sharing`` only."""
    kv_tokens: PositiveInt | None = None
    """Tokens that the KV cache of a replica holds. None: no limit."""
    prefill_request_s: NonNegativeFloat = 0.0
    """Disaggregated engines: seconds to hand the KV of one prompt over."""


class TrainerDurations(StrictModel):
    """One optimizer step of the recipe's trainer. With ``--nodes``, the work is shared by as many more ranks."""

    batch_s: Distribution = _seconds(0.0)
    """Seconds from asking for a batch that is ready until it is there."""
    forward_backward_base_s: NonNegativeFloat = 0.0
    """Seconds of forward and backward that do not depend on tokens."""
    forward_backward_per_token_s: NonNegativeFloat
    """More seconds for each token of the batch, on the recipe's ranks."""
    forward_backward_noise: Distribution = _seconds(1.0)
    """Factor of one step on the two above; 1 on average."""
    optimizer_s: Distribution = _seconds(0.0)
    """Seconds of the optimizer."""
    other_s: Distribution = _seconds(0.0)
    """Seconds of a step in no phase."""
    checkpoint_s: Distribution = _seconds(0.0)
    """Seconds that a checkpoint stops the trainer."""
    checkpoint_write_s: Distribution = _seconds(0.0)
    """Further seconds until it is complete, during the next steps."""
    restart_s: Distribution = _seconds(0.0)
    """Seconds from the start of an attempt until rollouts begin."""


class HandoffDurations(StrictModel):
    """A weight update. Taken as the same whatever the number of engines: they load side by side."""

    publish_s: Distribution = _seconds(0.0)
    """Seconds that publishing stops the trainer: for a copy where it overlaps with the next step."""
    write_s: Distribution = _seconds(0.0)
    """Further seconds until engines can see the version, during the next step; the next copy waits for their end."""
    read_s: Distribution = _seconds(0.0)
    """Seconds in which one engine fetches a version and continues with the one before."""
    load_s: Distribution = _seconds(0.0)
    """Seconds in which one engine loads what it has fetched; frozen, with ``engine.pause: keep``."""


class SharingDurations(StrictModel):
    """Roles that share the CPUs of one machine. With ``n`` of them at work at the same time (the trainer, each busy
    engine, the writing of a version, each tool call, the orchestrator with a request), each proceeds at ``min(1, cpus /
    n)`` of its speed alone; all other durations of the file are those of work alone."""

    cpus: NonNegativeFloat = 0.0
    """CPUs of the machine. 0, the default, is right for roles with nodes of their own."""


class Durations(StrictModel):
    """Durations of all activities in one run of a recipe."""

    version: Literal[1] = 1
    """Version of this format."""
    source: str = ""
    """Source of the figures, in a sentence."""
    environments: Annotated[dict[Name | Literal["*"], EnvironmentDurations], Field(min_length=1)]
    """By name in the recipe; ``*`` stands for those that are not named."""
    engine: EngineDurations
    """An engine replica."""
    trainer: TrainerDurations
    """The trainer."""
    handoff: HandoffDurations = HandoffDurations()
    """A weight update."""
    sharing: SharingDurations = SharingDurations()
    """Roles on the same CPUs."""
    failed_share: Fraction = 0.0
    """Share of rollouts that end without a reward."""
    zero_variance_share: Fraction = 0.0
    """Share of groups whose rewards are all equal (dropped where the recipe says so)."""

    def merged(self, turns: int) -> Durations:
        """Take ``turns`` turns of each recorded rollout as one; what distributions describe stays."""
        if turns == 1:
            return self
        overhead_s = self.engine.request_overhead_s
        environments = {
            name: found.model_copy(
                update={"trace": tuple(rollout.merged(turns, overhead_s) for rollout in found.trace)}
            )
            for name, found in self.environments.items()
        }
        return self.model_copy(update={"environments": environments})

    def environment(self, name: str) -> EnvironmentDurations:
        """Return the durations of one environment (UsageError where there are none)."""
        found = self.environments.get(name) or self.environments.get("*")
        if found is None:
            known = ", ".join(self.environments)
            raise UsageError(
                f"the durations do not say how long environment {name!r} takes (they have {known})\n"
                "    hint: add it under environments, or an entry '*' for all others"
            )
        return found


class _Calibration(BaseModel):
    """Relevant part of a file of ``hpcrl plan calibrate``."""

    durations: Durations


def load_durations(path: Path) -> Durations:
    """Read a YAML file, of durations alone or of ``hpcrl plan calibrate`` (ConfigError with every finding)."""
    tree, origins = parse_file(path)
    form = _Calibration if "durations" in tree else Durations
    try:
        found = form.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain_errors(form, error, origins, path)) from None
    return found.durations if isinstance(found, _Calibration) else found


def durations_document(durations: Durations) -> dict[str, Any]:
    """Return the durations in the form of a file."""
    # kinds have no defaults, and model_dump keeps them; version identifies the file
    return {"version": 1, **durations.model_dump(mode="json", exclude_defaults=True)}


def save_durations(durations: Durations, path: Path) -> None:
    """Write a file that `load_durations` reads."""
    atomic_write(path, yaml.safe_dump(durations_document(durations), sort_keys=False, allow_unicode=True).encode())
