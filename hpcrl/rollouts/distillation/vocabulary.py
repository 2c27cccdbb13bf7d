"""Check that another tokenizer gives the policy's ids, by texts with known ids that cover the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer

from hpcrl.models.tokenizer_files import read_tokenizer_files

_MAX_TOKENS = 16384
"""Maximum number of vocabulary tokens whose text is compared, spread evenly; added tokens are all compared."""
_TEXT = "The 42 cats' naïve €3.50 plan:\n\n\tdef f(x):\n        return x**2 != 0  # 日本語 Привет 🙂\r\n"


class Probe:
    """Texts with the ids that the policy's tokenizer has for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of_model(cls, model_dir: Path) -> Probe:
        """Return the probe of a model directory (TokenizerError where its tokenizer cannot be read)."""
        return cls(read_tokenizer_files(model_dir).tokenizer)

    def texts(self, most: int) -> Iterator[tuple[str, list[int]]]:
        """Yield texts of about ``most`` tokens, each with its ids.

        The ids of a text differ where a vocabulary has other tokens, other numbers or other merges.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        vocabulary = [token_id for token_id in sorted(self._tokenizer.get_vocab().values()) if token_id not in added]
        step = -(-len(vocabulary) // _MAX_TOKENS) if vocabulary else 1
        chosen = [*sorted(added), *vocabulary[::step]]
        # a word that is one token by itself may be several tokens between other words
        size = max(1, most // 4)
        starts = [*range(0, len(chosen), size), len(chosen)]
        for text in (_TEXT, *(self._decoded(chosen[low:high]) for low, high in pairwise(starts))):
            yield from self._cut(text, most)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return " ".join(self._tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids)

    def _cut(self, text: str, most: int) -> Iterator[tuple[str, list[int]]]:
        token_ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if len(token_ids) > most and len(text) > 1:
            half = len(text) // 2
            yield from self._cut(text[:half], most)
            yield from self._cut(text[half:], most)
        elif token_ids:
            yield text, token_ids

    def difference(self, own: Sequence[int], other: Sequence[int]) -> str:
        """Return a description of the first difference in the ids of the same text."""
        at = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
        text = self._tokenizer.decode(list(own[at : at + 1]), skip_special_tokens=False)
        ids = [str(each[at]) if at < len(each) else "no token" for each in (own, other)]
        return f"for the text {text!r} the policy has {ids[0]}, the teacher {ids[1]}"
