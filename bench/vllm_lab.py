"""What the benches of vLLM share: small models, hand-offs of them, engines and routers by the commands of a plan."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import ROOT

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role, RoleGroup
from hpcrl.jobplan.groups import make_groups
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import published_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import ModelArch, Qwen3MoeArch
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.network.ports import choose_blocks
from hpcrl.storage.files import write_json
from hpcrl.supervisor.launch.commands import fill_placeholders
from hpcrl.weights import Handoff, HandoffStore, VersionCommitter, write_shard
from hpcrl.weights.format.shard import TensorBytes
from hpcrl.weights.write.handoff_writer import ShardResult

HOST = "127.0.0.1"
_START_S = 1200.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def python() -> str:
    """The interpreter of engines and routers."""
    return os.environ.get("HPCRL_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))


class Engine:
    """A server: where it is, and a small client of it."""

    def __init__(self, name: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self.url, self.process, self.log = name, url, process, log

    def call(
        self, path: str, body: Any = None, *, method: str = "POST", session: str = "", timeout_s: float = 900.0
    ) -> Any:
        """The decoded answer of a call; fails where it is not 200."""
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("content-type", "application/json")
        if session:
            request.add_header("x-session-id", session)
        try:
            with _OPENER.open(request, timeout=timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{self.name}: {path} answered {error.code}: {error.read()[:500]!r}") from error
        with contextlib.suppress(ValueError):
            return json.loads(text)
        return text.decode()

    def generate(
        self, token_ids: Sequence[int], *, session: str = "", salt: str = "bench", name: str = "", **sampling: Any
    ) -> Any:
        """The only choice of ``/inference/v1/generate``."""
        body = {"token_ids": list(token_ids), "sampling_params": sampling, "cache_salt": salt}
        if name:
            body["request_id"] = name
        return self.call("/inference/v1/generate", body, session=session)["choices"][0]

    def metrics(self) -> dict[str, float]:
        """Samples by name, summed over labels."""
        values: dict[str, float] = {}
        for line in self.call("/metrics", method="GET").splitlines():
            if line and not line.startswith("#"):
                name = line.split("{")[0].split(" ")[0]
                values[name] = values.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return values

    def wait_ready(self, path: str) -> None:
        """Until ``path`` answers 200."""
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError, RuntimeError):
                self.call(path, method="GET", timeout_s=5.0)
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not become ready; log:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """The whole group: workers outlive a server that ended badly."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def started_engines(model: Path, logs: Path, *settings: str) -> Iterator[list[Engine]]:
    """Engines of ``recipes/quickstart_vllm.yaml`` with changes, on loopback, without a KV pool."""
    # a bench that is told to end takes its engines along: they are groups of their own
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    group = _groups(f"model.path={model}", "engine.kv_store=null", *settings)[Role.ENGINE]
    ports = choose_blocks([group.ports] * group.replicas, first=21000, last=29999, host=HOST)
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(_started(group, i, port, logs)) for i, port in enumerate(ports)]
        for engine in engines:
            engine.wait_ready("/health")
        yield engines


@contextlib.contextmanager
def routed(engines: Sequence[Engine], logs: Path, *settings: str) -> Iterator[Engine]:
    """The router of the recipe in front of engines."""
    group = _groups(*settings)[Role.ROUTER]
    (port,) = choose_blocks([group.ports], first=21000, last=29999, host=HOST)
    with _started(group, 0, port, logs) as router:
        router.wait_ready("/liveness")
        for engine in engines:
            router.call(f"/add_worker?url={engine.url}")
        yield router


def _groups(*settings: str) -> dict[Role, RoleGroup]:
    recipe = load_recipe("quickstart_vllm", settings).value
    return {group.role: group for group in make_groups(recipe, load_cluster("local").value, "bench")}


@contextlib.contextmanager
def _started(group: RoleGroup, replica: int, port: int, logs: Path) -> Iterator[Engine]:
    values = {"python": python(), "host": HOST, "port": str(port), "replica": str(replica), "run_dir": str(logs)}
    log, command = logs / f"{group.role.value}-{replica}.log", list(fill_placeholders(group.command, values))
    # nobody has a token here: there is no run
    if "--middleware" in command:
        del command[(at := command.index("--middleware")) : at + 2]
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            env={**os.environ, **group.env},
        )
    engine = Engine(f"{group.role.value}-{replica}", f"http://{HOST}:{port}", process, log)
    try:
        yield engine
    finally:
        engine.stop()


def make_arch(path: Path, **sizes: int) -> ModelArch:
    """A small Qwen3-MoE with a character tokenizer, which is written to ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    vocab_size, eos = write_character_tokenizer(path)
    defaults = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest that vLLM's CPU attention takes
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": eos,
    }
    return Qwen3MoeArch(**{**defaults, **sizes})


def random_model(arch: ModelArch, seed: int, std: float = 0.25) -> Decoder:
    """Weights large enough that distributions are far from uniform and differ much between seeds."""
    model = build_model(arch, device="cpu").requires_grad_(False).eval()
    model.init_weights(torch.Generator().manual_seed(seed), std=std)
    return model


def write_model(path: Path, model: Decoder, dtype: torch.dtype) -> None:
    """The start model of engines."""
    config = {**model.arch.to_hf_config(), "torch_dtype": str(dtype).removeprefix("torch.")}
    write_json(path / "config.json", config)
    write_shard(path / "model.safetensors", _tensor_bytes(model, dtype))


def publish(store: HandoffStore, version: int, model_dir: Path, model: Decoder, dtype: torch.dtype) -> Handoff:
    """A hand-off of a model."""
    writer = VersionCommitter.claim(store.root, 1)
    path = writer.stage(version) / "model-00001-of-00001.safetensors"
    record, records = write_shard(path, _tensor_bytes(model, dtype))
    shard = ShardResult(path.name, record, records)
    return writer.publish(version=version, shards=[shard], model_dir=model_dir, producer="bench")


def _tensor_bytes(model: Decoder, dtype: torch.dtype) -> list[TensorBytes]:
    tensors = ((name, tensor.to(dtype).contiguous()) for name, tensor in published_tensors(model, model.adapter))
    return [
        TensorBytes(
            name,
            str(dtype).removeprefix("torch."),
            tuple(tensor.shape),
            memoryview(tensor.view(torch.uint8).numpy()).cast("B"),
        )
        for name, tensor in tensors
    ]
