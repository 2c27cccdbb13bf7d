"""Ranks of nodes as processes, and a warehouse's server that counts what it is asked for, and may misbehave."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from patience import patience

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.frames import Answer, Request, frame
from hpcrl.dock.warehouse.interface import Location
from hpcrl.dock.warehouse.server import WarehouseServer
from hpcrl.network.auth import Gate
from hpcrl.network.credentials import Credentials, ensure_token

RANK = Path(__file__).with_name("sharing_rank.py")
ATTEMPT = 3


class CountingServer(WarehouseServer):
    """Counts bytes by block.

    Attributes
    ----------
    served:
        Bytes by the key of the block.
    damage:
        Keys of which the next answer has a wrong byte.
    stall:
        A key whose next answer stops in the middle for ever; `stalled` is set then.
    """

    def __init__(self, directory: Path, gate: Gate) -> None:
        super().__init__(directory, gate)
        self.served: Counter[str] = Counter()
        self.damage: set[str] = set()
        self.stall, self.stalled = "", threading.Event()

    async def _send(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        self.served[request.key] += request.length
        if request.key not in (*self.damage, self.stall):
            return await super()._send(request, writer)
        block = bytearray((self._directory / request.key).read_bytes()[: request.length])
        writer.write(frame(Answer(200)))
        if request.key == self.stall:
            self.stall = ""
            writer.write(block[: len(block) // 2])
            await writer.drain()
            self.stalled.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return False
        self.damage.discard(request.key)
        block[-1] ^= 1
        writer.write(block)
        await writer.drain()
        return True


@contextmanager
def counted(warehouse: EmbeddedWarehouse, run: Path) -> Iterator[tuple[CountingServer, Location]]:
    """A server of a warehouse in a thread, for attempt `ATTEMPT` of the run; and where other nodes find it."""
    ensure_token(run)
    server = CountingServer(warehouse.directory, Gate("warehouse", Credentials.of_run(run, ATTEMPT)))
    loop, started = asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []

    async def serve() -> None:
        listening, port = await server.start("127.0.0.1", 0)
        ports.append(port)
        started.set()
        async with listening:
            await listening.serve_forever()

    def work() -> None:
        with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10.0 * patience())
    yield server, Location(f"/nowhere/{warehouse.directory.name}", "127.0.0.1", ports[0])
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    thread.join(10.0 * patience())


class Rank:
    """A rank in a process of its own. Its node is the directory where it shares blocks."""

    def __init__(self, base: Path, run: Path, *, limit_bytes: int = 1 << 30, attempt: int = ATTEMPT) -> None:
        own = Credentials.of_run(run, attempt).headers["Authorization"]
        command = [sys.executable, str(RANK), str(base), str(limit_bytes), own]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        assert self._output.readline() == "ready\n"

    def ask(self, location: Location, payload: Path, step: int, places: Sequence[PayloadPlace]) -> None:
        """Have it read blocks; `answer` waits for that."""
        job = {"location": location, "payload": str(payload), "step": step, "places": places}
        self._input.write(msgspec.json.encode(job).decode() + "\n")
        self._input.flush()

    def answer(self) -> dict[str, Any]:
        return dict(json.loads(self._output.readline()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """In order; nothing where it was killed."""
        with suppress(BrokenPipeError):
            self._input.close()
        self.process.wait(20.0 * patience())
        self._output.close()


@contextmanager
def ranks_of(*new: Callable[[], Rank]) -> Iterator[list[Rank]]:
    """Ranks that end with the block."""
    ranks: list[Rank] = []
    try:
        for each in new:
            ranks.append(each())
        yield ranks
    except BaseException:
        for rank in ranks:
            rank.kill()
        raise
    finally:
        for rank in ranks:
            rank.end()
