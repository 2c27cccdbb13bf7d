"""Tensors of a version from a whole one and deltas: which bytes are read, which are compared, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcrl.errors import HandoffError
from hpcrl.weights.format.delta import encode_chunk
from hpcrl.weights.format.manifest import Piece, TensorRecord, chunk_digests
from hpcrl.weights.read.assemble import ServedVersion, StoredTensor, assemble

CHUNK = 8
#: by version: the bits of each tensor in bfloat16; ``still`` never changes, ``late`` changes in the last delta alone
CONTENT: dict[int, dict[str, list[int]]] = {
    3: {"moves": [1, 2, 3, 4, 5, 6], "still": [7, 8], "late": [9]},
    4: {"moves": [1, 2, 3, 4, 5, 60], "still": [7, 8], "late": [9]},
    6: {"moves": [10, 2, 3, 4, 5, 60], "still": [7, 8], "late": [90]},
}
WHOLE, *DELTAS = CONTENT


def data_of(version: int, name: str) -> bytes:
    return np.array(CONTENT[version][name], "<i2").tobytes()


class Store:
    """Versions in memory, and what was read of them."""

    def __init__(self, *, needs: Mapping[int, Sequence[int]] | None = None) -> None:
        self.files: dict[tuple[int, str], bytearray] = {}
        self.read_from: list[tuple[int, str]] = []
        needs = needs or {4: (3,), 6: (3, 4)}
        self.chain = [self._whole(WHOLE), *(self._delta(version, tuple(needs[version])) for version in DELTAS)]

    def _records(self, version: int, places: Mapping[str, tuple[str, int]]) -> dict[str, TensorRecord]:
        found = {}
        for name in CONTENT[version]:
            data, (file, offset) = data_of(version, name), places.get(name, ("", 0))
            shape = (len(data) // 2,)
            found[name] = TensorRecord("bfloat16", shape, file, offset, len(data), chunk_digests(data, CHUNK))
        return found

    def _version(self, version: int, kind: str, needs: tuple[int, ...], **manifest: Any) -> Any:
        made = SimpleNamespace(kind=kind, needs=needs, version=version, chunk_bytes=CHUNK, **manifest)
        by_file: dict[str, list[tuple[str, TensorRecord]]] = {}
        for name, record in made.tensors.items():
            by_file.setdefault(record.file, []).append((name, record))
        made.tensors_by_file = lambda: {file: records for file, records in by_file.items() if file}
        return SimpleNamespace(path=Path(f"/weights/v{version:06d}"), manifest=made, version=version)

    def _whole(self, version: int) -> Any:
        places, files = {}, {"one": bytearray(4), "two": bytearray(6)}
        for name in CONTENT[version]:
            file = "two" if name == "late" else "one"
            places[name] = (file, len(files[file]))
            files[file] += data_of(version, name)
        self.files |= {(version, file): data for file, data in files.items()}
        return self._version(version, "full", (), tensors=self._records(version, places), changes={})

    def _delta(self, version: int, needs: tuple[int, ...]) -> Any:
        content, changes = bytearray(b"head"), dict[str, tuple[Piece, ...]]()
        for name in CONTENT[version]:
            old, new = (data_of(each, name) for each in (needs[-1], version))
            for number in range(0, len(new), CHUNK):
                part = slice(number, number + CHUNK)
                record = encode_chunk(number // CHUNK, memoryview(old[part]), memoryview(new[part]), 2)
                if record:
                    piece = Piece("changes", len(content), len(record))
                    changes[name] = (*changes.get(name, ()), piece)
                    content += record
        self.files[version, "changes"] = content
        return self._version(version, "delta", needs, tensors=self._records(version, {}), changes=changes)

    def read(self, version: int, file: str, offset: int, size: int) -> memoryview:
        self.read_from.append((version, file))
        return memoryview(bytes(self.files[version, file][offset : offset + size]))

    def assembled(self, *arguments: Any, **how: Any) -> dict[str, list[int]]:
        return {each.name: np.frombuffer(each.data, "<i2").tolist() for each in self.tensors(*arguments, **how)}

    def tensors(self, *arguments: Any, **how: Any) -> list[StoredTensor]:
        return list(assemble(self.chain, self.read, *arguments, **how))


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("check_all", [False, True])
def test_each_version_of_a_chain_has_its_content(length: int, check_all: bool) -> None:
    store = Store()
    store.chain = store.chain[:length]
    found = store.tensors(check_all=check_all)
    assert {each.name: np.frombuffer(each.data, "<i2").tolist() for each in found} == CONTENT[[3, 4, 6][length - 1]]
    # the records are those of the last version, and tensors come in the order of the whole version's files
    assert [each.record for each in found] == [store.chain[-1].manifest.tensors[each.name] for each in found]
    assert [each.name for each in found] == ["moves", "still", "late"]
    changes = {3: 0, 4: 1, 6: 3}
    assert len(store.read_from) == 3 + changes[[3, 4, 6][length - 1]]


def test_only_the_tensors_that_are_asked_for_are_read() -> None:
    store = Store()
    assert store.assembled(only={"late"}) == {"late": [90]}
    assert store.read_from == [(3, "two"), (6, "changes")]
    assert store.assembled(only=()) == {}


def copies(version: int, *names: str) -> ServedVersion:
    """A reader that has these tensors of a version in memory."""
    return ServedVersion(version, lambda name, record: bytearray(data_of(version, name)) if name in names else None)


def test_a_reader_that_has_a_version_reads_what_came_after_it() -> None:
    store = Store()
    assert store.assembled(copies(4, "moves", "still", "late")) == CONTENT[6]
    assert store.read_from == [(6, "changes")] * 2
    store.read_from.clear()
    assert store.assembled(copies(3, "moves", "still", "late")) == CONTENT[6]
    assert store.read_from == [(4, "changes"), (6, "changes"), (6, "changes")]


def test_a_tensor_that_it_does_not_have_is_read_from_the_beginning() -> None:
    store = Store()
    assert store.assembled(copies(4, "late", "still")) == CONTENT[6]
    assert store.read_from == [(3, "one"), (4, "changes"), (6, "changes"), (6, "changes")]


def test_a_version_that_is_not_in_the_chain_is_of_no_use() -> None:
    store = Store()

    def copy(name: str, record: TensorRecord) -> bytearray:
        raise AssertionError("not asked for")

    assert store.assembled(ServedVersion(5, copy)) == CONTENT[6]
    assert (3, "one") in store.read_from
    # nor of a whole version, which is read as it is
    store.chain = store.chain[:1]
    assert store.assembled(ServedVersion(3, copy)) == CONTENT[3]


def test_a_copy_that_is_not_what_the_reader_took_it_for_is_found() -> None:
    """Also of a tensor that nothing changed since."""
    store = Store()
    wrong = ServedVersion(4, lambda name, record: bytearray(record.bytes) if name == "still" else None)
    with pytest.raises(HandoffError, match="tensor still does not have the content"):
        store.tensors(wrong)


@pytest.mark.parametrize("check_all", [False, True])
def test_what_no_delta_changes_is_compared_if_it_was_not_verified(check_all: bool) -> None:
    store = Store()
    at = store.chain[0].manifest.tensors["still"].offset
    store.files[3, "one"][at] ^= 1
    if check_all:
        with pytest.raises(HandoffError, match="v000006: tensor still does not have the content"):
            store.tensors(check_all=True)
    else:
        assert store.assembled()["still"] != CONTENT[6]["still"]


def test_a_tensor_without_a_change_that_should_have_one_is_found() -> None:
    store = Store()
    del store.chain[2].manifest.changes["late"]
    with pytest.raises(HandoffError, match="tensor late does not have the content"):
        store.tensors()


def test_bytes_that_others_may_read_are_not_changed() -> None:
    store = Store()
    before = {place: bytes(data) for place, data in store.files.items()}
    views: list[memoryview] = []

    def read(version: int, file: str, offset: int, size: int) -> memoryview:
        views.append(memoryview(store.files[version, file])[offset : offset + size].toreadonly())
        return views[-1]

    assert len(list(assemble(store.chain, read))) == 3
    assert {place: bytes(data) for place, data in store.files.items()} == before


@pytest.mark.parametrize("needs", [{4: (3,), 6: (3,)}, {4: (3,), 6: (4, 3)}, {4: (3,), 6: (3, 4, 4)}])
def test_versions_of_other_histories_do_not_fit(needs: dict[int, tuple[int, ...]]) -> None:
    store = Store(needs=needs)
    with pytest.raises(HandoffError, match="of different histories"):
        store.tensors()


def test_an_adapter_stands_for_itself() -> None:
    """It needs the version that it changes, which is not read here."""
    store = Store()
    store.chain[0].manifest.kind, store.chain[0].manifest.needs = "lora", (1, 2)
    store.chain = store.chain[:1]
    assert store.assembled() == CONTENT[3]


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"shape": (2, 3)}])
def test_a_tensor_of_another_form_does_not_fit(at: int, change: dict[str, Any]) -> None:
    store = Store()
    tensors = store.chain[at].manifest.tensors
    values = {name: getattr(tensors["moves"], name) for name in TensorRecord.__struct_fields__}
    tensors["moves"] = TensorRecord(**{**values, **change})
    with pytest.raises(HandoffError, match="dtype or shape of tensor moves"):
        store.tensors()


def test_tensors_that_one_version_alone_has_do_not_fit() -> None:
    for at, message in ((2, "differ in their tensors"), (1, "dtype or shape of tensor new")):
        store = Store()
        tensors = store.chain[at].manifest.tensors
        tensors["new"] = tensors["late"]
        with pytest.raises(HandoffError, match=message):
            store.tensors()


def test_damaged_changes_name_their_file() -> None:
    store = Store()
    piece = store.chain[2].manifest.changes["late"][0]
    store.chain[2].manifest.changes["late"] = (Piece("changes", piece.offset, piece.bytes - 1),)
    with pytest.raises(HandoffError, match="v000006/changes: "):
        store.tensors()
