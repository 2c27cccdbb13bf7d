"""The dock beside its peers: rollouts from 2 producers to 4 consumers, each a process, on one node.

Every way carries the same rollouts (token ids, log-probabilities, versions, masks; with ``routes`` the experts of 78
layers x 8 as uint8) and ends when a consumer has the columns as arrays:

- ``memcpy``: a producer copies the bytes of a rollout into shared memory that is warm, a consumer copies them out. The
  limit: no hash, no index, nothing durable.
- ``embedded``: the warehouse. A producer hashes and puts, a consumer maps, compares the hash and has views.
- ``served``: the same, asked for over TCP as from another node (one server a producer).
- ``mooncake``: the warehouse in Mooncake Store, over TCP (one pool a producer).
- ``whole shards``: what was before batches went by reference. A shard is encoded with all columns and decoded behind a
  socket; the real way had one process in place of these two producers.

- ``TransferQueue, SimpleStorage`` and ``TransferQueue, MooncakeStore``: with ``--transfer-queue PYTHON``, which has
  TransferQueue (and for the second one Mooncake); see ``bench/peers/with_transfer_queue.py``.

Then ranks of one context-parallel group on another node, who all want the same rollouts: ``each for itself``, as ranks
that share nothing, and ``shared``, where each rollout comes over the wire once and is mapped by all. Bytes over the
wire and seconds until all ranks have all rollouts. Here the wire is loopback: what it costs is processor time.

Rollouts go in twos, as those of a shard do, and a window of 8 is under way at a time. What is consumed is released.
Processor time is of producers, consumers and servers together: where others use the machine, it says more than seconds
do. For the TransferQueue::

    python -m venv /tmp/tq && /tmp/tq/bin/pip install TransferQueue==0.1.11 mooncake-transfer-engine-non-cuda
    python bench/dock_peers.py --transfer-queue /tmp/tq/bin/python
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from dock_ways.carry import WAYS, columns, measure
from dock_ways.shared_fetch import measure_shared
from dock_ways.transfer_queue import PEERS, measure_peers
from harness import OtherLoad, record

from hpcrl.dock.columns import encode_columns

MARK = "HPCRL_BENCH_DOCK_PEERS"
SIZES = {(8192, False): 256, (8192, True): 64, (131_072, False): 64, (131_072, True): 8}
"""Rollouts of each length, without routes and with them."""
GOAL_MEMCPY, GOAL_TRANSFER_QUEUE = 0.7, 2.0
RANKS = (2, 4)
"""Context-parallel ranks of a node."""
FETCHED = {(8192, False): 64, (8192, True): 16, (131_072, False): 16, (131_072, True): 4}
"""Rollouts that each of them wants."""


def carried(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a size, with what each way took."""
    rows, peers = [], {}
    print(f"{'tokens':>7} {'routes':>6} {'way':>28} {'GB/s':>7} {'rollouts/s':>10} {'GB/s of a CPU':>13}")
    if arguments.transfer_queue:
        sizes = [(tokens, routed, count) for (tokens, routed), count in SIZES.items()]
        peers = {
            way: measure_peers(arguments.transfer_queue, name, arguments.rounds, sizes) for name, way in PEERS.items()
        }
    for (tokens, routed), count in SIZES.items():
        size = sum(memoryview(piece).nbytes for piece in encode_columns(b"", columns(tokens, routed=routed)))
        found = {way: measured[tokens, routed] for way, measured in peers.items() if (tokens, routed) in measured}
        for _ in range(arguments.rounds):
            for way in WAYS:
                found.setdefault(way, []).append(measure(way, tokens, count, routed=routed))
        row: dict[str, Any] = {"tokens": tokens, "routes": routed, "rollout_bytes": size, "rollouts": count}
        for way, measured in found.items():
            wall_s, cpu_s = (min(each) for each in zip(*measured, strict=True))
            gigabytes = 1e-9 * size * count
            row[way] = {"gb_s": gigabytes / wall_s, "rollouts_s": count / wall_s, "gb_cpu_s": gigabytes / cpu_s}
            shown = f"{row[way]['gb_s']:7.2f} {row[way]['rollouts_s']:10.0f} {row[way]['gb_cpu_s']:12.2f}"
            print(f"{tokens:>7} {routed!s:>6} {way:>28} {shown}", flush=True)
        rows.append(row)
    return rows


def fetched(rounds: int) -> list[dict[str, Any]]:
    """A row a size and a number of ranks, with and without sharing."""
    rows = []
    print(f"{'tokens':>7} {'routes':>6} {'ranks':>5} {'how':>16} {'GB by wire':>10} {'seconds':>8} {'CPU s':>6}")
    for (tokens, routed), count in FETCHED.items():
        for ranks in RANKS:
            row: dict[str, Any] = {"tokens": tokens, "routes": routed, "rollouts": count, "ranks": ranks}
            for how in ("each for itself", "shared"):
                row[how] = measure_shared(tokens, count, ranks, rounds, routed=routed, shared=how == "shared")
                shown = f"{1e-9 * row[how]['wire_bytes']:10.3f} {row[how]['wall_s']:8.3f} {row[how]['cpu_s']:6.2f}"
                print(f"{tokens:>7} {routed!s:>6} {ranks:>5} {how:>16} {shown}", flush=True)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts")
    parser.add_argument("--transfer-queue", metavar="PYTHON", help="interpreter of an environment that has it")
    parser.add_argument("--shared-fetch", action="store_true", help="only that part, and write nothing")
    arguments = parser.parse_args()
    os.environ[MARK] = "1"
    if arguments.shared_fetch:
        fetched(arguments.rounds)
        return
    with OtherLoad(MARK) as load:
        rows = carried(arguments)
        shared = fetched(arguments.rounds)
    result: dict[str, Any] = {"rows": rows, "shared_fetch": shared, "other_load": load.share}
    for unit in ("gb_s", "gb_cpu_s"):
        result[f"embedded_to_memcpy_{unit}"] = [row["embedded"][unit] / row["memcpy"][unit] for row in rows]
        for ours, theirs in (("embedded", "SimpleStorage"), ("mooncake", "MooncakeStore")):
            ratios = [row[ours][unit] / row[PEERS[theirs]][unit] for row in rows if PEERS[theirs] in row]
            result[f"{ours}_to_{theirs}_{unit}"] = ratios
    result["goal_memcpy"], result["goal_transfer_queue"] = GOAL_MEMCPY, GOAL_TRANSFER_QUEUE
    record("dock_peers", result)


if __name__ == "__main__":
    main()
