"""Safetensors files by the byte: heads at the edges of what they can be, parts of tensors, and what an index says."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.errors import UsageError
from hpcrl.weights.read import model_directory, model_files
from hpcrl.weights.read.model_directory import INDEX, find_weight_files
from hpcrl.weights.read.model_files import ModelFiles
from hpcrl.weights.read.stored_weights import EMBEDDING, HEAD, dtype_problem, rows_differ, tied_name

FILE = "model.safetensors"


def write(path: Path, head: Any, data: bytes = b"", *, size: int | None = None) -> None:
    """A file of which the head says what it likes."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)


def tensor(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# -- heads


def test_tensors_lie_where_the_head_says(tmp_path: Path) -> None:
    head = {
        "__metadata__": {"format": "pt"},
        "a": tensor([2, 3], 0, 12, "BF16"),
        "scalar": tensor([], 12, 16, "F32"),
        "empty": tensor([0, 5], 16, 16, "F16"),
        "scale": tensor([2], 16, 18, "F8_E8M0"),
        "strange": tensor([3], 18, 20, "F4"),
    }
    write(tmp_path / FILE, head, bytes(range(20)))
    begin = 8 + len(json.dumps(head))
    with ModelFiles(tmp_path) as files:
        found = {name: (b.offset - begin, b.dtype, b.width, b.shape) for name, b in files.tensors.items()}
        assert {block.file for block in files.tensors.values()} == {tmp_path / FILE}
        assert files.read("a", (0, 0), (2, 3)) == bytes(range(12))
        assert files.read("scalar", (), ()) == bytes(range(12, 16))
        assert files.read("empty", (0, 0), (0, 5)) == b""
    assert found == {
        "a": (0, "bfloat16", 2, (2, 3)),
        "scalar": (12, "float32", 4, ()),
        "empty": (16, "float16", 2, (0, 5)),
        "scale": (16, "float8_e8m0fnu", 1, (2,)),
        # of a dtype that nobody here knows: its name is kept, for a message
        "strange": (18, "F4", 0, (3,)),
    }


def test_a_weight_in_blocks_has_no_bytes_of_its_own(tmp_path: Path) -> None:
    """Its bytes are those of its blocks and scales: a sum over all tensors counts each byte of the file once."""
    head = {"w_blocks": tensor([2, 3, 4, 16], 0, 384), "w_scales": tensor([2, 3, 4], 384, 408)}
    write(tmp_path / FILE, head, bytes(408))
    with ModelFiles(tmp_path) as files:
        weight, blocks = files.tensors["w"], files.tensors["w_blocks"]
        assert (weight.dtype, weight.offset, weight.width) == ("mxfp4", blocks.offset, 0)
        # 4 blocks of 16 bytes are 128 numbers of 4 bits
        assert weight.shape == (2, 128, 3)
        assert sum(block.nbytes for block in files.tensors.values()) == 408


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (b"{{", "JSONDecodeError"),
        (b"[]", "AttributeError"),
        ({"a": 1}, "TypeError"),
        ({"a": {"dtype": "U8", "shape": [1]}}, "KeyError: 'data_offsets'"),
        ({"a": tensor([1], 0, 1) | {"shape": 1}}, "shape or data_offsets is not a list"),
        ({"a": tensor([1], 0, 1) | {"data_offsets": 1}}, "shape or data_offsets is not a list"),
        ({"a": tensor([1], 0, 1) | {"data_offsets": [0, 1, 2]}}, "too many values"),
        ({"a": tensor([1], -1, 0)}, "offsets -1 to 0 of a tensor of shape"),
        ({"a": tensor([1], 1, 0)}, "offsets 1 to 0 of a tensor of shape"),
        ({"a": tensor([-1, -1], 0, 1)}, r"offsets 0 to 1 of a tensor of shape \[-1, -1\]"),
        ({"a": tensor([1], 0, 1) | {"shape": [1.0]}}, r"offsets 0 to 1 of a tensor of shape \[1\.0\]"),
        ({"a": tensor([2], 0, 1)}, r"1 bytes for \[2\] of U8"),
        ({"a": tensor([1], 0, 1, "F16")}, r"1 bytes for \[1\] of F16"),
    ],
)
def test_heads_that_are_none_are_refused(tmp_path: Path, head: Any, problem: str) -> None:
    write(tmp_path / FILE, head, bytes(4))
    with pytest.raises(UsageError, match=f"{FILE} is not a safetensors file: .*{problem}"):
        ModelFiles(tmp_path)


