"""Audit of a reward: properties of replies other than the right answer that a policy may earn it with.

Nothing here proves that a reward is wrong. It counts, and names rollouts for a person to look at.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence

import msgspec

_MOST = 5
"""Maximum number of examples of each kind."""
_EXCERPT = 100
"""Maximum characters of a reply that a document shows."""
_REPEATED_CHARACTERS = 400
_REPEATED_RATIO = 0.08
"""A reply that is at least so long, and that deflate makes so small, says one thing again and again: English prose
comes to about 0.4."""
_MOST_ANSWERS = 2
"""A reply with more different marked answers guesses."""
_ANSWER = re.compile(r"\\boxed\{([^{}]{0,200})\}|<answer>(.{0,200}?)</answer>|####[ \t]*([^\n]{1,200})", re.DOTALL)


class AuditedReply(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as an audit sees it.

    Attributes
    ----------
    id:
        ``GROUP/MEMBER``.
    reward, parts:
        As computed.
    prompt:
        Equal for equal prompts: their digest.
    tokens:
        That the policy sampled.
    finished:
        Whether the last reply ended by itself; None where that is not known.
    text:
        The last reply.
    """

    id: str
    prompt: str
    reward: float
    parts: dict[str, float]
    tokens: int
    finished: bool | None
    text: str


class FormatOnly(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards that come from the format of a reply alone: every other part is 0 or less.

    Attributes
    ----------
    share_of_rewarded:
        Share of the rollouts with a reward above 0.
    share_of_reward:
        Share of the sum of all rewards above 0.
    """

    rollouts: int
    share_of_rewarded: float
    share_of_reward: float


class Duplicate(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that was given to several prompts."""

    text: str
    rollouts: int
    prompts: int
    mean_reward: float


class LongReply(msgspec.Struct, frozen=True, kw_only=True):
    """One of the longest replies."""

    id: str
    tokens: int
    reward: float


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """Rewarded rollouts of one kind; ``ids`` names a few."""

    rollouts: int
    ids: list[str]


class RewardAudit(msgspec.Struct, frozen=True, kw_only=True):
    """The audit of the rewards of one environment.

    Attributes
    ----------
    rollouts, rewarded:
        All with a known reward, and those with one above 0.
    format_only:
        None where the reward has no part of the kind ``format``.
    duplicated:
        Rewarded rollouts whose reply, but for blanks, was given to another prompt as well.
    duplicates:
        The most frequent of these replies.
    longest:
        The longest rollouts.
    mean_of_longest, mean_of_others:
        Mean reward of the longest tenth of the rollouts, and of the others; None where there are too few.
    suspicious:
        Rewarded rollouts by kind: ``truncated`` (cut at a limit), ``empty`` (no text), ``repetitive`` (one thing again
        and again) and ``several_answers`` (more than two different marked answers).
    """

    rollouts: int
    rewarded: int
    format_only: FormatOnly | None
    duplicated: int
    duplicates: list[Duplicate]
    longest: list[LongReply]
    mean_of_longest: float | None
    mean_of_others: float | None
    suspicious: dict[str, Suspicion]


def audit_rewards(replies: Sequence[AuditedReply], kinds: Mapping[str, str]) -> RewardAudit:
    """Audit the rewards of one environment.

    Parameters
    ----------
    kinds:
        The kind of each part of the reward, as far as it is known: ``numeric``, ``format``, ``length``, …
    """
    rewarded = [each for each in replies if each.reward > 0]
    by_length = sorted(replies, key=lambda each: each.tokens, reverse=True)
    tenth = len(by_length) // 10
    duplicated, duplicates = _duplicates(rewarded)
    return RewardAudit(
        rollouts=len(replies),
        rewarded=len(rewarded),
        format_only=_format_only(rewarded, kinds),
        duplicated=duplicated,
        duplicates=duplicates,
        longest=[LongReply(id=each.id, tokens=each.tokens, reward=each.reward) for each in by_length[:_MOST]],
        mean_of_longest=_mean(by_length[:tenth]),
        mean_of_others=_mean(by_length[tenth:]) if tenth else None,
        suspicious=_suspicious(rewarded),
    )


def _format_only(rewarded: Sequence[AuditedReply], kinds: Mapping[str, str]) -> FormatOnly | None:
    if "format" not in kinds.values():
        return None
    others = [name for name, kind in kinds.items() if kind not in ("format", "length")]
    found = [each for each in rewarded if all(each.parts.get(name, 0.0) <= 0 for name in others)]
    total = sum(each.reward for each in rewarded)
    return FormatOnly(
        rollouts=len(found),
        share_of_rewarded=len(found) / len(rewarded) if rewarded else 0.0,
        share_of_reward=sum(each.reward for each in found) / total if total else 0.0,
    )


def _duplicates(rewarded: Sequence[AuditedReply]) -> tuple[int, list[Duplicate]]:
    by_text: dict[str, list[AuditedReply]] = {}
    for each in rewarded:
        by_text.setdefault(" ".join(each.text.split()), []).append(each)
    prompts = {text: len({each.prompt for each in same}) for text, same in by_text.items()}
    found = [text for text, count in prompts.items() if count > 1]
    found.sort(key=lambda text: (-len(by_text[text]), text))
    shown = [
        Duplicate(
            text=text[:_EXCERPT] + "…" * (len(text) > _EXCERPT),
            rollouts=len(by_text[text]),
            prompts=prompts[text],
            mean_reward=_mean(by_text[text]) or 0.0,
        )
        for text in found[:_MOST]
    ]
    return sum(len(by_text[text]) for text in found), shown


def _suspicious(rewarded: Sequence[AuditedReply]) -> dict[str, Suspicion]:
    found: dict[str, list[str]] = {}
    for each in rewarded:
        for kind in _suspicions(each):
            found.setdefault(kind, []).append(each.id)
    return {kind: Suspicion(rollouts=len(ids), ids=ids[:_MOST]) for kind, ids in sorted(found.items())}


def _suspicions(reply: AuditedReply) -> list[str]:
    found = []
    if reply.finished is False:
        found.append("truncated")
    text = reply.text.strip()
    if not text:
        found.append("empty")
    data = text.encode("utf-8", "replace")
    if len(text) >= _REPEATED_CHARACTERS and len(zlib.compress(data)) < _REPEATED_RATIO * len(data):
        found.append("repetitive")
    answers = {" ".join("".join(groups).split()) for groups in _ANSWER.findall(text)}
    if len(answers) > _MOST_ANSWERS:
        found.append("several_answers")
    return found


def _mean(replies: Sequence[AuditedReply]) -> float | None:
    return sum(each.reward for each in replies) / len(replies) if replies else None
