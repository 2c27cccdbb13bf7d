"""Ranks of a node that train on the same rollouts of another node fetch each of them once; each rank is a process."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patience import wait_for
from sharing_testing import CountingServer, Rank, counted, ranks_of
from warehouse_testing import Disk

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.interface import Location, key_of
from hpcrl.dock.warehouse.sharing import Sharing
from hpcrl.network.credentials import Credentials

LARGE, SMALL = 60_000, 5_000
"""Numbers of 8 bytes: blocks that are mapped, and that are copied."""


class Lab:
    """A run whose blocks are on disk, and in a warehouse on a node of its own."""

    def __init__(self, path: Path) -> None:
        self.run = path
        (path / "orchestrator").mkdir()
        self.disk = Disk(path / "payload")
        self.warehouse = EmbeddedWarehouse(path / "orchestrator", limit_bytes=1 << 28)
        self.server: CountingServer
        self.location: Location

    def node(self, name: str = "node") -> Path:
        base = self.run / name
        base.mkdir(mode=0o700, exist_ok=True)
        return base

    def put(self, count: int, numbers: int = LARGE, first: int = 0) -> list[PayloadPlace]:
        places = []
        for seed in range(first, first + count):
            place, block = self.disk.write(seed, numbers)
            assert self.warehouse.put(place, block)
            places.append(place)
        return places

    def rank(self, base: Path, **options: Any) -> Any:
        return partial(Rank, base, self.run, **options)

    def ask(self, rank: Rank, places: list[PayloadPlace], step: int = 1) -> None:
        rank.ask(self.location, self.disk.directory, step, places)

    def shared(self, base: Path) -> Path:
        """What the ranks of a node share."""
        (found,) = base.glob("hpcrl-dock-*")
        return found


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    with counted(lab.warehouse, tmp_path) as (lab.server, lab.location):
        yield lab
    lab.warehouse.close()


def hashes(places: list[PayloadPlace]) -> list[str]:
    return [place.xxh3_128 for place in places]


@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_of_a_node_fetch_each_byte_once_and_a_second_node_once_more(lab: Lab, cp: int) -> None:
    places = lab.put(8) + lab.put(8, SMALL, first=8)
    new = [lab.rank(lab.node(name)) for name in ("first", "second") for _ in range(4)]
    with ranks_of(*new) as ranks:
        shards = [places[i // cp % (4 // cp) :: 4 // cp] for i in range(len(ranks))]  # as context-parallel groups lie
        for rank, shard in zip(ranks, shards, strict=True):
            lab.ask(rank, shard)
        answers = [rank.answer() for rank in ranks]
        assert [answer["hashes"] for answer in answers] == [hashes(shard) for shard in shards]
        assert all(answer["problems"] == answer["unshared"] == [] for answer in answers)
        assert lab.server.served == {key_of(place): 2 * place.bytes for place in places}
        sources = sum((Counter(answer["sources"]) for answer in answers), Counter[str]())
        assert sources == {"server": 2 * len(places), "node": 2 * (cp - 1) * len(places)}
        directory = lab.shared(lab.node("first"))
        assert directory.stat().st_mode & 0o777 == 0o700
        files = list((directory / "000001").iterdir())
        assert {path.stat().st_mode & 0o777 for path in files} == {0o400}
        assert len(files) == len(places)
    # who ends last takes all of it away
    assert list(lab.node("first").iterdir()) == list(lab.node("second").iterdir()) == []


def test_another_rank_takes_over_where_the_one_that_fetches_is_killed(lab: Lab) -> None:
    places = lab.put(3)
    lab.server.stall = key_of(places[0])
    base = lab.node()
    with ranks_of(*[lab.rank(base) for _ in range(3)]) as (first, *others):
        lab.ask(first, places)
        assert lab.server.stalled.wait(30)
        for rank in others:
            lab.ask(rank, places)
        # they have fetched the rest meanwhile, and wait for the block that is under way
        rest = [lab.shared(base) / "000001" / key_of(place) for place in places[1:]]
        wait_for(lambda: all(path.exists() for path in rest), 30.0, "blocks of the others")
        assert not (lab.shared(base) / "000001" / key_of(places[0])).exists()
        first.kill()
        answers = [rank.answer() for rank in others]
        assert [answer["hashes"] for answer in answers] == [hashes(places)] * 2
        assert all(answer["problems"] == answer["unshared"] == [] for answer in answers)
        assert lab.server.served == {key_of(place): (1 + (i == 0)) * place.bytes for i, place in enumerate(places)}
    assert list(base.iterdir()) == []


def test_what_is_damaged_on_the_wire_comes_from_disk_for_all(lab: Lab) -> None:
    places = lab.put(4)
    lab.server.damage = {key_of(places[1])}
    with ranks_of(*[lab.rank(lab.node()) for _ in range(3)]) as ranks:
        for rank in ranks:
            lab.ask(rank, places)
        answers = [rank.answer() for rank in ranks]
    assert [answer["hashes"] for answer in answers] == [hashes(places)] * 3
    sources = sum((Counter(answer["sources"]) for answer in answers), Counter[str]())
    assert sources == {"server": 3, "disk": 1, "node": 8}
    (problem,) = [problem for answer in answers for problem in answer["problems"]]
    assert problem.startswith(f"{key_of(places[1])}: ")
    assert "is not what was written" in problem


@pytest.mark.parametrize("numbers", [LARGE, SMALL])
@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_what_is_damaged_in_shared_memory_is_fetched_again(lab: Lab, damage: str, numbers: int) -> None:
    places = lab.put(3, numbers)
    base = lab.node()
    with ranks_of(*[lab.rank(base) for _ in range(3)]) as (first, *others):
        lab.ask(first, places)
        assert first.answer()["sources"] == {"server": 3}
        path = lab.shared(base) / "000001" / key_of(places[1])
        path.chmod(0o600)
        if damage == "changed":
            with path.open("r+b") as file:
                file.seek(places[1].bytes - 1)
                file.write(b"\xff")
        elif damage == "cut":
            os.truncate(path, 100)
        else:
            path.unlink()
        for rank in others:
            lab.ask(rank, places)
        answers = [rank.answer() for rank in others]
    assert [answer["hashes"] for answer in answers] == [hashes(places)] * 2
    assert all(answer["unshared"] == [] for answer in answers)
    assert lab.server.served[key_of(places[1])] == 2 * places[1].bytes


@pytest.mark.parametrize("what", ["open to others", "a link"])
def test_what_others_could_have_planted_is_not_read(lab: Lab, what: str) -> None:
    (place, other) = lab.put(2)
    base = lab.node()
    with ranks_of(lab.rank(base), lab.rank(base)) as (first, second):
        lab.ask(first, [place, other])
        first.answer()
        path = lab.shared(base) / "000001" / key_of(place)
        if what == "a link":
            path.unlink()
            path.symlink_to(path.with_name(key_of(other)))
        else:
            path.chmod(0o622)
        lab.ask(second, [place, other])
        answer = second.answer()
    assert answer["hashes"] == hashes([place, other])
    assert answer["sources"] == {"server": 1, "node": 1}
    assert [said.partition(":")[0] for said in answer["unshared"]] == [key_of(place)]


def test_memory_is_bounded_and_what_has_no_room_is_fetched_by_each(lab: Lab) -> None:
    places = lab.put(12)
    base, limit = lab.node(), 5 * places[0].bytes + 100
    most, ended = [0], threading.Event()

    def held() -> int:
        sizes = {}  # a name may change while others are looked at
        for path in base.rglob("*.columns.*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                sizes[status.st_ino] = status.st_size
        return sum(sizes.values())

    def watch() -> None:
        while not ended.is_set():
            with suppress(FileNotFoundError):  # directories come and go while they are looked at
                most[0] = max(most[0], held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ranks_of(*[lab.rank(base, limit_bytes=limit) for _ in range(3)]) as ranks:
        for rank in ranks:
            lab.ask(rank, places)
        answers = [rank.answer() for rank in ranks]
        ended.set()
        watcher.join()
        assert [answer["hashes"] for answer in answers] == [hashes(places)] * 3
        assert 4 * places[0].bytes <= most[0] <= limit
        for answer in answers:
            assert answer["problems"] == []
            assert len(answer["unshared"]) == 12 - 5
            assert "blocks that this node shares would take more than" in answer["unshared"][0]
        # and goes on: what the last step but one had is given back
        for step in (2, 3):
            more = lab.put(2, first=20 + 2 * step)
            for rank in ranks:
                lab.ask(rank, more, step)
            last = [rank.answer() for rank in ranks]
            assert [answer["hashes"] for answer in last] == [hashes(more)] * 3
        assert [answer["unshared"] for answer in last] == [[]] * 3
        assert sorted(path.name for path in lab.shared(base).iterdir()) == ["000002", "000003", "alive", "room"]


def test_what_another_attempt_has_left_is_swept_and_live_ones_stay(lab: Lab) -> None:
    places = lab.put(2)
    base = lab.node()
    with ranks_of(*[lab.rank(base) for _ in range(2)], lab.rank(base, attempt=9)) as (first, second, other):
        for rank in (first, second):
            lab.ask(rank, places)
            rank.answer()
        directory = lab.shared(base)
        first.kill()
        lab.ask(other, places)  # it is refused by the server of this attempt, and reads files
        assert other.answer()["sources"] == {"disk": 2}
        assert directory.exists()
        (theirs,) = set(base.glob("hpcrl-dock-*")) - {directory}
        second.kill()
        other.kill()
    assert directory.exists()
    with ranks_of(lab.rank(base)) as (last,):
        lab.ask(last, places)
        assert last.answer()["sources"] == {"server": 2}
        assert lab.shared(base) == directory  # begun anew by the same name
        assert not theirs.exists()
    assert list(base.iterdir()) == []


def test_a_file_of_another_process_is_kept(lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = lab.node()
    own = Credentials.of_run(tmp_path, 3).headers["Authorization"]
    sharing = Sharing(base, limit_bytes=1 << 20)
    blocks = sharing.of(lab.location, own, 1)
    assert blocks is not None
    name = blocks.directory
    sharing.close()
    assert not name.exists()
    name.mkdir()
    name.chmod(0o777)
    assert sharing.of(lab.location, own, 1) is None
    assert "is writable by others" in caplog.text
    assert "hint: rollouts.warehouse.directory" in caplog.text
    name.rmdir()
    # without the run's token the name is another one
    assert sharing.of(lab.location, own, 2) is not None
    stranger = Sharing(base, limit_bytes=1 << 20)
    theirs = stranger.of(lab.location, own[:-1] + "4", 2)
    assert theirs is not None
    assert theirs.directory != name
    stranger.close()
    sharing.close()


def test_who_loses_the_directory_begins_anew_with_the_next_step(lab: Lab) -> None:
    places = lab.put(2)
    base = lab.node()
    with ranks_of(lab.rank(base), lab.rank(base)) as ranks:
        for step in (1, 2, 3):
            for rank in ranks:
                lab.ask(rank, places, step)
            assert [rank.answer()["hashes"] for rank in ranks] == [hashes(places)] * 2
            if step == 1:
                lab.shared(base).rename(base / "taken away")
    # nobody shared in the first step after it, or both in a new directory
    assert [path.name for path in base.iterdir()] == ["taken away"]


def test_a_full_filesystem_is_reported_and_costs_no_rollout(lab: Lab) -> None:
    """A small tmpfs, really full."""
    places = lab.put(4)
    base = lab.node()
    options = f"size={(8 * places[0].bytes) >> 10}k,mode=700"
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", base], capture_output=True, check=False
    ).returncode:
        pytest.skip("A FULL SHARED MEMORY IS NOT TESTED: a tmpfs cannot be mounted here")
    try:
        with ranks_of(lab.rank(base), lab.rank(base)) as ranks:
            for rank in ranks:
                lab.ask(rank, places[:1])
                assert rank.answer()["unshared"] == []
            (base / "others").write_bytes(bytes(6 * places[0].bytes + (places[0].bytes >> 1)))
            for rank in ranks:
                lab.ask(rank, places)
            answers = [rank.answer() for rank in ranks]
        assert [answer["hashes"] for answer in answers] == [hashes(places)] * 2
        assert all("No space left on device" in answer["unshared"][0] for answer in answers)
        assert all(answer["sources"] == {"node": 1, "server": 3} for answer in answers)
    finally:
        subprocess.run(["umount", base], check=True)
