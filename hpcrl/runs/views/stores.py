"""Stored hand-offs of a run as rows and documents."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.runs.rundir import RunDir
from hpcrl.weights import Handoff, HandoffStore
from hpcrl.weights.format.announcement import AnnouncedVersion
from hpcrl.weights.format.manifest import OpenedVersion
from hpcrl.weights.read.announced import announced_versions, open_version

SCHEMA = "hpcrl.stored/1"


class StoredItem(msgspec.Struct, frozen=True, kw_only=True):
    """Version or checkpoint that a store has.

    Attributes
    ----------
    number:
        Policy version.
    created_at_s:
        Seconds since the epoch by its writer's clock; None where the manifest cannot be read.
    bytes, files:
        Size of all files, and how many.
    by:
        Its writer.
    durable:
        False for a version that is only announced: ranks of the trainer serve it, and it ends with them.
    announced_by:
        Attempt whose trainer announced it; None for a durable version, and where the announcement cannot be read.
    problem:
        Reason why it is unusable; empty where no problem is known.
    """

    number: int
    path: str
    created_at_s: float | None = None
    bytes: int = 0
    files: int = 0
    by: str = ""
    durable: bool = True
    announced_by: int | None = None
    problem: str = ""

    @property
    def age_s(self) -> float | None:
        return None if self.created_at_s is None else max(0.0, time.time() - self.created_at_s)


def weights_items(run: RunDir) -> list[StoredItem]:
    """Return all versions, durable or announced, ascending; manifests are read, data is not."""
    return _handoff_items(HandoffStore(run.weights_dir), None, run, verify=False)


def verify_handoffs(run: RunDir, version: int | None) -> list[StoredItem]:
    """Read every byte of one version, or of all, and compare with the manifest (HandoffError: no such version).

    A version that is only announced has no bytes to read here.
    """
    return _handoff_items(HandoffStore(run.weights_dir), version, run, verify=True)


def weights_difference(run: RunDir, old: int, new: int) -> dict[str, Any]:
    """Return the differences between two versions, by the hashes of their manifests; no data is read.

    Raises
    ------
    HandoffError
        One of them does not exist or cannot be read.
    """
    before, after = (find_version(run, version).manifest.tensors for version in (old, new))
    both = before.keys() & after.keys()
    changed = sorted(name for name in both if before[name].xxh3_128 != after[name].xxh3_128)
    return {
        "old": old,
        "new": new,
        "tensors": len(after),
        "changed": changed,
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed_bytes": sum(after[name].bytes for name in changed),
        "total_bytes": sum(record.bytes for record in after.values()),
    }


def stores_document(run: RunDir, kind: str, items: list[StoredItem]) -> str:
    """Return the items as JSON (schema `SCHEMA`)."""
    document = {"schema": SCHEMA, "run": run.name, "kind": kind, "items": items}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def find_version(run: RunDir, version: int | None) -> OpenedVersion:
    """Open a version, durable or announced; by default the newest durable one, or where none is, the newest announced.

    Raises
    ------
    HandoffError
        It does not exist, or cannot be read.
    """
    store = HandoffStore(run.weights_dir)
    if version is None:
        newest = store.newest()
        # a version whose manifest is damaged is opened all the same: the error says what is wrong with it
        known = store.versions() if newest is None else [newest]
        version = max(known or announced_versions(store.root), default=None)
    if version is None or version not in {*store.versions(), *announced_versions(store.root)}:
        raise unknown_version(run, version)
    return open_version(store, version)


def unknown_version(run: RunDir, version: int | None) -> HandoffError:
    """Return the error about a version that is not durable, which says what is known of it; None means the newest."""
    store = HandoffStore(run.weights_dir)
    durable, announced = store.versions(), announced_versions(store.root)
    there = f"there are {', '.join(map(str, durable))}" if durable else "there are none"
    if only := [number for number in announced if number not in durable]:
        there += f"; {', '.join(map(str, only))} announced, not durable"
    if version in only:
        return HandoffError(f"version {version} of {run.name} is announced, not durable\n    hint: {there}")
    name = "the newest" if version is None else version
    return HandoffError(f"{name} is not a version of {run.name}\n    hint: {there}")


def _handoff_items(store: HandoffStore, version: int | None, run: RunDir, *, verify: bool) -> list[StoredItem]:
    durable = set(store.versions())
    known = sorted(durable | set(announced_versions(store.root)))
    if version is not None and version not in known:
        raise unknown_version(run, version)
    chosen = known if version is None else [version]
    return [_handoff_item(store, number, verify=verify, durable=number in durable) for number in chosen]


def _handoff_item(store: HandoffStore, version: int, *, verify: bool, durable: bool) -> StoredItem:
    item = StoredItem(number=version, path=str(store.path_of(version)), durable=durable)
    try:
        handoff = open_version(store, version)
        manifest = handoff.manifest
        item = msgspec.structs.replace(
            item,
            durable=isinstance(handoff, Handoff),  # it may have become durable since the listing
            created_at_s=manifest.created_at_s,
            bytes=manifest.total_bytes,
            files=len(manifest.files),
            by=manifest.producer,
            announced_by=handoff.attempt if isinstance(handoff, AnnouncedVersion) else None,
        )
        if verify and isinstance(handoff, Handoff):
            handoff.verify(content=True)
    except HandoffError as error:
        item = msgspec.structs.replace(item, problem=str(error))
    return item
