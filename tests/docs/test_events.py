"""Every event that the code emits is documented, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_EMITTED = re.compile(
    r"\b(?:_?emit(?:_on_any_rank)?|_record)\(\s*\"([a-z_.]+)\"|add_signal_handler\([^)]*emit, \"([a-z_.]+)\""
)


def test_events_are_documented() -> None:
    emitted = {
        one or other
        for path in (ROOT / "hpcrl").rglob("*.py")
        for one, other in _EMITTED.findall(path.read_text(encoding="utf-8"))
    }
    rows = re.findall(r"^\| `([a-z_.]+)` \|", (ROOT / "docs/events.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert emitted == set(rows)
    assert len(rows) == len(set(rows))
