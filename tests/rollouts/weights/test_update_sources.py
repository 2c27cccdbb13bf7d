"""Counts of the ways by which engines have read versions: from real registrations, by engine, each byte once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.rollouts.weights.update_sources import UpdateSources
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.fleet import FleetView
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.fabric_notes import fabric_notes
from hpcrl.runs.views.fleet_table import _head
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.readers import ReadSources, Registration

NONE = {"fabric_bytes": 0, "node_bytes": 0, "share_bytes": 0, "fabric_s": 0}


class CountingReader:
    """A registered reader that says what it has read."""

    def __init__(self, root: Path, name: str) -> None:
        self.sources = ReadSources()
        self.registration = Registration(root, name, expiry_s=60.0, sources=lambda: self.sources).open()

    def has_read(self, version: int, **counts: object) -> None:
        self.sources = ReadSources(**counts)  # type: ignore[arg-type]
        self.registration.acknowledge(version)


async def test_each_engine_gets_its_own_bytes_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    attempt = run.start_attempt()
    root = run.weights_dir
    readers = {name: CountingReader(root, name) for name in ("engine-1", "engine-10", "decode-0-0", "decode-0-1")}
    events = EventWriter(run, attempt=attempt, writer="orchestrator-0")
    sources = UpdateSources(ReaderWatch(root, expiry_s=60.0), events)
    try:
        readers["engine-1"].has_read(1, fabric_bytes=70, fabric_s=0.5)
        readers["engine-10"].has_read(1, share_bytes=1000)
        readers["decode-0-0"].has_read(1, fabric_bytes=30)
        readers["decode-0-1"].has_read(1, node_bytes=40, fabric_bytes=1)
        assert await sources.after("engine-1", 1) == {**NONE, "fabric_bytes": 70, "fabric_s": 0.5}
        assert await sources.after("engine-1", 1) == NONE
        assert await sources.after("decode-0", 1) == {**NONE, "fabric_bytes": 31, "node_bytes": 40}
        assert sources.gauges()["weights_fabric_bytes"] == 101
        assert sources.gauges()["weights_share_bytes"] == 0
        # a restarted reader begins anew
        readers["engine-1"].registration.close()
        readers["engine-1"] = CountingReader(root, "engine-1")
        readers["engine-1"].has_read(
            2, fabric_bytes=5, share_bytes=7, fabric_failures=2, fabric_problem="rank 0 is away"
        )
        assert await sources.after("engine-1", 2) == {**NONE, "fabric_bytes": 5, "share_bytes": 7}
        assert sources.totals["fabric_bytes"] == 106
        events.close()
        (event,) = read_events(run, kind="engine.fabric_failed")
        assert event.data == {"engine": "engine-1", "version": 2, "failures": 2, "why": "rank 0 is away"}
        ((_, note),) = fabric_notes(run, attempt)
        assert note == "engine-1 did not pull version 2 over the fabric: rank 0 is away"
    finally:
        for reader in readers.values():
            reader.registration.close()


def test_status_names_the_ways() -> None:
    view = FleetView(time_s=0.0, newest=3, in_flight=0, limit=8)
    assert "weights" not in _head(view).plain
    ways = {"fabric_bytes": 2.5e9, "node_bytes": 0, "share_bytes": 1e8, "fabric_s": 1.0, "fabric_failures": 2}
    view = FleetView(time_s=0.0, newest=3, in_flight=0, limit=8, weights=ways)
    assert _head(view).plain.endswith("weights: 2.5 GB over the fabric, 0.1 GB from the share, 2 pulls failed")


@pytest.mark.parametrize(
    ("durable", "expected"),
    [(None, "newest version 3"), (3, "newest version 3"), (2, "newest version 3, which is not durable; version 2 is")],
)
def test_status_names_the_newest_durable_version(durable: int | None, expected: str) -> None:
    view = FleetView(time_s=0.0, newest=3, in_flight=0, limit=8, durable=durable)
    assert _head(view).plain.endswith(expected)
