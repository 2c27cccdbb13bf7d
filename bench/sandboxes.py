"""What sandboxes cost on this node: starts a second, many at once with their memory, and milliseconds of a program.

Wall-clock figures depend on what else runs; CPU seconds of the daemon and its children, and the load of the node, are
printed with them. ``--output`` records the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import time
from pathlib import Path

import psutil

from hpcrl.processes.daemon_threads import run_process
from hpcrl.sandboxes import Sandbox, SandboxFile, SandboxLimits
from hpcrl.sandboxes.client import SandboxClient, SandboxDaemon

FILES = 200
FILE_BYTES = 4096


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--starts", type=int, default=200, help="sandboxes that are started at a fixed number at a time"
    )
    parser.add_argument("--at-a-time", type=int, default=4, help="starts at a time")
    parser.add_argument("--at-once", type=int, default=1000, help="sandboxes that live at the same time")
    parser.add_argument("--programs", type=int, default=200, help="programs that are run one after the other")
    parser.add_argument("--output", type=Path, help="file for the figures, for example bench/results/sandboxes.json")
    given = parser.parse_args()
    figures = run_process(measure(given))
    for name, value in figures.items():
        print(f"{name:44} {value}")
    if given.output:
        given.output.write_text(json.dumps(figures, indent=2) + "\n")


async def measure(given: argparse.Namespace) -> dict[str, object]:
    """Return all figures, by name."""
    daemon = SandboxDaemon()
    try:
        client = await SandboxClient.connect(daemon.directory)
        how = await client.describe()
        figures: dict[str, object] = {
            "processors": len(os.sched_getaffinity(0)),
            "load of the node before (1 minute)": round(os.getloadavg()[0], 2),
            "memory by": how["memory"],
        }
        process = psutil.Process(daemon.pid)
        figures |= await starts(client, process, given.starts, given.at_a_time)
        figures |= await trees(client, max(10, given.starts // 10))
        figures |= await programs(client, given.programs)
        figures |= await at_once(client, process, given.at_once)
        figures["load of the node after (1 minute)"] = round(os.getloadavg()[0], 2)
        await client.close()
        return figures
    finally:
        daemon.stop()


async def starts(client: SandboxClient, process: psutil.Process, count: int, at_a_time: int) -> dict[str, object]:
    """Start sandboxes and kill each one."""
    waiting = list(range(count))

    async def work() -> None:
        while waiting:
            waiting.pop()
            await (await client.start()).kill()

    cpu, began = cpu_s(process), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(at_a_time)))
    wall = time.perf_counter() - began
    return {
        f"starts and ends a second, {at_a_time} at a time": round(count / wall, 1),
        "CPU milliseconds of a start and end": round(1000 * (cpu_s(process) - cpu) / count, 1),
    }


async def trees(client: SandboxClient, count: int) -> dict[str, object]:
    """Start sandboxes from a tree of the size of a small package."""
    files = {f"package/part{n % 10}/module{n}.py": SandboxFile(os.urandom(FILE_BYTES)) for n in range(FILES)}
    tree = await client.add_tree(files)
    took: dict[str, list[float]] = {"start": [], "diff": [], "snapshot": []}
    for _ in range(count):
        began = time.perf_counter()
        sandbox = await client.start(tree=tree)
        took["start"].append(time.perf_counter() - began)
        await sandbox.put({"package/part1/module1.py": b"changed"})
        began = time.perf_counter()
        await sandbox.diff(tree)
        took["diff"].append(time.perf_counter() - began)
        began = time.perf_counter()
        await sandbox.snapshot()
        took["snapshot"].append(time.perf_counter() - began)
        await sandbox.kill()
    size = f"{FILES} files, {FILES * FILE_BYTES // 1024} KiB"
    return {f"{name} of a tree ({size}), ms": milliseconds(times) for name, times in took.items()}


async def programs(client: SandboxClient, count: int) -> dict[str, object]:
    """Run programs in one sandbox, one after the other."""
    sandbox = await client.start()
    took = []
    for _ in range(count):
        began = time.perf_counter()
        assert (await sandbox.exec(["true"])).rc == 0
        took.append(time.perf_counter() - began)
    await sandbox.kill()
    return {
        "program, median ms": milliseconds(took),
        "program, 95th percentile ms": round(1000 * statistics.quantiles(took, n=20)[-1], 1),
    }


async def at_once(client: SandboxClient, process: psutil.Process, count: int) -> dict[str, object]:
    """Start many sandboxes that stay, and look at their memory."""
    limits = dataclasses.replace(SandboxLimits(), disk_bytes=16 << 20)
    free, began, cpu = psutil.virtual_memory().available, time.perf_counter(), cpu_s(process)
    gate = asyncio.Semaphore(32)

    async def start() -> Sandbox:
        async with gate:
            return await client.start(limits=limits)

    sandboxes = await asyncio.gather(*(start() for _ in range(count)))
    wall = time.perf_counter() - began
    used = free - psutil.virtual_memory().available
    cpu = cpu_s(process) - cpu
    pss = sum(memory(each) for each in process.children(recursive=True))
    answers = await asyncio.gather(*(each.exec(["true"], timeout_s=300) for each in sandboxes[:100]))
    assert all(answer.rc == 0 for answer in answers)
    began = time.perf_counter()
    await asyncio.gather(*(each.kill() for each in sandboxes))
    return {
        f"{count} at once, seconds": round(wall, 1),
        f"{count} at once, CPU seconds": round(cpu, 1),
        f"{count} at once, MiB of processes (Pss)": round(pss / 2**20),
        f"{count} at once, MiB less available on the node": round(used / 2**20),
        f"{count} at once, seconds to end": round(time.perf_counter() - began, 1),
    }


def cpu_s(process: psutil.Process) -> float:
    """Return CPU seconds of a daemon and of all children of it and of its spawner that have ended."""
    return sum(sum(each.cpu_times()[:4]) for each in (process, *process.children()))


def memory(process: psutil.Process) -> int:
    """Return the proportional set size of a process; 0 where it has ended."""
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0


def milliseconds(took: list[float]) -> float:
    """Return the median of seconds, in milliseconds."""
    return round(1000 * statistics.median(took), 1)


if __name__ == "__main__":
    main()
