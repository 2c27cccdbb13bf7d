"""What the trainer's tests share: tiny models, hand-made batches, a dock that serves them, several ranks."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import torch
import yaml
from free_ports import free_port
from patience import wait_for
from torch import Tensor

from hpcrl.config.recipe import Recipe
from hpcrl.dock.wire import BatchShard, BatchStats, MicroBatch, encode_shard
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import published_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import ModelArch, Qwen3MoeArch
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.runs.role import Endpoints, RoleContext
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import write_json
from hpcrl.trainer.publish.publisher import tensor_bytes
from hpcrl.weights.format.shard import write_shard

VOCAB = 103


def tiny_arch(**changes: Any) -> ModelArch:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 128,
        "eos_token_id": 2,
    }
    return Qwen3MoeArch(**{**sizes, **changes})


def tiny_model(arch: ModelArch, seed: int = 0, std: float = 0.2) -> Decoder:
    model = build_model(arch, device="cpu")
    model.init_weights(torch.Generator().manual_seed(seed), std=std)
    return model


def gradient_distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Of all gradients together, relative to the wanted ones."""
    apart = sum(float((found[name] - wanted[name]).double().square().sum()) for name in wanted)
    return float((apart / sum(float(tensor.double().square().sum()) for tensor in wanted.values())) ** 0.5)


def write_model_dir(
    path: Path, arch: ModelArch | None = None, seed: int = 0, change: Callable[[Decoder], None] = lambda model: None
) -> Path:
    """A model directory with random weights, which ``change`` may change, and the character tokenizer."""
    arch = arch or tiny_arch()
    write_character_tokenizer(path)
    model = tiny_model(arch, seed)
    change(model)
    tensors = [
        tensor_bytes(hf_name, tensor, torch.float32) for hf_name, tensor in published_tensors(model, model.adapter)
    ]
    write_shard(path / "model.safetensors", tensors)
    write_json(path / "config.json", arch.to_hf_config())
    return path


class Rollouts:
    """Hand-made rollouts of one batch, and the shards they are cut into."""

    def __init__(self, step: int, *, count: int = 6, seed: int = 0, lags: int = 2) -> None:
        rng = np.random.default_rng([seed, step])
        self.step = step
        self.rollouts: list[MicroBatch] = []
        for i in range(count):
            length = int(rng.integers(4, 15))
            mask = (rng.random(length) < 0.7).astype(np.uint8)
            mask[0], mask[-1] = 0, 1
            # versions only rise in a rollout; its prompt has the version of its cache salt
            lag = np.sort(rng.integers(0, min(lags, step - 1) + 1, length))[::-1]
            self.rollouts.append(
                MicroBatch(
                    token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                    cu_seqlens=np.array([0, length], np.int32),
                    loss_mask=mask,
                    logprobs=(np.log(rng.uniform(0.005, 0.03, length)) * mask).astype(np.float32),
                    versions=(step - 1 - lag).astype(np.int32),
                    advantages=(rng.normal() * mask).astype(np.float32),
                    rollouts=[(step, i)],
                )
            )
        self.sampled = int(sum(r.loss_mask.sum() for r in self.rollouts))
        self.tokens = sum(len(r.token_ids) for r in self.rollouts)

    def shard(self, rank: int = 0, world_size: int = 1, *, micro_batches: int = 2) -> BatchShard:
        """Rollouts are dealt to ranks and micro-batches in turn; ranks may get empty ones."""
        piles: list[list[MicroBatch]] = [[] for _ in range(micro_batches)]
        for i, rollout in enumerate(self.rollouts[rank::world_size]):
            piles[i % micro_batches].append(rollout)
        return BatchShard(
            step=self.step,
            rank=rank,
            world_size=world_size,
            micro_batches=[pack(pile) for pile in piles],
            stats=BatchStats(
                reward_mean=0.5,
                reward_std=0.1,
                reward_by_env={"toy": 0.5},
                reward_parts={"toy/exact": 0.5},
                staleness_mean=0.0,
                staleness_max=0,
                staleness_histogram={"0": len(self.rollouts)},
                total_tokens=self.tokens,
                total_sampled_tokens=self.sampled,
                rollouts={"finished": float(len(self.rollouts))},
            ),
        )


def pack(rollouts: list[MicroBatch]) -> MicroBatch:
    """Several rollouts behind each other; none gives the empty micro-batch."""
    lengths = [len(r.token_ids) for r in rollouts]
    dtypes = {
        "token_ids": np.int32,
        "loss_mask": np.uint8,
        "logprobs": np.float32,
        "versions": np.int32,
        "advantages": np.float32,
    }
    return MicroBatch(
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        rollouts=[name for r in rollouts for name in r.rollouts],
        **{
            name: np.concatenate([np.zeros(0, dtype), *(getattr(r, name) for r in rollouts)]).astype(dtype)
            for name, dtype in dtypes.items()
        },
    )


