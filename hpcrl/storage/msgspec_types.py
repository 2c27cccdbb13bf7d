"""Types of messages, prepared for decoders in any thread.

msgspec inspects the fields of a struct when it first decodes one, and takes no lock for that: two concurrent threads
crash the interpreter (0.22.0; its documentation promises that decoding is thread-safe). So decoders pass
``type=prepared(Kind)``.

msgspec usually, but not always, reports damaged data as `msgspec.DecodeError`. `decode_json` and
`decode_msgpack` always do: they are for data that another process, or a file, may have damaged.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")

_lock = threading.Lock()
_ready: set[object] = set()


def prepared(kind: type[_T]) -> type[_T]:
    """Make msgspec analyse ``kind`` once, in the first thread that asks while others wait; return it."""
    if kind not in _ready:
        with _lock:
            msgspec.json.Decoder(kind)
            _ready.add(kind)
    return kind


_UNREADABLE = (RecursionError, MemoryError, OverflowError, UnicodeError)
"""Further errors that msgspec raises: unlimited nesting, lengths beyond any memory, invalid text."""


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
