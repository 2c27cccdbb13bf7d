"""Seconds from a published version to the last engine that has it: by the share, by fan-out, and over the fabric.

A process writes two versions and serves them over Mooncake's transfer engine on TCP. Readers, one process for each,
stand for nodes: they have caches of their own, in memory as in a run. In the way "fabric, no cache" each reader is the
only process of its node. The second version is measured: libraries are loaded then, and memory was used before. Each
way is measured in the same call, in turn, several rounds of them; the files are dropped from the page cache of this
machine before each round where the kernel lets us, but the share is a local directory: a shared filesystem is slower.
The bare rate of loopback between two processes is measured in each round as well.

    python bench/fabric.py --gib 0.25 --readers 1 2 --output bench/results/fabric.json
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
WAYS = ("share", "fan-out", "fabric", "fabric, no cache", "fabric and fan-out")
_TENSOR_BYTES = 8 << 20


def main() -> None:
    """Measure all ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25, help="size of a version in GiB")
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2], help="engines, each on a node of its own")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the trainer that serve it")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each way")
    parser.add_argument("--segment-mib", type=int, default=16, help="size of a segment in MiB")
    parser.add_argument("--cache", type=Path, default=Path("/dev/shm"), help="directory of the nodes' caches")
    parser.add_argument("--output", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    results = measure(arguments)
    print(json.dumps(results, indent=2))
    if arguments.output is not None:
        atomic_write(arguments.output, json.dumps(results, indent=2).encode() + b"\n")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of each way, and of bare loopback."""
    directory = Path(tempfile.mkdtemp(prefix="hpcrl-fabric-"))
    caches = Path(tempfile.mkdtemp(prefix="hpcrl-fabric-", dir=arguments.cache))
    try:
        root, tensors = directory / "weights", max(2, round(arguments.gib * (1 << 30) / _TENSOR_BYTES))
        size = tensors * _TENSOR_BYTES
        shape = {"tensors": tensors, "words": _TENSOR_BYTES // 8}
        slot_bytes = size // arguments.ranks + 3 * _TENSOR_BYTES
        settings = {
            "ranks": arguments.ranks,
            "slots": 2,
            "piece": 4 << 20,
            "slot_bytes": slot_bytes,
            "timeout_s": 120.0,
        }
        found: dict[tuple[int, str], list[dict[str, float]]] = {
            (readers, way): [] for readers in arguments.readers for way in WAYS if readers > 1 or "fan-out" not in way
        }
        raw = []
        with writer_process(root, {1: shape, 2: shape}, **settings):
            for _ in range(arguments.rounds):
                raw.append(raw_loopback(min(size, 1 << 29)))
                for (readers, way), rounds in found.items():
                    rounds.append(one_round(root, caches, way, readers, arguments))
        rate = statistics.median(raw)
        return {
            "version_bytes": size,
            "ranks": arguments.ranks,
            "rounds": arguments.rounds,
            "cpus": os.cpu_count(),
            "loopback_bytes_per_s": rate,
            "load_average": round(os.getloadavg()[0], 1),
            "ways": {
                f"{way}, {readers} reader{'s' if readers > 1 else ''}": summary(rounds, size, rate)
                for (readers, way), rounds in found.items()
            },
        }
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(caches, ignore_errors=True)


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


def one_round(root: Path, caches: Path, way: str, readers: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Let all readers read the version at once; return seconds to the last one, CPU seconds, and bytes by their way."""
    for path in HandoffStore(root).open(2).shards:
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    processes, ends = [], []
    for number in range(readers):
        here, there = SPAWN.Pipe()
        cache = caches / f"node-{number}"
        shutil.rmtree(cache, ignore_errors=True)
        settings = ReaderSettings(
            segment_bytes=arguments.segment_mib << 20,
            pace=Pace(300.0),
            cache_dir=None if "no cache" in way else cache,
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
    """Read a version, then the measured one; report, and then compare every byte."""
    with Subscriber(root, f"reader-{number}", settings, node=f"node-{number}") as subscriber:
        with subscriber.reading(1) as reading:
            for _ in reading.tensors():
                pass
        before = subscriber._sources()
        subscriber._urls = (0.0, {})  # the other readers serve by now
        end.send("ready")
        end.recv()
        cpu = time.process_time()
        with subscriber.reading(2) as reading:
            for _ in reading.tensors():
                pass
        cpu, counts = time.process_time() - cpu, subscriber._sources()
        end.send(
            {
                "cpu_s": cpu,
                "share_bytes": counts.share_bytes - before.share_bytes,
                "node_bytes": counts.node_bytes - before.node_bytes,
                "fabric_bytes": counts.fabric_bytes - before.fabric_bytes,
                "failures": counts.fabric_failures,
            }
        )
        end.recv()
        with subscriber.reading(2) as reading:
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