def test_a_head_is_from_two_bytes_to_the_limit_of_the_format(tmp_path: Path) -> None:
    write(tmp_path / FILE, b"{}")
    assert ModelFiles(tmp_path).tensors == {}
    for size in (1, 0, 100_000_001, 1 << 60):
        write(tmp_path / FILE, b"{}", size=size)
        with pytest.raises(UsageError, match=f"not a safetensors file: its head would have {size} bytes"):
            ModelFiles(tmp_path)
    write(tmp_path / FILE, b"{}", size=100_000_000)  # which this file has not
    assert ModelFiles(tmp_path).tensors == {}


def test_a_file_that_ends_before_its_last_byte_was_not_copied_whole(tmp_path: Path) -> None:
    head = {"a": tensor([4], 0, 4), "b": tensor([4], 4, 8)}
    write(tmp_path / FILE, head, bytes(8))
    assert set(ModelFiles(tmp_path).tensors) == {"a", "b"}
    write(tmp_path / FILE, head, bytes(7))
    with pytest.raises(UsageError, match="and ends before its tensor 'b' does: it was not copied whole"):
        ModelFiles(tmp_path)


def test_a_file_that_is_cut_while_it_is_read_is_reported(tmp_path: Path) -> None:
    write(tmp_path / FILE, {"a": tensor([4], 0, 4)}, bytes(4))
    with ModelFiles(tmp_path) as files:
        os.truncate(tmp_path / FILE, (tmp_path / FILE).stat().st_size - 1)
        with pytest.raises(UsageError, match="ends before its tensors do"):
            files.read("a", (0,), (4,))


def test_a_path_that_is_not_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / FILE).symlink_to(tmp_path / "blobs" / "x")
    with pytest.raises(UsageError, match=r"is a link to .*blobs/x, which does not exist.*\n    hint: download"):
        ModelFiles(tmp_path)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    with pytest.raises(UsageError, match=f"{FILE} is not a file"):
        ModelFiles(tmp_path)


def test_a_link_to_a_file_is_read_and_a_file_that_went_away_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "blobs" / "x", {"a": tensor([4], 0, 4)}, b"abcd")
    (tmp_path / FILE).symlink_to(tmp_path / "blobs" / "x")
    with ModelFiles(tmp_path) as files:
        assert files.read("a", (0,), (4,)) == b"abcd"
    with pytest.raises(UsageError, match="is not a file"):
        model_files._head(tmp_path / "gone.safetensors")


def test_a_tensor_is_in_one_file(tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        write(tmp_path / name, {"a": tensor([1], 0, 1)}, b"x")
    with pytest.raises(UsageError, match=r"two\.safetensors has tensor 'a', and so has .*one\.safetensors"):
        ModelFiles(tmp_path)


# -- parts


@pytest.mark.parametrize("gap", [0, 3, 1 << 16])
@pytest.mark.parametrize("span", [1, 20, 1 << 22])
def test_parts_of_tensors_are_read_however_runs_are_grouped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, gap: int, span: int
) -> None:
    monkeypatch.setattr(model_files, "_GAP_BYTES", gap)
    monkeypatch.setattr(model_files, "_SPAN_BYTES", span)
    values = np.arange(4 * 5 * 6, dtype=np.uint16).reshape(4, 5, 6)
    data = values.astype("<u2").tobytes()
    write(tmp_path / FILE, {"a": tensor([4, 5, 6], 3, 3 + len(data), "BF16")}, b"xyz" + data + b"end")
    with ModelFiles(tmp_path) as files:
        for low in itertools.product((0, 2), (0, 3), (0, 1)):
            for high in itertools.product((3, 4), (4, 5), (2, 6)):
                part = values[tuple(slice(*sides) for sides in zip(low, high, strict=True))]
                assert files.read("a", low, high) == part.tobytes()


@pytest.mark.parametrize(
    ("gap", "span", "spans"),
    [
        (2, 100, [(0, 10, 2), (13, 15, 1)]),  # two bytes between runs are read with them, three are not
        (3, 100, [(0, 15, 3)]),
        (3, 15, [(0, 15, 3)]),
        (3, 14, [(0, 10, 2), (13, 15, 1)]),
        (1, 100, [(0, 4, 1), (6, 10, 1), (13, 15, 1)]),
    ],
)
def test_runs_that_lie_near_each_other_are_read_together(
    monkeypatch: pytest.MonkeyPatch, gap: int, span: int, spans: list[tuple[int, int, int]]
) -> None:
    monkeypatch.setattr(model_files, "_GAP_BYTES", gap)
    monkeypatch.setattr(model_files, "_SPAN_BYTES", span)
    found = model_files._spans([(0, 4), (6, 4), (13, 2)])
    assert [(begin, end, len(group)) for begin, end, group in found] == spans


