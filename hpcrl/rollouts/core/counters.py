"""Counters of the orchestrator, under their names in batches, snapshots and ``/metrics``."""

from __future__ import annotations

import msgspec


class Counters(msgspec.Struct, kw_only=True):
    """Counts since the start of the run (a resume continues from its checkpoint), in rollouts unless noted.

    Attributes
    ----------
    started, finished, consumed:
        Rollouts started, finished with a reward, and handed to the trainer.
    mixed_versions:
        Finished rollouts with tokens of two or more policy versions.
    dropped_engine:
        Given up after the last retry of a request.
    dropped_environment:
        The environment raised an error or gave no usable reward, the prompt left no room for an answer, or the teacher
        gave no log-probabilities.
    sandboxes_evicted:
        Those of ``dropped_environment`` whose sandbox was ended, because all sandboxes of its node together used too
        much memory.
    dropped_branches:
        Would have had more sequences than ``rollouts.max_branches``.
    branched:
        Finished rollouts with more than one sequence.
    declared_branches:
        How often conversations of finished rollouts were begun anew by their environment, as behind a summary.
    judge_tampered:
        Finished rollouts that interfered with their judge: their part ``judge_tampered`` is above 0.
    malformed_calls:
        Tool calls of finished rollouts that cannot be run: invalid JSON, no end, unknown tool.
    turns_ended_otherwise:
        Turns of finished rollouts that the policy has ended by another token than the chat template does.
    refused_parts:
        Parts of rewards that were left out of finished rollouts, because they are not finite numbers.
    dropped_group:
        Finished, but too few members of the group did.
    dropped_stale:
        Finished, but too old to be used.
    dropped_zero_variance:
        Finished in groups without variance, where the recipe drops these.
    cancelled_stale:
        Aborted in flight, because they could not have been used any more.
    zero_variance_groups:
        Groups whose rewards were all equal.
    engine_requests, engine_retries:
        Generation requests sent, and those of them that repeat a failed one.
    unusable_answers:
        Answers of engines that were damaged, or that training cannot use; their requests were made again elsewhere.
    tokens_kept:
        Tokens that had arrived from engines that were lost; their requests continued from there.
    turns_recalled:
        Turns of rollouts in progress that were restored after an interruption.
    turns_given_up:
        Turns that were saved and not used: too old after a restore, damaged, or the environment gave other messages.
    rows_answer, rows_shared_prefix, rows_unknown:
        Tokens of finished rollouts by the source of their rows of experts: the engine that answered; another rollout of
        the same prompt and salt (`hpcrl.rollouts.sampling.known_rows`), maybe of another forward pass; unknown. The
        last token of a rollout has none, and is not counted.
    teacher_requests, teacher_retries:
        Requests to the teacher of a distillation, and those that were made again.
    gateway_requests:
        Turns that programs asked for by OpenAI's API (`hpcrl.rollouts.gateway`).
    gateway_joins, gateway_aborts:
        Repetitions by an SDK that got the answer of the request before; turns that no program waited for any more.
    gateway_overrides:
        Values of such requests that were not followed: the recipe says how tokens are sampled.
    routes_bytes:
        Size of the rows of experts of finished rollouts.
    rows_prefill:
        Tokens of all answers whose rows came from a prefill engine after the answer; in finished rollouts
        ``rows_answer`` includes them.
    """

    started: int = 0
    finished: int = 0
    consumed: int = 0
    mixed_versions: int = 0
    dropped_engine: int = 0
    dropped_environment: int = 0
    sandboxes_evicted: int = 0
    dropped_branches: int = 0
    branched: int = 0
    declared_branches: int = 0
    judge_tampered: int = 0
    malformed_calls: int = 0
    turns_ended_otherwise: int = 0
    refused_parts: int = 0
    dropped_group: int = 0
    dropped_stale: int = 0
    dropped_zero_variance: int = 0
    cancelled_stale: int = 0
    zero_variance_groups: int = 0
    engine_requests: int = 0
    engine_retries: int = 0
    unusable_answers: int = 0
    tokens_kept: int = 0
    turns_recalled: int = 0
    turns_given_up: int = 0
    rows_answer: int = 0
    rows_shared_prefix: int = 0
    rows_unknown: int = 0
    rows_prefill: int = 0
    routes_bytes: int = 0
    teacher_requests: int = 0
    teacher_retries: int = 0
    gateway_requests: int = 0
    gateway_joins: int = 0
    gateway_aborts: int = 0
    gateway_overrides: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return {name: getattr(self, name) for name in self.__struct_fields__}
