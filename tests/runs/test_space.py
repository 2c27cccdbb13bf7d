"""Whether something fits: the filesystem, and every quota that can be asked."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from hpcrl.storage import disk_space

Stat = namedtuple("Stat", "f_bavail f_frsize f_files f_favail")


def test_the_filesystem_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: Stat(1000, 4096, 100, 10))
    assert disk_space.find_shortage(tmp_path, size=4_000_000, files=10) is None
    assert disk_space.find_shortage(tmp_path, size=5_000_000, files=1) == (
        f"5,000,000 bytes in {tmp_path}, the filesystem leaves 4,096,000"
    )
    assert "11 inodes" in str(disk_space.find_shortage(tmp_path, size=1, files=11))
    # a filesystem that does not count inodes
    monkeypatch.setattr("os.statvfs", lambda _: Stat(1000, 4096, 0, 0))
    assert disk_space.find_shortage(tmp_path, size=1, files=11) is None


def test_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [disk_space.Space("the filesystem", 1 << 40, None), disk_space.Space("the quota of user 7", 1000, 5)]
    monkeypatch.setattr(disk_space, "find_space", lambda _: limits)
    assert disk_space.find_shortage(tmp_path, size=1000, files=5) is None
    assert disk_space.find_shortage(tmp_path, size=1001, files=5) == (
        f"1,001 bytes in {tmp_path}, the quota of user 7 leaves 1,000"
    )
    assert "inodes" in str(disk_space.find_shortage(tmp_path, size=1, files=6))