def test_a_file_is_opened_once_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / FILE, {"a": tensor([4], 0, 4)}, b"abcd")
    opened, closed = list[int](), list[int]()
    real_open, real_close = os.open, os.close
    with ModelFiles(tmp_path) as files:
        monkeypatch.setattr(os, "open", lambda *a, **k: (opened.append(real_open(*a, **k)), opened[-1])[1])
        monkeypatch.setattr(os, "close", lambda fd: (closed.append(fd), real_close(fd))[1])
        assert [files.read("a", (i,), (i + 1,)) for i in range(4)] == [b"a", b"b", b"c", b"d"]
        assert (len(opened), closed) == (1, [])
    assert closed == opened
    assert files.read("a", (1,), (3,)) == b"bc"  # opened anew
    files.__exit__(None, None, None)


# -- the index


def indexed(path: Path, document: Any) -> Path:
    write(path / "x-1.safetensors", {"a": tensor([1], 0, 1)}, b"x")
    (path / INDEX).write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_an_index_may_be_as_large_as_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = indexed(tmp_path, {"weight_map": {"a": "x-1.safetensors"}})
    size = (path / INDEX).stat().st_size
    monkeypatch.setattr(model_directory, "_MAX_INDEX_BYTES", size)
    found = find_weight_files(path)
    assert (found.paths, found.placed) == ((path / "x-1.safetensors",), {"a": path / "x-1.safetensors"})
    monkeypatch.setattr(model_directory, "_MAX_INDEX_BYTES", size - 1)
    with pytest.raises(UsageError, match=f"{INDEX} cannot be read: it has {size} bytes"):
        find_weight_files(path)


def test_an_index_of_any_model_is_within_the_limit() -> None:
    """A million tensors, with a hundred characters each."""
    assert model_directory._MAX_INDEX_BYTES > 2 * 10**8


def test_an_index_with_a_mark_of_its_encoding_is_read(tmp_path: Path) -> None:
    path = indexed(tmp_path, "\ufeff" + json.dumps({"weight_map": {"a": "x-1.safetensors"}}))
    assert list(find_weight_files(path).placed) == ["a"]


@pytest.mark.parametrize(
    "name", ["../x-1.safetensors", "sub/../x-1.safetensors", "/x.safetensors", "x-1.bin", "x\0.safetensors", "x-1"]
)
def test_an_index_names_files_of_its_directory(tmp_path: Path, name: str) -> None:
    path = indexed(tmp_path, {"weight_map": {"a": "x-1.safetensors", "b": name}})
    with pytest.raises(UsageError, match=r"says that tensor 'b' is in .*not a safetensors file of this directory"):
        find_weight_files(path)


def test_an_index_may_name_files_below_its_directory(tmp_path: Path) -> None:
    path = indexed(tmp_path, {"weight_map": {"a": "sub/x.safetensors"}})
    write(path / "sub" / "x.safetensors", {"a": tensor([1], 0, 1)}, b"x")
    found = find_weight_files(path)
    assert (found.paths, found.ignored) == ((path / "sub" / "x.safetensors",), ("x-1.safetensors",))


@pytest.mark.parametrize(
    ("lost", "said"), [(1, "lacks y-0.safetensors, which"), (5, r"y-2\.safetensors and 2 more, which")]
)
def test_what_an_index_names_is_there(tmp_path: Path, lost: int, said: str) -> None:
    places = {f"t{number}": f"y-{number}.safetensors" for number in range(lost)}
    path = indexed(tmp_path, {"weight_map": {"a": "x-1.safetensors", **places}})
    with pytest.raises(UsageError, match=said):
        find_weight_files(path)


@pytest.mark.parametrize(
    "document", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}']
)
def test_an_index_has_a_map(tmp_path: Path, document: str) -> None:
    with pytest.raises(UsageError, match="has no weight_map of tensors and files"):
        find_weight_files(indexed(tmp_path, document))


def test_an_index_that_is_a_link_to_nothing_is_one(tmp_path: Path) -> None:
    write(tmp_path / FILE, {"a": tensor([1], 0, 1)}, b"x")
    (tmp_path / INDEX).symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match="cannot be read"):
        find_weight_files(tmp_path)


def test_an_index_names_the_single_file_where_there_is_one(tmp_path: Path) -> None:
    path = indexed(tmp_path, {"weight_map": {"a": "x-1.safetensors"}})
    write(path / FILE, {"b": tensor([1], 0, 1)}, b"x")
    with pytest.raises(UsageError, match=f"has {FILE} and an index, .* that does not name it"):
        find_weight_files(path)
    (path / INDEX).write_text(json.dumps({"weight_map": {"a": "x-1.safetensors", "b": FILE}}))
    assert len(find_weight_files(path).paths) == 2


