"""Proof that a node can use the pool: put, get, compare, remove. Needs the package ``mooncake``."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.mooncake import load_client
from hpcrl.store.endpoints import StoreEndpoints

CANARY_SEGMENT_BYTES = 16 << 20
"""Bytes that a canary gives to the pool while it runs; engines give more."""
_BUFFER_BYTES = 16 << 20
_PAYLOAD_BYTES = 1 << 20
_RETRY_S = 0.5


class CanaryResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one node.

    Attributes
    ----------
    host:
        The node.
    put_s, get_s:
        Seconds for one MiB.
    """

    host: str
    put_s: float
    get_s: float


def run_canary(
    endpoints: StoreEndpoints,
    *,
    host: str,
    run_id: str,
    protocol: str,
    devices: tuple[str, ...] = (),
    timeout_s: float = 60.0,
) -> CanaryResult:
    """Join the pool with a little memory, write a block, read it back, and leave.

    Parameters
    ----------
    host:
        Address of this node that the others reach.
    run_id:
        The namespace.
    timeout_s:
        For the whole of it.

    Raises
    ------
    HpcrlError
        It did not work; names the node and what failed.
    MissingExtraError
        ``mooncake`` is not installed here.
    """
    deadline = time.monotonic() + timeout_s
    where = f"the KV store's canary on {host} (master {endpoints.master}, {protocol})"
    _wait_reachable(endpoints, deadline, where)
    store = _join(endpoints, host=host, run_id=run_id, protocol=protocol, devices=devices, where=where)
    try:
        key, payload = f"canary-{host}-{os.getpid()}-{time.time_ns()}", os.urandom(_PAYLOAD_BYTES)
        while True:
            started = time.monotonic()
            code = store.put(key, payload)
            put_s = time.monotonic() - started
            if code == 0:
                break
            # after a restart of the master segments need a moment to register again
            if time.monotonic() > deadline:
                raise HpcrlError(f"{where}: put failed with code {code} for {timeout_s:g} s")
            time.sleep(_RETRY_S)
        started = time.monotonic()
        found = store.get(key)
        get_s = time.monotonic() - started
        store.remove(key, True)
        if found != payload:
            what = "nothing" if not found else f"{len(found)} other bytes"
            raise HpcrlError(f"{where}: get gave {what} for the block that was just put")
        return CanaryResult(host=host, put_s=put_s, get_s=get_s)
    finally:
        store.close()


def _wait_reachable(endpoints: StoreEndpoints, deadline: float, where: str) -> None:
    """Connect before mooncake does: its own attempts take a minute and a half, and cannot be interrupted."""
    for what, port in (("master", endpoints.rpc_port), ("metadata server", endpoints.metadata_port)):
        while True:
            left_s = deadline - time.monotonic()
            try:
                socket.create_connection((endpoints.host, port), timeout=max(0.1, min(5.0, left_s))).close()
                break
            except OSError as error:
                if left_s <= 0:
                    raise HpcrlError(f"{where}: the {what} cannot be reached on port {port}: {error}") from error
                time.sleep(_RETRY_S)


def _join(
    endpoints: StoreEndpoints, *, host: str, run_id: str, protocol: str, devices: tuple[str, ...], where: str
) -> Any:
    client = load_client()
    os.environ.update(endpoints.variables)
    store = client.MooncakeDistributedStore()
    code = store.setup(
        host,
        endpoints.metadata,
        CANARY_SEGMENT_BYTES,
        _BUFFER_BYTES,
        protocol,
        ",".join(devices),
        endpoints.master,
        tenant_id=run_id,
    )
    if code != 0:
        raise HpcrlError(f"{where}: joining the pool failed with code {code}")
    return store
