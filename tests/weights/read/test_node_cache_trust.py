"""The node's cache where other users may write beside it, or did so first."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from handoff_lab import check_content, model_directory, publish

from hpcrl.network.credentials import TOKEN_FILE, ensure_token
from hpcrl.storage import trusted_paths
from hpcrl.weights import HandoffStore
from hpcrl.weights.format.segments import Segment, SegmentMap, first_wrong_byte
from hpcrl.weights.read import nodecache
from hpcrl.weights.read.nodecache import NodeCache
from hpcrl.weights.read.share import Pace
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

SEGMENT = 16 << 10
STRANGER = 54321


@pytest.fixture
def store(tmp_path: Path) -> HandoffStore:
    store = HandoffStore(tmp_path / "weights")
    publish(store, 1, model_directory(tmp_path / "model"), tensors=6, words=5000)
    return store


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory of the node as `/dev/shm` is."""
    path = tmp_path / "node"
    path.mkdir()
    path.chmod(0o1777)
    return path


def settings(base: Path) -> ReaderSettings:
    return ReaderSettings(segment_bytes=SEGMENT, pace=Pace(10.0, 1 << 20), cache_dir=base)


def cache_of(store: HandoffStore, base: Path) -> NodeCache:
    ensure_token(store.root)
    secret = (store.root / TOKEN_FILE).read_text()
    return NodeCache(base, store.root, secret=secret, limit_bytes=1 << 30, segment_limit_s=Pace(10.0).limit_s)


def name_of(store: HandoffStore, base: Path) -> Path:
    """Where the cache of this store will be; who has no secret cannot know."""
    with contextlib.closing(cache_of(store, base)) as cache:
        return cache.directory


@contextlib.contextmanager
def another_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is made inside belongs to somebody else, as far as this process can tell."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: STRANGER)
        yield


def test_the_directory_is_closed_and_its_name_needs_the_secret(store: HandoffStore, base: Path) -> None:
    previous = os.umask(0)
    try:
        with contextlib.closing(cache_of(store, base)) as cache:
            assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700
    finally:
        os.umask(previous)
    first = name_of(store, base)
    assert name_of(store, base) == first, "all processes of a node find the same one"
    (store.root / TOKEN_FILE).unlink()
    assert name_of(store, base) != first, "a store at the same path with another secret"