def test_without_an_index_all_files_but_those_of_other_formats_are_read(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "consolidated.safetensors", "adapter_model.safetensors", "c.bin"):
        (tmp_path / name).touch()
    found = find_weight_files(tmp_path)
    assert [path.name for path in found.paths] == ["a.safetensors", "b.safetensors"]
    assert found.ignored == ("adapter_model.safetensors", "c.bin", "consolidated.safetensors")
    assert found.placed == {}


def test_a_directory_without_any_is_none_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no \*\.safetensors: it is not a model directory"):
        find_weight_files(tmp_path)
    for name in ("a.pt", "b.pth", "c.gguf", "d.bin"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"\(there is a\.pt, b\.pth, c\.gguf, which hpcrl does not read\)"):
        find_weight_files(tmp_path)


# -- stored weights


def stored(path: Path, tensors: dict[str, tuple[list[int], str]], data: bytes = b"") -> ModelFiles:
    widths = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1}
    head, end = {}, 0
    for name, (shape, dtype) in tensors.items():
        size = int(np.prod(shape)) * widths[dtype]
        head[name] = tensor(shape, end, end + size, dtype)
        end += size
    write(path / FILE, head, data or bytes(end))
    return ModelFiles(path)


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        (([2, 3], "F32"), ""),
        (([2, 3], "BF16"), ""),
        (([2, 3], "F8_E8M0"), ""),
        (None, "'w' is in FP8, but its scales, 'w_scale_inv', are missing"),
        (([3, 2], "F32"), "'w_scale_inv' has shape (3, 2), not (2, 3): blocks are 128 wide"),
        (
            ([2, 3], "U8"),
            "'w_scale_inv' has dtype uint8; scales are read in float32, bfloat16, float16, float8_e8m0fnu",
        ),
    ],
)
def test_scales_of_a_matrix_are_those_of_its_blocks(tmp_path: Path, scale: Any, problem: str) -> None:
    """129 rows are two blocks, 384 columns are three."""
    files = stored(tmp_path, {"w": ([129, 384], "F8_E4M3")} | ({} if scale is None else {"w_scale_inv": scale}))
    found = dtype_problem("w", files.tensors)
    assert found == (problem and f"tensor {problem}")


def test_weights_have_dtypes_of_weights(tmp_path: Path) -> None:
    files = stored(tmp_path, {"a": ([2], "F32"), "b": ([2], "BF16"), "c": ([2], "F16"), "d": ([2], "U8")})
    assert [dtype_problem(name, files.tensors) for name in "abc"] == [""] * 3
    assert dtype_problem("d", files.tensors) == "tensor 'd' has dtype uint8, which cannot be read as a weight"
    vector = stored(tmp_path / "other", {"v": ([2], "F8_E4M3")})
    assert (
        dtype_problem("v", vector.tensors)
        == "tensor 'v' is in FP8 but is not a matrix: the layout of its scales is unknown"
    )


@pytest.mark.parametrize(
    ("names", "tied"), [([EMBEDDING], EMBEDDING), ([HEAD], HEAD), ([EMBEDDING, HEAD], EMBEDDING), ([], EMBEDDING)]
)
def test_a_tied_tensor_has_either_name(tmp_path: Path, names: list[str], tied: str) -> None:
    assert tied_name(stored(tmp_path, {name: ([1], "U8") for name in names}).tensors) == tied


@pytest.mark.parametrize("rows", [1, 63, 127, 128, 200])
def test_some_rows_of_head_and_embedding_are_compared(tmp_path: Path, rows: int) -> None:
    """All of up to 127, and at least 64 of more: the first always, and others at equal distances."""
    rng = np.random.default_rng(0)
    same = rng.integers(0, 255, (rows, 3), dtype=np.uint8)
    seen = 0
    for row in range(rows):
        other = same.copy()
        other[row, 2] += 1
        shapes = {EMBEDDING: ([rows, 3], "U8"), HEAD: ([rows, 3], "U8")}
        with stored(tmp_path, shapes, same.tobytes() + other.tobytes()) as files:
            seen += rows_differ(files)
    assert seen == (rows if rows < 128 else -(-rows // (rows // 64)))
    with stored(tmp_path, shapes, same.tobytes() * 2) as files:
        assert not rows_differ(files)


@pytest.mark.parametrize("head", [([4, 2], "U8"), ([2, 4], "F8_E8M0"), ([8], "U8")])
def test_rows_of_other_shapes_or_dtypes_are_not_compared(tmp_path: Path, head: Any) -> None:
    with stored(tmp_path, {EMBEDDING: ([2, 4], "U8"), HEAD: head}, bytes(8) + bytes([1] * 8)) as files:
        assert not rows_differ(files)
    vectors = {EMBEDDING: ([8], "U8"), HEAD: ([8], "U8")}
    with stored(tmp_path, vectors, bytes(8) + bytes([1] * 8)) as files:
        assert not rows_differ(files)
