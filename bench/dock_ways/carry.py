"""Rollouts from producers to consumers on one node, by ways of ours."""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash

from hpcrl.dock.columns import decode_columns, encode_columns
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.routes import RoutedExperts
from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.interface import Location, Pool, Warehouse
from hpcrl.dock.warehouse.mooncake_payloads import MooncakeWarehouse
from hpcrl.dock.warehouse.reading import BlockReader
from hpcrl.dock.wire import BatchShard, BatchStats, MicroBatch, decode_shard, encode_shard
from hpcrl.network.ports import choose_blocks
from hpcrl.processes.interpreter import module_command

PRODUCERS, CONSUMERS, WINDOW = 2, 4, 8
PORTION = WINDOW // PRODUCERS // 2
"""Rollouts that a consumer is told of at a time."""
WAYS = ("memcpy", "embedded", "served", "mooncake", "whole shards")


def columns(tokens: int, *, routed: bool) -> dict[str, Any]:
    rng = np.random.default_rng(tokens)
    arrays: dict[str, Any] = {
        "token_ids": rng.integers(0, 100_000, tokens).astype(np.int32),
        "sampled": np.ones(tokens, np.uint8),
        "logprobs": -rng.random(tokens).astype(np.float32),
        "versions": np.full(tokens, 3, np.int32),
    }
    if routed:
        arrays["routed_experts"] = rng.integers(0, 256, (tokens, 78, 8), dtype=np.uint8)
        arrays["routed_present"] = np.ones(tokens, np.uint8)
    return arrays


class Producer:
    """Puts the same rollout again and again, under a place of its own each time."""

    def __init__(self, way: str, number: int, tokens: int, *, routed: bool) -> None:
        self._way, self._number = way, number
        self._arrays = columns(tokens, routed=routed)
        self._block = encode_columns(b"", self._arrays)
        self.bytes = sum(memoryview(piece).nbytes for piece in self._block)
        self._end, self._free, self._server = 0, list[str](), None
        self._warehouse: Warehouse | None = None
        if way == "mooncake":
            (port,) = choose_blocks([2], first=21000 + 2000 * number, last=29999, host="127.0.0.1")
            pooled = MooncakeWarehouse(Pool("127.0.0.1", port, "tcp"), limit_bytes=1 << 30)
            self._warehouse, self.location, self.master = pooled, pooled.location, pooled.master
        if way in ("embedded", "served"):
            files = EmbeddedWarehouse(Path("/dev/shm"), limit_bytes=4 << 30)
            self._warehouse, self.location = files, Location(str(files.directory))
        if way == "served":
            options = ["--directory", self.location.directory, "--host", "127.0.0.1"]
            command = module_command(sys.executable, "hpcrl.dock.warehouse.server", *options)
            self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._server.stdout is not None
            self.location = Location("/nowhere", "127.0.0.1", int(self._server.stdout.readline()))

    def put(self) -> Any:
        """What a consumer is told of a portion."""
        if self._way == "whole shards":
            return self._shard()
        if self._way == "memcpy":
            return [self._copy() for _ in range(PORTION)]
        return self.location, [self.store() for _ in range(PORTION)]

    def _copy(self) -> str:
        name = self._free.pop() if self._free else self._file()
        with open(name, "r+b") as file:
            view, start = mmap.mmap(file.fileno(), self.bytes), 0
            for piece in self._block:
                size = memoryview(piece).nbytes
                np.copyto(np.frombuffer(view, np.uint8, size, start), np.frombuffer(piece, np.uint8))
                start += size
        return name

    def _shard(self) -> bytes:
        a, routes = self._arrays, None
        if "routed_experts" in a:
            routes = RoutedExperts.of(a["routed_experts"], a["routed_present"])
        micro = MicroBatch(
            token_ids=a["token_ids"],
            cu_seqlens=np.asarray([0, len(a["token_ids"])], np.int32),
            loss_mask=a["sampled"],
            logprobs=a["logprobs"],
            versions=a["versions"],
            advantages=a["logprobs"],
            routed_experts=routes,
        )
        micros, stats = [micro] * PORTION, BatchStats.of_tokens()
        return encode_shard(BatchShard(step=1, rank=0, world_size=1, micro_batches=micros, stats=stats))

    def store(self) -> PayloadPlace:
        digest = xxhash.xxh3_128()
        for piece in self._block:
            digest.update(piece)
        place = PayloadPlace(f"{self._number:06d}-000001.columns", self._end, self.bytes, digest.hexdigest())
        self._end += self.bytes
        # a pool forgets what was released in a thread, a little later
        deadline = time.monotonic() + 30.0
        while not self._warehouse.put(place, self._block):
            assert time.monotonic() < deadline, f"{self._way} took no rollout for 30 s"
            time.sleep(0.001)
        return place

    def _file(self) -> str:
        fd, name = tempfile.mkstemp(dir="/dev/shm", prefix="hpcrl-bench-memcpy-")
        os.truncate(fd, self.bytes)
        os.close(fd)
        self._end += 1
        return name

    def release(self, told: Any) -> None:
        """A consumer has done with it."""
        if self._way == "memcpy":
            self._free += told
        elif self._warehouse is not None:
            self._warehouse.release(told[1])

    def server_cpu_s(self) -> float:
        """Processor time of the server, or of the pool's master, in seconds."""
        pid = self._server.pid if self._server is not None else self.master.pid if self._way == "mooncake" else None
        return 0.0 if pid is None else sum(psutil.Process(pid).cpu_times()[:2])

    def close(self) -> None:
        for name in self._free:
            os.unlink(name)
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
        if self._warehouse is not None:
            self._warehouse.close()


