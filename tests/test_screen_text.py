"""Text of others is shown, and not obeyed."""

from __future__ import annotations

import json
import sys
import unicodedata

import msgspec
import pytest

from hpcrl.reporting.screen_text import visible, visible_line, without_colours


def test_every_character_that_a_terminal_may_obey_is_shown() -> None:
    obeyed = [
        char
        for char in map(chr, range(sys.maxunicode + 1))
        # controls; lone surrogates; separators of lines and paragraphs; marks of the writing direction
        if unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"} or unicodedata.bidirectional(char) in _DIRECTIONS
    ]
    assert len(obeyed) > 2100
    for char in obeyed:
        shown = visible(f"a{char}b")
        assert shown == f"a{char}b" if char in "\n\t" else shown.isascii() and shown.isprintable(), hex(ord(char))
        assert visible_line(char).isprintable()


_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@pytest.mark.parametrize(
    "text", ["plain", "Grüße, 你好 \U0001f44d", "a\tb\n\nc", "non\u00a0breaking", "e\u0301", "\ue000 private"]
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_forms() -> None:
    assert visible("\x1b]52;c;cm0=\x07") == "\\x1b]52;c;cm0=\\x07"
    assert visible("a\rb") == "a\\rb"
    assert visible("\u202egnp.exe") == "\\u202egnp.exe"
    assert visible_line("a\nb\tc") == "a\\nb\\tc"
    assert visible_line("x" * 50, 10) == "x" * 9 + "…"
    assert visible_line("\x1b" * 50, 10) == "\\x1b\\x1b\\…"
    assert visible_line("exactly", 7) == "exactly"


def test_colours_of_logs_are_cut() -> None:
    assert without_colours("\x1b[1;31mERROR\x1b[0m \x1b[38:5:1mx\x1b[2J") == "ERROR x\x1b[2J"


def test_a_json_document_stays_equal() -> None:
    document = {"text": "".join(map(chr, [*range(0x300), *range(0x2000, 0x2100), 0xE0001, 0xE007F, 0x1F600]))}
    for encoded in (msgspec.json.encode(document).decode(), json.dumps(document), json.dumps(document, indent=2)):
        assert json.loads(visible(encoded)) == document
        assert "\x9b" not in visible(encoded)
