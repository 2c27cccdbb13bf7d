"""Replies of a stored rollout, as the policy gave them to the environment."""

from __future__ import annotations

from datetime import datetime

import msgspec

from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.replay import Held
from hpcrl.dock.sequences import turn_places
from hpcrl.rollouts.batches.columns import MAX_TEXT_CHARACTERS
from hpcrl.rollouts.core.records import Rollout, decode_rollout
from hpcrl.rollouts.environments.base import Prompt, Reply
from hpcrl.rollouts.rendering import Parsed, Renderer
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import ConsumedLines

_OTHER_PROMPT = "its environment gives another prompt now"


class UnknownRewardError(Exception):
    """Raised where a reward cannot be computed again; the message says what is missing."""


class StoredReplies:
    """Reads replies from the columns of rollouts, and where these are gone from the text that is kept for people."""

    def __init__(self, run: RunDir, renderer: Renderer) -> None:
        self._run, self._renderer, self._consumed = run, renderer, ConsumedLines(run)

    def read(self, held: Held, prompt: Prompt) -> tuple[Reply, ...]:
        """Return the replies of a rollout to a prompt.

        Raises
        ------
        UnknownRewardError
            They are not stored whole, or were given to another prompt.
        """
        try:
            rollout = decode_rollout(read_payload(self._run.rollouts_dir / "payload", held.entry.payload))
        except FileNotFoundError:
            return self._of_text(held, prompt)
        except (OSError, ValueError) as error:
            raise UnknownRewardError(f"its tokens cannot be read: {error}") from None
        return self._of_tokens(rollout, prompt)

    def _of_tokens(self, rollout: Rollout, prompt: Prompt) -> tuple[Reply, ...]:
        ids = rollout.token_ids.tolist()
        places = turn_places(map(msgspec.structs.astuple, rollout.turns), rollout.starts)
        if not places or rollout.repeated_tokens + sum(at.end - at.said for at in places) != len(ids):
            raise UnknownRewardError("its turns are not stored")
        # a chat template may contain the date
        began = datetime.fromtimestamp(rollout.ended_s - rollout.seconds)
        if ids[: rollout.turns[0].said] != self._opening(prompt, began):
            raise UnknownRewardError(_OTHER_PROMPT)
        replies = []
        for number, (turn, at) in enumerate(zip(rollout.turns, places, strict=True)):
            # what has begun the thinking of a branch may be shared
            said, sampled = ids[at.begin if turn.shared else at.said : at.sampled], ids[at.sampled : at.end]
            last = number == len(rollout.turns) - 1
            finished = not last or self._finished(sampled, rollout.parts.get("unfinished"))
            parsed = self._renderer.parse(sampled, said=said, tools=prompt.tools, turn=number)
            replies.append(_reply(parsed, finished=finished, tokens=len(sampled)))
        return tuple(replies)

    def _finished(self, sampled: list[int], unfinished: float | None) -> bool:
        """Return whether a last turn was not cut: it has an end, or its environment treated it as complete."""
        return unfinished == 0.0 or (bool(sampled) and sampled[-1] in self._renderer.stop_token_ids)

    def _of_text(self, held: Held, prompt: Prompt) -> tuple[Reply, ...]:
        """Read the only turn of a rollout from its text, which is kept whole where it is short."""
        line = self._consumed.of(held)
        text, turns = line.get("text"), line.get("turns")
        if not isinstance(text, str) or not isinstance(turns, list) or not turns:
            raise UnknownRewardError("its tokens are no longer kept, and neither is its text")
        if len(turns) > 1:
            raise UnknownRewardError("its tokens are no longer kept, and its text does not tell where turns end")
        if len(text) > MAX_TEXT_CHARACTERS:
            raise UnknownRewardError("its tokens are no longer kept, and the middle of its text was left out")
        try:
            said, sampled, seconds = int(turns[0][0]), int(turns[0][1]), float(line.get("seconds") or 0.0)
        except (TypeError, ValueError, LookupError, OverflowError):
            raise UnknownRewardError("its tokens are no longer kept, and what is kept cannot be read") from None
        opening = self._opening(prompt, datetime.fromtimestamp(held.entry.ended_s - seconds))
        before = self._renderer.full_text(opening)
        if len(opening) != said or not text.startswith(before):
            raise UnknownRewardError(_OTHER_PROMPT)
        ids = self._renderer.ids_of_text(text[len(before) :])
        parsed = self._renderer.parse(ids, said=opening, tools=prompt.tools)
        parts = line.get("parts")
        unfinished = parts.get("unfinished") if isinstance(parts, dict) else None
        return (_reply(parsed, finished=self._finished(ids, unfinished), tokens=sampled),)

    def _opening(self, prompt: Prompt, began: datetime) -> list[int]:
        return self._renderer.opening(prompt.messages, tools=prompt.tools, now=began)


def _reply(parsed: Parsed, *, finished: bool, tokens: int) -> Reply:
    return Reply(text=parsed.text, finished=finished, thinking=parsed.thinking, calls=parsed.calls, tokens=tokens)
