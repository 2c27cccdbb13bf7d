"""The conversation of one rollout of ``swe``: turns with tools, and summaries where the context becomes too large.

A summary is a turn of the policy as any other, and is trained. Behind it the conversation begins anew with the task and
the summary: a declared branch of the rollout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpcrl.config.environments import SweEnv
from hpcrl.rollouts.environments.base import Message, Policy, Prompt, Reply, malformed_answer, tool_message
from hpcrl.rollouts.environments.swe.tools import ToolBox

_ASKED = """The conversation is about to become too long. Do not call a tool now. Write a summary of your work: what you
have found out, what you have changed, what is left to do, and what you need to know for it. You go on from the task and
this summary alone."""
_WITHOUT_RESULT = "[left out: the conversation is too long]"
_GOES_ON = "You have worked on this task already, in this sandbox. Your summary of that work:"
_NO_SUMMARY = "(you have written none)"
SHARE = 0.45
"""Share of ``turn_timeout_s`` that all calls of a turn may take, and the same for the tests of the judgement: after the
last turn both lie between two replies."""


class SweWork:
    """The work of one rollout.

    Attributes
    ----------
    tools:
        Tools in its sandbox.
    turns:
        Replies of the policy, summaries included.
    summaries:
        How often it continued from a summary.
    truncated:
        A limit of turns, time or tokens ended it.
    """

    def __init__(self, config: SweEnv, tools: ToolBox, *, timeout_s: float = 0.0) -> None:
        """Begin the time of the rollout.

        Parameters
        ----------
        timeout_s:
            Time of the task itself, where that is shorter; 0 for none.
        """
        self._config, self.tools = config, tools
        limit_s = min(config.rollout_timeout_s, timeout_s or config.rollout_timeout_s)
        self._end_s = time.monotonic() + limit_s
        self._turn_over = False
        self.turns = self.summaries = 0
        self.truncated = False

    async def run(self, prompt: Prompt, policy: Policy) -> None:
        """Talk with the policy until it is done or a limit is reached."""
        reply = await policy.reply(prompt.messages)
        while self._goes_on(reply) and reply.calls:
            results = await self._results(reply)
            if self._over() or self._turn_over:
                # no turn is left in which results could be used; changes that the last calls made still count
                self.truncated = True
                return
            reply = await self._told(prompt, policy, reply, results)

    async def _told(self, prompt: Prompt, policy: Policy, reply: Reply, results: list[Message]) -> Reply:
        """Give the policy the results of its calls and return its next turn; with a summary between them, if need be.

        A reply that is not finished ends the work.
        """
        within = self._bound(reply)
        if within is None:
            return await policy.reply(results)
        following = await policy.reply(results, within=within)
        if following.fits:
            return following
        summary = await self._summary(policy, reply, results)
        if not self._goes_on(summary):
            return summary
        if self._over():
            self.truncated = True
            return Reply("", finished=True)
        self.summaries += 1
        return await policy.reply(_begun_again(prompt.messages, summary.text), anew=True)

    async def _summary(self, policy: Policy, reply: Reply, results: list[Message]) -> Reply:
        """Ask for a summary, with the results of the last calls where there is room for them."""
        asked: Message = {"role": "user", "content": _ASKED}
        limit = self._limit(reply)
        if limit is not None:
            summary = await policy.reply([*results, asked], within=limit)
            if summary.fits:
                return summary
        return await policy.reply([*({**each, "content": _WITHOUT_RESULT} for each in results), asked])

    def _bound(self, reply: Reply) -> int | None:
        """Return the size of the context from which on a summary is asked for; None where there is no such size."""
        points = self._config.summary_points
        if not points or self.summaries >= self._config.max_summaries:
            return None
        point, limit = points[min(self.summaries, len(points) - 1)], self._limit(reply)
        return point if limit is None else min(point, limit)

    def _limit(self, reply: Reply) -> int | None:
        """Return how large the context may be where there shall be room for a summary; None where it is unknown."""
        if reply.context is None or reply.room is None:
            return None
        return reply.context + reply.room - self._config.summary_room_tokens

    def _goes_on(self, reply: Reply) -> bool:
        """Count a turn; return whether it is finished."""
        self.turns += 1
        self.truncated = self.truncated or not reply.finished
        return reply.finished

    def _over(self) -> bool:
        return self.turns >= self._config.max_turns or time.monotonic() >= self._end_s

    async def _results(self, reply: Reply) -> list[Message]:
        """Run the calls of a turn and return the messages with their results."""
        messages = []
        # all of them together: a policy that needs more than turn_timeout_s would have no reward at all
        end_s = time.monotonic() + SHARE * self._config.turn_timeout_s
        for call in reply.calls:
            left_s = min(self._end_s, end_s) - time.monotonic()
            if call.status != "ok":
                messages.append(malformed_answer(call))
            elif left_s <= 0:
                messages.append(tool_message(call, "error: the time of the task is over"))
            else:
                timeout_s = min(self._config.command_timeout_s, left_s)
                messages.append(
                    tool_message(call, await self.tools.call(call.name, call.arguments, timeout_s=timeout_s))
                )
        self._turn_over = time.monotonic() >= end_s
        return messages


def _begun_again(messages: Sequence[Message], summary: str) -> list[Message]:
    """Return the task with a summary behind it, in the message of the user: not all templates have two in a row."""
    *before, last = messages
    text = f"{last['content']}\n\n{_GOES_ON}\n\n{summary.strip() or _NO_SUMMARY}"
    return [*before, {**last, "content": text}]
