"""``python -m hpcrl.store.master``: the role ``store``. Runs Mooncake's master and the metadata server of the pool, and
reports events of the master.

When the master dies, engines continue without the pool: a request then computes its prompt anew, after a few seconds of
waiting. This process ends with it, and the supervisor starts it again on the same ports; segments then register again
by themselves. The contents of the pool are lost, which costs only time.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import time
from types import FrameType

from hpcrl.errors import DeadlineError, HpcrlError
from hpcrl.mooncake import program_of_master
from hpcrl.runs.events import EventWriter
from hpcrl.runs.record import RunRecord
from hpcrl.runs.role import RoleContext, run_role
from hpcrl.store.admin import PoolStatus, StoreAdmin
from hpcrl.store.canary import CANARY_SEGMENT_BYTES
from hpcrl.store.endpoints import StoreEndpoints
from hpcrl.store.metadata import MetadataServer

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_LOOK_S = 2.0
_START_S = 60.0
_SILENT_S = 30.0
"""A master that lives but does not answer for so long is ended, so that it is started again."""
_STOP_S = 5.0


def master_command(program: str, endpoints: StoreEndpoints, settings: argparse.Namespace) -> list[str]:
    """Return the command line of Mooncake's master."""
    flags = {
        "rpc_port": endpoints.rpc_port,
        "rpc_address": endpoints.host,
        "metrics_host": endpoints.host,
        "metrics_port": endpoints.admin_port,
        "client_ttl": max(1, round(settings.client_ttl_s)),
        "default_kv_lease_ttl": round(settings.lease_ttl_s * 1000),
        "eviction_high_watermark_ratio": settings.eviction_high_watermark,
        "eviction_ratio": settings.eviction_ratio,
        "enable_offload": str(settings.disk).lower(),
    }
    if settings.etcd:
        # a second candidate of the same run waits until the lease of the first has ended
        flags |= {"enable_ha": "true", "ha_backend_type": "etcd", "ha_backend_connstring": settings.etcd}
        flags |= {"etcd_endpoints": settings.etcd, "cluster_id": endpoints.cluster}
    return [program, *(f"--{name}={value}" for name, value in flags.items())]


def _parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpcrl.store.master")
    parser.add_argument("--host", required=True)
    parser.add_argument(
        "--port", type=int, required=True, help="port for clients; the master also uses the two ports above it"
    )
    parser.add_argument("--client-ttl-s", type=float, required=True)
    parser.add_argument("--lease-ttl-s", type=float, required=True)
    parser.add_argument("--eviction-high-watermark", type=float, required=True)
    parser.add_argument("--eviction-ratio", type=float, required=True)
    parser.add_argument("--disk", action="store_true")
    parser.add_argument(
        "--etcd", default="", help="endpoints of etcd, separated by semicolons: the master is elected there"
    )
    return parser.parse_args(argv)


def _endpoints(context: RoleContext, settings: argparse.Namespace) -> StoreEndpoints:
    """Return the endpoints, equal for each start in an attempt, because engines know them."""
    port = settings.port
    endpoints = StoreEndpoints(
        host=settings.host,
        rpc_port=port,
        metadata_port=port + 1,
        admin_port=port + 2,
        etcd=settings.etcd,
        # an attempt does not wait for the lease of the one before it
        cluster=f"{RunRecord.read(context.run).run_id}-{context.attempt}" if settings.etcd else "",
    )
    endpoints.write(context.run, context.attempt)
    return endpoints


class _Watch:
    """Says in events what changes in the pool."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self._segments: set[str] = set()

    def look(self, status: PoolStatus) -> None:
        """Compare with the last look."""
        now = {s.name for s in status.segments if s.capacity_bytes != CANARY_SEGMENT_BYTES}
        for name in sorted(now - self._segments):
            self._events.emit("store.segment_joined", segment=name, segments=len(now))
        for name in sorted(self._segments - now):
            # its node or engine is gone: blocks that were only there are computed again
            self._events.emit("store.segment_lost", segment=name, segments=len(now))
        self._segments = now


def main(context: RoleContext) -> None:
    """Run the master until it ends or a signal asks to stop."""
    settings = _parse()
    endpoints, events = _endpoints(context, settings), context.events()
    command = master_command(program_of_master(), endpoints, settings)
    _log.info("%s", " ".join(command))
    metadata = MetadataServer(endpoints.host, endpoints.metadata_port)
    process = subprocess.Popen(command)
    stopping: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        stopping.append(signum)
        process.terminate()

    signal.signal(signal.SIGTERM, stop)
    admin = StoreAdmin(endpoints.admin)
    try:
        _wait_ready(process, admin)
        events.emit("store.ready", master=endpoints.master, admin=endpoints.admin)
        context.ready()
        _follow(process, admin, _Watch(events), stopping)
    finally:
        _end(process)
        metadata.close()
    if not stopping:
        raise HpcrlError(f"mooncake_master ended with exit code {process.returncode}; its output is in this log")


def _wait_ready(process: subprocess.Popen[bytes], admin: StoreAdmin) -> None:
    deadline = time.monotonic() + _START_S
    while not admin.healthy():
        if process.poll() is not None:
            raise HpcrlError(f"mooncake_master ended at its start with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise DeadlineError(f"mooncake_master was not healthy at {admin.url} within {_START_S:g} s")
        time.sleep(_POLL_S)


def _follow(process: subprocess.Popen[bytes], admin: StoreAdmin, watch: _Watch, stopping: list[int]) -> None:
    answered = time.monotonic()
    while process.poll() is None and not stopping:
        try:
            watch.look(admin.status())
            answered = time.monotonic()
        except HpcrlError as error:
            silent_s = time.monotonic() - answered
            _log.warning("%s (for %.0f s)", error, silent_s)
            if silent_s > _SILENT_S and process.poll() is None:
                raise DeadlineError(f"mooncake_master runs, but has not answered for {silent_s:.0f} s") from error
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    run_role(main)
