"""The same rollouts through TransferQueue, in an interpreter that has it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable

from harness import ROOT

from dock_ways.carry import CONSUMERS, PRODUCERS, WINDOW
from hpcrl.dock.warehouse.interface import Pool
from hpcrl.dock.warehouse.pool_master import PoolMaster
from hpcrl.network.ports import choose_blocks

PEERS = {name: f"TransferQueue, {name}" for name in ("SimpleStorage", "MooncakeStore")}
PEER_S = 600.0

Measured = dict[tuple[int, bool], list[tuple[float, float]]]


def measure_peers(python: str, backend: str, rounds: int, sizes: Iterable[tuple[int, bool, int]]) -> Measured:
    """Seconds and seconds of processors of each round, by size; empty, and said why, where it does not run.

    Parameters
    ----------
    sizes:
        Tokens, whether with routes, and how many such rollouts.
    """
    work = {"producers": PRODUCERS, "consumers": CONSUMERS, "window": WINDOW, "rounds": rounds, "sizes": list(sizes)}
    script = ROOT / "bench/peers/with_transfer_queue.py"
    command = [python, str(script), "--backend", backend, "--work", json.dumps(work)]
    with contextlib.ExitStack() as stack:
        if backend == "MooncakeStore":
            (port,) = choose_blocks([2], first=21000, last=29999, host="127.0.0.1")
            stack.callback(PoolMaster(Pool("127.0.0.1", port, "tcp")).close)
            command += ["--master", f"127.0.0.1:{port}"]
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            out, _ = process.communicate(timeout=PEER_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
        if process.returncode:
            log.seek(0)
            print(f"TransferQueue with {backend} ended with {process.returncode}:\n{log.read()[-2000:]}", flush=True)
    found: Measured = {}
    for line in out.splitlines():
        if line.startswith("{"):
            each = json.loads(line)
            found.setdefault((each["tokens"], each["routes"]), []).append((each["wall_s"], each["cpu_s"]))
    return found
