"""Control tokens of a tokenizer, and how text of others that spells them is encoded as text.

A control token is one that a template writes to say who speaks and where a turn ends. A message that spells one, for
example a file with ``<|im_end|>`` that a tool prints, must not become one: it would end its own turn and open another.
Content is therefore marked while a template renders it (`hpcrl.models.foreign_text`), control tokens are looked for in
what the template itself wrote, and everything between them is encoded by a tokenizer that does not know them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import AddedToken, Tokenizer, models

from hpcrl.models.chat_template import ChatTemplateError
from hpcrl.models.foreign_text import Substitutes

_BRACKETS = {"<": ">", "[": "]", "{": "}", "(": ")"}
_BARS = frozenset("|｜")
_NEVER_MARKED = frozenset('"\\')
"""Characters that JSON escapes; white space and unprintable characters are excluded as well."""
_RESERVED = range(0x100000, 0x10FFFE)
"""Plane 16: characters that stand for control tokens while the text between them is encoded."""
_UNKNOWN = "\U0010ffff"
"""A character that no tokenizer has: what comes of it is the unknown token."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Rendered conversation.

    Attributes
    ----------
    text:
        Output of the template.
    marked:
        The same with text of others marked, where some of that could be taken for a control token; else equal.
    substitutes:
        Substitutes in ``marked``; None where nothing is marked.
    """

    text: str
    marked: str
    substitutes: Substitutes | None = None

    def __getitem__(self, part: slice) -> Rendered:
        text, marked = self.text[part], self.marked[part]
        # a part without text that spells control tokens is encoded as a text without any
        return Rendered(text, marked, None if text == marked else self.substitutes)


class ControlTokens:
    """Finds control tokens in text, and encodes rendered conversations."""

    def __init__(self, tokenizer: Tokenizer, written: str) -> None:
        """Choose control tokens.

        Parameters
        ----------
        tokenizer:
            Tokenizer of the model, with all its added tokens.
        written:
            Text of the chat template itself. Tokens that it writes are control tokens, as are special ones, those
            that open a bracket and those between bars; other added tokens, for example several blanks, are text.
        """
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._tokens = {token.content: number for number, token in added.items() if _is_control(token, written)}
        self._ids = frozenset(self._tokens.values())
        self._others = [token for token in added.values() if token.content not in self._tokens]
        self._other_ids = {token.content: number for number, token in added.items() if number not in self._ids}
        # a token that is searched in normalized text may have other spellings
        folded = any(added[number].normalized for number in self._ids) and tokenizer.normalizer is not None
        self._normalizer = tokenizer.normalizer if folded else None
        spelled = [self._normal(token) for token in self._tokens]
        self._pattern = _any_of(spelled)
        self._longest = max(map(len, spelled), default=0)
        self._beginnings = {token[:end] for token in spelled for end in range(1, len(token))}
        self._ends = {token[begin:] for token in spelled for begin in range(1, len(token))}
        self._first, self._last = ({token[at] for token in spelled if token} for at in (0, -1))
        self._joined = "\0".join(spelled)
        shown = (list(filter(_may_be_marked, token)) for token in self._tokens)
        self._edges = {char for token in shown for char in (token[0], token[-1])}

    @property
    def ids(self) -> frozenset[int]:
        """Return the ids of the control tokens."""
        return self._ids

    def spells(self, text: str) -> bool:
        """Return whether a text has a control token in it, or may become part of one next to other text."""
        normal = self._normal(text)
        if not normal:
            return False
        head, tail = normal[: self._longest], normal[-self._longest :]
        return (
            self._pattern.search(normal) is not None
            # most texts have no bracket there, and this is asked of each text of a turn
            or (not self._first.isdisjoint(tail) and any(tail[at:] in self._beginnings for at in range(len(tail))))
            or (not self._last.isdisjoint(head) and any(head[:at] in self._ends for at in range(1, len(head) + 1)))
            or normal in self._joined
        )

    def has_control(self, text: str) -> bool:
        """Return whether a text has a whole control token in it."""
        return self._pattern.search(self._normal(text)) is not None

    def mark(self, text: str, substitutes: Substitutes) -> str:
        """Mark a text of others such that no control token is found where it comes out."""
        everything = self._normalizer is not None or text in self._joined
        edges = None if everything else self._edges
        return substitutes.mark(text, lambda char: (edges is None or char in edges) and _may_be_marked(char))

    def same(self, text: str, marked: str) -> bool:
        """Return whether the same control tokens stand in a text without marks as in the marked one."""
        return [found for _, _, found in self._find(text)] == [found for _, _, found in self._find(marked)]

    def encode(self, rendered: Rendered) -> list[int]:
        """Return token ids, in which control tokens are those of the template alone.

        Raises
        ------
        ChatTemplateError
            The tokenizer makes a control token of plain text, whatever is done.
        """
        if rendered.substitutes is None:
            return list(self._tokenizer.encode(rendered.text, add_special_tokens=False).ids)
        pieces, found = _divide(rendered.text, self._find_added(rendered.marked))
        ids = self._encode_between(pieces, found, cut=False)
        if self._spelled(ids, found):
            # the model itself makes control tokens, of the template's text or of a message: it must find them, too
            pieces, found = _divide(rendered.text, self._find(rendered.marked))
            ids = self._encode_between(pieces, found, cut=False)
        if self._spelled(ids, found):
            # a model of words or pieces has control tokens as words: those of messages are cut in two
            ids = self._encode_between(pieces, found, cut=True)
        if spelled := self._spelled(ids, found):
            names = ", ".join(repr(token) for token, number in self._tokens.items() if number in spelled)
            raise ChatTemplateError(f"a message contains {names}, which the tokenizer cannot write as plain text")
        return ids

    def _find_added(self, text: str) -> list[tuple[int, int, int]]:
        """Return where the tokenizer finds control tokens before its model reads the text between them.

        The result is that of `_find`, but for control tokens that the model itself makes.
        """
        encoded, known = self._finder.encode(text, add_special_tokens=False), self._found_ids
        triples = zip(encoded.offsets, encoded.ids, encoded.tokens, strict=True)
        return [
            (begin, end, known[ours])
            for (begin, end), ours, token in triples
            if ours in known and (known[ours] not in self._unknown or text[begin:end].strip() == token)
        ]

    def _find(self, text: str) -> list[tuple[int, int, int]]:
        """Return where the tokenizer finds control tokens, its model included: beginning, end and id."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        pairs = zip(encoded.offsets, encoded.ids, encoded.tokens, strict=True)
        return [
            (begin, end, number)
            for (begin, end), number, token in pairs
            # the unknown token stands for any text, and is a control token where it is written
            if number in self._ids and (number not in self._unknown or text[begin:end].strip() == token)
        ]

    def _encode_between(self, pieces: Sequence[str], found: Sequence[int], *, cut: bool) -> list[int]:
        """Encode texts between control tokens, and put the ids of these between; ``cut`` divides spelled ones."""
        stand_in, divider = self._reserved(pieces)
        # an unusual pair occurs in one text alone, where the usual one is text
        tokenizer = self._without_control if stand_in == chr(_RESERVED[0]) else self._make_without_control()
        tokenizer.add_special_tokens([AddedToken(char, normalized=False) for char in (stand_in, divider)])
        if cut:
            pieces = [
                self._pattern.sub(lambda match: f"{match[0][:1]}{divider}{match[0][1:]}", text) for text in pieces
            ]
        control = iter(found)
        encoded = tokenizer.encode(stand_in.join(pieces), add_special_tokens=False)
        pairs = zip(encoded.tokens, encoded.ids, strict=True)
        return [
            next(control) if token == stand_in else self._other_ids.get(token, number)
            for token, number in pairs
            if token != divider
        ]

    def _spelled(self, ids: Iterable[int], found: Sequence[int]) -> Counter[int]:
        """Return control tokens of which there are more than were found in what the template wrote."""
        there = Counter(filter(self._countable.__contains__, ids))
        return there - Counter(found)

    @cached_property
    def _finder(self) -> Tokenizer:
        """Make the tokenizer that finds added tokens as the model's does, and has one word for any text between them.

        Only places are asked of it: merges of a long text take most of the time, and their tokens are not used.
        """
        own, added = self._tokenizer, list(self._tokenizer.get_added_tokens_decoder().values())
        word = "?" * (1 + max((len(token.content) for token in added), default=0))
        made = Tokenizer(models.WordLevel({word: 0}, unk_token=word))
        if own.normalizer is not None:
            made.normalizer = own.normalizer
        if own.post_processor is not None:
            # it moves the edges of tokens that begin with white space
            made.post_processor = own.post_processor
        made.add_tokens(added)
        return made

    @cached_property
    def _found_ids(self) -> dict[int, int]:
        """Return the ids of control tokens by those of `_finder`."""
        pairs = ((self._finder.token_to_id(token), number) for token, number in self._tokens.items())
        return {ours: number for ours, number in pairs if ours is not None}

    @cached_property
    def _countable(self) -> frozenset[int]:
        """Return the ids of control tokens but the unknown one, which stands for any text."""
        return self._ids - self._unknown

    @cached_property
    def _without_control(self) -> Tokenizer:
        return self._make_without_control()

    def _make_without_control(self) -> Tokenizer:
        """Make the tokenizer without control tokens; it shares vocabulary and rules, and so is small."""
        own = self._tokenizer
        made = Tokenizer(own.model)
        if own.normalizer is not None:
            made.normalizer = own.normalizer
        if own.pre_tokenizer is not None:
            made.pre_tokenizer = own.pre_tokenizer
        made.add_tokens(self._others)
        return made

    @cached_property
    def _unknown(self) -> frozenset[int]:
        return frozenset(self._without_control.encode(_UNKNOWN, add_special_tokens=False).ids) & self._ids

    def _reserved(self, pieces: Sequence[str]) -> tuple[str, str]:
        """Return two characters that no text has: the first two, but for texts that have one of these."""
        pairs = ((chr(code), chr(code + 1)) for code in _RESERVED[::2])
        pair = next((pair for pair in pairs if not any(char in text for text in pieces for char in pair)), None)
        if pair is None:
            raise ChatTemplateError("a message has too many different characters of Unicode's private use")
        return pair

    def _normal(self, text: str) -> str:
        return text if self._normalizer is None else self._normalizer.normalize_str(text)


