"""Types of messages, made ready for decoders of any thread.

msgspec looks at the fields of a struct when it first decodes one, and takes no lock for that: two threads that meet
there crash the interpreter (0.22.0; its own promise is that decoding is safe). So who decodes says
``type=prepared(Kind)``.

msgspec says of damaged data mostly, but not always, that it is a `msgspec.DecodeError`. `decode_json` and
`decode_msgpack` always do: they are for data that another process, or a file, may have damaged.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

__all__ = ["decode_json", "decode_msgpack", "prepared"]

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


_UNREADABLE = (RecursionError, MemoryError, OverflowError, UnicodeError)
"""What msgspec raises beside its own errors: nesting without end, lengths that no memory holds, text that is none."""


def decode_json(data: bytes | bytearray | memoryview | str, kind: type[_T] | Any = Any) -> _T | Any:
    """Decode JSON of unknown origin; every defect of it is a `msgspec.DecodeError`, which is a ValueError."""
    try:
        return msgspec.json.decode(data, type=prepared(kind))
    except _UNREADABLE as error:
        raise msgspec.DecodeError(f"the data is damaged: {error or type(error).__name__}") from error


def decode_msgpack(data: bytes | bytearray | memoryview, kind: type[_T] | Any = Any, **options: Any) -> _T | Any:
    """Decode msgpack of unknown origin, as `decode_json`; ``options`` are those of `msgspec.msgpack.decode`."""
    try:
        return msgspec.msgpack.decode(data, type=prepared(kind), **options)
    except _UNREADABLE as error:
        raise msgspec.DecodeError(f"the data is damaged: {error or type(error).__name__}") from error
