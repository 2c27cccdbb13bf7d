"""Marked strings behave as the strings they were made of, and what comes out of them is the same text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from hpcrl.models.foreign_text import ForeignText, Substitutes, join_texts

OPERATIONS: dict[str, Callable[[str, str, int], Any]] = {
    "split": lambda text, other, count: text.split(other or None, count),
    "rsplit": lambda text, other, count: text.rsplit(other or None, count),
    "splitlines": lambda text, other, count: (text.splitlines(), text.splitlines(True)),
    "partition": lambda text, other, count: (text.partition(other or "a"), text.rpartition(other or "<")),
    "strip": lambda text, other, count: (text.strip(), text.strip(other), text.lstrip(other), text.rstrip(other)),
    "replace": lambda text, other, count: (text.replace(other, "<|", count), text.replace("<", other)),
    "case": lambda text, other, count: (text.upper(), text.lower(), text.title(), text.capitalize(), text.swapcase()),
    "slices": lambda text, other, count: (text[1:3], text[-1:], text[::-1], text[count:], list(text)),
    "joins": lambda text, other, count: (text + other, other + text, text * 2, text.join(["a", other])),
    "affixes": lambda text, other, count: (text.removeprefix(other), text.removesuffix(other)),
    "tests": lambda text, other, count: (
        other in text,
        text.startswith((other, "<")),
        text.endswith(other),
        text > other,
    ),
    "places": lambda text, other, count: (
        text.find(other),
        text.rfind(other),
        text.count(other),
        len(text),
        hash(text),
    ),
    "kinds": lambda text, other, count: (text.isspace(), text.isalpha(), text.isupper(), text == other, text != other),
    "repr": lambda text, other, count: (repr(text), repr([text, {text: text}])),
    "bytes": lambda text, other, count: text.encode(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_that_of_the_string(name: str) -> None:
    draw, operation = random.Random(name), OPERATIONS[name]
    for _ in range(400):
        text, other = ("".join(draw.choices("ab <|>\n\tßA'\"\\", k=draw.randrange(12))) for _ in range(2))
        other = other[: draw.randrange(3)]
        table, count = Substitutes([text]), draw.randrange(-1, 3)
        marked = table.mark(text, lambda char: char in "<>|aßA")
        right, made = operation(text, other, count), operation(marked, other, count)
        if name != "repr":
            assert made == right
        assert restored(table, made) == restored(table, right)


def restored(table: Substitutes, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [restored(table, each) for each in value]
    return table.restore(value) if isinstance(value, str) else value


def test_marks_stay_where_they_were() -> None:
    table = Substitutes([])
    marked = table.mark("a<b", lambda char: char == "<")
    assert isinstance(marked, ForeignText)
    assert str.__str__(marked) == "a\U000f0000b"
    for made in (marked.upper(), marked + "<", "<" + marked, marked.strip("b"), join_texts(["<", marked])):
        assert str.__str__(made).count("\U000f0000") == 1
    assert str.__str__(("<" + marked).replace("<", "-")) == "-a-b"
    assert {"a<b": 1}[marked] == 1
    assert {marked: 1}["a<b"] == 1


def test_substitutes_are_characters_that_no_text_has() -> None:
    table = Substitutes(["x\U000f0000", "\U000f0001"])
    assert str.__str__(table.mark("<\U000f0000", lambda char: char == "<")) == "\U000f0002\U000f0000"
    with pytest.raises(ValueError, match="private use"):
        Substitutes(["".join(map(chr, range(0xF0000, 0xFFFFE)))]).mark("<", lambda char: True)
