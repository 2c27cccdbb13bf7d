"""``python -m hpcrl.store.join … -- COMMAND``: how an engine starts that has a share in the KV pool.

Proves that this node can use the pool (put, get, compare), writes what the engine must know into the run directory,
and becomes COMMAND. An engine that cannot use the pool would serve, slowly and in silence: it does not start.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.network.interfaces import address_towards
from hpcrl.runs.events import EventWriter
from hpcrl.runs.record import RunRecord
from hpcrl.runs.role import RoleContext, run_role
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import write_json
from hpcrl.store.canary import CanaryResult, run_canary
from hpcrl.store.endpoints import StoreEndpoints, engine_settings

_CANARY_S = 60.0
_SLACK_S = 30.0
"""Loading mooncake, and closing it."""


def config_path(run: RunDir, attempt: int, role: str, replica: int, node: int) -> Path:
    """Return the path for ``MOONCAKE_CONFIG_PATH`` of the engines on one node of a replica."""
    return run.attempt_dir(attempt) / "store" / f"{role}-{replica}-{node}.json"


def _parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpcrl.store.join")
    parser.add_argument("--protocol", choices=("rdma", "tcp"), required=True)
    parser.add_argument("--host", default="", help="address of this node, if the plan knows it")
    parser.add_argument("--devices", default="", help="adapters by name, separated by commas")
    parser.add_argument("--segment-bytes", type=int, required=True, help="memory that each rank gives to the pool")
    parser.add_argument(
        "--local-buffer-bytes", type=int, required=True, help="size of the transfer buffer of each rank"
    )
    parser.add_argument("--node", type=int, default=0, help="index of this node in the replica")
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


def main(context: RoleContext) -> None:
    """Prove, write, become the engine."""
    settings = _parse()
    endpoints = StoreEndpoints.read(context.run, context.attempt)
    run_id = RunRecord.read(context.run).run_id
    devices = tuple(filter(None, settings.devices.split(",")))
    host = _own_address(settings.host, endpoints)
    result = _canary_apart(endpoints, host=host, run_id=run_id, protocol=settings.protocol, devices=devices)
    writer = f"{context.writer}.{settings.node}" if settings.node else context.writer
    with contextlib.closing(EventWriter(context.run, attempt=context.attempt, writer=writer)) as events:
        events.emit("store.canary", host=result.host, put_s=result.put_s, get_s=result.get_s)
    path = config_path(context.run, context.attempt, context.role, context.replica, settings.node)
    path.parent.mkdir(exist_ok=True)
    value = engine_settings(
        endpoints,
        run_id=run_id,
        protocol=settings.protocol,
        devices=devices,
        segment_bytes=settings.segment_bytes,
        local_buffer_bytes=settings.local_buffer_bytes,
        disk=settings.disk,
    )
    write_json(path, value)
    os.environ |= {"MOONCAKE_CONFIG_PATH": str(path), **endpoints.variables}
    # by default vLLM uses the address of the default route, which may be another network than that of the other nodes
    os.environ.setdefault("VLLM_HOST_IP", result.host)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(settings.command[0], settings.command)


def _own_address(given: str, endpoints: StoreEndpoints) -> str:
    """Return the address for other nodes: Slurm's address of this node, else the one on the route to the master.

    A name is not sufficient: mooncake and vLLM need addresses, and nodes often resolve their own name to 127.0.1.1.
    """
    try:
        return str(ipaddress.ip_address(given))
    except ValueError:
        return address_towards(endpoints.host)


def _canary_apart(
    endpoints: StoreEndpoints, *, host: str, run_id: str, protocol: str, devices: tuple[str, ...]
) -> CanaryResult:
    """Run the canary in its own process, because its calls cannot be interrupted and its threads must not stay.

    Raises
    ------
    HpcrlError
        It failed or took too long; names the node.
    """
    processes = get_context("spawn")
    ours, theirs = processes.Pipe(duplex=False)
    settings = {"host": host, "run_id": run_id, "protocol": protocol, "devices": devices, "timeout_s": _CANARY_S}
    child = processes.Process(target=_canary, args=(theirs, endpoints, settings), name="canary", daemon=True)
    child.start()
    theirs.close()
    try:
        answered = ours.poll(_CANARY_S + _SLACK_S)
        said = ours.recv() if answered else None
    except EOFError:
        said = None
    finally:
        child.kill()
        child.join()
    if isinstance(said, CanaryResult):
        return said
    why = said or (f"no answer within {_CANARY_S + _SLACK_S:g} s" if not answered else "its process ended")
    raise HpcrlError(
        f"{host} cannot use the KV store: {why}\n"
        "    hint: hpcrl store canary on that node; the log of the role store says how the master is"
    )


def _canary(answer: Connection, endpoints: StoreEndpoints, settings: dict[str, Any]) -> None:
    try:
        result = run_canary(endpoints, **settings)
    except HpcrlError as error:
        answer.send(str(error))
    else:
        answer.send(result)


if __name__ == "__main__":
    run_role(main)
