"""The KV pool's put and get against a copy in memory and a bare TCP connection, all on loopback.

Two processes: one owns the pool's memory (a real Mooncake Store with its master), this one writes and reads blocks over
TCP. The same sizes are copied from buffer to buffer, and sent through a plain socket to a third process that answers
with one byte when it has all (put), or sends them back on one byte (get). By turns, so that what else the machine does
meets all of them. Writes ``bench/results/store_speed.json``.

    python bench/store_speed.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import record, scratch

from hpcrl.network.ports import choose_blocks
from hpcrl.runs.rundir import RunDir
from hpcrl.store.endpoints import StoreEndpoints

HOST = "127.0.0.1"
RUN_ID = "0123456789abcdef"
MIB = 1 << 20
SIZES_MIB = (1, 4, 16, 64)
#: gives its memory to the pool until it is killed
OWNER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", sys.argv[1], 1 << 30, 16 << 20, "tcp", "", sys.argv[2], tenant_id=sys.argv[3]) == 0
print("joined", flush=True)
time.sleep(3600)
"""
#: takes 8 bytes of length; positive: takes that much and answers with a byte; negative: sends that much
PEER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
buffer = bytearray(64 << 20)
while head := connection.recv(8, socket.MSG_WAITALL):
    size = int.from_bytes(head, "little", signed=True)
    view = memoryview(buffer)[: abs(size)]
    if size < 0:
        connection.sendall(view)
        continue
    done = 0
    while done < size:
        done += connection.recv_into(view[done:])
    connection.sendall(b"k")
"""


@contextlib.contextmanager
def pool(path: Path) -> Iterator[StoreEndpoints]:
    """A master, by the command of the role, and one owner of memory."""
    run = RunDir(path / "run")
    run.path.mkdir()
    attempt = run.start_attempt()
    (port,) = choose_blocks([3], first=21000, last=29999, host=HOST)
    command = [sys.executable, "-m", "hpcrl.store.master", "--host", HOST, "--port", str(port), "--client-ttl-s", "10"]
    command += ["--lease-ttl-s", "1", "--eviction-high-watermark", "0.9", "--eviction-ratio", "0.1"]
    env = {**os.environ, "HPCRL_RUN_DIR": str(run.path), "HPCRL_ATTEMPT": "1", "HPCRL_ROLE": "store"}
    with (path / "store.log").open("wb") as log:
        master = subprocess.Popen(command, env=env | {"HPCRL_REPLICA": "0"}, stdout=log, stderr=log)
        deadline, ready = time.monotonic() + 300.0, run.path / "attempts/0001/ready/store-0.json"
        while not ready.exists():
            if master.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((path / "store.log").read_text())
            time.sleep(0.05)
        endpoints = StoreEndpoints.read(run, attempt if isinstance(attempt, int) else 1)
        arguments = [endpoints.metadata, endpoints.master, RUN_ID]
        owner = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, stderr=log)
        assert owner.stdout is not None
        try:
            assert owner.stdout.readline() == b"joined\n"
            yield endpoints
        finally:
            owner.kill()
            owner.wait()
            master.terminate()
            master.wait(30)


@contextlib.contextmanager
def peer() -> Iterator[socket.socket]:
    """A connection to a process that takes and gives bytes."""
    process = subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        with socket.create_connection((HOST, int(process.stdout.readline()))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection
    finally:
        process.kill()
        process.wait()


def client(endpoints: StoreEndpoints) -> Any:
    """A member of the pool that gives it nothing."""
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415

    store = MooncakeDistributedStore()
    settings = (HOST, endpoints.metadata, 0, 256 * MIB, "tcp", "", endpoints.master)
    assert store.setup(*settings, tenant_id=RUN_ID) == 0
    return store


def seconds(action: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(store: Any, connection: socket.socket, size: int, repeats: int) -> dict[str, Any]:
    """GB/s of each way for blocks of ``size`` bytes, medians."""
    source = np.frombuffer(os.urandom(size), dtype=np.uint8).copy()
    target, view = np.zeros(size, dtype=np.uint8), memoryview(bytearray(size))
    assert store.register_buffer(source.ctypes.data, size) == 0
    assert store.register_buffer(target.ctypes.data, size) == 0

    def send() -> None:
        connection.sendall(size.to_bytes(8, "little", signed=True))
        connection.sendall(source)
        assert connection.recv(1) == b"k"

    def receive() -> None:
        connection.sendall((-size).to_bytes(8, "little", signed=True))
        done = 0
        while done < size:
            done += connection.recv_into(view[done:])

    times: dict[str, list[float]] = {}
    for number in range(repeats + 1):
        key = f"{size}-{number}"
        ways: dict[str, Callable[[], object]] = {
            "memcpy": lambda: np.copyto(target, source),
            "tcp_send": send,
            "tcp_receive": receive,
            # from and to registered memory, as engines do
            "put": lambda key=key: _check(store.put_from(key, source.ctypes.data, size) == 0),
            "get": lambda key=key: _check(store.get_into(key, target.ctypes.data, size) == size),
            # with a copy in Python's memory
            "get_bytes": lambda key=key: _check(len(store.get(key)) == size),
        }
        for name, way in ways.items():
            if name == "get":
                target[:] = 0
            times.setdefault(name, []).append(seconds(way))
        assert bytes(target[:64]) == bytes(source[:64])
        assert np.array_equal(target, source)
        store.remove(key, True)
    store.unregister_buffer(source.ctypes.data)
    store.unregister_buffer(target.ctypes.data)
    # the first round touches memory and opens connections
    middle = {name: statistics.median(values[1:]) for name, values in times.items()}
    rates = {f"{name}_gb_s": round(size / value / 1e9, 3) for name, value in middle.items()}
    return {
        **rates,
        "put_ms": round(1e3 * middle["put"], 2),
        "get_ms": round(1e3 * middle["get"], 2),
        "put_over_tcp": round(middle["put"] / middle["tcp_send"], 2),
        "get_over_tcp": round(middle["get"] / middle["tcp_receive"], 2),
        "put_over_memcpy": round(middle["put"] / middle["memcpy"], 2),
        "get_over_memcpy": round(middle["get"] / middle["memcpy"], 2),
    }


def _check(good: bool) -> None:
    if not good:
        raise RuntimeError("the pool refused a block")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    figures: dict[str, Any] = {"load_average": round(os.getloadavg()[0], 1), "repeats": repeats}
    with pool(scratch("store-speed")) as endpoints, peer() as connection:
        store = client(endpoints)
        for mib in SIZES_MIB:
            figures[f"{mib}_mib"] = measure(store, connection, mib * MIB, repeats)
            print(mib, figures[f"{mib}_mib"], flush=True)
        store.close()
    record("store_speed", figures)


if __name__ == "__main__":
    main()
