"""A process that owns a daemon and holds sandboxes with programs; tests kill it, or what it has started.

``sandbox_owner.py SECONDS [DIRECTORY]``: with a directory it is a client of a daemon that another process owns.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from hpcrl.processes.daemon_threads import run_process
from hpcrl.sandboxes.client import SandboxClient, SandboxDaemon


async def main(seconds: str, directory: str = "") -> None:
    """Start three sandboxes that each have a program in the background, and wait for ever."""
    daemon = None if directory else SandboxDaemon()
    client = await SandboxClient.connect(Path(directory) if daemon is None else daemon.directory)
    for _ in range(3):
        sandbox = await client.start()
        await sandbox.exec(["sh", "-c", f"setsid sleep {seconds} > /dev/null 2>&1 &"])
    # a start and a program that are under way
    starts = [asyncio.create_task(client.start()) for _ in range(3)]
    programs = [asyncio.create_task(sandbox.exec(["sleep", seconds], timeout_s=1000))]
    print(json.dumps({"daemon": daemon and daemon.pid, "directory": str(daemon and daemon.directory)}), flush=True)
    await asyncio.gather(*starts, *programs)


if __name__ == "__main__":
    run_process(main(*sys.argv[1:]))
