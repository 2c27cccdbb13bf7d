"""Blocks of columns: what goes in comes out, without a copy, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from hpcrl.dock.columns import decode_columns, encode_columns
from hpcrl.dock.wire import decode_shard

ARRAYS = {
    "tokens": np.arange(7, dtype=np.int32),
    "rows": np.arange(24, dtype=np.uint8).reshape(4, 3, 2),
    "empty": np.zeros((0, 5), dtype=np.float32),
    "every_second": np.arange(10, dtype="<u2")[::2],
}


def test_columns_come_back_as_views() -> None:
    block = b"".join(encode_columns(b"about it", ARRAYS))
    about, back = decode_columns(block)
    assert about == b"about it"
    assert list(back) == list(ARRAYS)
    base = np.frombuffer(block, dtype=np.uint8)
    for name, array in ARRAYS.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape)
        assert (back[name] == array).all()
        if array.size:
            assert np.shares_memory(back[name], base), name
            assert (back[name].__array_interface__["data"][0] - base.__array_interface__["data"][0]) % 64 == 0
            assert not back[name].flags.writeable


def test_contiguous_arrays_are_not_copied_to_be_written() -> None:
    pieces = encode_columns(b"", {"tokens": ARRAYS["tokens"]})
    assert any(np.shares_memory(np.frombuffer(piece, np.uint8), ARRAYS["tokens"]) for piece in pieces if len(piece))


def test_a_block_that_is_cut_off_anywhere_is_refused() -> None:
    block = b"".join(encode_columns(b"x", {"tokens": ARRAYS["tokens"]}))
    for end in range(len(block)):
        with pytest.raises(ValueError, match="block of columns"):
            decode_columns(block[:end])


@pytest.mark.parametrize(
    ("block", "message"),
    [(b"x" * 100, "begin like"), (b"hpcrlcol" + b"\x09\0\0\0" + bytes(100), "format 9, this hpcrl reads 1")],
)
def test_other_bytes_are_refused(block: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_columns(block)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-7]},
        {"shape": [2**62, 2**62]},
        {"shape": [10**18]},
        {"offset": -64},
        {"offset": 2**62},
        {"dtype": "|O"},
        {"dtype": "float65"},
        {"dtype": "(("},
        {"dtype": "V0"},
    ],
)
def test_a_header_of_numbers_that_are_none_is_refused(change: dict[str, Any]) -> None:
    block = b"".join(encode_columns(b"x", {"tokens": ARRAYS["tokens"]}))
    length = int.from_bytes(block[12:16], "little")
    about, (column,) = msgspec.msgpack.decode(block[16 : 16 + length])
    fields = dict(zip(("name", "dtype", "shape", "offset"), column, strict=True))
    changed = msgspec.msgpack.encode([about, [list({**fields, **change}.values())]])
    with pytest.raises(ValueError, match="block of columns"):
        decode_columns(block[:12] + len(changed).to_bytes(4, "little") + changed + bytes(256))


def test_a_header_that_nests_is_refused() -> None:
    deep = b"\x91" * 100_000 + b"\x90"
    block = b"".join(encode_columns(b"x", {"tokens": ARRAYS["tokens"]}))
    with pytest.raises(ValueError, match="block of columns"):
        decode_columns(block[:12] + len(deep).to_bytes(4, "little") + deep)
    with pytest.raises(ValueError, match="batch shard"):
        decode_shard(b"\x81\xa1x" + deep)


def test_objects_are_no_column() -> None:
    with pytest.raises(ValueError, match="column it has objects"):
        encode_columns(b"", {"it": np.asarray([object()])})
