"""The daemon of sandboxes, one on a node: ``python -m hpcrl.sandboxes.daemon --directory DIRECTORY``.

It is started by `hpcrl.sandboxes.client.SandboxDaemon`, and ends with the process that started it, together with all
sandboxes. The directory is private and has the secret in ``secret``; the socket is made next to that file.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import shutil
import signal
import stat
import sys
from pathlib import Path

from hpcrl.processes.daemon_threads import run_process
from hpcrl.processes.procfs import adopt_orphans, die_with_parent
from hpcrl.sandboxes.bubblewrap_host import BubblewrapHost
from hpcrl.sandboxes.container_commands import ApptainerCommands, DockerCommands
from hpcrl.sandboxes.container_host import ContainerHost
from hpcrl.sandboxes.interface import SandboxError, SandboxStartError
from hpcrl.sandboxes.node_memory import NodeMemory
from hpcrl.sandboxes.process_trees import kill_descendants
from hpcrl.sandboxes.server import SandboxServer

READY_LINE = "ready"
SECRET_FILE, SOCKET_FILE = "secret", "socket"
_CLOSE_S = 30.0


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hpcrl.sandboxes.daemon", description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="private directory with the file `secret`")
    parser.add_argument(
        "--lifeline", type=int, help="pipe that ends with the owner; without it the daemon ends with its parent"
    )
    parser.add_argument("--cgroup", type=Path, help="delegated control group (version 2) for sandboxes alone")
    backends = ("bubblewrap", "docker", "podman", "apptainer")
    parser.add_argument("--backend", choices=backends, default="bubblewrap", help="program that makes sandboxes")
    given = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    _raise_open_files()
    try:
        secret = _read_secret(given.directory)
        run_process(_serve(given, secret))
    except SandboxError as error:
        kill_descendants(limit_s=_CLOSE_S)
        # the first line is for the process that waits for READY_LINE
        print(f"error {error}", flush=True)
        return 1
    return 0


async def _serve(given: argparse.Namespace, secret: str) -> None:
    directory: Path = given.directory
    lifeline: int | None = given.lifeline
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    if lifeline is None:
        die_with_parent()
        lifeline, _ = os.pipe()  # ends with ourselves
    os.set_inheritable(lifeline, False)

    def owner_ended() -> None:
        loop.remove_reader(lifeline)
        ending.set()

    loop.add_reader(lifeline, owner_ended)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    # what the spawner leaves where it is killed
    adopt_orphans()
    host: BubblewrapHost | ContainerHost
    node_memory = NodeMemory.of(os.environ)
    if given.backend == "bubblewrap":
        host = BubblewrapHost(directory, lifeline, on_lost=ending.set, delegated=given.cgroup, node_memory=node_memory)
    else:
        commands = ApptainerCommands() if given.backend == "apptainer" else DockerCommands(given.backend)
        host = ContainerHost(commands, directory, node_memory=node_memory)
    server = SandboxServer(host, secret)
    try:
        await server.listen(directory / SOCKET_FILE)
        print(READY_LINE, flush=True)
        await ending.wait()
    finally:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await server.close()
                await host.close()
        finally:
            kill_descendants(limit_s=_CLOSE_S)
            host.release()
            if given.lifeline is not None:
                # an owner that was killed does not remove what it has made
                shutil.rmtree(directory, ignore_errors=True)


def _read_secret(directory: Path) -> str:
    """Read the secret of a directory that no other user may write to or read.

    Raises
    ------
    SandboxStartError
        Other users may, or there is no secret.
    """
    path = directory / SECRET_FILE
    for each in (directory, path):
        try:
            found = each.stat(follow_symlinks=False)
        except OSError as error:
            raise SandboxStartError(f"{each}: {error.strerror}") from None
        if found.st_uid != os.geteuid() or found.st_mode & 0o077 or stat.S_ISLNK(found.st_mode):
            raise SandboxStartError(f"{each} must belong to the user alone\n    hint: chmod -R go= {directory}")
    secret = path.read_text(encoding="ascii").strip()
    if len(secret) < 32:
        raise SandboxStartError(f"{path} has no secret of at least 32 characters")
    return secret


def _raise_open_files() -> None:
    """Take as many open files as the user may have: a sandbox needs two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
