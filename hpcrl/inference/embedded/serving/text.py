"""Text of sequences while they grow, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.models.tokenizer import ChatTokenizer

_UNFINISHED = "\ufffd"


class TextStream:
    """Turns tokens into text as they arrive.

    A token's text can depend on its neighbours, and a character can span tokens; so text is decoded from a
    window that starts where the last complete piece began, and what may still change is held back.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """Start with no tokens.

        Parameters
        ----------
        tokenizer:
            Tokenizer of the model.
        stop:
            Strings that end the sequence.
        include_stop:
            Whether the text keeps the stop string that ended it.
        min_tokens:
            Number of tokens after which stop strings count.
        skip_special_tokens:
            Leave special tokens out of the text.
        """
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._stop, self._include_stop, self._min_tokens = tuple(stop), include_stop, min_tokens
        self._ids: list[int] = []
        self._window = self._read = 0
        self._text = ""
        self._reported = 0
        self._hold = max((len(s) - 1 for s in self._stop), default=0)
        self.stopped_by: str | None = None

    def has_stopped(self) -> bool:
        """Return whether a stop string was found, which is then in `stopped_by`."""
        return self.stopped_by is not None

    def push(self, token_ids: Sequence[int]) -> int:
        """Take new tokens up to the one that completes a stop string; returns how many were taken."""
        if not self._stop:
            self._ids.extend(token_ids)
            self._decode(final=False)
            return len(token_ids)
        for taken, token in enumerate(token_ids, start=1):
            before = len(self._text)
            self._ids.append(token)
            self._decode(final=False)
            if len(self._ids) >= self._min_tokens and self._find_stop(before):
                return taken
        return len(token_ids)

    def take(self, *, final: bool) -> str:
        """Return text that has become certain since the last call; all remaining text if ``final``."""
        if final and self.stopped_by is None:
            self._decode(final=True)
        end = len(self._text) if final or self.stopped_by is not None else len(self._text) - self._hold
        if end <= self._reported:
            return ""
        new = self._text[self._reported : end]
        self._reported = end
        return new

    def _decode(self, *, final: bool) -> None:
        known = self._tokenizer.decode(self._ids[self._window : self._read], skip_special_tokens=self._skip)
        text = self._tokenizer.decode(self._ids[self._window :], skip_special_tokens=self._skip)
        if len(text) > len(known) and (final or not text.endswith(_UNFINISHED)):
            self._text += text[len(known) :]
            self._window, self._read = self._read, len(self._ids)

    def _find_stop(self, before: int) -> bool:
        """Look for a stop string that ends in the text after ``before``."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self._text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return False
        at, self.stopped_by = found
        self._text = self._text[: at + len(self.stopped_by) if self._include_stop else at]
        return True
