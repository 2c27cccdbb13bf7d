"""What the tests of the engine share: a tiny model, its plain forward pass, hand-offs, a server process."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from free_ports import free_port
from numpy.typing import NDArray
from patience import patience, wait_for

from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import published_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import GlmMoeDsaArch, GptOssArch, ModelArch, NemotronHArch, Qwen3MoeArch, Qwen3NextArch
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.processes import procfs
from hpcrl.storage.files import write_json
from hpcrl.supervisor.process.guard import end_processes
from hpcrl.supervisor.process.leftovers import Scratch
from hpcrl.weights import Handoff, HandoffStore, VersionCommitter, write_shard
from hpcrl.weights.format.shard import TensorBytes
from hpcrl.weights.write.handoff_writer import ShardResult

SERVED_NAME = "tiny"


def tiny_arch(vocab_size: int = 103, eos_token_id: int = 2) -> ModelArch:
    return Qwen3MoeArch(
        vocab_size=vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        eos_token_id=eos_token_id,
    )


def tiny_nemotron_arch() -> ModelArch:
    return NemotronHArch(
        vocab_size=103,
        hidden_size=32,
        num_hidden_layers=5,
        layers_block_type=("mamba", "moe", "attention", "mlp", "mamba"),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=8,
        max_position_embeddings=256,
    )


def tiny_qwen3_next_arch() -> ModelArch:
    return Qwen3NextArch(
        vocab_size=103,
        hidden_size=32,
        num_hidden_layers=3,
        layer_types=("linear_attention", "full_attention", "linear_attention"),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        partial_rotary_factor=0.5,
        intermediate_size=24,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=(2,),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        max_position_embeddings=256,
    )


def tiny_gpt_oss_arch() -> ModelArch:
    return GptOssArch(
        vocab_size=103,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=11,
        max_position_embeddings=256,
    )


def tiny_glm_arch() -> ModelArch:
    """GLM-5 in small: the second layer takes what the indexer of the first has chosen."""
    return GlmMoeDsaArch(
        vocab_size=103,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=0,
        max_position_embeddings=256,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        index_n_heads=8,
        index_head_dim=8,
        index_topk=8,
        indexer_types=("full", "shared", "full"),
    )


def random_model(arch: ModelArch, seed: int) -> Decoder:
    """Weights large enough that distributions are far from uniform and differ much between seeds."""
    model = build_model(arch, device="cpu").requires_grad_(False).eval()
    model.init_weights(torch.Generator().manual_seed(seed), std=0.25)
    return model


def tensors_of(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in published_tensors(model, model.adapter)}


def shard_of(path: Path, tensors: dict[str, torch.Tensor]) -> ShardResult:
    data = [
        TensorBytes(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), memoryview(t.numpy()).cast("B"))
        for name, t in tensors.items()
    ]
    record, records = write_shard(path, data)
    return ShardResult(path.name, record, records)


def write_model(path: Path, seed: int, arch: ModelArch | None = None) -> Decoder:
    """A model directory with tokenizer; returns the model in it. ``arch``: None for `tiny_arch`."""
    vocab_size, eos = write_character_tokenizer(path)
    model = random_model(arch or tiny_arch(vocab_size, eos), seed)
    write_json(path / "config.json", model.arch.to_hf_config())
    shard_of(path / "model.safetensors", tensors_of(model))
    return model


def publish(
    store: HandoffStore, version: int, model_dir: Path, tensors: dict[str, torch.Tensor], shards: int = 2
) -> Handoff:
    """A hand-off of ``tensors``."""
    writer = VersionCommitter.claim(store.root, 1)
    stage = writer.stage(version)
    names = list(tensors)
    results = [
        shard_of(stage / f"model-{i + 1:05d}-of-{shards:05d}.safetensors", {n: tensors[n] for n in names[i::shards]})
        for i in range(shards)
    ]
    return writer.publish(version=version, shards=results, model_dir=model_dir, producer="test")


def forward(model: Decoder, token_ids: Sequence[int]) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Plain forward pass of a sequence: log-probabilities ``[tokens, vocab]``, experts ``[tokens, layers, k]``."""
    arch = model.arch
    chosen = torch.zeros(len(token_ids), arch.num_hidden_layers, arch.experts_per_token, dtype=torch.long)

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: None) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)

    with torch.inference_mode():
        ids = torch.tensor(list(token_ids))
        # attention over chosen latents or with sinks, and states, are compared with transformers, not written once more
        packed = PackedAttention(torch.tensor([0, len(ids)]))
        sparse = packed if arch.has_latent_attention else None
        record = lambda layer, experts: chosen[:, layer].copy_(experts)  # noqa: E731
        plain = sparse is None and not getattr(arch, "sinks", False)
        attend = attention if plain else packed
        context = BatchContext(torch.arange(len(ids)), attend, record=record, sparse=sparse, recurrence=packed)
        return model(ids, context).log_softmax(-1), chosen.numpy()


