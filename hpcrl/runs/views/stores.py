"""What a run has on disk: its hand-offs, as rows and documents."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.runs.rundir import RunDir
from hpcrl.weights import Handoff, HandoffStore

__all__ = [
    "StoredItem",
    "items_document",
    "verify_handoffs",
    "weights_difference",
    "weights_items",
]

SCHEMA = "hpcrl.stored/1"


class StoredItem(msgspec.Struct, frozen=True, kw_only=True):
    """A version or checkpoint that a store has.

    Attributes
    ----------
    number:
        Policy version.
    created_at_s:
        Seconds since the epoch by its writer's clock; None where the manifest cannot be read.
    bytes, files:
        Size of all files, and how many.
    by:
        Who wrote it.
    problem:
        Why it cannot be used; empty where nothing is known against it.
    """

    number: int
    path: str
    created_at_s: float | None = None
    bytes: int = 0
    files: int = 0
    by: str = ""
    problem: str = ""

    @property
    def age_s(self) -> float | None:
        return None if self.created_at_s is None else max(0.0, time.time() - self.created_at_s)


def weights_items(run: RunDir) -> list[StoredItem]:
    """All published versions, ascending; manifests are read, data is not."""
    store = HandoffStore(run.weights_dir)
    return [_handoff_item(store, version, verify=False) for version in store.versions()]


def verify_handoffs(run: RunDir, version: int | None) -> list[StoredItem]:
    """Read every byte of one version, or of all, and compare with the manifest (HandoffError: no such version)."""
    store = HandoffStore(run.weights_dir)
    numbers = _chosen(store.versions(), version, f"version of {run.name}")
    return [_handoff_item(store, number, verify=True) for number in numbers]


def weights_difference(run: RunDir, old: int, new: int) -> dict[str, Any]:
    """What changed between two versions, by the hashes of their manifests; no data is read.

    Raises
    ------
    HandoffError
        One of them does not exist or cannot be read.
    """
    store = HandoffStore(run.weights_dir)
    before, after = (_open(store, run, version).manifest.tensors for version in (old, new))
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


def items_document(run: RunDir, kind: str, items: list[StoredItem]) -> str:
    """Items as JSON (schema `SCHEMA`)."""
    document = {"schema": SCHEMA, "run": run.name, "kind": kind, "items": items}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _open(store: HandoffStore, run: RunDir, version: int) -> Handoff:
    _chosen(store.versions(), version, f"version of {run.name}")
    return store.open(version)


def _chosen(numbers: list[int], wanted: int | None, what: str) -> list[int]:
    if wanted is None:
        return numbers
    if wanted not in numbers:
        there = f"there are {', '.join(map(str, numbers))}" if numbers else "there are none"
        raise HandoffError(f"{wanted} is no {what}\n    hint: {there}")
    return [wanted]


def _handoff_item(store: HandoffStore, version: int, *, verify: bool) -> StoredItem:
    item = StoredItem(number=version, path=str(store.path_of(version)))
    try:
        handoff = store.open(version)
        manifest = handoff.manifest
        item = msgspec.structs.replace(
            item,
            created_at_s=manifest.created_at_s,
            bytes=manifest.total_bytes,
            files=len(manifest.files),
            by=manifest.producer,
        )
        if verify:
            handoff.verify(content=True)
    except HandoffError as error:
        item = msgspec.structs.replace(item, problem=str(error))
    return item
