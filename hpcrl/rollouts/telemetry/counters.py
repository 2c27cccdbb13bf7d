"""What the orchestrator counts. Counters go into batches, snapshots and ``/metrics`` under these names."""

from __future__ import annotations

import msgspec

__all__ = ["Counters"]


class Counters(msgspec.Struct, kw_only=True):
    """Counts since the start of the run (a resume goes on from its checkpoint). In rollouts, where not said.

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
    malformed_calls:
        Tool calls of finished rollouts that cannot be run: no JSON, no end, no tool of that name.
    turns_ended_otherwise:
        Turns of finished rollouts that the policy has ended by another token than the chat template does.
    refused_parts:
        Parts of rewards that were left out of finished rollouts, because they are no finite numbers.
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
        Tokens that had arrived from engines that were lost; their requests went on from there.
    turns_recalled:
        Turns of rollouts in progress that an interruption did not cost.
    turns_given_up:
        Turns that were saved and not used: too old after a restore, damaged, or the environment said something else.
    rows_answer, rows_shared_prefix, rows_unknown:
        Tokens of finished rollouts by where their rows of experts are from: the engine that answered; another rollout
        of the same prompt and salt (`hpcrl.rollouts.sampling.known_rows`), maybe of another forward pass; nobody.
        The last token of a rollout has none, and is not counted.
    teacher_requests, teacher_retries:
        Requests to the teacher of a distillation, and those that were made again.
    routes_bytes:
        Of the rows of experts of finished rollouts.
    rows_prefill:
        Tokens of all answers whose rows a prefill engine gave behind the answer; of finished rollouts they are among
        ``rows_answer``.
    """

    started: int = 0
    finished: int = 0
    consumed: int = 0
    mixed_versions: int = 0
    dropped_engine: int = 0
    dropped_environment: int = 0
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

    def as_dict(self) -> dict[str, int]:
        """Names and counts."""
        return {name: getattr(self, name) for name in self.__struct_fields__}
