"""Names that an admin has chosen, as YAML that is read as the same text."""

from __future__ import annotations

import json
import re

import yaml

__all__ = ["yaml_text"]

_PLAIN = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_UNSEEN = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
"""What JSON leaves as it is, and YAML refuses or takes for a line break."""


def yaml_text(text: str) -> str:
    """A text as a key or a value: plain where that is read as this very text, else in quotes.

    ``on``, ``null``, ``1e3``, ``0123`` and ``12:30`` are something else without quotes.
    """
    if _PLAIN.fullmatch(text) and yaml.safe_load(text) == text:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)
