"""Readers: load against a raw read, memory, bytes from the share by ranks of a node, fan-out over nodes, engine pause.

    python bench/handoff_readers.py [--mib 256] [--disk DIRECTORY] [--memory /dev/shm]

Ranks and nodes are processes of this machine; a node is one with a cache of its own. The page cache is dropped where we
may (root), else figures are of warm files; which it was stands in the result.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import ROOT, record

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests/inference"))

import aiohttp.web  # noqa: F401 - once, and not in each forked node
import torch
from engine_helpers import publish as publish_model
from engine_helpers import random_model, tensors_of, tiny_arch, write_model
from handoff_lab import model_directory, publish
from kill_harness import Say, fork_child

from hpcrl.inference.embedded.engine.config import EngineSettings
from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.weights.updates import ReaderConfig, UpdateSession
from hpcrl.inference.metrics import EngineMetrics, Registry
from hpcrl.modeling.decoder import Decoder
from hpcrl.weights import HandoffStore
from hpcrl.weights.read.share import Pace
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

MIB = 1 << 20
ROUNDS = 3


def drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def raw_read(store: HandoffStore) -> float:
    """Seconds to read the files of a version into one buffer, again and again."""
    buffer = bytearray(64 * MIB)
    started = time.monotonic()
    for path in store.open(1).shards:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.monotonic() - started


def raw_and_copy(store: HandoffStore) -> float:
    """The same into memory that stays, as a load must."""
    started = time.monotonic()
    kept = []
    for path in store.open(1).shards:
        data = bytearray(path.stat().st_size)
        with path.open("rb", buffering=0) as stream:
            view, done = memoryview(data), 0
            while got := stream.readinto(view[done:]):
                done += got
        kept.append(data)
    return time.monotonic() - started


def together(count: int, work: Callable[[int, Say], None]) -> list[dict[str, Any]]:
    """Run ``work`` in ``count`` processes; returns what each says last."""
    children = [fork_child(lambda say, i=i: work(i, say)) for i in range(count)]
    outcomes = [child.wait(timeout_s=280.0) for child in children]
    assert not any(outcome.failed for outcome in outcomes)
    return [json.loads(outcome.lines[-1]) for outcome in outcomes]


def load(
    store: HandoffStore, name: str, settings: ReaderSettings, *, at: float, node: str, linger: Path
) -> dict[str, Any]:
    """Load version 1 as a reader: every tensor into memory that is there already."""
    target = bytearray(max(r.bytes for r in store.open(1).manifest.tensors.values()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Subscriber(store.root, name, settings, node=node) as subscriber:
        time.sleep(max(0.0, at - time.time()))
        started = time.monotonic()
        with subscriber.reading(1) as reading:
            for _, _, data in reading.tensors():
                target[: len(data)] = data
        seconds = time.monotonic() - started
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = {
            "seconds": seconds,
            "share_bytes": subscriber.share.bytes_read,
            "peer_bytes": subscriber.peers.bytes_read if subscriber.peers else 0,
            "peak_mib": (after - before) / 1024,
        }
        # others may still be served by this one
        (linger / name).touch()
        deadline = time.monotonic() + 60
        while len(list(linger.iterdir())) < int(linger.name.rpartition("-")[2]) and time.monotonic() < deadline:
            time.sleep(0.02)
    return result


def crowd(store: HandoffStore, base: Path, count: int, *, nodes: int, fanout: bool, cache: bool) -> dict[str, Any]:
    """``count`` readers on ``nodes`` nodes load at the same time."""
    drop_caches()
    linger = base / f"linger-{count}"
    shutil.rmtree(linger, ignore_errors=True)
    linger.mkdir()
    at = time.time() + 1.5 + 0.2 * count

    def work(i: int, say: Say) -> None:
        node = f"node{i % nodes:02d}"
        settings = ReaderSettings(
            pace=Pace(120.0),
            streams=2,
            segment_bytes=16 * MIB,
            cache_dir=Path("/dev/shm") / f"{base.name}-{node}" if cache else None,
            fanout_host="127.0.0.1" if fanout else None,
        )
        say(json.dumps(load(store, f"r{i}", settings, at=at, node=node, linger=linger)))

    results = together(count, work)
    for path in Path("/dev/shm").glob(f"{base.name}-*"):
        shutil.rmtree(path, ignore_errors=True)
    whole = store.open(1).manifest.tensor_bytes
    return {
        "readers": count,
        "nodes": nodes,
        "seconds": round(max(r["seconds"] for r in results), 3),
        "copies_from_share": round(sum(r["share_bytes"] for r in results) / whole, 3),
        "copies_from_peers": round(sum(r["peer_bytes"] for r in results) / whole, 3),
        "peak_mib_of_a_reader": round(max(r["peak_mib"] for r in results), 1),
    }


def alone(store: HandoffStore, base: Path, verify: bool) -> tuple[float, float]:
    """Seconds and MiB of peak memory of one reader without a cache."""
    settings = ReaderSettings(pace=Pace(120.0), streams=2, segment_bytes=16 * MIB, verify=verify)
    linger = base / "linger-1"
    shutil.rmtree(linger, ignore_errors=True)
    linger.mkdir()
    (result,) = together(
        1, lambda _, say: say(json.dumps(load(store, "alone", settings, at=0.0, node="n", linger=linger)))
    )
    return result["seconds"], result["peak_mib"]


def engine_pause(base: Path) -> dict[str, Any]:
    """How long the embedded engine's step loop stands still for an update, and how long reading takes beside it."""
    torch.set_num_threads(1)
    model_dir = base / "tiny"
    model_dir.mkdir()
    write_model(model_dir, 0)
    arch = tiny_arch()
    store = HandoffStore(base / "tiny-weights")
    versions = range(1, 21)
    for version in versions:
        publish_model(store, version, model_dir, tensors_of(random_model(arch, seed=version)))
    config = EngineSettings(
        max_num_seqs=4, max_model_len=256, max_num_batched_tokens=256, block_size=16, num_blocks=128
    )
    metrics = EngineMetrics(Registry({}))
    model = random_model(arch, 0)
    engine = Engine(model, config, metrics)
    updater = UpdateSession(model, ReaderConfig(store.root, "bench", ReaderSettings()))
    updater.init()
    engine.start(lambda _: None)
    reads, pauses = [], []
    for version in versions:
        updater.start()
        started = time.monotonic()
        updater.update({"path": str(store.path_of(version))})
        reads.append(time.monotonic() - started)

        def exchange(new: Decoder, label: str) -> Decoder:
            started = time.monotonic()
            old = engine.exchange_weights(new, label).result(10)
            pauses.append(time.monotonic() - started)
            return old

        updater.finish(exchange, str(version))
    engine.stop()
    updater.shutdown()
    reads.sort()
    pauses.sort()
    return {
        "updates": len(pauses),
        "read_beside_generation_ms_median": round(1e3 * reads[len(reads) // 2], 2),
        "frozen_if_paused_for_the_read_ms_median": round(1e3 * (reads[len(reads) // 2] + pauses[len(pauses) // 2]), 2),
        "pause_ms_median": round(1e3 * pauses[len(pauses) // 2], 3),
        "pause_ms_max": round(1e3 * pauses[-1], 3),
    }


def one_reader(store: HandoffStore, base: Path) -> dict[str, Any]:
    """A load against a raw read of the same files, in turns."""
    raw, kept, verified, plain = [], [], [], []
    for _ in range(ROUNDS):
        for values, work in (
            (raw, lambda: raw_read(store)),
            (kept, lambda: raw_and_copy(store)),
            (verified, lambda: alone(store, base, True)),
            (plain, lambda: alone(store, base, False)),
        ):
            drop_caches()
            values.append(work())
    raw_s, kept_s = statistics.median(raw), statistics.median(kept)
    verified_s, plain_s = (statistics.median(seconds for seconds, _ in values) for values in (verified, plain))
    return {
        "raw_read_s": round(raw_s, 3),
        "raw_read_into_kept_memory_s": round(kept_s, 3),
        "load_verified_s": round(verified_s, 3),
        "load_s": round(plain_s, 3),
        "load_over_raw": round(raw_s / plain_s, 3),
        "verified_over_raw": round(raw_s / verified_s, 3),
        "verified_over_kept": round(kept_s / verified_s, 3),
        "peak_mib": round(max(peak for _, peak in verified), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"mib": arguments.mib, "cold": drop_caches()}
    for name, directory in (("disk", arguments.disk), ("memory", arguments.memory)):
        base = Path(tempfile.mkdtemp(prefix="hpcrl-readers-", dir=directory))
        try:
            store = HandoffStore(base / "weights")
            words = arguments.mib * MIB // 8 // 32
            publish(store, 1, model_directory(base / "model"), tensors=32, words=words, shards=4)
            row = figures[name] = {"one_reader": one_reader(store, base)}
            print(name, json.dumps(row), flush=True)
            if name == "memory":
                continue
            row["ranks_of_a_node"] = [crowd(store, base, n, nodes=1, fanout=False, cache=True) for n in (1, 4, 8)]
            row["ranks_without_cache"] = [crowd(store, base, 8, nodes=1, fanout=False, cache=False)]
            row["nodes_with_fanout"] = [crowd(store, base, n, nodes=n, fanout=True, cache=True) for n in (1, 4, 8, 16)]
            row["nodes_without_fanout"] = [crowd(store, base, 16, nodes=16, fanout=False, cache=False)]
            row["engine"] = engine_pause(base)
        finally:
            shutil.rmtree(base, ignore_errors=True)
    print(json.dumps(figures, indent=2))
    record("handoff_readers", figures)


if __name__ == "__main__":
    main()
