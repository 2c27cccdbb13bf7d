"""What rewards that were computed again come to, and what an audit of them finds."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.evaluation.audit import AuditedReply, audit_rewards
from hpcrl.evaluation.rescored import RescoredRollout, rescored_steps


def rollout(group: int, member: int, before: float | None, after: float | None, **more: Any) -> RescoredRollout:
    about = {"environment": "sums", "prompt_index": group, "state": "trained", "step": 1, **more}
    return RescoredRollout(group=group, member=member, before=before, after=after, **about)


def test_steps_say_what_would_have_changed() -> None:
    (step,) = rescored_steps(
        [
            # in another order
            *(rollout(0, 0, 1.0, 0.0), rollout(0, 1, 0.0, 1.0), rollout(0, 2, 0.5, 0.5)),
            # other rewards, in the same order
            *(rollout(1, 0, 1.0, 0.5), rollout(1, 1, 0.0, 0.25)),
            # equal rewards from now on: no gradient
            *(rollout(2, 0, 1.0, 1.0), rollout(2, 1, 0.0, 1.0)),
            # only rounding
            *(rollout(3, 0, 0.3, 0.1 + 0.2), rollout(3, 1, 0.3, 0.3)),
            # one alone is in no order
            *(rollout(4, 0, 0.0, 1.0), rollout(4, 1, 0.0, None, unknown="its tokens are gone")),
            rollout(5, 0, 1.0, None, failed="ZeroDivisionError"),
        ]
    )
    assert (step.rollouts, step.known, step.unknown, step.failed) == (12, 10, 1, 1)
    assert (step.changed, step.groups, step.reordered) == (6, 4, 2)
    assert (step.varied_before, step.varied_after) == (3, 2)
    # of the known ones alone: what is not known is no zero
    assert step.mean_before == pytest.approx(4.1 / 10)
    assert step.mean_after == pytest.approx((1.5 + 0.75 + 2.0 + 0.6 + 1.0) / 10)


def test_steps_come_in_order_and_what_is_in_none_at_the_end() -> None:
    steps = rescored_steps(
        [
            rollout(3, 0, 1.0, 1.0, state="waiting", step=None),
            rollout(2, 0, 1.0, 1.0, state="dropped", step=2),
            rollout(1, 0, 1.0, None, step=10, unknown="gone"),
            rollout(0, 0, 1.0, 1.0, step=9),
        ]
    )
    assert [(step.state, step.step) for step in steps] == [
        ("trained", 9),
        ("trained", 10),
        ("dropped", None),
        ("waiting", None),
    ]
    assert (steps[1].known, steps[1].mean_before, steps[1].mean_after) == (0, None, None)


def reply(number: int, reward: float, text: str = "", **more: Any) -> AuditedReply:
    about = {"prompt": str(number), "parts": {}, "tokens": 10, "finished": True, **more}
    return AuditedReply(id=f"{number}/0", reward=reward, text=text or f"the answer is {number}", **about)


def test_rewards_from_format_alone_are_counted() -> None:
    found = audit_rewards(
        [
            reply(0, 1.2, parts={"right": 1.0, "tags": 1.0}),
            reply(1, 0.2, parts={"right": 0.0, "tags": 1.0}),
            reply(2, 0.2, parts={"right": 0.0, "tags": 1.0}),
            reply(3, 0.0, parts={"right": 0.0, "tags": 0.0}),
        ],
        {"right": "numeric", "tags": "format", "long": "length"},
    )
    assert (found.rollouts, found.rewarded) == (4, 3)
    assert found.format_only is not None
    assert found.format_only.rollouts == 2
    assert found.format_only.share_of_rewarded == pytest.approx(2 / 3)
    assert found.format_only.share_of_reward == pytest.approx(0.4 / 1.6)
    assert audit_rewards([reply(0, 1.0)], {"right": "numeric"}).format_only is None


def test_a_reply_to_several_prompts_is_a_duplicate() -> None:
    found = audit_rewards(
        [
            *(reply(number, 0.5, "42 \n is it") for number in range(3)),
            reply(3, 1.0, "42 is it"),
            # of one prompt alone, and without a reward
            *(reply(9, 1.0, "7"), reply(9, 1.0, "7"), reply(10, 0.0, "42 is it")),
        ],
        {},
    )
    assert found.duplicated == 4
    (most,) = found.duplicates
    assert (most.text, most.rollouts, most.prompts, most.mean_reward) == ("42 is it", 4, 4, 0.625)


def test_the_longest_are_named_and_compared() -> None:
    found = audit_rewards([reply(n, 1.0 if n >= 18 else 0.25, tokens=n) for n in range(20)], {})
    assert [each.id for each in found.longest] == ["19/0", "18/0", "17/0", "16/0", "15/0"]
    assert (found.mean_of_longest, found.mean_of_others) == (1.0, 0.25)
    few = audit_rewards([reply(n, 1.0) for n in range(9)], {})
    assert (few.mean_of_longest, few.mean_of_others) == (None, None)


def test_rewards_that_a_person_should_look_at() -> None:
    prose = " ".join(f"step {n} adds {n * n} and leaves {n * 7 % 13} of them" for n in range(40))
    found = audit_rewards(
        [
            reply(0, 1.0, finished=False),
            reply(1, 1.0, "  \n"),
            reply(2, 1.0, "wait, " * 200),
            reply(3, 1.0, r"\boxed{1} or \boxed{2} or <answer>3</answer> or" + "\n#### 4"),
            reply(4, 1.0, r"\boxed{1} and so \boxed{1}"),
            reply(5, 1.0, prose, finished=None),
            # without a reward nothing was gained
            reply(6, 0.0, "wait, " * 200, finished=False),
        ],
        {},
    )
    assert {kind: each.ids for kind, each in found.suspicious.items()} == {
        "truncated": ["0/0"],
        "empty": ["1/0"],
        "repetitive": ["2/0"],
        "several_answers": ["3/0"],
    }


def test_no_rollouts_are_no_error() -> None:
    found = audit_rewards([], {"tags": "format"})
    assert (found.rollouts, found.duplicates, found.longest, found.suspicious) == (0, [], [], {})
    assert rescored_steps([]) == []
