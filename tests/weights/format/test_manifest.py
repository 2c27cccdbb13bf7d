"""Manifests that contradict themselves or their directory: an error that names it, and the next older version."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaged_json import damaged
from handoff_lab import check_content, model_directory, publish, publish_delta

from hpcrl.errors import HandoffError
from hpcrl.weights import Handoff, HandoffStore, VersionCommitter
from hpcrl.weights.format.manifest import MANIFEST, WrongManifestError
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.read.share import Pace
from hpcrl.weights.read.subscriber import ReaderSettings, Reading, Subscriber

SETTINGS = ReaderSettings(pace=Pace(5.0, 1e9), streams=1)
WORDS = 64


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Version 1, whole, and version 2, a delta of it."""
    model = model_directory(tmp_path / "model")
    writer = VersionCommitter.claim(tmp_path / "weights", 1)
    publish(writer, 1, model, words=WORDS)
    publish_delta(writer, 2, (1,), model, words=WORDS)
    return tmp_path / "weights"


Document = dict[str, Any]


def changed(root: Path, version: int, change: Callable[[Document], object]) -> None:
    path = root / f"v{version:06d}" / MANIFEST
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def put(*keys: str | int, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        *way, last = keys
        place: Any = document
        for key in way:
            place = place[key]
        place[last] = value

    return change


CONTRADICTIONS = {
    "another version": put("version", value=3),
    "a negative version": put("version", value=-1),
    "a version without end": put("version", value=10**30),
    "needs itself": put("needs", value=[1, 2]),
    "needs a later one": put("needs", value=[7]),
    "needs one twice": put("needs", value=[1, 1]),
    "needs none": put("needs", value=[]),
    "another parent": put("parent", value=0),
    "another kind": put("kind", value="full"),
    "no chunks": put("chunk_bytes", value=0),
    "an unknown dtype": put("tensors", "t.1", "dtype", value="float65"),
    "a dtype of another width": put("tensors", "t.1", "dtype", value="int32"),
    "another shape": put("tensors", "t.1", "shape", value=[WORDS - 1]),
    "a negative shape": put("tensors", "t.1", "shape", value=[-8, -8]),
    "a negative size": put("tensors", "t.1", "bytes", value=-8),
    "a size without end": put("tensors", "t.1", "bytes", value=2**62),
    "a file elsewhere": lambda document: document["files"].update({"../x": document["files"]["config.json"]}),
    "a file that cannot be": lambda document: document["files"].update({"a\0b": document["files"]["config.json"]}),
    "a file that is longer": put("files", "config.json", "bytes", value=2**60),
    "changes of nothing": put("changes", value={}),
    "a tensor of another shape": put("tensors", "t.1", "shape", value=[8, 8]),
    "a hash that is cut": put("files", "config.json", "xxh3_128", value=""),
}


CONTRADICTS_OTHERS = {"changes of nothing", "a tensor of another shape"}
"""These are seen when the version is read with those that it needs."""


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_version_that_contradicts_itself_falls_back_to_an_older_one(root: Path, case: str) -> None:
    changed(root, 2, CONTRADICTIONS[case])
    store = HandoffStore(root)
    if case not in CONTRADICTS_OTHERS:
        with pytest.raises(WrongManifestError):
            Handoff.open(root / "v000002")
        assert (store.versions(), store.newest()) == ([1, 2], 1)
    with Subscriber(root, None, SETTINGS) as subscriber:
        found = subscriber.load_newest(check_content)
    assert (found.version, [skipped.version for skipped in found.skipped]) == (1, [2])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no chunks", "chunk_bytes is 0$"),
        ("a negative version", "-1 is not a version$"),
        # a text of so many digits is no help, and Python refuses to write the longest
        ("a version without end", "a number of more than 18 digits is not a version$"),
        ("a file that is longer", r"config\.json cannot have a number of more than 18 digits bytes$"),
    ],
)
def test_numbers_are_shown_unless_they_are_too_long(root: Path, case: str, words: str) -> None:
    changed(root, 2, CONTRADICTIONS[case])
    with pytest.raises(WrongManifestError, match=words):
        Handoff.open(root / "v000002")