def logprob_error(model: Decoder, prompt: Sequence[int], output: Sequence[int], logprobs: Sequence[float]) -> float:
    """The largest difference between reported log-probabilities and those of the plain forward pass."""
    expected, _ = forward(model, [*prompt, *output])
    rows = expected[len(prompt) - 1 : len(prompt) + len(output) - 1]
    wanted = rows.gather(1, torch.tensor(list(output))[:, None])[:, 0]
    return float((wanted - torch.tensor(list(logprobs))).abs().max())


def decode_experts(text: str) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array


@dataclass
class Server:
    """A server process and a small client of it."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    model: Decoder
    model_dir: Path
    kind: str = "embedded"
    timeout_s: float = 60.0
    headers: dict[str, str] = field(default_factory=dict)
    _opener: Any = field(default_factory=lambda: urllib.request.build_opener(urllib.request.ProxyHandler({})))

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """Send a request; returns the open answer, an error answer too."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        http = urllib.request.Request(self.url + path, data=data, method=method)
        for name, value in {"content-type": "application/json", **self.headers, **(headers or {})}.items():
            http.add_header(name, value)
        try:
            return self._opener.open(http, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            return error

    def call(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> tuple[int, Any]:
        """Status and decoded answer."""
        with self.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()}) as answer:
            text = answer.read()
            try:
                return answer.status, json.loads(text)
            except ValueError:
                return answer.status, text.decode()

    def get(self, path: str) -> tuple[int, Any]:
        return self.call(path, method="GET")

    def ok(self, path: str, body: Any = None) -> Any:
        """The answer of a call that has to succeed."""
        status, answer = self.call(path, body)
        assert status == 200, f"{path}: {status} {answer}; log:\n{self.log.read_text(errors='replace')[-20_000:]}"
        return answer

    def generate(self, token_ids: Sequence[int], *, request: dict[str, Any] | None = None, **sampling: Any) -> Any:
        """The answer of ``/inference/v1/generate``."""
        body = {"model": SERVED_NAME, "token_ids": list(token_ids), "sampling_params": sampling}
        return self.ok("/inference/v1/generate", {**body, **(request or {})})

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """Decoded events of a stream; checks that it ends as it should."""
        with self.request("POST", path, body) as answer:
            assert answer.status == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            last = ""
            for line in answer:
                if line.startswith(b"data: "):
                    last = line[6:].decode().strip()
                    if last != "[DONE]":
                        yield json.loads(last)
            assert last == "[DONE]"

    def metrics(self) -> dict[str, float]:
        """Samples by name, summed over labels."""
        _, text = self.get("/metrics")
        values: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name = line.split("{")[0].split(" ")[0]
                values[name] = values.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return values

    def wait_for(self, condition: Any, what: str, timeout_s: float = 10.0) -> None:
        """Wait until a condition holds, for longer while the machine is busy."""
        try:
            wait_for(condition, timeout_s, what, every_s=0.01)
        except AssertionError as error:
            raise AssertionError(f"{error}; log:\n{self.log.read_text()[-3000:]}") from None

    def wait_idle(self) -> None:
        """Wait until no request is left in the engine."""

        def idle() -> bool:
            metrics = self.metrics()
            return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"] == 0

        self.wait_for(idle, "an idle engine")

    def stop(self) -> int:
        """SIGTERM, then the exit code. Only the session of this server is signalled."""
        scratch = Scratch(str(self.log.parent), run_id=uuid.uuid4().hex, attempt=1, role="server", replica=0)
        scratch.prepare()
        scratch.note(self._session())
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30 * patience())
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        if self.kind == "vllm":
            # its workers outlive a server that ended badly; they, and what removes their shared memory, get a moment
            end_processes(self._session, kill_at=time.monotonic() + 5.0)
        scratch.remove()
        return self.process.returncode

    def _session(self) -> list[procfs.Process]:
        return [p for p in procfs.all_processes().values() if p.session == self.process.pid and not p.dead]


def start_server(
    command: list[str],
    model_dir: Path,
    model: Decoder,
    log: Path,
    *,
    kind: str = "embedded",
    ready_s: float = 60.0,
    environment: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
) -> Server:
    """Start a server on a free loopback port and wait until it is healthy."""
    port = free_port()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--model", str(model_dir), "--host", "127.0.0.1", "--port", str(port)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    server = Server(process, f"http://127.0.0.1:{port}", log, model, model_dir, kind, headers=headers or {})

    def healthy() -> bool:
        try:
            return server.get("/health")[0] == 200
        except OSError:
            return False

    try:
        wait_for(lambda: process.poll() is not None or healthy(), ready_s, "health of the server", every_s=0.05)
        assert process.poll() is None, "the server has ended"
    except AssertionError as error:
        server.stop()
        raise AssertionError(f"{error}; log:\n{log.read_text()[-5000:]}") from None
    return server


def embedded_command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "hpcrl.inference.embedded.server", "--served-model-name", SERVED_NAME, *flags]
