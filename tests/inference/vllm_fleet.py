"""Parts of a run as the supervisor starts them, by the commands of a plan, without a supervisor."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from engine_helpers import Server
from free_ports import free_blocks
from vllm_environment import VLLM_PYTHON

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import HttpProbe, Role, RoleGroup
from hpcrl.jobplan.groups import make_groups
from hpcrl.modeling.decoder import Decoder
from hpcrl.network.credentials import Credentials
from hpcrl.runs.record import RunRecord
from hpcrl.runs.role import Endpoints, ready_path
from hpcrl.runs.rundir import RunDir
from hpcrl.supervisor.launch.commands import fill_placeholders, role_environment
from hpcrl.supervisor.process.node_values import fill_node

HOST = "127.0.0.1"
RUN_ID = "0123456789abcdef"


class Fleet:
    """Store, engines and router of a recipe on loopback, in one run directory.

    Attributes
    ----------
    servers:
        By role and replica, as far as they were started.
    """

    def __init__(self, path: Path, model: tuple[Path, Decoder], *settings: str) -> None:
        self.run, (self._model_dir, self._model) = RunDir(path), model
        self.run.path.mkdir()
        self.attempt = self.run.start_attempt()
        self.headers = Credentials.of_run(self.run.path, self.attempt).headers
        for file in (self.run.recipe_path, self.run.cluster_path):
            file.touch()
        record = RunRecord.new(self.run, name="fleet", provenance={})
        msgspec.structs.replace(record, run_id=RUN_ID).write(self.run)
        overrides = [f"model.path={self._model_dir}", "engine.max_model_len=1024", *settings]
        recipe = load_recipe("quickstart_vllm", overrides).value
        groups = make_groups(recipe, load_cluster("local").value, "fleet")
        wanted = (Role.STORE, Role.ENGINE, Role.PREFILL, Role.DECODE, Role.ROUTER)
        self.groups = {group.role: group for group in groups if group.role in wanted}
        blocks = [(group, replica) for group in self.groups.values() for replica in range(group.replicas)]
        chosen = free_blocks([group.ports for group, _ in blocks])
        self._ports = {(g.role, replica): port for (g, replica), port in zip(blocks, chosen, strict=True)}
        self.servers: dict[tuple[Role, int], Server] = {}
        self._scratch = contextlib.ExitStack()
        urls: dict[str, list[str]] = {}
        for (role, _), port in self._ports.items():
            urls.setdefault(role.value, []).append(f"http://{HOST}:{port}")
        Endpoints(urls=urls).write(self.run, self.attempt)

    def start(self, *roles: Role, timeout_s: float = 1500.0) -> list[Server]:
        """Start all replicas of some roles together, and wait until they are ready."""
        started = [self._start(self.groups[r], i) for r in roles for i in range(self.groups[r].replicas)]
        deadline = time.monotonic() + timeout_s
        for group, replica, server in started:
            while not self._ready(group, replica, server):
                assert server.process.poll() is None, server.log.read_text()[-5000:]
                assert time.monotonic() < deadline, f"{group.role} is not ready:\n{server.log.read_text()[-5000:]}"
                time.sleep(0.1)
        return [server for *_, server in started]

    def _start(self, group: RoleGroup, replica: int) -> tuple[RoleGroup, int, Server]:
        port = self._ports[group.role, replica]
        values = {"python": str(VLLM_PYTHON), "host": HOST, "port": str(port), "replica": str(replica)}
        command = fill_placeholders(group.command, {**values, "run_dir": str(self.run.path)})
        env = role_environment(
            group, replica, run=self.run, run_id=RUN_ID, attempt=self.attempt, inherited=dict(os.environ)
        )
        # as the guard does: vLLM's sockets in TMPDIR have the same names in every server. Their paths have to be short
        scratch = self._scratch.enter_context(tempfile.TemporaryDirectory(prefix="hpcrl-", ignore_cleanup_errors=True))
        env = {**fill_node(env, 0, hosts=[HOST], interfaces=[]), "TMPDIR": scratch}
        log = self.run.path / f"{group.role.value}-{replica}.log"
        with log.open("ab") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True, env=env)
        url = f"http://{HOST}:{port}"
        server = Server(
            process, url, log, self._model, self._model_dir, kind="vllm", timeout_s=300.0, headers=self.headers
        )
        self.servers[group.role, replica] = server
        return group, replica, server

    def _ready(self, group: RoleGroup, replica: int, server: Server) -> bool:
        if not isinstance(group.ready, HttpProbe):
            return ready_path(self.run, self.attempt, group.role.value, replica).exists()
        with contextlib.suppress(OSError):
            return bool(server.get(group.ready.path)[0] == 200)
        return False

    def stop(self) -> None:
        """End all, the store last."""
        with self._scratch:
            for _, server in sorted(self.servers.items(), key=lambda item: item[0][0] is Role.STORE):
                server.stop()


def generate(server: Server, name: str, prompt: list[int], *, session: str = "s", **request: Any) -> Any:
    """The choice of ``/inference/v1/generate``."""
    sampling = {"max_tokens": 24, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    body = {"model": name, "token_ids": prompt, "sampling_params": {**sampling, **request.pop("sampling", {})}}
    status, answer = server.call("/inference/v1/generate", {**body, **request}, x_session_id=session)
    assert status == 200, answer
    return answer["choices"][0]
