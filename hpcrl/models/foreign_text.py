"""Text of others inside a chat template: a string that behaves as written and is marked where it comes out.

A chat template joins its own marks (``<|im_end|>``) and text of others (messages, tool calls, tools) into one text, in
which the two can no longer be distinguished. `Substitutes.mark` therefore gives a template strings in which some
characters are replaced by characters of Unicode's private use. A template sees the string as it was written: it
compares, searches, splits and strips it by the original characters. What comes out has the substitutes, and
`Substitutes.restore` puts the original characters back. Both have the same length, so that positions agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
"""Plane 15: characters without a meaning of their own."""
_MAX_REPLACED = 32
"""Maximum number of substitutes that are replaced one after the other."""


class Substitutes:
    """Private-use characters that stand for characters of text of others during one rendering."""

    def __init__(self, present: Iterable[str]) -> None:
        """Choose from those private-use characters that none of the texts ``present`` has."""
        taken = {ord(char) for text in present if not text.isascii() for char in text}
        self._free = (code for code in _PRIVATE_USE if code not in taken)
        self._of: dict[int, int] = {}
        self._original: dict[int, int] = {}

    def mark(self, text: str, characters: Callable[[str], bool]) -> str:
        """Return ``text`` with those of its characters replaced for which ``characters`` is true.

        Raises
        ------
        ValueError
            There are not enough private-use characters left.
        """
        chosen = {char: self.substitute(char) for char in set(text) if characters(char)}
        if len(chosen) > _MAX_REPLACED:
            return _made(text, text.translate({ord(char): other for char, other in chosen.items()}), self)
        marked = text
        # substitutes are in no text: none of them is replaced again
        for char, other in chosen.items():
            marked = marked.replace(char, other)
        return _made(text, marked, self)

    def substitute(self, char: str) -> str:
        """Return the private-use character that stands for ``char``."""
        code = ord(char)
        if code not in self._of:
            free = next(self._free, None)
            if free is None:
                raise ValueError("a text has all characters of Unicode's private use; it cannot be rendered")
            self._of[code] = free
            self._original[free] = code
        return chr(self._of[code])

    def restore(self, text: str) -> str:
        """Return the text with all original characters back."""
        found = _data(text)
        if len(self._original) > _MAX_REPLACED:
            return found.translate(self._original)
        # a translation looks up each character of a text, in which few are substitutes
        for code, original in self._original.items():
            found = found.replace(chr(code), chr(original))
        return found

    def absent(self, text: str) -> bool:
        """Return whether a text has none of the substitutes."""
        return text.isascii() or not any(chr(code) in text for code in self._original)


def join_texts(texts: Iterable[Any]) -> str:
    """Join texts as ``"".join`` does; marked ones stay marked."""
    parts = [text if isinstance(text, str) else str(text) for text in texts]
    table = next((part._table for part in parts if isinstance(part, ForeignText)), None)
    if table is None:
        return "".join(parts)
    return _made("".join(map(_raw, parts)), "".join(map(_data, parts)), table)


def marked_like(text: ForeignText, data: str) -> str:
    """Return a marked string that comes out as ``data``; its substitutes are those of ``text``."""
    return _made(text._table.restore(data), data, text._table)


def original_text(text: ForeignText, char: str) -> str:
    """Return the character that ``char`` stands for in ``text``; any other character as it is."""
    return text._table.restore(char)


def _raw(text: str) -> str:
    return text._raw if isinstance(text, ForeignText) else text


def _data(text: str) -> str:
    return str.__str__(text)


def _plain(value: Any) -> Any:
    """Return arguments of string methods with marked strings as they were written."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return _raw(value) if isinstance(value, str) else value


def _made(raw: str, data: str, table: Substitutes) -> str:
    return raw if raw == data else ForeignText(raw, data, table)


