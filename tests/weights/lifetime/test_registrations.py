"""How a reader speaks for itself: its names, what a share that refuses costs it, and how a watch reads what changes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.errors import HandoffError
from hpcrl.weights.lifetime import leases, readers
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.readers import KEEP_NAME_S, ReaderName, ReaderRecord, Registration, parse_name

LONG_S = 3600.0


class Clock:
    """A clock that the test turns; in place of the module `time`, too."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Names stay however long a test takes."""
    clock = Clock()
    monkeypatch.setattr(readers, "time", clock)
    return clock


@pytest.fixture
def reader(root: Path) -> Iterator[Registration]:
    with Registration(root, "engine-0", expiry_s=LONG_S, node="n1") as reader:
        yield reader


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root / ".readers"))


def newest(root: Path) -> ReaderRecord:
    return msgspec.json.decode((root / ".readers" / names(root)[-1]).read_bytes(), type=ReaderRecord)


# -- names


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("engine-0.0123456789ab~00000007.json", ReaderName("engine-0", "0123456789ab", 7)),
        ("a.b_c.0123456789ab~123456789.json", ReaderName("a.b_c", "0123456789ab", 123456789)),
        ("engine-0.0123456789ab~0000007.json", None),
        ("engine-0.0123456789AB~00000007.json", None),
        ("engine-0.0123456789ab~00000007.json.tmp", None),
        (".engine-0.0123456789ab~00000007.json", None),
    ],
)
def test_names_of_records(name: str, parsed: ReaderName | None) -> None:
    assert parse_name(name) == parsed


@pytest.mark.parametrize("name", ["", "a/b", ".a", "a b", "a~b", "ä"])
def test_names_that_are_no_part_of_a_file_name_are_refused(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match="letters, digits, dot, dash and underscore only"):
        Registration(root, name, expiry_s=LONG_S)


def test_each_word_has_a_name_of_its_own(root: Path, reader: Registration) -> None:
    reader.acknowledge(1)
    reader.lease([2])
    parsed = [parse_name(name) for name in names(root)]
    assert parsed == [ReaderName("engine-0", reader.incarnation, beat) for beat in range(3)]
    assert newest(root) == ReaderRecord(
        reader="engine-0", incarnation=reader.incarnation, node="n1", acknowledged=1, leases=(2,)
    )


def test_a_name_stays_for_as_long_as_a_listing_may_take(root: Path, clock: Clock) -> None:
    with Registration(root, "r", expiry_s=LONG_S) as reader:
        clock.now += 5.0
        reader.acknowledge(1)  # takes the place of the first
        clock.now += KEEP_NAME_S - 0.5
        reader.acknowledge(2)
        assert len(names(root)) == 3
        clock.now += 0.5
        reader.acknowledge(3)
        assert [parsed.beat for name in names(root) if (parsed := parse_name(name))] == [1, 2, 3]
    assert names(root) == []


def test_an_address_that_is_known_is_not_reported_again(root: Path, reader: Registration) -> None:
    for url, words in (("http://a:1", 2), ("http://a:1", 2), ("", 3), ("", 3)):
        reader.serve_at(url)
        assert (len(names(root)), newest(root).url) == (words, url)


def test_two_of_one_name_do_not_speak_for_each_other(root: Path, reader: Registration) -> None:
    with Registration(root, "engine-0", expiry_s=LONG_S, node="n2") as second:
        reader.lease([1])
        second.lease([2])
        found = ReaderWatch(root, expiry_s=60.0).observe()
    assert sorted((record.node, record.leases) for record in found) == [("n1", (1,)), ("n2", (2,))]


def test_what_is_kept_is_leased_until_it_or_another_takes_its_place(root: Path, reader: Registration) -> None:
    reader.lease([3, 4])
    reader.keep(3)
    reader.release([3, 4])
    assert reader.leases == newest(root).leases == (3,)
    reader.keep(5)
    assert reader.leases == (5,)
    reader.acknowledge(5)
    assert (newest(root).acknowledged, newest(root).leases) == (5, ())


# -- a share that refuses


class Refusing:
    """In place of `atomic_write`: the next so many fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left, self._write = times, readers.atomic_write
        monkeypatch.setattr(readers, "atomic_write", self.write)

    def write(self, path: Path, data: bytes, *, durable: bool) -> None:
        assert not durable
        if self.left:
            self.left -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self._write(path, data, durable=durable)


def replace_pauses(reader: Registration, monkeypatch: pytest.MonkeyPatch, wait: Callable[[float], bool]) -> None:
    """Let ``wait`` stand in for the pauses between attempts.

    The thread of renewals, which may only now come to its first wait, keeps its own.
    """
    really = reader._stop.wait

    def wait_by_thread(seconds: float) -> bool:
        return (really if threading.current_thread() is reader._thread else wait)(seconds)

    monkeypatch.setattr(reader._stop, "wait", wait_by_thread)


def test_a_lease_waits_for_a_share_that_is_full_for_a_while(
    root: Path, reader: Registration, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = Refusing(monkeypatch, 6)
    pauses = list[float]()
    replace_pauses(reader, monkeypatch, lambda seconds: bool(pauses.append(seconds)))
    reader.lease([7])
    assert (refusing.left, newest(root).leases, reader.leases) == (0, (7,), (7,))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert caplog.text.count("No space left on device; trying again") == 6
    # a name whose write failed may be there all the same
    assert [parsed.beat for name in names(root) if (parsed := parse_name(name))] == [0, 7]


def test_a_lease_that_cannot_be_written_in_time_is_none(
    reader: Registration, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a quarter of the time after which others count it as dead, because renewals cannot be written, either."""
    reader.lease([1])
    Refusing(monkeypatch, 10**6)

    def wait(seconds: float) -> bool:
        clock.now += seconds
        assert clock.now < 1000.0 + LONG_S
        return False

    replace_pauses(reader, monkeypatch, wait)
    with pytest.raises(HandoffError, match=r"\.readers/engine-0\..* cannot be written: .*No space left"):
        reader.lease([1, 7])
    assert LONG_S / 4 < clock.now - 1000.0 < LONG_S / 4 + 3.0
    assert reader.leases == (1,)


