"""Each contradiction of a manifest by itself, beside the values that are just possible."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hpcrl.storage.files import FileRecord
from hpcrl.weights.format.manifest import Chunk, Manifest, Piece, TensorRecord

DIGEST = "0123456789abcdef" * 2
#: an int32 of policy versions, and the largest whole number that JSON of other programs has
LAST_VERSION, LARGEST = 2147483647, 9007199254740992


def record(shape: tuple[int, ...], offset: int, file: str = "model.safetensors", chunk: int = 8) -> TensorRecord:
    """A tensor of numbers of two bytes."""
    size = 2
    for each in shape:
        size *= each
    return TensorRecord("bfloat16", shape, file, offset, size, DIGEST * -(-size // chunk))


def whole(**changes: Any) -> Manifest:
    """A head of ten bytes, three tensors of 12, 8 and no bytes, and two files without tensors."""
    made = Manifest(
        version=4,
        kind="full",
        parent=None,
        producer="me",
        created_at_s=1.0,
        tensors={"b": record((4,), 22), "a": record((2, 3), 10), "empty": record((0, 7), 30)},
        files={
            "model.safetensors": FileRecord(30, DIGEST * 2),
            "config.json": FileRecord(8, DIGEST),
            "nothing.txt": FileRecord(0, ""),
        },
        chunk_bytes=8,
    )
    return msgspec.structs.replace(made, **changes)


def delta(**changes: Any) -> Manifest:
    made = whole(
        kind="delta",
        parent=3,
        needs=(1, 3),
        tensors={"a": record((2, 3), 0, ""), "b": record((4,), 0, "")},
        changes={"a": (Piece("changes-0", 0, 2), Piece("changes-0", 2, 4))},
        files={"changes-0": FileRecord(6, DIGEST)},
    )
    return msgspec.structs.replace(made, **changes)


def adapter(**changes: Any) -> Manifest:
    return msgspec.structs.replace(whole(kind="lora", parent=3, needs=(3,), parent_xxh3_128=DIGEST), **changes)


@pytest.mark.parametrize("make", [whole, delta, adapter])
def test_versions_without_a_contradiction(make: Any) -> None:
    assert list(make().problems()) == []


@pytest.mark.parametrize(
    "manifest",
    [
        whole(version=0),
        whole(kind="fp8"),
        whole(version=LAST_VERSION),
        delta(version=LAST_VERSION, parent=LAST_VERSION - 1, needs=(0, LAST_VERSION - 1)),
        whole(tensors={}, files={}),
        whole(tensors={}, files={"x": FileRecord(LARGEST, "")}, chunk_bytes=1),
        # a piece of no bytes at the end of its file
        delta(changes={"a": (Piece("changes-0", 6, 0),), "b": ()}),
    ],
)
def test_values_that_are_just_possible(manifest: Manifest) -> None:
    assert [problem for problem in manifest.problems() if "hash of x" not in problem] == []


def of(name: str, **changes: Any) -> dict[str, Any]:
    """One changed tensor of the whole version."""
    return {"tensors": {**whole().tensors, name: msgspec.structs.replace(whole().tensors[name], **changes)}}


def files(**records: FileRecord) -> dict[str, Any]:
    return {"files": {**whole().files, **records}}


#: what contradicts, and a word of it that is named
CONTRADICTIONS: list[tuple[Manifest, str]] = [
    (whole(chunk_bytes=0), "chunk_bytes"),
    (whole(chunk_bytes=LARGEST + 1), "chunk_bytes"),
    (whole(version=-1), "-1"),
    (whole(version=LAST_VERSION + 1), str(LAST_VERSION + 1)),
    (delta(needs=(-1, 3)), "-1"),
    (whole(**files(other=FileRecord(-1, ""))), "other"),
    (whole(**files(other=FileRecord(LARGEST + 1, ""))), "other"),
    (whole(**of("a", offset=-1)), "tensor a "),
    (whole(**of("a", bytes=-12)), "tensor a "),
    (whole(**of("a", shape=(-2, -3))), "tensor a "),
    (whole(**of("a", bytes=LARGEST + 1)), "tensor a "),
    (whole(**of("a", dtype="float65")), "tensor a "),
    (whole(**of("a", dtype="float32")), "tensor a "),
    (whole(**of("a", shape=(2, 4))), "tensor a "),
    (delta(changes={"a": (Piece("changes-0", -1, 2),)}), "tensor a "),
    (delta(changes={"a": (Piece("changes-0", 0, 2), Piece("changes-0", 2, -1))}), "tensor a "),
    (delta(changes={"b": (Piece("changes-0", 0, LARGEST + 1),)}), "tensor b "),
    # a parent, and what is needed
    (whole(parent=3), "parent 3"),
    (whole(needs=(3,)), "[3]"),
    (whole(parent=3, needs=(3,)), "parent 3"),
    (delta(parent=None), "parent None"),
    (delta(parent=1), "parent 1"),
    (delta(parent=None, needs=()), "parent None"),
    (adapter(parent=2), "parent 2"),
    (adapter(parent_xxh3_128=None), "parent_xxh3_128"),
    (whole(parent_xxh3_128=DIGEST), "parent_xxh3_128"),
    (delta(needs=(3, 3)), "[3, 3]"),
    (delta(needs=(5, 3)), "[5, 3]"),
    (delta(parent=4, needs=(1, 4)), "[1, 4]"),
    # names of files
    *[(whole(**files(**{name: FileRecord(0, "")})), repr(name)) for name in ("../x", "a/b", "", ".", "..", "a\0b")],
    (whole(**files(**{"manifest.json": FileRecord(0, "")})), "manifest.json"),
    # places
    (whole(**of("b", offset=23)), "tensor b "),
    (whole(**files(**{"model.safetensors": FileRecord(31, DIGEST * 2)})), "model.safetensors"),
    (whole(**files(**{"model.safetensors": FileRecord(29, DIGEST * 2)})), "model.safetensors"),
    # lengths of hashes: of a head, of a file without tensors, of a tensor
    (whole(**files(**{"model.safetensors": FileRecord(30, DIGEST)})), "model.safetensors"),
    (whole(**files(**{"model.safetensors": FileRecord(30, DIGEST * 4)})), "model.safetensors"),
    (whole(**files(**{"config.json": FileRecord(8, DIGEST * 2)})), "config.json"),
    (whole(**files(**{"config.json": FileRecord(9, DIGEST)})), "config.json"),
    (whole(**files(**{"nothing.txt": FileRecord(0, DIGEST)})), "nothing.txt"),
    (whole(**of("a", xxh3_128=DIGEST)), "tensor a "),
    (whole(**of("b", xxh3_128=DIGEST * 2)), "tensor b "),
    (whole(**of("empty", xxh3_128=DIGEST)), "tensor empty "),
    # what lies in no file, and changes of what is not there
    (adapter(tensors={"a": record((4,), 0, "")}, files={}), "tensor a "),
    (delta(changes={"c": (Piece("changes-0", 0, 2),)}), "tensor c "),
    (delta(changes={"a": (Piece("changes-0", 5, 2),)}), "changes-0"),
    (delta(changes={"a": (Piece("changes-0", 0, 7),)}), "changes-0"),
    (delta(changes={"a": (Piece("changes-0", 7, 0),)}), "changes-0"),
    (delta(changes={"a": (Piece("changes-1", 0, 2),)}), "changes-1"),
]


@pytest.mark.parametrize(("manifest", "word"), CONTRADICTIONS)
def test_each_contradiction_is_reported_once(manifest: Manifest, word: str) -> None:
    # a tensor that moves is followed by one that does not begin where it ends
    found = [problem for problem in manifest.problems() if not (word == "tensor b " and "tensor empty" in problem)]
    assert len(found) == 1, found
    assert word in found[0]


def test_a_tensor_in_a_file_that_is_not_listed_is_reported() -> None:
    found = list(whole(**of("b", file="other.safetensors", offset=0)).problems())
    assert any("tensor b " in problem and "other.safetensors" in problem for problem in found)
    # one for the file that is shorter without it, and one for what begins behind it
    assert len(found) == 2
    # nothing else is asked of tensors in such a file
    apart = {name: record((4,), place, "other.safetensors") for name, place in (("b", 0), ("c", 100))}
    found = list(whole(tensors={**apart, "a": whole().tensors["a"]}).problems())
    assert sum("other.safetensors" in problem for problem in found) == len(found) - 1 == 1


def test_chunks_of_files_have_no_gaps() -> None:
    first, second = "1" * 32, "2" * 32
    made = whole(
        **of("a", xxh3_128=first + second),
        files={"model.safetensors": FileRecord(30, second + first), "config.json": FileRecord(8, first)},
    )
    assert made.chunks() == {
        "model.safetensors": [
            Chunk(0, 8, second),
            Chunk(8, 2, first),
            Chunk(10, 8, first),
            Chunk(18, 4, second),
            Chunk(22, 8, DIGEST),
        ],
        "config.json": [Chunk(0, 8, first)],
    }
    assert (made.total_bytes, made.tensor_bytes) == (38, 20)
