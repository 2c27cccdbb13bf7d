"""Names that another node has just made or hidden: how often the directory is listed before one counts as missing."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.weights import visibility
from hpcrl.weights.visibility import HIDDEN_PREFIX, exists_uncached, missing_names

ROOT = Path("/somewhere/weights")
ONE, TWO = ROOT / "v000001", ROOT / "v000002"
HIDDEN = f"{HIDDEN_PREFIX}{ONE.name}"


class Directory:
    """Listings of a directory, one after the other and then the last one again, and a clock that sleeps turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *listings: Sequence[str] | None) -> None:
        self.listings, self.looks, self.now, self.slept = listings, 0, 100.0, list[float]()
        monkeypatch.setattr(visibility, "os", SimpleNamespace(listdir=self._list))
        monkeypatch.setattr(visibility, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _list(self, path: Path) -> list[str]:
        assert path == ROOT
        found = self.listings[min(self.looks, len(self.listings) - 1)]
        self.looks += 1
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "gone")
        return list(found)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_what_is_there_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(monkeypatch, [ONE.name, TWO.name, "other"])
    assert missing_names([ONE, TWO]) == []
    assert (directory.looks, directory.slept) == (1, [])


def test_nothing_is_missing_of_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(monkeypatch, None)
    assert missing_names([]) == []
    assert directory.looks == 0


@pytest.mark.parametrize("names", [[TWO.name], [], None])
def test_a_name_is_missing_if_two_listings_do_not_have_it(
    monkeypatch: pytest.MonkeyPatch, names: list[str] | None
) -> None:
    """None: the directory itself is gone."""
    directory = Directory(monkeypatch, names)
    assert missing_names([ONE, TWO]) == ([ONE] if names else [ONE, TWO])
    assert directory.looks == 2
    # a moment, not the time that the collector needs
    assert directory.slept == [visibility._AGAIN_S]


def test_a_name_that_changed_during_a_listing_is_seen_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(monkeypatch, [TWO.name], [ONE.name, TWO.name])
    assert missing_names([ONE, TWO]) == []
    assert directory.looks == 2


def test_other_names_in_each_listing_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(monkeypatch, [TWO.name], [ONE.name], [TWO.name], [TWO.name])
    assert missing_names([ONE, TWO]) == [ONE]
    assert directory.looks == 4


def test_a_hidden_name_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(monkeypatch, [HIDDEN], [HIDDEN], [HIDDEN], [ONE.name])
    assert missing_names([ONE]) == []
    assert directory.slept == [visibility._LOOK_S] * 3


def test_a_hidden_name_that_is_removed_is_missing_after_two_listings_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = Directory(monkeypatch, [HIDDEN], ["other"], ["other"])
    assert missing_names([ONE]) == [ONE]
    assert directory.looks == 3


def test_a_name_that_stays_hidden_is_missing_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(monkeypatch, [HIDDEN])
    assert missing_names([ONE]) == [ONE]
    assert directory.now - 100.0 == pytest.approx(visibility._RESTORE_S, abs=2 * visibility._LOOK_S)


def test_one_hidden_name_of_several_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(monkeypatch, [HIDDEN], [HIDDEN], [ONE.name])
    # the other one was missing all the time
    assert missing_names([TWO, ONE]) == [TWO]
    assert directory.looks == 4


# -- one name, whatever a cache says


def test_what_exists_and_what_does_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "directory").mkdir()
    assert exists_uncached(tmp_path / "file")
    assert exists_uncached(tmp_path / "directory")
    assert not exists_uncached(tmp_path / "other")
    assert not exists_uncached(tmp_path / "none" / "file")
    assert not exists_uncached(tmp_path / "file" / "below")


def test_a_link_to_nothing_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "none")
    assert not exists_uncached(tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["link"]


def test_a_listed_name_that_a_cache_denies_is_asked_for_by_a_rename(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "new"
    asked: list[tuple[Any, Any]] = []

    def rename(source: Any, target: Any) -> None:
        # the cache has forgotten that the name was missing
        asked.append((source, target))
        path.touch()
        raise OSError(errno.EINVAL, "a directory into itself")

    monkeypatch.setattr(visibility, "os", SimpleNamespace(listdir=lambda parent: ["new"], rename=rename))
    assert exists_uncached(path)
    assert asked == [(tmp_path, path)]
    # now it is found without
    assert exists_uncached(path)
    assert len(asked) == 1
