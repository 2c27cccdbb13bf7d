"""How an engine joins a real pool: proof first, then the engine in the same process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from free_ports import free_blocks
from store_testing import MISSING, REASON, RUN_ID, MasterRole, make_run_dir

from hpcrl.errors import HpcrlError
from hpcrl.runs.events import read_events
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.store import join
from hpcrl.store.admin import StoreAdmin
from hpcrl.store.endpoints import StoreEndpoints

pytestmark = pytest.mark.skipif(MISSING, reason=REASON)

#: of the node, as a plan may know it; not the one that connections to the master leave from
HOST = "127.7.7.7"
#: says what an engine would find
ENGINE = """
import json, os, sys
with open(os.environ["MOONCAKE_CONFIG_PATH"]) as file:
    print(json.dumps([os.getpid(), sys.argv[1:], os.environ["VLLM_HOST_IP"], json.load(file)]))
"""


@pytest.fixture
def port() -> int:
    return free_blocks([3])[0]


@pytest.fixture
def role(tmp_path: Path, port: int) -> Iterator[MasterRole]:
    run = make_run_dir(tmp_path / "run")
    record(run)
    role = MasterRole(run, port)
    yield role
    role.stop()


def record(run: RunDir) -> None:
    for path in (run.recipe_path, run.cluster_path):
        path.touch()
    msgspec.structs.replace(RunRecord.new(run, name="r", provenance={}), run_id=RUN_ID).write(run)


def test_a_node_that_can_use_the_pool_becomes_the_engine(role: MasterRole) -> None:
    endpoints = role.wait_ready()
    settings = ["--protocol", "tcp", "--segment-bytes", "1000", "--local-buffer-bytes", "500"]
    settings += ["--host", HOST]
    command = [sys.executable, "-m", "hpcrl.store.join", *settings, "--", sys.executable, "-c", ENGINE, "--flag"]
    env = {**os.environ, "HPCRL_RUN_DIR": str(role.run.path), "HPCRL_ATTEMPT": "1", "HPCRL_ROLE": "engine"}
    with subprocess.Popen(command, env=env | {"HPCRL_REPLICA": "3"}, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    pid, words, address, config = json.loads(out.splitlines()[-1])
    assert (pid, words, address) == (process.pid, ["--flag"], HOST)
    assert (config["global_segment_size"], config["local_buffer_size"]) == (1000, 500)
    assert (config["master_server_address"], config["tenant_id"]) == (endpoints.master, RUN_ID)
    (event,) = read_events(role.run, kind="store.canary")
    assert (event.writer, event.data["host"]) == ("engine-3", HOST)
    assert StoreAdmin(endpoints.admin).status().keys == 0
    assert role.events("store.segment_joined") == []  # a canary is not an engine


@pytest.mark.parametrize(("given", "own"), [("127.7.7.7", "127.7.7.7"), ("dev-007", "127.0.0.1"), ("", "127.0.0.1")])
def test_a_name_is_not_an_address(given: str, own: str) -> None:
    """Mooncake and vLLM want addresses."""
    master = StoreEndpoints(host="127.0.0.1", rpc_port=1, metadata_port=2, admin_port=3)
    assert join._own_address(given, master) == own


def test_a_node_that_cannot_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = StoreEndpoints(host="127.0.0.1", rpc_port=port, metadata_port=port + 1, admin_port=port + 2)
    monkeypatch.setattr(join, "_CANARY_S", 1.0)
    with pytest.raises(HpcrlError, match=r"127\.0\.0\.1 cannot use the KV store: .*cannot be reached on port"):
        join._canary_apart(nowhere, host="127.0.0.1", run_id=RUN_ID, protocol="tcp", devices=())
