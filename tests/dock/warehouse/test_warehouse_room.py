"""How much of shared memory a warehouse takes: pages of released blocks are used again, and counted once."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from warehouse_testing import Block, Disk

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.warehouse import embedded
from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.interface import Location, key_of
from hpcrl.dock.warehouse.reading import BlockReader

PAGE = 4096


@pytest.fixture
def warehouse(tmp_path: Path) -> Iterator[EmbeddedWarehouse]:
    """Of ten pages."""
    (tmp_path / "memory").mkdir()
    warehouse = EmbeddedWarehouse(tmp_path / "memory", limit_bytes=10 * PAGE)
    yield warehouse
    warehouse.close()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "payload")


class Blocks:
    """Blocks of so many pages, the last of which is not full."""

    def __init__(self, warehouse: EmbeddedWarehouse, disk: Disk) -> None:
        self._warehouse, self._disk = warehouse, disk
        self._made = 0

    def make(self, pages: int) -> tuple[PayloadPlace, Block]:
        self._made += 1
        place, block = self._disk.write(self._made, numbers=(pages * PAGE - 512) // 8)
        assert (pages - 1) * PAGE < place.bytes < pages * PAGE
        return place, block

    def put(self, pages: int) -> tuple[PayloadPlace, Block]:
        place, block = self.make(pages)
        assert self._warehouse.put(place, block)
        return place, block

    def held(self) -> tuple[int, int]:
        """Blocks that may be read, and pages that are held."""
        figures = self._warehouse.figures()
        assert figures.held_bytes == sum(path.stat().st_size for path in files(self._warehouse))
        return figures.blocks, figures.held_bytes // PAGE

    def check(self, *blocks: tuple[PayloadPlace, Block]) -> None:
        """All of these, and no others, are read from memory."""
        reader = BlockReader(Location(str(self._warehouse.directory)), self._disk.directory)
        for place, block in blocks:
            assert reader.read(place) == b"".join(block)
        assert reader.sources == {"node": len(blocks)}
        assert self._warehouse.figures().blocks == len(blocks)


def files(warehouse: EmbeddedWarehouse) -> list[Path]:
    return [path for path in warehouse.directory.iterdir() if path.name != "alive"]


@pytest.fixture
def blocks(warehouse: EmbeddedWarehouse, disk: Disk) -> Blocks:
    return Blocks(warehouse, disk)


def test_a_block_takes_whole_pages(warehouse: EmbeddedWarehouse, blocks: Blocks) -> None:
    first, second = blocks.put(1), blocks.put(3)
    assert blocks.held() == (2, 4)
    blocks.check(first, second)


def test_a_warehouse_is_full_with_its_last_page(warehouse: EmbeddedWarehouse, blocks: Blocks) -> None:
    kept = blocks.put(4), blocks.put(6)
    assert not warehouse.full
    assert not warehouse.put(*blocks.make(1))
    assert (warehouse.full, warehouse.figures().refused) == (True, 1)
    assert not warehouse.put(*blocks.make(1))
    assert warehouse.figures().refused == 2
    blocks.check(*kept)


def test_pages_of_a_released_block_are_used_once(warehouse: EmbeddedWarehouse, blocks: Blocks) -> None:
    first = blocks.put(2)
    warehouse.release([first[0]])
    assert blocks.held() == (0, 2)
    second = blocks.put(2)
    assert blocks.held() == (1, 2)
    third = blocks.put(2)
    assert blocks.held() == (2, 4)
    blocks.check(second, third)


@pytest.mark.parametrize(
    ("released", "pages", "held"), [(4, 1, 5), (4, 2, 4), (4, 3, 4), (4, 4, 4), (4, 5, 9), (3, 1, 4), (5, 2, 7)]
)
def test_pages_are_used_for_blocks_of_half_to_all_of_their_size(
    blocks: Blocks, *, released: int, pages: int, held: int
) -> None:
    blocks._warehouse.release([blocks.put(released)[0]])
    own = blocks.put(pages)
    assert blocks.held() == (1, held)
    blocks.check(own)


def test_the_smallest_file_that_fits_is_taken(warehouse: EmbeddedWarehouse, blocks: Blocks) -> None:
    released = [blocks.put(pages) for pages in (4, 2, 3)]
    warehouse.release([place for place, _ in released])
    blocks.put(2)
    sizes = {path.name: path.stat().st_size // PAGE for path in files(warehouse)}
    assert sorted(size for name, size in sizes.items() if name.startswith("free")) == [3, 4]


def test_what_is_kept_goes_where_a_large_block_needs_the_room(warehouse: EmbeddedWarehouse, blocks: Blocks) -> None:
    """The oldest first, and no more than it needs."""
    released = [blocks.put(pages) for pages in (1, 2, 3)]
    warehouse.release([place for place, _ in released])
    own = blocks.put(7)
    assert blocks.held() == (1, 10)
    assert sorted(path.stat().st_size // PAGE for path in files(warehouse)) == [3, 7]
    blocks.check(own)


def test_a_warehouse_with_room_again_is_not_full(warehouse: EmbeddedWarehouse, blocks: Blocks) -> None:
    first, second = blocks.put(5), blocks.put(5)
    assert not warehouse.put(*blocks.make(5))
    warehouse.release([first[0]])
    assert not warehouse.full
    blocks.check(second, blocks.put(5))


def test_unknown_blocks_are_skipped(warehouse: EmbeddedWarehouse, blocks: Blocks) -> None:
    first, unknown, second = blocks.put(1), blocks.make(1), blocks.put(1)
    warehouse.release([unknown[0], first[0], first[0]])
    assert blocks.held() == (1, 2)
    # and those whose file somebody has removed
    (warehouse.directory / key_of(second[0])).unlink()
    warehouse.release([second[0]])
    assert blocks.held() == (0, 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_block_that_memory_refuses_leaves_nothing(
    warehouse: EmbeddedWarehouse,
    blocks: Blocks,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    number: int,
) -> None:
    kept, refused = blocks.put(2), blocks.make(3)

    def refuse(fd: int, pieces: object, offset: int) -> int:
        os.write(fd, b"torn")
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "write_pieces", refuse)
        assert not warehouse.put(*refused)
    assert blocks.held() == (1, 2)
    assert warehouse.figures().refused == 1
    # others would find room where this was an error of its own
    assert warehouse.full is (number != errno.EIO)
    assert f"cannot keep a block of {refused[0].bytes} bytes: [Errno {number}]" in caplog.text
    assert warehouse.put(*refused)
    blocks.check(kept, refused)


def test_a_directory_that_was_removed_is_closed_all_the_same(warehouse: EmbeddedWarehouse) -> None:
    shutil.rmtree(warehouse.directory)
    warehouse.close()


def test_a_closed_warehouse_takes_and_gives_nothing(warehouse: EmbeddedWarehouse, blocks: Blocks) -> None:
    (place, _), other = blocks.put(1), blocks.make(1)
    warehouse.close()
    warehouse.close()
    assert not warehouse.put(*other)
    warehouse.release([place])
    assert not warehouse.full
    assert not warehouse.directory.exists()
