"""Ranks of one node that want the same rollouts of another one: by themselves, or sharing what they fetch."""

from __future__ import annotations

import multiprocessing as mp
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from dock_ways.carry import Producer
from hpcrl.dock.columns import decode_columns
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.warehouse.interface import Location
from hpcrl.dock.warehouse.reading import BlockReader
from hpcrl.dock.warehouse.sharing import Sharing

_LIMIT_BYTES = 4 << 30
_WAIT_S = 120.0


def measure_shared(tokens: int, count: int, ranks: int, rounds: int, *, routed: bool, shared: bool) -> dict[str, float]:
    """What it takes until ``ranks`` ranks have ``count`` rollouts: the best of some rounds.

    Returns
    -------
    dict
        ``wire_bytes`` from the server, ``wall_s``, and ``cpu_s`` of processors of ranks and server, in seconds.
    """
    producer = Producer("served", 1, tokens, routed=routed)
    node = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="hpcrl-bench-node-"))
    context = mp.get_context("spawn")
    try:
        places = [producer.store() for _ in range(count)]
        meet, said = context.Barrier(ranks + 1), context.Queue()
        arguments = (producer.location, places, node if shared else None, rounds, (meet, said))
        processes = [context.Process(target=_rank, args=arguments) for _ in range(ranks)]
        for process in processes:
            process.start()
        found = [_round(producer, ranks, meet, said) for _ in range(rounds)]
        for process in processes:
            process.join(30)
    finally:
        producer.close()
        shutil.rmtree(node, ignore_errors=True)
    return min(found, key=lambda each: each["wall_s"])


def _round(producer: Producer, ranks: int, meet: Any, said: Any) -> dict[str, float]:
    meet.wait(_WAIT_S)
    before, began = producer.server_cpu_s(), time.monotonic()
    meet.wait(_WAIT_S)
    wall_s, served_s = time.monotonic() - began, producer.server_cpu_s() - before
    answers = [said.get(timeout=_WAIT_S) for _ in range(ranks)]
    blocks, cpu_s = (sum(each) for each in zip(*answers, strict=True))
    return {"wire_bytes": blocks * producer.bytes, "wall_s": wall_s, "cpu_s": cpu_s + served_s}


def _rank(location: Location, places: list[PayloadPlace], node: Path | None, rounds: int, with_others: Any) -> None:
    """A process: has the columns of all rollouts, once a round, each a step of its own."""
    meet, said = with_others
    sharing = None if node is None else Sharing(node, limit_bytes=_LIMIT_BYTES)
    for step in range(1, rounds + 1):
        meet.wait(_WAIT_S)
        busy, reader = time.process_time(), BlockReader(location, Path("/nowhere"))
        if sharing is not None:
            reader.share(sharing, step)
        reader.prepare(places)
        arrays = [decode_columns(reader.read(place))[1] for place in places]
        assert len(arrays) == len(places)
        assert not reader.unshared, reader.unshared
        said.put((reader.sources["server"], time.process_time() - busy))
        meet.wait(_WAIT_S)
        reader.close()
    if sharing is not None:
        sharing.close()
