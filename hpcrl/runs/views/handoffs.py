"""Hand-offs of a run for operators: the content of a version, pins, and what may be removed."""

from __future__ import annotations

import getpass
from collections import Counter
from typing import Any

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.processes.procfs import hostname
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.stores import find_version, unknown_version
from hpcrl.weights import HandoffStore
from hpcrl.weights.format.announcement import AnnouncedVersion
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.pins import handoff_pins, read_pins
from hpcrl.weights.visibility import missing_names


def handoff_document(run: RunDir, version: int | None) -> dict[str, Any]:
    """Return the content and the holders of a version, durable or announced; the newest durable one by default.

    Raises
    ------
    HandoffError
        The version does not exist, or its manifest cannot be read.
    """
    store = HandoffStore(run.weights_dir)
    handoff = find_version(run, version)
    version, manifest = handoff.version, handoff.manifest
    announced = handoff if isinstance(handoff, AnnouncedVersion) else None
    records = ReaderWatch(store.root, expiry_s=_expiry_s(run)).observe()
    pinned = read_pins(store.root).get(version)
    dtypes = Counter[str]()
    for record in manifest.tensors.values():
        dtypes[record.dtype] += record.bytes
    return {
        "version": version,
        "path": str(handoff.path),
        "durable": announced is None,
        "announced_by": None if announced is None else announced.attempt,
        "served_by_ranks": None if announced is None else len(announced.record.peers),
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


def pin_handoff(run: RunDir, version: int, reason: str) -> None:
    """Keep a version until it is unpinned.

    Raises
    ------
    HandoffError
        The version does not exist (any more); it is not pinned then.
    """
    store = HandoffStore(run.weights_dir)
    if version not in store.versions():
        raise unknown_version(run, version)
    pins = handoff_pins(store.root)
    pins.add(version, reason=reason, by=f"{getpass.getuser()}@{hostname()}")
    if missing_names([store.path_of(version)]):
        pins.remove(version)
        raise HandoffError(f"version {version} of {run.name} was removed while it was being pinned")


def unpin(run: RunDir, version: int) -> bool:
    """Unpin a version, which may be removed then; return False where it was not pinned."""
    return handoff_pins(run.weights_dir).remove(version)


def collector_of(run: RunDir, keep_last: int | None = None) -> Collector:
    """Return a collector that may run concurrently with that of the orchestrator.

    It has not observed readers for long, so each registered reader counts as alive.
    """
    store = HandoffStore(run.weights_dir)
    keep = run.recipe().handoff.keep_last if keep_last is None else keep_last
    return Collector(store, ReaderWatch(store.root, expiry_s=_expiry_s(run)), keep_last=keep)


def removal_plan(collector: Collector) -> tuple[list[int], dict[int, str]]:
    """Return the versions that a pass would remove, and the reasons why the others stay."""
    reasons = collector.plan()
    return [version for version, reason in reasons.items() if not reason], {v: r for v, r in reasons.items() if r}


def version_bytes(run: RunDir, versions: list[int]) -> int:
    """Return how many bytes removing ``versions`` frees, as far as their manifests can be read."""
    store, total = HandoffStore(run.weights_dir), 0
    for version in versions:
        total += sum(path.stat().st_size for path in store.path_of(version).glob("*") if path.is_file())
    return total


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
