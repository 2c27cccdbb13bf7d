"""The hand-offs of a run as operators handle them: what a version holds, what is pinned, what may go."""

from __future__ import annotations

import getpass
from collections import Counter
from typing import Any

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.procfs import hostname
from hpcrl.runs.rundir import RunDir
from hpcrl.weights import HandoffStore
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.pins import pins_of, read_pins
from hpcrl.weights.visibility import missing_names

__all__ = ["collector_of", "handoff_document", "pin", "removal_plan", "unpin", "version_bytes"]


def handoff_document(run: RunDir, version: int | None) -> dict[str, Any]:
    """What a version holds and who holds it; the newest one by default.

    Raises
    ------
    HandoffError
        There is no such version, or its manifest cannot be read.
    """
    store = HandoffStore(run.weights_dir)
    version = _existing(run, store, version)
    handoff = store.open(version)
    manifest = handoff.manifest
    records = ReaderWatch(store.root, expiry_s=_expiry_s(run)).observe()
    pinned = read_pins(store.root).get(version)
    dtypes = Counter[str]()
    for record in manifest.tensors.values():
        dtypes[record.dtype] += record.bytes
    return {
        "version": version,
        "path": str(handoff.path),
        "kind": manifest.kind,
        "parent": manifest.parent,
        "needs": list(manifest.needs),
        "needed_by": [v for v in store.versions() if v > version and version in _needs(store, v)],
        "producer": manifest.producer,
        "created_at_s": manifest.created_at_s,
        "bytes": manifest.total_bytes,
        "tensors": len(manifest.tensors),
        "changed_tensors": len(manifest.changes) if manifest.kind == "delta" else None,
        "dtypes": dict(dtypes),
        "files": {name: record.bytes for name, record in manifest.files.items()},
        "pin": None if pinned is None else msgspec.to_builtins(pinned),
        "served_by": [record.reader for record in records if record.acknowledged == version],
        "leased_by": [record.reader for record in records if version in record.leases],
    }


def pin(run: RunDir, version: int, reason: str) -> None:
    """Keep a version until it is unpinned.

    Raises
    ------
    HandoffError
        There is no such version (any more); it is not pinned then.
    """
    store = HandoffStore(run.weights_dir)
    _existing(run, store, version)
    pins = pins_of(store.root)
    pins.add(version, reason=reason, by=f"{getpass.getuser()}@{hostname()}")
    if missing_names([store.path_of(version)]):
        pins.remove(version)
        raise HandoffError(f"version {version} of {run.name} was removed while it was being pinned")


def unpin(run: RunDir, version: int) -> bool:
    """Let a version go where nothing else keeps it; False where it was not pinned."""
    return pins_of(run.weights_dir).remove(version)


def collector_of(run: RunDir, keep_last: int | None = None) -> Collector:
    """A collector beside that of the orchestrator; more than one at a time do no harm.

    It has not watched readers for long, so each that is registered counts as alive.
    """
    store = HandoffStore(run.weights_dir)
    keep = run.recipe().handoff.keep_last if keep_last is None else keep_last
    return Collector(store, ReaderWatch(store.root, expiry_s=_expiry_s(run)), keep_last=keep)


def removal_plan(collector: Collector) -> tuple[list[int], dict[int, str]]:
    """What a pass would remove, and why the others stay."""
    reasons = collector.plan()
    return [version for version, reason in reasons.items() if not reason], {v: r for v, r in reasons.items() if r}


def version_bytes(run: RunDir, versions: list[int]) -> int:
    """Bytes that removing ``versions`` frees, as far as their manifests can be read."""
    store, total = HandoffStore(run.weights_dir), 0
    for version in versions:
        total += sum(path.stat().st_size for path in store.path_of(version).glob("*") if path.is_file())
    return total


def _existing(run: RunDir, store: HandoffStore, version: int | None) -> int:
    versions = store.versions()
    if version is None and versions:
        newest = store.newest()
        return versions[-1] if newest is None else newest
    if version is None or version not in versions:
        there = f"there are {', '.join(map(str, versions))}" if versions else "there are none"
        raise HandoffError(f"{version or 'the newest'} is no version of {run.name}\n    hint: {there}")
    return version


def _needs(store: HandoffStore, version: int) -> tuple[int, ...]:
    try:
        return store.open(version).manifest.needs
    except HandoffError:
        return ()


def _expiry_s(run: RunDir) -> float:
    try:
        return run.recipe().handoff.lease_timeout_s
    except (OSError, ValueError):
        return 60.0