class ForeignText(str):
    """A string whose characters are partly substituted; all its methods go by the original ones.

    Methods that return strings return marked ones, of which each character is still marked as it was. Those that
    are not defined here work on substituted characters.
    """

    _raw: str
    _table: Substitutes

    def __new__(cls, raw: str, data: str, table: Substitutes) -> ForeignText:
        """Make a string that reads as ``raw`` and comes out as ``data``, of the same length."""
        assert len(raw) == len(data)
        made = super().__new__(cls, data)
        made._raw, made._table = raw, table
        return made

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        # the text of a list is marked, too, because a template may write a whole list
        quote = repr(self._raw)[0]
        escapes = {"'": "'", '"': '"'} | {quote: f"\\{quote}"}
        pairs = zip(_data(self), self._raw, strict=True)
        return quote + "".join(d if d != r else escapes.get(r, repr(r)[1:-1]) for d, r in pairs) + quote

    def __eq__(self, other: object) -> bool:
        return bool(self._raw == _plain(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._raw != _plain(other))

    def __hash__(self) -> int:
        return hash(self._raw)

    def __lt__(self, other: str) -> bool:
        return bool(self._raw < _plain(other))

    def __le__(self, other: str) -> bool:
        return bool(self._raw <= _plain(other))

    def __gt__(self, other: str) -> bool:
        return bool(self._raw > _plain(other))

    def __ge__(self, other: str) -> bool:
        return bool(self._raw >= _plain(other))

    def __contains__(self, key: object) -> bool:
        return _plain(key) in self._raw

    def __getitem__(self, key: SupportsIndex | slice[Any, Any, Any]) -> str:
        return self._made(self._raw[key], super().__getitem__(key))

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: str) -> str:
        return join_texts((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return join_texts((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return self._made(self._raw * times, super().__mul__(times))

    __rmul__ = __mul__

    def join(self, iterable: Iterable[str], /) -> str:
        parts: list[str] = []
        for text in iterable:
            parts += (self, text)
        return join_texts(parts[1:])

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(self._raw.split(_plain(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(self._raw.rsplit(_plain(sep), maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._found(self._raw.splitlines(keepends), None)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parts(self._raw.partition(_plain(sep)))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parts(self._raw.rpartition(_plain(sep)))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(self._raw.lstrip(_plain(chars))) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(self._raw.rstrip(_plain(chars)))]

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:  # type: ignore[override, unused-ignore]
        if not old:
            return self._made(self._raw.replace("", _plain(new), count), super().replace("", _data(new), count))
        parts: list[str] = []
        for part in self.split(old, count):
            parts += (new, part)
        return join_texts(parts[1:])

    def lower(self) -> str:
        return self._changed(self._raw.lower())

    def upper(self) -> str:
        return self._changed(self._raw.upper())

    def capitalize(self) -> str:
        return self._changed(self._raw.capitalize())

    def title(self) -> str:
        return self._changed(self._raw.title())

    def casefold(self) -> str:
        return self._changed(self._raw.casefold())

    def swapcase(self) -> str:
        return self._changed(self._raw.swapcase())

    def find(self, *args: Any) -> int:
        return self._raw.find(*map(_plain, args))

    def rfind(self, *args: Any) -> int:
        return self._raw.rfind(*map(_plain, args))

    def index(self, *args: Any) -> int:
        return self._raw.index(*map(_plain, args))

    def rindex(self, *args: Any) -> int:
        return self._raw.rindex(*map(_plain, args))

    def count(self, *args: Any) -> int:
        return self._raw.count(*map(_plain, args))

    def startswith(self, *args: Any) -> bool:
        return self._raw.startswith(*map(_plain, args))

    def endswith(self, *args: Any) -> bool:
        return self._raw.endswith(*map(_plain, args))

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return self._raw.encode(encoding, errors)

    def isalnum(self) -> bool:
        return self._raw.isalnum()

    def isalpha(self) -> bool:
        return self._raw.isalpha()

    def isascii(self) -> bool:
        return self._raw.isascii()

    def isdecimal(self) -> bool:
        return self._raw.isdecimal()

    def isdigit(self) -> bool:
        return self._raw.isdigit()

    def isidentifier(self) -> bool:
        return self._raw.isidentifier()

    def islower(self) -> bool:
        return self._raw.islower()

    def isnumeric(self) -> bool:
        return self._raw.isnumeric()

    def isprintable(self) -> bool:
        return self._raw.isprintable()

    def isspace(self) -> bool:
        return self._raw.isspace()

    def istitle(self) -> bool:
        return self._raw.istitle()

    def isupper(self) -> bool:
        return self._raw.isupper()

    def _made(self, raw: str, data: str) -> str:
        return _made(raw, data, self._table)

    def _found(self, pieces: list[str], separator: str | None) -> list[str]:
        """Return the part of this string at each piece, which follow each other in the original one."""
        found, at = [], 0
        for piece in pieces:
            begin = at if separator else self._raw.index(piece, at)
            found.append(self[begin : begin + len(piece)])
            at = begin + len(piece) + len(separator or "")
        return found

    def _parts(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        before, middle = len(parts[0]), len(parts[0]) + len(parts[1])
        return self[:before], self[before:middle], self[middle:]

    def _changed(self, raw: str) -> str:
        """Return this string in another case: a character is marked where the one in its place was."""
        data, table = _data(self), self._table
        if len(raw) != len(data):
            return _made(raw, "".join(map(table.substitute, raw)), table)
        marked = (
            table.substitute(new) if table.restore(old) != old else new for old, new in zip(data, raw, strict=True)
        )
        return _made(raw, "".join(marked), table)