class StubDock:
    """An orchestrator that hands out `Rollouts` and writes down what it is told."""

    def __init__(self, *, rollouts_per_step: int = 6, hold_step: int | None = None) -> None:
        self.rollouts_per_step, self.hold_step = rollouts_per_step, hold_step
        self.published: list[int] = []
        self.snapshots: list[int] = []
        self.finished: list[int] = []
        self.trained: list[int] = []
        self.asked: list[tuple[int, int, int]] = []
        dock = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                self.reply(*dock.get(self.path))

            def do_POST(self) -> None:
                self.reply(*dock.post(self.path))

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def get(self, path: str) -> tuple[int, bytes]:
        parts = urlsplit(path)
        step, query = int(parts.path.rsplit("/", 1)[1]), parse_qs(parts.query)
        rank, world_size = int(query["rank"][0]), int(query["world_size"][0])
        self.asked.append((step, rank, world_size))
        if step == self.hold_step:
            threading.Event().wait(0.2)
            return 204, b""
        return 200, self.encoded(step, rank, world_size)

    def encoded(self, step: int, rank: int, world_size: int) -> bytes:
        """What a rank is sent."""
        return encode_shard(self.shard(step, rank, world_size))

    def shard(self, step: int, rank: int, world_size: int) -> BatchShard:
        """What a rank is given."""
        return Rollouts(step, count=self.rollouts_per_step).shard(rank, world_size)

    def post(self, path: str) -> tuple[int, bytes]:
        _, what, number = urlsplit(path).path.strip("/").split("/")
        told = {
            "published": self.published,
            "snapshot": self.snapshots,
            "finish": self.finished,
            "trained": self.trained,
        }
        told[what].append(int(number))
        return 200, f"orchestrator at {number}".encode()

    @contextmanager
    def serving(self) -> Iterator[StubDock]:
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            thread.join()
            self.server.server_close()


def make_recipe(model_dir: Path, *, steps: int, **trainer: Any) -> Recipe:
    return Recipe.model_validate_json(
        json.dumps(
            {
                "name": "toy",
                "model": {"path": str(model_dir)},
                "environments": [
                    {"name": "toy", "kind": "custom", "factory": "toy_environment:ToyEnvironment", "weight": 2.0}
                ],
                "trainer": {"steps": steps, "optimizer": {"learning_rate": 1e-3}, **trainer},
                "checkpoint": {"every_steps": 2, "keep_last": 2},
                "orchestrator": {"wait_timeout_s": 20.0},
            }
        )
    )


def write_recipe(run: RunDir, recipe: Recipe) -> None:
    """The trainer reads no more of the run's configuration than this."""
    run.path.mkdir(parents=True, exist_ok=True)
    run.recipe_path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))


def start_attempt(run: RunDir, dock: StubDock, rank: int = 0) -> RoleContext:
    attempt = run.start_attempt()
    Endpoints(urls={"orchestrator": [dock.url]}).write(run, attempt)
    return RoleContext(run, attempt=attempt, role="trainer", replica=0, rank=rank)


def _rank_main(rank: int, environment: dict[str, str], target: Callable[..., Any], args: tuple, results: Any) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        results.put((rank, True, target(rank, *args)))
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        results.put((rank, False, (type(error).__name__, str(error), traceback.format_exc())))


def _rank_server() -> ForkServerContext:
    """What ranks are forked from, which has imported `rank_imports`."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["rank_imports"])
    # it gets the environment of this process, and not the places that this process imports from
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ensure_running()
    return context


def _answers(results: Any, processes: list[Any], timeout_s: float) -> list[Any]:
    """What all ranks put into the queue, for which a busy machine has longer; a rank that was killed is told."""
    answers: list[Any] = []

    def all_came() -> bool:
        # asked before the queue is: what ended has put its answer there
        ended = [process.exitcode for process in processes]
        try:
            answers.append(results.get(timeout=1.0))
        except queue.Empty:
            answered = {rank for rank, *_ in answers}
            lost = {rank: code for rank, code in enumerate(ended) if code is not None and rank not in answered}
            assert not lost, f"ranks ended without an answer, with the codes {lost}"
        return len(answers) == len(processes)

    wait_for(all_came, timeout_s, f"answers of all {len(processes)} ranks", every_s=0.0)
    return answers


def run_ranks(
    world_size: int,
    target: Callable[..., Any],
    *args: Any,
    fails: bool = False,
    timeout_s: float = 60.0,
    **keywords: Any,
) -> list[Any]:
    """Call ``target(rank, *args, **keywords)`` in processes that can form a group; results in rank order.

    With ``fails`` every rank must raise; the results are ``(type name, message)``. ``target`` lies at the top
    of a module and returns what can be pickled. Processes are forked from a server that has torch loaded.
    """
    context = _rank_server()
    environment = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    results = context.Queue()
    processes = [
        context.Process(target=_rank_main, args=(rank, environment, partial(target, **keywords), args, results))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        answers = sorted(_answers(results, processes, timeout_s), key=lambda answer: answer[0])
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        results.close()
        results.join_thread()
    for rank, succeeded, value in answers:
        if succeeded == fails:
            raise AssertionError(f"rank {rank}: {value if succeeded else value[2]}")
    return [value[:2] if fails else value for _, _, value in answers]
