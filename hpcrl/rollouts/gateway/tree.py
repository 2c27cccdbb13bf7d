"""Finds the turn of the policy that a list of messages continues.

A program sends its whole history with each request. The conversation continues behind the longest beginning of it that
ends with a turn which was sampled here. A program that drops a turn, shortens its history or rewrites it continues from
an earlier turn, or begins again: that is a branch, not an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcrl.rollouts.environments.base import ToolCall
from hpcrl.rollouts.gateway.messages import extended_digest


@dataclass(frozen=True, slots=True, eq=False)
class TreeNode:
    """A turn of the policy.

    Attributes
    ----------
    before:
        The turn before it in its conversation; None for the first.
    position:
        Messages before it.
    message:
        The turn as the chat template reads it, with thinking; calls have their arguments as objects.
    calls:
        Those of them.
    sequence, end:
        Number of its sequence, and tokens of that up to the end of the turn.
    ended_by:
        Its last token.
    thought:
        There is thinking in the sequence.
    """

    before: TreeNode | None
    position: int
    message: dict[str, Any]
    calls: tuple[ToolCall, ...]
    sequence: int
    end: int
    ended_by: int
    thought: bool


class TokenTree:
    """The turns of a rollout by the messages that lead to them."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, list[TreeNode]] = {}

    def add(self, before: bytes, node: TreeNode) -> None:
        """Add a turn that follows the messages of a digest."""
        self._nodes.setdefault(extended_digest(before, node.message), []).append(node)

    def find(self, messages: Sequence[dict[str, Any]], digests: Sequence[bytes]) -> TreeNode | None:
        """Return the last turn that is part of a conversation and has messages behind it; None where there is none.

        Parameters
        ----------
        digests:
            Digests of all beginnings of ``messages`` (`hpcrl.rollouts.gateway.messages.ReadHistory`).
        """
        for count in range(len(messages) - 1, 0, -1):
            if found := self._nodes.get(digests[count]):
                return _same_ids(found, messages[count - 1])
        return None

    def with_thinking(self, messages: Sequence[dict[str, Any]], node: TreeNode | None) -> list[dict[str, Any]]:
        """Return messages with turns of the policy as they were sampled: programs leave out what it has thought.

        Parameters
        ----------
        node:
            Result of `find` for them.
        """
        found = list(messages)
        while node is not None:
            found[node.position] = node.message
            node = node.before
        return found


def _same_ids(nodes: list[TreeNode], message: dict[str, Any]) -> TreeNode:
    """Return the turn whose calls have the identifiers of a message, of several that say the same; else the newest."""
    ids = [call["id"] for call in message.get("tool_calls", ())]
    return next((node for node in reversed(nodes) if [call.id for call in node.calls] == ids), nodes[-1])