def produce(way: str, number: int, size: tuple[int, bool, int], pipes: Any, shared: tuple[Any, Any]) -> None:
    """A process: ``count`` rollouts in turn to its consumers, each of which says when it has done with one."""
    (tokens, routed, count), (begin, cpu) = size, shared
    producer = Producer(way, number, tokens, routed=routed)
    used: dict[Any, float] = {}
    under_way: list[tuple[Any, Any]] = []

    def finish() -> None:
        pipe, told = under_way.pop(0)
        used[pipe] = pipe.recv()
        producer.release(told)

    def total() -> float:
        return sum(used.values()) + time.process_time() + producer.server_cpu_s()

    def run(many: int) -> None:
        for i in range(many // PORTION):
            if len(under_way) == WINDOW // PRODUCERS // PORTION:
                finish()
            told, pipe = producer.put(), pipes[i % len(pipes)]
            if isinstance(told, bytes):
                pipe.send_bytes(told)
                told = None
            else:
                pipe.send(told)
            under_way.append((pipe, told))
        while under_way:
            finish()

    run(WINDOW)  # warm
    begin.wait()
    before = total()
    run(count)
    with cpu.get_lock():
        cpu.value += total() - before
    begin.wait()
    producer.close()
    for pipe in pipes:
        pipe.close()


def consume(way: str, tokens: int, routed: bool, pipe: Any) -> None:
    """A process: has the columns of each rollout that it is told of, until nobody tells it of more."""
    reader, warm = None, None
    while True:
        try:
            told = pipe.recv_bytes() if way == "whole shards" else pipe.recv()
        except EOFError:
            return
        if way == "memcpy":
            for name in told:
                with open(name, "rb") as file:
                    view = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
                warm = np.empty_like(view) if warm is None else warm
                np.copyto(warm, view)
        elif way == "whole shards":
            assert decode_shard(told).micro_batches[-1].token_ids[-1] >= 0
        else:
            location, places = told
            reader = reader or BlockReader(location, Path("/nowhere"))
            reader.prepare(places)
            for place in places:
                try:
                    block = reader.read(place)
                except OSError as error:
                    raise SystemExit(f"{way}: {reader.problems}") from error
                assert len(decode_columns(block)[1]["token_ids"]) == tokens
        pipe.send(time.process_time())


def measure(way: str, tokens: int, count: int, *, routed: bool) -> tuple[float, float]:
    """Seconds, and seconds of processors, for ``count`` rollouts."""
    context = mp.get_context("spawn")
    begin, cpu, processes = context.Barrier(PRODUCERS + 1), context.Value("d", 0.0), []
    for number in range(PRODUCERS):
        ends = []
        for _ in range(CONSUMERS // PRODUCERS):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=consume, args=(way, tokens, routed, theirs)))
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        arguments = (way, number + 1, (tokens, routed, count // PRODUCERS), ends, (begin, cpu))
        processes.append(context.Process(target=produce, args=arguments))
        processes[-1].start()
        for end in ends:
            end.close()
    begin.wait(120)
    began = time.monotonic()
    begin.wait(300)
    seconds = time.monotonic() - began
    for process in processes:
        process.join(30)
    return seconds, cpu.value