def test_a_copy_under_another_number_is_not_a_version(root: Path) -> None:
    shutil.copytree(root / "v000001", root / "v000090")
    shutil.copytree(root / "v000001", root / "v0000002")
    (root / "v000091").mkdir()
    store = HandoffStore(root)
    assert store.versions() == [1, 2, 90, 91]
    assert store.newest() == 2
    with pytest.raises(HandoffError, match="is that of version 1"):
        store.open(90)
    (root / "v000091").rmdir()
    # it keeps nothing from being removed, and does not count among the newest
    model = model_directory(root.parent / "model")
    writer = VersionCommitter.claim(root, 2)
    publish(writer, 3, model, words=WORDS)
    collector = Collector(store, ReaderWatch(root, expiry_s=60.0), keep_last=1, settle_s=0.0)
    assert 3 not in collector.collect().removed
    # and not from being published
    if 90 not in store.versions():
        shutil.copytree(root / "v000003", root / "v000090")
    publish(writer, 90, model, words=WORDS)
    assert store.open(90).version == 90
    with pytest.raises(FileExistsError):
        publish(writer, 90, model, words=WORDS)


@pytest.mark.parametrize("name", [".hidden-v000002", "v000002"])
def test_a_version_may_be_read_where_it_was_put_out_of_the_way(root: Path, name: str) -> None:
    (root / "v000002").rename(root / name)
    assert Handoff.open(root / name).version == 2
    (root / name).rename(root / "v000003")
    with pytest.raises(WrongManifestError):
        Handoff.open(root / "v000003")


# -- any damage


def load(reading: Reading) -> int:
    """Load as engines do, which compare names with their model's (`check_fits`); each byte is compared, too."""
    if sorted(reading.handoff.manifest.tensors) != ["t.0", "t.1", "t.2", "t.3"]:
        raise HandoffError("it does not fit the model")
    return check_content(reading)


def read_everything(root: Path) -> int | None:
    """Use a store in all ways in which a run does; returns the version that was loaded. Any other error is a fault."""
    store = HandoffStore(root)
    for version in store.versions():
        try:
            store.open(version).verify(content=True)
        except HandoffError:
            continue
    try:
        store.newest()
        Collector(store, ReaderWatch(root, expiry_s=60.0), keep_last=1, settle_s=0.0).plan()
    except HandoffError:
        pass
    with Subscriber(root, None, SETTINGS) as subscriber:
        try:
            return subscriber.load_newest(load).version
        except HandoffError:
            return None


def fuzz(root: Path, rng: random.Random, goes_on: Callable[[], bool]) -> int:
    good = {version: (root / f"v{version:06d}" / MANIFEST).read_bytes() for version in (1, 2)}
    done = 0
    while goes_on():
        version = rng.choice([1, 2, 2])
        path = root / f"v{version:06d}" / MANIFEST
        text = damaged(rng, good[version])
        path.write_bytes(text)
        try:
            found = read_everything(root)
        except BaseException as error:
            raise AssertionError(f"a bare {type(error).__name__} for {text[:2000]!r}") from error
        # `load` has compared each byte of what was loaded with what was published
        assert found in (1, 2, None)
        assert found is not None or version == 1, text[:2000]
        path.write_bytes(good[version])
        done += 1
    return done


def test_damaged_manifests_are_errors_of_their_version(root: Path) -> None:
    left = iter(range(60))
    assert fuzz(root, random.Random(5), lambda: next(left, None) is not None) == 60


@pytest.mark.campaign
def test_damaged_manifests_for_a_while(root: Path) -> None:
    seed = int(os.environ.get("HPCRL_FUZZ_SEED", time.time_ns()))
    end = time.monotonic() + 45.0
    print(f"HPCRL_FUZZ_SEED={seed}: {fuzz(root, random.Random(seed), lambda: time.monotonic() < end)} manifests")
