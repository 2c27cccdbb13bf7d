"""Types of messages, made ready for decoders of any thread.

msgspec looks at the fields of a struct when it first decodes one, and takes no lock for that: two threads that meet
there crash the interpreter (0.22.0; its own promise is that decoding is safe). So who decodes says
``type=prepared(Kind)``.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

__all__ = ["prepared"]

_T = TypeVar("_T")

_lock = threading.Lock()
_ready: set[object] = set()


def prepared(kind: type[_T]) -> type[_T]:
    """``kind``, which msgspec knows from now on: the first thread that asks lets it look, others wait for that."""
    if kind not in _ready:
        with _lock:
            msgspec.json.Decoder(kind)
            _ready.add(kind)
    return kind
