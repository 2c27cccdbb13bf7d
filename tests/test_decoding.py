"""Decoding: by several threads at once of what was never decoded before, and of data that is damaged."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from hpcrl.storage.msgspec_types import decode_json, decode_msgpack

RACE = """
import sys, threading
import msgspec
from hpcrl.storage.msgspec_types import prepared

sys.setswitchinterval(1e-6)
for number in range(200):
    inner = msgspec.defstruct(f"Inner{number}", [("words", list[int])])
    outer = msgspec.defstruct(f"Outer{number}", [("one", inner), ("more", dict[str, inner]), ("step", int)])
    barrier, found = threading.Barrier(4), []

    def decode():
        barrier.wait()
        text = b'{"one": {"words": [1, 2]}, "more": {"x": {"words": [3]}}, "step": 4}'
        found.append(msgspec.json.decode(text, type=prepared(outer)).more["x"].words)

    threads = [threading.Thread(target=decode) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == [[3]] * 4, found
"""


def test_threads_may_decode_a_kind_for_the_first_time_at_once() -> None:
    """In a process of its own: what may happen without `prepared` is a crash of the interpreter."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


class _Kind(msgspec.Struct):
    words: list[str] = []


DAMAGED: list[tuple[Any, bytes]] = [
    (decode_json, b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    (decode_json, b'{"words":["\xff"]}'),
    (decode_json, b'{"words":[' + b"9" * 10_000 + b"]}"),
    (decode_json, b'{"words":["\\ud800"]}'),
    (decode_json, b""),
    (decode_msgpack, b"\x81\xa1x" + b"\x91" * 200_000 + b"\x90"),
    (decode_msgpack, b"\x81\xa5words\xdd\xff\xff\xff\xff"),
    (decode_msgpack, b"\x81\xa5words\x91\xa1\xff"),
]


@pytest.mark.parametrize(("decode", "data"), DAMAGED)
@pytest.mark.parametrize("kind", [_Kind, Any])
def test_damage_is_always_a_decode_error(decode: Any, data: bytes, kind: Any) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(data, kind)
    assert decode_json(b'{"words":["a"]}', _Kind) == _Kind(["a"])
    assert decode_msgpack(b"\x81\xa5words\x91\xa1a") == {"words": ["a"]}
