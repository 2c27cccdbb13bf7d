"""The master of the KV pool where a site has etcd: a real one elects it, and clients ask it who the master is."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from free_ports import free_blocks
from patience import wait_for
from store_testing import MISSING, REASON, RUN_ID, MasterRole, make_run_dir

from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.store.endpoints import StoreEndpoints, engine_settings
from hpcrl.store.join import _canary_apart

ETCD = shutil.which("etcd")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.campaign,
    pytest.mark.skipif(MISSING, reason=REASON),
    pytest.mark.skipif(ETCD is None, reason="etcd is not installed: apt-get install etcd-server"),
]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """URL of an etcd of our own."""
    port, peer = free_blocks([1, 1])
    url, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    command = [ETCD, "--data-dir", tmp_path / "etcd", "--listen-client-urls", url, "--advertise-client-urls", url]
    command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
    command += ["--initial-cluster", f"default={peers}"]

    def healthy() -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{url}/health", timeout=2.0).status == 200)
        return False

    with (tmp_path / "etcd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(healthy, 30.0, "etcd")
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run_dir(tmp_path / "run")
    for file in (run.recipe_path, run.cluster_path):
        file.touch()
    record = RunRecord.new(run, name="run", provenance={})
    msgspec.structs.replace(record, run_id=RUN_ID).write(run)
    return run


def prove(endpoints: StoreEndpoints) -> None:
    """Put and get, in a process of its own: etcd's client brings threads that must not be ours."""
    _canary_apart(endpoints, host="127.0.0.1", run_id=RUN_ID, protocol="tcp", devices=())


def test_a_master_is_elected_and_elected_again(run: RunDir, etcd: str) -> None:
    (port,) = free_blocks([3])
    role = MasterRole(run, port, etcd=etcd)
    try:
        endpoints = role.wait_ready()
        assert endpoints.master == f"etcd://{etcd}"
        assert endpoints.cluster == f"{RUN_ID}-1"
        settings = engine_settings(
            endpoints,
            run_id=RUN_ID,
            protocol="tcp",
            devices=(),
            segment_bytes=1,
            local_buffer_bytes=1,
            disk=False,
        )
        assert settings["master_server_address"] == endpoints.master
        prove(endpoints)
        (master,) = psutil.Process(role.process.pid).children()
        master.kill()
        assert role.process.wait(120) != 0
        # its lease must end before another is elected
        role = MasterRole(run, port, etcd=etcd)
        assert role.wait_ready() == endpoints
        prove(endpoints)
    finally:
        if role.process.poll() is None:
            role.stop()
