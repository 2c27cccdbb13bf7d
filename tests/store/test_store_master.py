"""The role ``store`` with a real Mooncake master: start, death, restart, segments that come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from free_ports import free_blocks
from patience import wait_for
from store_testing import MISSING, REASON, RUN_ID, MasterRole, make_run_dir

from hpcrl.errors import HpcrlError
from hpcrl.runs.role import FailureRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.store.admin import StoreAdmin
from hpcrl.store.canary import run_canary
from hpcrl.store.endpoints import StoreEndpoints, engine_settings

pytestmark = pytest.mark.skipif(MISSING, reason=REASON)

#: a client that keeps a segment until it is killed
KEEP = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", sys.argv[1], 32 << 20, 16 << 20, "tcp", "", sys.argv[2], tenant_id=sys.argv[3]) == 0
assert store.put("mine", b"x" * 5000) == 0
print("joined", flush=True)
time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run_dir(tmp_path / "run")


@pytest.fixture
def port() -> int:
    return free_blocks([3])[0]


@pytest.fixture
def role(run: RunDir, port: int) -> Iterator[MasterRole]:
    role = MasterRole(run, port)
    yield role
    if role.process.poll() is None:
        role.stop()


def master_pid(role: MasterRole) -> int:
    (child,) = psutil.Process(role.process.pid).children()
    return int(child.pid)


def canary(endpoints: StoreEndpoints, timeout_s: float = 20.0) -> None:
    run_canary(endpoints, host="127.0.0.1", run_id=RUN_ID, protocol="tcp", timeout_s=timeout_s)


def test_a_ready_master_takes_and_gives_blocks(role: MasterRole) -> None:
    endpoints = role.wait_ready()
    canary(endpoints)
    status = StoreAdmin(endpoints.admin).status()
    assert status.segments == []  # the canary left nothing
    # on the address it was given, all three ports, and nowhere else
    role_processes = [psutil.Process(role.process.pid), psutil.Process(master_pid(role))]
    listening = {c.laddr for p in role_processes for c in p.net_connections("tcp") if c.status == "LISTEN"}
    assert {ip for ip, _ in listening} == {"127.0.0.1"}
    assert {port for _, port in listening} >= {endpoints.rpc_port, endpoints.metadata_port, endpoints.admin_port}
    assert status.metrics["master_put_start_requests_total"] >= 1
    assert role.stop() == 0
    assert not StoreAdmin(endpoints.admin, timeout_s=1).healthy()


def test_segments_are_counted_and_their_loss_is_an_event(role: MasterRole) -> None:
    endpoints = role.wait_ready()
    command = [sys.executable, "-c", KEEP, endpoints.metadata, endpoints.master, RUN_ID]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"joined\n"
        status = StoreAdmin(endpoints.admin).status()
        assert [s.capacity_bytes for s in status.segments] == [32 << 20]
        assert status.segments[0].host == "127.0.0.1"
        assert status.used_bytes == 5000
        assert status.keys == 1
        wait_for(lambda: role.events("store.segment_joined"), 30.0, "event of the segment")
        client.kill()
    wait_for(lambda: role.events("store.segment_lost"), 30.0, "event of the loss")
    assert StoreAdmin(endpoints.admin).status().segments == []


def test_a_dead_master_ends_the_role_and_the_next_has_its_ports(role: MasterRole, run: RunDir, port: int) -> None:
    before = role.wait_ready()
    os.kill(master_pid(role), signal.SIGKILL)
    assert role.process.wait(120) == 1
    (record,) = FailureRecord.read_all(run, 1)
    assert "mooncake_master ended with exit code -9" in record.message
    with pytest.raises(HpcrlError, match="does not answer"):
        StoreAdmin(before.admin, timeout_s=1).status()
    again = MasterRole(run, port)
    try:
        assert again.wait_ready() == before
        canary(before)
    finally:
        again.stop()


def test_killing_the_role_by_sigterm_leaves_no_master(role: MasterRole) -> None:
    role.wait_ready()
    pid = master_pid(role)
    assert role.stop() == 0
    assert not psutil.pid_exists(pid)


def test_the_canary_names_node_and_master_where_no_process_listens(port: int) -> None:
    nowhere = StoreEndpoints(host="127.0.0.1", rpc_port=port, metadata_port=port, admin_port=port)
    with pytest.raises(HpcrlError, match=rf"canary on 127\.0\.0\.1 \(master 127\.0\.0\.1:{port}, tcp\)"):
        canary(nowhere, timeout_s=1.0)


def test_settings_that_an_engine_gets() -> None:
    endpoints = StoreEndpoints(host="10.0.0.7", rpc_port=1, metadata_port=2, admin_port=3)
    assert engine_settings(
        endpoints,
        run_id=RUN_ID,
        protocol="rdma",
        devices=("mlx5_0", "mlx5_3"),
        segment_bytes=125 << 30,
        local_buffer_bytes=1 << 30,
        disk=False,
    ) == {
        "metadata_server": "http://10.0.0.7:2/metadata",
        "master_server_address": "10.0.0.7:1",
        "protocol": "rdma",
        "device_name": "mlx5_0,mlx5_3",
        "mode": "embedded",
        "global_segment_size": 125 << 30,
        "local_buffer_size": 1 << 30,
        "enable_offload": False,
        "tenant_id": RUN_ID,
    }