@pytest.mark.parametrize("kind", ["open directory", "link", "file", "foreign"])
def test_a_taken_name_is_not_used(
    kind: str, store: HandoffStore, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = name_of(store, base)
    match kind:
        case "open directory":
            taken.mkdir()
            taken.chmod(0o777)
        case "link":
            (tmp_path / "mine").mkdir()
            taken.symlink_to(tmp_path / "mine")
        case "file":
            taken.touch()
        case "foreign":
            if os.geteuid():
                pytest.skip("only root can give a directory away")
            taken.mkdir()
            os.chown(taken, STRANGER, STRANGER)
    with Subscriber(store.root, "r", settings(base)) as subscriber:
        with subscriber.reading(1) as reading:
            check_content(reading)
        assert subscriber.cache is None
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "this process reads for itself" in said.getMessage()
    assert str(taken) in said.getMessage()
    assert not list(taken.iterdir() if taken.is_dir() else []), "nothing was written there"


def test_a_base_where_others_may_rename_is_not_used(
    store: HandoffStore, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base.chmod(0o777)
    with Subscriber(store.root, "r", settings(base)) as subscriber:
        assert subscriber.cache is None
    assert "no sticky bit" in caplog.text


def test_what_belongs_to_another_user_is_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "file").write_bytes(b"x")
    (base / "file").chmod(0o400)
    os.close(trusted_paths.open_trusted(base / "file"))
    os.link(base / "file", base / "second")
    with pytest.raises(trusted_paths.NotOursError, match="other names"):
        trusted_paths.open_trusted(base / "file")
    (base / "link").symlink_to(base / "second")
    with pytest.raises(trusted_paths.NotOursError, match="file of this user"):
        trusted_paths.open_trusted(base / "link")
    (base / "open").touch()
    (base / "open").chmod(0o620)
    with pytest.raises(trusted_paths.NotOursError, match="writable by others"):
        trusted_paths.open_trusted(base / "open")
    os.mkfifo(base / "pipe", 0o600)
    with pytest.raises(trusted_paths.NotOursError, match="not a regular file"):
        trusted_paths.open_trusted(base / "pipe")
    (base / "second").unlink()
    with another_user(monkeypatch), pytest.raises(trusted_paths.NotOursError, match=f"we are {STRANGER}"):
        trusted_paths.open_trusted(base / "file")
    with another_user(monkeypatch), pytest.raises(trusted_paths.NotOursError, match=f"we are {STRANGER}"):
        trusted_paths.make_private(base)


def test_what_was_not_loaded_here_is_compared_with_the_manifest_once(
    store: HandoffStore, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another reader of the node maps what the first has loaded; one segment was changed between the two."""
    with Subscriber(store.root, "a", settings(base)) as first, Subscriber(store.root, "b", settings(base)) as second:
        with first.reading(1) as reading:
            check_content(reading)
        assert second.cache is not None
        segments = SegmentMap(store.open(1), SEGMENT)
        segment = segments.of(segments.files[0])[1]
        poisoned = second.cache.directory / segments.key / segment.file / "1"
        poisoned.chmod(0o600)
        data = bytearray(poisoned.read_bytes())
        data[7] ^= 1
        poisoned.write_bytes(data)
        with second.reading(1) as reading:
            check_content(reading)
        assert f"{poisoned} is not what the manifest says (at byte {segment.offset})" in caplog.text
        # that segment alone came from the share; it lies in the cache again, and is right
        assert second.share.bytes_read == len(data)
        assert poisoned.read_bytes() != data
        assert first.cache is not None
        assert second.cache._known.keys() == first.cache._known.keys()


def test_what_is_known_is_not_compared_again(store: HandoffStore, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(segment: Segment, data: memoryview) -> int | None:
        compared.append(segment.part)
        return first_wrong_byte(segment, data)

    monkeypatch.setattr(nodecache, "first_wrong_byte", compare)
    with Subscriber(store.root, "a", settings(base)) as first, Subscriber(store.root, "b", settings(base)) as second:
        for reader in (first, second):
            with reader.reading(1) as reading:
                check_content(reading)
            assert first.cache is not None
            # who loaded it has verified it
            assert len(compared) == (len(first.cache._known) if reader is second else 0)
        compared.clear()
        for reader in (first, second):
            with reader.reading(1) as reading:
                check_content(reading)
        assert not compared


def test_a_segment_that_is_cut_short_is_not_a_bus_error(store: HandoffStore, base: Path) -> None:
    with Subscriber(store.root, "a", settings(base)) as first, Subscriber(store.root, "b", settings(base)) as second:
        with first.reading(1) as reading:
            check_content(reading)
        assert second.cache is not None
        segments = SegmentMap(store.open(1), SEGMENT)
        cut = second.cache.directory / segments.key / segments.files[0] / "1"
        cut.chmod(0o600)
        os.truncate(cut, 100)
        with second.reading(1) as reading:
            check_content(reading)


def test_deserted_caches_of_others_are_left_alone(store: HandoffStore, base: Path, tmp_path: Path) -> None:
    (tmp_path / "victim/members").mkdir(parents=True)
    link = base / f"hpcrl-weights-{os.getuid()}-0123"
    link.symlink_to(tmp_path / "victim")
    (base / f".removed-hpcrl-weights-{os.getuid()}-1").symlink_to(tmp_path / "victim")
    name_of(store, base)
    assert link.is_symlink()
    assert (tmp_path / "victim/members").is_dir()
