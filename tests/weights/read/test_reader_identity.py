"""Who an engine is among the readers of a run: what it was started with is what it reads with, and who calls agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.weights.read.reading import ReaderSettings
from hpcrl.weights.read.registration import ReaderIdentity, check_same_reader
from hpcrl.weights.read.share import Pace

#: each value differs from its default, and from all others
WHOLE: dict[str, Any] = {
    "name": "engine-1",
    "expiry_s": 31.0,
    "floor_s": 17.0,
    "min_bytes_per_s": 1e6,
    "streams": 9,
    "cache_dir": "/fast/node",
    "cache_bytes": 12345,
    "fanout_host": "node7",
    "fanout_degree": 3,
}
ROOT = Path("/runs/one/weights")


def test_an_engine_reads_with_what_it_was_started_with() -> None:
    settings = msgspec.convert(WHOLE, ReaderIdentity).settings
    assert settings == ReaderSettings(
        expiry_s=31.0,
        pace=Pace(floor_s=17.0, bytes_per_s=1e6),
        streams=9,
        cache_dir=Path("/fast/node"),
        cache_bytes=12345,
        fanout_host="node7",
        fanout_degree=3,
    )
    assert settings.pace.limit_s(2_000_000) == 19.0
    assert settings.verify


def test_what_is_left_out_is_as_readers_are_without_it() -> None:
    least = {key: WHOLE[key] for key in ("name", "expiry_s", "floor_s", "min_bytes_per_s", "streams")}
    identity, plain = msgspec.convert(least, ReaderIdentity), ReaderSettings()
    assert msgspec.to_builtins(identity) == least
    found = identity.settings
    assert (found.cache_dir, found.cache_bytes) == (None, plain.cache_bytes)
    assert (found.fanout_host, found.fanout_degree) == (None, plain.fanout_degree)


@pytest.mark.parametrize("key", ["name", "expiry_s", "floor_s", "min_bytes_per_s", "streams"])
def test_the_identity_of_a_reader_is_required(key: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=key):
        msgspec.convert({name: value for name, value in WHOLE.items() if name != key}, ReaderIdentity)
    with pytest.raises(msgspec.ValidationError, match="secret"):
        msgspec.convert({**WHOLE, "secret": 1}, ReaderIdentity)


def check(given: dict[str, Any], **changes: Any) -> None:
    own = msgspec.convert({**WHOLE, **changes}, ReaderIdentity)
    check_same_reader(given, root=ROOT, name=own.name, settings=own.settings)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"root": str(ROOT)},
        {"root": "/runs/two/../one/weights/"},
        {"reader": None},
        {"reader": WHOLE},
        # host names have no case
        {"root": str(ROOT), "reader": {**WHOLE, "fanout_host": "NODE7"}},
        # how fast somebody thinks that it reads is nothing to refuse
        {"reader": {**WHOLE, "streams": 1, "expiry_s": 5.0}},
    ],
)
def test_who_says_the_same_or_nothing_is_let(given: dict[str, Any]) -> None:
    check(given)
    check(given, fanout_host="Node7")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"root": "/runs/two"}, "was started with root /runs/one/weights; a call cannot change it to /runs/two"),
        ({"reader": {"name": "engine-2"}}, "was started with name engine-1; a call cannot change it to engine-2"),
        ({"reader": {"cache_dir": "/dev/shm"}}, "was started with cache_dir /fast/node; a call"),
        ({"reader": {"fanout_host": "10.0.0.9"}}, "was started with fanout_host node7; a call cannot change it to 10"),
    ],
)
def test_who_says_something_else_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(given)


@pytest.mark.parametrize("key", ["cache_dir", "fanout_host"])
def test_what_an_engine_has_not_a_call_does_not_give_it(key: str) -> None:
    with pytest.raises(ValueError, match=f"was started with {key} None"):
        check({"reader": {key: WHOLE[key]}}, **{key: None})


def test_outside_of_a_run_an_engine_reads_from_the_given_directory() -> None:
    given = {"root": "/anywhere", "reader": {"name": "x", "cache_dir": "/y"}}
    check_same_reader(given, root=None, name=None, settings=ReaderSettings())
