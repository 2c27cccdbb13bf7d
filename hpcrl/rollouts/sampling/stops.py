"""Stop conditions of turns besides the model's own end tokens: texts and tokens of a recipe.

Engines search the texts while they sample. In an answer of which two engines sampled parts, a text may cross the
boundary, so that neither engine found it; so every answer is searched again here. Tokens after the first text are not
part of the turn. Whether a turn ends depends only on its tokens so far, so that the remaining tokens are as they would
have been sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from hpcrl.config.sampling import SamplingConfig
from hpcrl.rollouts.engines.answers import Generation
from hpcrl.rollouts.rendering import Parsed, Renderer


class TurnStops:
    """Stop conditions for the turns of one kind of rollouts.

    Attributes
    ----------
    strings:
        Texts that end a turn.
    token_ids:
        Tokens that end a turn: those of the model, then the recipe's own.
    """

    def __init__(self, renderer: Renderer, sampling: SamplingConfig) -> None:
        """Join the stops of the model and of the recipe."""
        self._renderer = renderer
        self.strings = sampling.stop
        own = frozenset(renderer.stop_token_ids)
        self._added = frozenset(sampling.stop_token_ids) - own
        self.token_ids = (*renderer.stop_token_ids, *dict.fromkeys(t for t in sampling.stop_token_ids if t not in own))

    def cut(self, answer: Generation) -> Generation:
        """Return the answer up to the first token that completes a text of the recipe; it has ended there."""
        count = len(answer.token_ids)
        kept = self._first_end(answer.token_ids.tolist()) if self.strings else None
        if kept is None:
            return answer
        rows = None if answer.experts is None else answer.experts[: len(answer.experts) - (count - kept)]
        return msgspec.structs.replace(
            answer,
            token_ids=answer.token_ids[:kept],
            logprobs=answer.logprobs[:kept],
            versions=answer.versions[:kept],
            finish_reason="stop",
            experts=rows,
        )

    def spoken(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a turn that are read: less the one at its end that the recipe has made one."""
        return token_ids[:-1] if token_ids and token_ids[-1] in self._added else token_ids

    def without_stop(self, parsed: Parsed, last: int) -> Parsed:
        """Return a turn that ended by itself without the text that ended it; ``last`` is its last token."""
        if not self.strings or last in self.token_ids:
            return parsed
        if (at := self._first_place(parsed.text)) is not None:
            return dataclasses.replace(parsed, text=parsed.text[:at])
        if (at := self._first_place(parsed.thinking)) is not None:
            return dataclasses.replace(parsed, thinking=parsed.thinking[:at])
        return parsed

    def _first_place(self, text: str) -> int | None:
        """Return where the first of the texts begins."""
        return min((at for each in self.strings if (at := text.find(each)) >= 0), default=None)

    def _first_end(self, token_ids: list[int]) -> int | None:
        """Return how many tokens there are up to the one that completes a text; None where none does.

        Control tokens are part of what is looked through, as they are in requests.
        """

        def has_stop(count: int) -> bool:
            return self._first_place(self._renderer.full_text(token_ids[:count])) is not None

        low, high = 0, len(token_ids)
        if not has_stop(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if has_stop(middle) else (middle, high)
        return high
