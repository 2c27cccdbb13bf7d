"""Seconds from a published version to the last engine that has it: by the share, by fan-out, and over the fabric.

A process writes a version and serves it over Mooncake's transfer engine on TCP. Readers, one process
for each, stand for nodes: they have caches of their own. Each way is measured in the same call, in turn, several rounds
of them; the files are dropped from the page cache of this machine before each round where the kernel lets us, but the
share is a local directory: a shared filesystem is slower. Beside it, the bare rate of loopback between two processes.

    python bench/fabric.py --gib 0.25 --readers 2 --output bench/results/fabric.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fabric_lab import writer_process
from handoff_lab import check_content

from hpcrl.storage.files import atomic_write
from hpcrl.weights import HandoffStore
from hpcrl.weights.read.share import Pace
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

SPAWN = multiprocessing.get_context("spawn")
WAYS = ("share", "fan-out", "fabric", "fabric and fan-out")
_TENSOR_BYTES = 8 << 20


def main() -> None:
    """Measure all ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25, help="size of a version in GiB")
    parser.add_argument("--readers", type=int, default=2, help="engines, each on a node of its own")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the trainer that serve it")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each way")
    parser.add_argument("--segment-mib", type=int, default=16, help="size of a segment in MiB")
    parser.add_argument("--output", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    results = measure(arguments)
    print(json.dumps(results, indent=2))
    if arguments.output is not None:
        atomic_write(arguments.output, json.dumps(results, indent=2).encode() + b"\n")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of each way, and of bare loopback."""
    directory = Path(tempfile.mkdtemp(prefix="hpcrl-fabric-"))
    try:
        root, tensors = directory / "weights", max(2, round(arguments.gib * (1 << 30) / _TENSOR_BYTES))
        size = tensors * _TENSOR_BYTES
        shape = {"tensors": tensors, "words": _TENSOR_BYTES // 8}
        settings = {"ranks": arguments.ranks, "piece": 4 << 20, "slot_bytes": size, "timeout_s": 120.0}
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        raw = []
        with writer_process(root, {1: shape}, **settings):
            for _ in range(arguments.rounds):
                raw.append(raw_loopback(min(size, 1 << 29)))
                for way in WAYS:
                    found[way].append(one_round(root, directory, way, arguments))
        rate = statistics.median(raw)
        return {
            "version_bytes": size,
            "readers": arguments.readers,
            "ranks": arguments.ranks,
            "rounds": arguments.rounds,
            "cpus": os.cpu_count(),
            "loopback_bytes_per_s": rate,
            "ways": {way: summary(rounds, size, rate) for way, rounds in found.items()},
        }
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def summary(rounds: list[dict[str, float]], size: int, rate: float) -> dict[str, float]:
    """Return medians, and what was sent over what is needed.

    ``of_loopback`` compares the bytes that came from the trainer or another node with what one stream of loopback
    carries in the same time.
    """
    middle = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    carried = middle["fabric_bytes"] + middle["node_bytes"]
    return {
        **middle,
        "fastest_s": min(each["seconds"] for each in rounds),
        "from_trainer_over_version": middle["fabric_bytes"] / size,
        "of_loopback": carried / middle["seconds"] / rate,
    }


def one_round(root: Path, directory: Path, way: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Let all readers read the version at once; return seconds to the last one, CPU seconds, and bytes by their way."""
    for path in HandoffStore(root).open(1).shards:
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    processes, ends = [], []
    for number in range(arguments.readers):
        here, there = SPAWN.Pipe()
        cache = directory / f"node-{number}"
        shutil.rmtree(cache, ignore_errors=True)
        settings = ReaderSettings(
            segment_bytes=arguments.segment_mib << 20,
            pace=Pace(300.0),
            cache_dir=cache,
            fanout_host="127.0.0.1" if "fan-out" in way else None,
            fabric="fabric" in way,
        )
        process = SPAWN.Process(target=reader, args=(there, root, number, settings))
        process.start()
        processes.append(process)
        ends.append(here)
    for end in ends:
        assert end.recv() == "ready"
    started = time.monotonic()
    for end in ends:
        end.send("go")
    answers = [end.recv() for end in ends]
    seconds = time.monotonic() - started
    for end in ends:
        end.send("end")  # a node that has everything still serves others
    for process in processes:
        process.join()
    assert all(answer["failures"] == 0 for answer in answers), answers
    names = ("cpu_s", "share_bytes", "node_bytes", "fabric_bytes")
    return {"seconds": seconds, **{name: sum(answer[name] for answer in answers) for name in names}}


def reader(end: Connection, root: Path, number: int, settings: ReaderSettings) -> None:
    """Read the version once, report, and then compare every byte."""
    with Subscriber(root, f"reader-{number}", settings, node=f"node-{number}") as subscriber:
        with subscriber.reading(1):
            pass  # serves others from now on
        end.send("ready")
        end.recv()
        cpu = time.process_time()
        with subscriber.reading(1) as reading:
            for _ in reading.tensors():
                pass
        cpu, counts = time.process_time() - cpu, subscriber._sources()
        end.send(
            {
                "cpu_s": cpu,
                "share_bytes": counts.share_bytes,
                "node_bytes": counts.node_bytes,
                "fabric_bytes": counts.fabric_bytes,
                "failures": counts.fabric_failures,
            }
        )
        end.recv()
        with subscriber.reading(1) as reading:
            check_content(reading)  # not measured
    os._exit(0)  # threads of the engine would be waited for


def raw_loopback(size: int) -> float:
    """Return the bytes a second of one TCP connection between two processes, without any work on them."""
    listener = socket.create_server(("127.0.0.1", 0))
    process = SPAWN.Process(target=_send, args=(listener.getsockname()[1], size))
    process.start()
    connection, _ = listener.accept()
    room, got = memoryview(bytearray(4 << 20)), 0
    connection.recv_into(room[:1])
    started = time.monotonic()
    while got < size - 1 and (count := connection.recv_into(room)):
        got += count
    seconds = time.monotonic() - started
    process.join()
    connection.close()
    listener.close()
    return got / seconds


def _send(port: int, size: int) -> None:
    data = memoryview(bytearray(4 << 20))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while size:
            count = min(size, len(data))
            connection.sendall(data[:count])
            size -= count


if __name__ == "__main__":
    main()
