"""Blocks of columns: what goes in comes out, without a copy, and nothing else is taken for one."""

from __future__ import annotations

import numpy as np
import pytest

from hpcrl.dock.columns import decode_columns, encode_columns

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


def test_objects_are_no_column() -> None:
    with pytest.raises(ValueError, match="column it has objects"):
        encode_columns(b"", {"it": np.asarray([object()])})