def test_a_lease_of_a_reader_that_leaves_is_given_up_at_once(
    reader: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Refusing(monkeypatch, 1000)
    reader._stop.set()
    with pytest.raises(HandoffError):
        reader.lease([7])
    assert (refusing.left, reader.leases) == (999, ())


@pytest.mark.parametrize("what", ["release", "acknowledge", "serve_at"])
def test_other_words_are_reported_with_the_next_renewal(
    root: Path, reader: Registration, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, what: str
) -> None:
    reader.lease([1])
    Refusing(monkeypatch, 1)
    getattr(reader, what)({"release": [1], "acknowledge": 4, "serve_at": "http://a:1"}[what])
    before = ReaderRecord(reader="engine-0", incarnation=reader.incarnation, node="n1", leases=(1,))
    assert newest(root) == before
    assert "the next renewal tries again" in caplog.text
    reader._change_later()
    changes: dict[str, Any] = {
        "release": {"leases": ()},
        "acknowledge": {"acknowledged": 4},
        "serve_at": {"url": "http://a:1"},
    }
    assert newest(root) == msgspec.structs.replace(before, **changes[what])


def test_a_reader_whose_directory_cannot_be_made_does_not_register(root: Path) -> None:
    root.parent.mkdir(exist_ok=True)
    root.write_text("a file")
    with pytest.raises(HandoffError, match="cannot be made, so r cannot register"):
        Registration(root, "r", expiry_s=LONG_S).open()


def test_renewals_come_four_times_as_often_as_a_reader_expires(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Registration(root, "r", expiry_s=40.0)
    waits = list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 3

    monkeypatch.setattr(reader._stop, "wait", wait)
    with reader:
        reader._thread.join(60.0)
        assert waits == [10.0] * 4
        assert len(names(root)) == 4


# -- a watch


def test_a_reader_lives_for_the_whole_of_its_time(root: Path, reader: Registration) -> None:
    clock = Clock()
    watch = ReaderWatch(root, expiry_s=60.0, clock=clock)
    assert len(watch.observe()) == 1
    clock.now += 60.0
    assert len(watch.observe()) == 1
    assert watch.forget_dead() == []
    clock.now += 0.1
    assert watch.observe() == []
    said = names(root)
    assert len(said) == 1
    assert watch.forget_dead() == said
    assert names(root) == []


def test_what_all_have_is_the_oldest_that_any_has(root: Path, reader: Registration) -> None:
    watch = ReaderWatch(root, expiry_s=60.0)
    reader.acknowledge(0)
    assert watch.acknowledged_version() == 0
    with Registration(root, "a", expiry_s=LONG_S) as other:
        assert watch.acknowledged_version() is None
        other.acknowledge(7)
        assert watch.acknowledged_version() == 0
        reader.acknowledge(9)
        assert watch.acknowledged_version() == 7


def test_a_record_that_is_replaced_while_it_is_read_is_read_anew(
    root: Path, reader: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, gone = Path.read_bytes, [3]

    def and_it_is_gone(path: Path) -> bytes:
        if gone[0]:
            gone[0] -= 1
            path.unlink()
            reader.acknowledge(10 - gone[0])
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", and_it_is_gone)
    assert [record.acknowledged for record in ReaderWatch(root, expiry_s=60.0).observe()] == [10]
    gone[0] = 1000
    with pytest.raises(HandoffError, match="records change faster than they can be read"):
        ReaderWatch(root, expiry_s=60.0).observe()


def test_a_record_is_read_once(root: Path, reader: Registration, monkeypatch: pytest.MonkeyPatch) -> None:
    read, seen = Path.read_bytes, list[Path]()
    monkeypatch.setattr(Path, "read_bytes", lambda path: (seen.append(path), read(path))[1])
    watch = ReaderWatch(root, expiry_s=60.0)
    for _ in range(3):
        watch.observe()
    assert len(seen) == 1
    reader.acknowledge(1)
    watch.observe()
    assert len(seen) == 2


@pytest.mark.parametrize("slow", [7, 8])
def test_a_listing_that_takes_too_long_is_not_believed(
    root: Path, reader: Registration, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """A name that is gone meanwhile, and the one in its place, may both be missing."""
    clock, listdir, listings = Clock(), os.listdir, [slow]

    def slowly(path: Path) -> list[str]:
        if listings[0]:
            listings[0] -= 1
            clock.now += KEEP_NAME_S
        return listdir(path)

    monkeypatch.setattr(leases, "time", clock)
    monkeypatch.setattr(os, "listdir", slowly)
    watch = ReaderWatch(root, expiry_s=60.0, clock=clock)
    if slow < 8:
        assert len(watch.observe()) == 1
    else:
        with pytest.raises(HandoffError, match=r"a listing takes more than \d+ s and may miss readers"):
            watch.observe()


def test_a_directory_that_cannot_be_listed_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ReaderWatch(root, expiry_s=60.0)
    assert watch.observe() == []  # nobody has registered yet

    def refuse(path: Path) -> list[str]:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        with pytest.raises(HandoffError, match=r"\.readers cannot be listed"):
            watch.observe()
