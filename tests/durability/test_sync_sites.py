"""Each fsync on the way of a promise is needed: without it, a power cut loses what was promised, or leaves it torn.

An fsync changes nothing that a program sees, so leaving it out of the code and leaving it out of the recording are the
same. Where one is left out, the states of the recording are opened until something is wrong; nothing wrong is a failure
of this test. Where two make the same durable, one is left out together with the other (``COVERED``).
"""

from __future__ import annotations

import pytest
from campaign import examine, sites
from recording import Recordings

#: by scenario and rules: sites without which something is lost
NEEDED = {
    ("handoffs", "posix"): (
        "storage.quarantine.put_aside: #",
        "storage.quarantine.put_aside: put-aside",
        "storage.fence._settle: .writer",
        "storage.fence.claim: root",
        "storage.fence.commit: weights",
        "storage.pins.add: .pins",
        "storage.pins.add: v#.json",
        "storage.pins.add: weights",
        "storage.pins.remove: .pins",
        "weights.lifetime.collector._delete_doomed: weights",
        "weights.write.handoff_writer.commit: config.json",
        "weights.write.handoff_writer.commit: manifest.json",
        "weights.write.handoff_writer.commit: model.safetensors.index.json",
        "weights.format.shard.write_shard: model-#-of-#.safetensors",
        "weights.write.writer.sync: model-#-of-#.safetensors",
        "weights.write.writer.write_stream: delta-#-of-#.bin",
    ),
    # the rank that allocates a file need not be the one that writes it
    ("handoffs", "clients"): ("weights.write.writer.preallocate: model-#-of-#.safetensors",),
    ("ledger", "posix"): (
        "storage.quarantine.collect_asides: checkpoints",
        "checkpoints.history.add_saved: history.jsonl",
        "checkpoints.ledger.remove: checkpoints",
        "checkpoints.writer.commit: manifest.json",
        "checkpoints.writer.commit: orchestrator.msgpack",
        "storage.fence._settle: .writer",
        "storage.fence.claim: root",
        "storage.fence.commit: checkpoints",
        "storage.pins.add: checkpoints",
        "storage.pins.add: step-#.pin.json",
    ),
    ("rollouts", "posix"): (
        "dock.ledger.entries._durable_bytes: #.jsonl",
        "dock.ledger.log.__init__: root",
        "dock.ledger.log.__init__: rollouts",
        "dock.ledger.log._make_file: ledger",
        "dock.ledger.log._write_at: #.jsonl",
        "dock.ledger.payload.write: #-#.columns",
        "dock.ledger.payload.write: payload",
        "storage.sealed_files.seal_file: #.jsonl.gz",
        "storage.sealed_files.seal_file: ledger",
    ),
    ("put_aside", "posix"): ("storage.fence._settle: checkpoints",),
    ("run_files", "posix"): (
        "checkpoints.restore.write: #",
        "checkpoints.restore.write: restore.json",
        "runs.record.write: run-#",
        "runs.record.write: run.json",
        "runs.rundir.start_attempt: attempts",
        "runs.rundir.start_attempt: run-#",
        "runs.rundir.write_configuration: cluster.yaml",
        "runs.rundir.write_configuration: plan.json",
        "runs.rundir.write_configuration: recipe.yaml",
        "network.credentials.ensure_token: token",
        "runs.elastic.ask: replicas",
        "runs.elastic.ask: run-#",
        "runs.elastic.ask: wanted.json",
        "runs.start.snapshot.keep_snapshot: #",
        "runs.start.snapshot.keep_snapshot: snapshot.json",
        "runs.start.snapshot.keep_snapshot: snapshots",
        "runs.status.write: run-#",
        "runs.status.write: status.json",
        "submit.submission.create_run: root",
        "submit.submission.create_run: runs",
    ),
}
#: sites that make durable what another one makes durable, too: together they are needed
COVERED = {
    "handoffs": (
        ("storage.fence.commit: v#", "weights.write.handoff_writer.commit: v#"),
        ("storage.fence.claim: weights", "storage.fence._settle: weights"),
        ("storage.quarantine.put_aside: weights", "storage.fence._settle: weights"),
    ),
    "ledger": (
        ("storage.fence.commit: step-#", "checkpoints.writer.commit: step-#"),
        ("storage.fence.claim: checkpoints", "storage.fence._settle: checkpoints"),
        ("storage.quarantine.put_aside: checkpoints", "storage.fence._settle: checkpoints"),
        ("storage.fence.claim: root", "storage.pins.add: root"),
        # in the scenario the test syncs it as well
        ("storage.fence.commit: trainer", "elsewhere: trainer"),
    ),
    "run_files": (
        (
            "submit.submission.create_run: .staging",
            "runs.record.write: .staging",
            "runs.rundir.write_configuration: .staging",
            "network.credentials.ensure_token: .staging",
        ),
        ("submit.submission.create_run: #", "runs.start.snapshot.keep_snapshot: #"),
        ("submit.submission.create_run: snapshots", "runs.start.snapshot.keep_snapshot: snapshots"),
    ),
}
#: written of a checkout with changes only
SOMETIMES = {"runs.start.snapshot.keep_snapshot: hpcrl.diff"}
TORCH = (
    "storage.fence.commit: trainer",
    "torch.distributed.checkpoint.filesystem._write_files_from_queue: __#_#.distcp",
    "torch.distributed.checkpoint.filesystem.finish: .metadata.tmp",
)


def assert_needed(recordings: Recordings, scenario: str, rules: str, without: tuple[str, ...]) -> None:
    operations = recordings(scenario)[0]
    assert set(without) <= sites(operations)
    figures = examine(scenario, operations, rules=rules, limit=16, most=400, without=without, first_only=True)
    assert figures.problems, f"nothing was wrong in {figures.opened} states without the fsync of {without}"


@pytest.mark.parametrize(
    ("scenario", "rules", "site"), [(*where, site) for where, all_sites in NEEDED.items() for site in all_sites]
)
def test_without_it_something_is_lost(scenario: str, rules: str, site: str, recordings: Recordings) -> None:
    assert_needed(recordings, scenario, rules, (site,))


@pytest.mark.parametrize(
    ("scenario", "together"),
    [(scenario, together) for scenario, all_sites in COVERED.items() for together in all_sites],
)
def test_without_all_of_them_something_is_lost(
    scenario: str, together: tuple[str, ...], recordings: Recordings
) -> None:
    assert_needed(recordings, scenario, "posix", together)


@pytest.mark.slow
@pytest.mark.parametrize("site", TORCH)
def test_torch_syncs_what_it_writes(site: str, recordings: Recordings) -> None:
    assert_needed(recordings, "torch_checkpoint", "posix", (site,))


@pytest.mark.parametrize("scenario", ["handoffs", "ledger", "put_aside", "rollouts", "run_files"])
def test_no_site_is_left_out(scenario: str, recordings: Recordings) -> None:
    """A new fsync of the product must be in the tables above, and be shown to be needed."""
    known = SOMETIMES | {site for all_sites in NEEDED.values() for site in all_sites}
    known |= {site for groups in COVERED.values() for together in groups for site in together}
    found = {site for site in sites(recordings(scenario)[0]) if not site.startswith("elsewhere")}
    assert found <= known
