"""Names that an admin has chosen, as YAML that is read as the same text."""

from __future__ import annotations

import json
import re

import yaml

_PLAIN = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_UNSEEN = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
"""Characters that JSON leaves as they are, and that YAML refuses or reads as a line break."""


def yaml_text(text: str) -> str:
    """Return a text as a YAML key or value: plain where YAML reads it as this very text, else in quotes.

    ``on``, ``null``, ``1e3``, ``0123`` and ``12:30`` mean something else without quotes.
    """
    if _PLAIN.fullmatch(text) and yaml.safe_load(text) == text:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)
