"""What is recorded: how the writers of a run make, replace and remove what must survive a power cut.

Run as a program under the recorder: ``durable_scenarios.py SCENARIO ROOT OTHER``. ROOT is the run directory, or the
directory of runs; OTHER is not recorded. Marks say what was promised: a call that returned is a promise.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
from handoff_lab import content, model_directory, publish, publish_delta
from kill_harness import Say, fork_child
from ledger_testing import write_files
from recording import mark, name_sync_sites

from hpcrl.checkpoints import CheckpointLedger, CheckpointWriter
from hpcrl.checkpoints.pins import pin
from hpcrl.dock.ledger.entries import Entry, Finished, Kept, PayloadPlace, Taken, TurnSaved, ledger_files
from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.dock.ledger.sealer import seal_ended_files
from hpcrl.storage.quarantine import list_asides
from hpcrl.weights import HandoffStore, VersionCommitter
from hpcrl.weights.format.layout import PublishedTensor, layout_shards
from hpcrl.weights.format.units import Runs, assign_units
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.pins import handoff_pins
from hpcrl.weights.write.own_units import Digests, OwnUnit, UnitChunk, full_results, write_units
from hpcrl.weights.write.writer import FileWriter, preallocate

WORDS = 100
PIN = "best on held-out"


# -- versions of weights


def publish_from_memory(writer: VersionCommitter, version: int, model: Path, *, tensors: int = 4) -> None:
    """As the trainer does: allocate the files, write units at their places, sync, publish."""
    wanted = [PublishedTensor(f"t.{i}", "int64", (WORDS,)) for i in range(tensors)]
    stage = writer.stage(version)
    shards = layout_shards(wanted, 2 * 8 * WORDS)
    numbers = {tensor.name: number for number, tensor in enumerate(wanted)}
    whole = np.zeros(tensors, np.int64)
    runs = Runs(np.arange(tensors), whole, whole, np.array([tensor.bytes for tensor in wanted]))

    def allocate(_: Say) -> None:
        for shard in shards:
            preallocate(stage / shard.file, shard.bytes, shard.head)

    # another rank does that, perhaps on another node
    outcome = fork_child(allocate).wait()
    assert not outcome.failed, outcome
    reports: list[Digests] = []
    with FileWriter(stage, direct=False) as files:
        for shard in shards:
            image = bytearray()
            units = []
            table = assign_units([shard], numbers, runs, 1, chunk_bytes=4096)
            for number, (offset, size) in enumerate(zip(table.units.offset, table.units.bytes, strict=True)):
                at, cuts = len(image), []
                for part in np.flatnonzero(table.parts.unit == number):
                    name, start, length = f"t.{table.parts.tensor[part]}", *(int(c[part]) for c in table.parts[3:5])
                    image += content(version, name, WORDS)[start : start + length]
                    cuts.append(UnitChunk(name, 0, length, 8))
                units.append(OwnUnit(shard.file, int(offset), at, int(size), tuple(cuts)))
            reports.append(write_units(files, units, memoryview(bytes(image)), 0))
        files.sync()
    results = full_results(shards, reports, 4096)
    writer.publish(version=version, shards=results, model_dir=model, producer="lab", chunk_bytes=4096)


def handoffs(root: Path, other: Path) -> None:
    """Two attempts of a trainer publish, one withdraws; a collector removes; somebody pins."""
    store, model = HandoffStore(root / "weights"), model_directory(other / "model")

    def claim(attempt: int) -> VersionCommitter:
        writer = VersionCommitter.claim(store.root, attempt)
        mark(["claimed", attempt])
        return writer

    def made(version: int) -> None:
        mark(["committed", version])

    def collect(*given_up: int) -> None:
        mark(["given up", *given_up])
        watch = ReaderWatch(store.root, expiry_s=5.0)
        report = Collector(store, watch, keep_last=1, settle_s=0.0, sleep=lambda _: None).collect()
        assert report.removed == list(given_up), report

    writer = claim(1)
    publish_from_memory(writer, 1, model)
    made(1)
    handoff_pins(store.root).add(1, reason=PIN, by="somebody")
    mark(["pinned", 1])
    publish(writer, 2, model, words=WORDS)
    made(2)
    publish_delta(writer, 3, (2,), model, words=WORDS)
    made(3)
    publish(writer, 4, model, words=WORDS)
    made(4)
    collect(2, 3)
    writer.stage(5)  # half built when the attempt dies
    writer = claim(2)
    mark(["given up", 4])
    writer.withdraw_after(1)
    mark(["kept aside", 4])
    publish(writer, 2, model, words=2 * WORDS)
    made(2)
    publish_delta(writer, 3, (2,), model, words=2 * WORDS)
    made(3)
    mark(["unpinned", 1])
    handoff_pins(store.root).remove(1)
    mark(["unpinned for good", 1])


# -- checkpoints


def save(writer: CheckpointWriter, step: int, number: int) -> None:
    """Save ``number`` of the scenario, of ``step``."""
    mark(["begin", step, number])
    records = write_files(writer.stage(step), _save_text(number), 2)
    writer.commit(
        step=step,
        world_size=1,
        files=records,
        orchestrator_state=_save_text(number),
        started_at_s=time.time(),
    )
    mark(["committed", step, number])


def _save_text(number: int) -> bytes:
    return f"save {number};".encode() * 200


def ledger(root: Path, other: Path) -> None:
    """Two attempts save, the same step again, too; entries are pinned, retained and removed."""
    del other
    path = root / "checkpoints"
    writer = CheckpointWriter.claim(path, 1)
    mark(["claimed", 1])
    save(writer, 10, 1)
    pin(writer.ledger, 10, reason=PIN, by="somebody")
    mark(["pinned", 10])
    save(writer, 20, 2)
    save(writer, 20, 3)
    save(writer, 30, 4)
    mark(["given up", 20])
    assert writer.retain(keep_last=1) == [20]
    mark(["removed", 20])
    save(writer, 40, 5)
    mark(["given up", 30])
    CheckpointLedger(path).remove(30)
    mark(["removed", 30])
    write_files(writer.stage(50), b"half built", 1)
    writer = CheckpointWriter.claim(path, 2)
    mark(["claimed", 2])
    save(writer, 50, 6)
    mark(["given up", 50])
    writer.put_aside_after(40)
    mark(["kept aside", 50])
    mark(["let go", 50])
    writer.take_back(list_asides(path, "step-")[0])
    mark(["committed", 50, 6])
    mark(["given up", 50])
    writer.put_aside_after(40)
    mark(["kept aside", 50])
    save(writer, 50, 7)
    mark(["let go", 50])
    writer.collect_aside(50)


def put_aside(root: Path, other: Path) -> None:
    """A writer dies between the two renames with which it replaces an entry; the next one puts the old one back."""
    del other
    path = root / "checkpoints"
    writer = CheckpointWriter.claim(path, 1)
    mark(["claimed", 1])
    save(writer, 10, 1)
    write_files(writer.stage(10), b"half built", 1)
    assert writer.fence.hide("step-000010")
    writer = CheckpointWriter.claim(path, 2)
    mark(["claimed", 2])
    save(writer, 20, 2)


def torch_checkpoint(root: Path, other: Path) -> None:
    """What torch's distributed checkpoint writes for us."""
    import torch
    import torch.distributed as dist

    from hpcrl.trainer.state.checkpoint import write_state

    other.mkdir()
    dist.init_process_group("gloo", init_method=f"file://{other}/meeting", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    writer = CheckpointWriter.claim(root / "checkpoints", 1)
    mark(["claimed", 1])
    for step in (10, 20):
        mark(["begin", step, step])
        staged = writer.stage(step)
        state = {"model": {"w": torch.full((700,), float(step))}, "step": torch.tensor(step)}
        records = {f"trainer/{name}": record for name, record in write_state(staged / "trainer", state, group).items()}
        writer.commit(step=step, world_size=1, files=records, orchestrator_state=b"o", started_at_s=time.time())
        mark(["committed", step, step])
    dist.destroy_process_group()


# -- the ledger of rollouts


def keep_rollout(log: RolloutLog, group: int, member: int) -> Future[Entry]:
    """One whose columns say who it is."""

    def entry(place: PayloadPlace) -> Entry:
        return Finished(
            group=group,
            member=member,
            environment="words",
            prompt_index=0,
            reward=0.0,
            tokens=400,
            sampled_tokens=400,
            first_version=0,
            last_version=0,
            ended_s=0.0,
            payload=place,
        )

    return log.finish(b"", {"tokens": np.full(400, 10 * group + member, np.int32)}, entry)


def keep_turn(log: RolloutLog, group: int, member: int, number: int) -> Future[Entry]:
    """A turn of a rollout in progress, whose columns say of which."""

    def entry(place: PayloadPlace) -> Entry:
        return TurnSaved(
            group=group,
            member=member,
            turn=number,
            environment="words",
            prompt_index=0,
            tokens=100,
            first_version=0,
            last_version=0,
            payload=place,
        )

    return log.finish(b"", {"tokens": np.full(100, 10 * group + member, np.int32)}, entry)


def rollouts(root: Path, other: Path) -> None:
    """Two orchestrators, one behind the other, of which each keeps rollouts and makes batches of them.

    One rollout of each is in progress to the end; of another the turns are replaced by the whole of it. A third one
    begins after a second one that was killed between a write and its sync. Files of entries are short, so that each
    process continues in further ones, and those that have ended are sealed.
    """
    del other
    directory = root / "rollouts"
    for attempt in (1, 2):
        log = RolloutLog(directory, attempt=attempt, restored=attempt - 1, limit_s=1.0, file_bytes=1500)
        log._sealer.close()  # a thread would seal at other times in each recording
        log._payload._file_bytes = 4000
        for group in range(10 * attempt, 10 * attempt + 6):
            if group == 10 * attempt + 1:
                for number in range(2):
                    for member in (0, 2):
                        keep_turn(log, group, member, number).result(10.0)
                    mark(["turn", group, 2, number])
            written = [keep_rollout(log, group, member) for member in range(2)]
            for member, future in enumerate(written):
                future.result(10.0)
                mark(["finished", group, member])
        log.append(Taken(step=attempt, groups=[(10 * attempt, [0, 1])])).result(10.0)
        mark(["taken", attempt])
        assert len(seal_ended_files(log.ledger_dir, newest=f"{log.number:06d}.jsonl")) > attempt
        log.close()
    with ledger_files(log.ledger_dir)[-1].open("ab") as stream:
        stream.write(msgspec.json.encode(Kept(group=22)) + b"\n")
    log = RolloutLog(directory, attempt=3, restored=2, limit_s=1.0)
    log._sealer.close()
    keep_rollout(log, 30, 0).result(10.0)
    mark(["finished", 30, 0])
    seal_ended_files(log.ledger_dir, newest=f"{log.number:06d}.jsonl")
    keep_rollout(log, 30, 1).result(10.0)
    mark(["finished", 30, 1])
    log.close()


# -- files of a run


def run_files(root: Path, other: Path) -> None:
    """A run is submitted, resumed and cancelled; two attempts write what they do."""
    from durable_runs import life

    del other
    life(root)


if __name__ == "__main__":
    scenario, root, other = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    name_sync_sites()
    globals()[scenario](root, other)
