"""Checks that data fits before any of it is written: free bytes, inodes, and quota if it can be asked."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hpcrl.errors import HandoffError

_BLOCK_BYTES = 1024  # of quotactl
_Q_GETQUOTA = 0x800007
_USER, _GROUP = 0, 1


class ShortageError(HandoffError):
    """A filesystem has too little room for a version now."""


class Space(NamedTuple):
    """A limit on what may still be written: ``what`` sets it; None where it sets none."""

    what: str
    bytes: int | None
    inodes: int | None


class _Quota(ctypes.Structure):
    """``struct if_dqblk`` of ``linux/quota.h``."""

    _fields_ = (
        ("hard_blocks", ctypes.c_uint64),
        ("soft_blocks", ctypes.c_uint64),
        ("space_bytes", ctypes.c_uint64),
        ("hard_inodes", ctypes.c_uint64),
        ("soft_inodes", ctypes.c_uint64),
        ("inodes", ctypes.c_uint64),
        ("space_time", ctypes.c_uint64),
        ("inode_time", ctypes.c_uint64),
        ("valid", ctypes.c_uint32),
    )


def find_space(directory: Path) -> list[Space]:
    """Return the limits on writing into ``directory`` (which exists): the filesystem, and quotas of user and group.

    Quotas are asked of the kernel (``quotactl``), which knows those of local filesystems. A parallel filesystem with
    its own quotas (Lustre, GPFS) is not asked; it answers EDQUOT at the preallocation, before any data.
    """
    stat = os.statvfs(directory)
    # filesystems without a fixed number of inodes report zero
    limits = [Space("the filesystem", stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else None)]
    device = _device(directory)
    if device is not None:
        for kind, owner, name in ((_USER, os.getuid(), "user"), (_GROUP, os.getgid(), "group")):
            limits.extend(_quota(device, kind, owner, f"the quota of {name} {owner}"))
    return limits


def find_shortage(directory: Path, *, size: int, files: int) -> str | None:
    """Return what ``directory`` lacks, in words, for ``size`` bytes in ``files`` files; None if they fit."""
    for limit in find_space(directory):
        for what, needed, left in (("bytes", size, limit.bytes), ("inodes", files, limit.inodes)):
            if left is not None and left < needed:
                return f"{needed:,} {what} in {directory}, {limit.what} leaves {left:,}"
    return None


def describe_space(directory: Path) -> str:
    """Return the space left for ``directory`` now, in words, to accompany the refusal of a filesystem."""
    try:
        limits = find_space(directory)
    except OSError as error:
        return f"the free space there is unknown: {error}"
    return ", ".join(f"{limit.what} leaves {_left_words(limit)}" for limit in limits)


def _left_words(limit: Space) -> str:
    words = []
    if limit.bytes is not None:
        words.append(f"{limit.bytes:,} bytes" if limit.bytes < 1 << 20 else f"{limit.bytes / (1 << 30):,.3g} GiB")
    if limit.inodes is not None:
        words.append(f"{limit.inodes:,} inodes")
    return " and ".join(words)


def _device(directory: Path) -> str | None:
    """Return the path of the block device of the filesystem of ``directory``; None if it has none."""
    number = os.stat(directory).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, tail = line.partition(" - ")
        if fields.split()[2] == wanted and len(tail.split()) > 1:
            source = tail.split()[1]
            return source if source.startswith("/") else None
    return None


def _quota(device: str, kind: int, owner: int, what: str) -> Iterator[Space]:
    quota = _Quota()
    try:
        answer = ctypes.CDLL(None, use_errno=True).quotactl(
            ctypes.c_int(_quota_command(kind)), device.encode(), ctypes.c_int(owner), ctypes.byref(quota)
        )
    except (AttributeError, OSError):
        return  # no such call on this system
    if answer != 0:
        return  # the filesystem has no quotas, or this user may not query them
    # the soft limit may be exceeded for a time of grace that is not known here: the hard one counts
    size = _left(quota.hard_blocks * _BLOCK_BYTES, quota.space_bytes)
    inodes = _left(quota.hard_inodes, quota.inodes)
    if size is not None or inodes is not None:
        yield Space(what, size, inodes)


def _quota_command(kind: int) -> int:
    """Return ``QCMD`` of ``sys/quota.h`` as the signed integer that the C call takes."""
    command = (_Q_GETQUOTA << 8) | kind
    return command - (1 << 32) if command >= 1 << 31 else command


def _left(limit: int, used: int) -> int | None:
    return max(0, limit - used) if limit else None
