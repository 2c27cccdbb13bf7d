"""From messages to token ids, a piece at a time: what was sampled or said before is never tokenized again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.environments import Message

__all__ = ["Transcript"]

_MARK = "hpcrl-mark-of-a-reply"


class Transcript:
    """Renders the pieces of conversations with a model's chat template."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id

    def opening(self, messages: Sequence[Message], *, now: datetime | None = None) -> list[int]:
        """Return token ids of a conversation up to where the policy speaks; ``now`` is the time it begins at."""
        return self._tokenizer.render_ids(messages, add_generation_prompt=True, now=now)

    def continuation(self, messages: Sequence[Message], *, now: datetime | None = None) -> list[int]:
        """Token ids from a sampled turn, which ended with the end-of-sequence token, to the next one.

        The template renders a conversation whose only reply is a mark; what follows the mark is the
        continuation. The policy's own tokens stay as they were sampled, whatever the template would have made of
        their text.

        Raises
        ------
        ValueError
            The template does not write replies as they are, ended by the end-of-sequence token.
        """
        frame: list[Message] = [{"role": "user", "content": ""}, {"role": "assistant", "content": _MARK}]
        rendered = self._tokenizer.render_marked([*frame, *messages], add_generation_prompt=True, now=now)
        before, mark, after = rendered.text.partition(_MARK)
        eos = self._tokenizer.eos_token
        if not mark or not after.startswith(eos):
            raise ValueError(f"the chat template does not end replies with {eos!r}; several turns need that")
        # encoded behind the end token: some tokenizers begin a text in another way than what follows a token
        ids = self._tokenizer.encode_rendered(rendered[len(before) + len(mark) :])
        if ids[:1] != [self.eos_token_id]:
            raise ValueError(f"the tokenizer does not read {eos!r} as the end of a reply; several turns need that")
        return ids[1:]

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special ones."""
        return self._tokenizer.decode(token_ids)

    def full_text(self, token_ids: Sequence[int]) -> str:
        """Text of a whole sequence with its special tokens, for people."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