def _divide(text: str, found: Sequence[tuple[int, int, int]]) -> tuple[list[str], list[int]]:
    """Return the texts around control tokens, one more than these, and the ids of these."""
    edges = [0, *(edge for begin, end, _ in found for edge in (begin, end)), len(text)]
    pieces = [text[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    return pieces, [number for _, _, number in found]


def _is_control(token: AddedToken, written: str) -> bool:
    content = token.content
    if not any(map(_may_be_marked, content)):
        return False  # white space, which templates contain as text
    return token.special or content in written or _looks_like_control(content)


def _looks_like_control(content: str) -> bool:
    """Return whether a text is in brackets, opens one, or is between bars (``<dsml:`` and ``｜DSML｜`` of DeepSeek)."""
    first, last = content[0], content[-1]
    if _BRACKETS.get(first) == last != content:
        return True
    return (first == "<" or (first in _BARS and last in _BARS)) and any(map(str.isalpha, content))


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of some texts, grouped by first character to be quick."""
    groups: dict[str, list[str]] = {}
    for token in sorted(filter(None, tokens), key=len, reverse=True):
        groups.setdefault(token[0], []).append(re.escape(token[1:]))
    each = (f"{re.escape(first)}(?:{'|'.join(rest)})" for first, rest in groups.items())
    return re.compile("|".join(each) or "(?!)")


def _may_be_marked(char: str) -> bool:
    return char.isprintable() and not char.isspace() and char not in _NEVER_MARKED
