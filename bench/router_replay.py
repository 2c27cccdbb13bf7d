"""What router replay does for the distance between engine and trainer, and what it costs.

An embedded engine in bfloat16 samples rollouts and says which experts it chose; the trainer, in float32, computes them
with ``trainer.router_replay`` and without. Once the engine has the trainer's weights in its own dtype, once noise was
added to those of its routers. ``mismatch_kl`` and ``routing_mismatch`` are the metrics of these names of a run. Seconds
are of one processor: ``step_cpu_s`` of the forward and backward passes of a step, medians of rounds in turn, and
``record_cpu_s`` of what it takes to read, check and keep the rows of experts. Writes
``bench/results/router_replay.json``. With ``--engine vllm`` the engine is a real vLLM, one for each model and noise,
and the result is ``bench/results/router_replay_vllm.json``.

    python bench/router_replay.py [--engine vllm]
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from harness import record, scratch
from planning.memory_worker import batch
from vllm_lab import make_arch, random_model, started_engines, write_model

from hpcrl.config.load import load_recipe
from hpcrl.dock.routes import RoutedExperts, joined
from hpcrl.dock.wire import BatchShard
from hpcrl.inference.embedded.engine.config import EngineSettings
from hpcrl.inference.embedded.engine.engine import Delivery, Engine
from hpcrl.inference.embedded.engine.params import SamplingParams
from hpcrl.inference.embedded.engine.request import EngineRequest, Output
from hpcrl.inference.metrics import EngineMetrics, Registry
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.layers.moe import SparseMLP
from hpcrl.models.arch import Glm4MoeArch, ModelArch, arch_from_config
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.known import find_config
from hpcrl.rollouts.engines.rows import read_rows
from hpcrl.trainer.batch.routed_experts import engine_experts
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.step.policy import TrainerPolicy

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 4096,
}
PROMPT, SAID = 64, 128
STD = 0.08
"""Of the weights: distributions are neither uniform nor certain."""
NOISE = 0.05
"""Of the noise on the engine's routers, as a share of the spread of their weights."""


_CACHED = "vllm:prefix_cache_hits_total"


def archs(root: Path) -> dict[str, ModelArch]:
    """A softmax router that chooses 2 of 16, and one of sigmoids behind a dense layer that chooses 4 of 32."""
    vocab_size, _ = write_character_tokenizer(root)
    glm4 = {"n_routed_experts": 32, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "intermediate_size": 256}
    return {
        "qwen3_moe": make_arch(root, **SIZES, num_experts=16),
        "glm4_moe": Glm4MoeArch(vocab_size=vocab_size, **SIZES, **glm4, use_qk_norm=True),
    }


def trained_model(path: Path, arch: ModelArch, dtype: torch.dtype) -> Decoder:
    """Random weights, in the directory ``path`` as the trainer loads them."""
    model = random_model(arch, 0, std=STD)
    path.mkdir()
    write_character_tokenizer(path)
    write_model(path, model, dtype)
    return model


def served(model: Decoder, *, noise: float) -> Decoder:
    """The model as the engine has it."""
    other = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(1)
    for module in other.modules():
        if isinstance(module, SparseMLP):
            weight = module.gate.weight
            weight += torch.randn(weight.shape, generator=draw) * noise * weight.std()
    # buffers as an engine has them: correction biases stay float32
    for parameter in other.parameters():
        parameter.data = parameter.data.bfloat16()
    return other


def sampled(model: Decoder, rollouts: int) -> list[tuple[list[int], Output]]:
    """Prompts and what an engine makes of them; the later half has the prompts of the first, in its cache."""
    config = EngineSettings(
        max_num_seqs=16,
        max_model_len=PROMPT + SAID,
        max_num_batched_tokens=1024,
        block_size=16,
        num_blocks=1024,
        return_routed_experts=True,
        logprobs_mode="processed_logprobs",
        weight_version="0",
    )
    engine, arrived, answers = Engine(model, config, EngineMetrics(Registry({}))), threading.Condition(), {}

    def deliver(delivery: Delivery) -> None:
        with arrived:
            answers.update(delivery)
            arrived.notify_all()

    half = rollouts // 2
    draws = [random.Random(i % half) for i in range(rollouts)]
    prompts = [[draw.randrange(7, 100) for _ in range(PROMPT)] for draw in draws]
    params = [SamplingParams(max_tokens=SAID, seed=i, logprobs=0) for i in range(rollouts)]
    requests = [EngineRequest(str(i), prompts[i], params[i], lambda _: None) for i in range(rollouts)]
    engine.start(deliver)
    try:
        for sent in (requests[:half], requests):
            for request in sent[-half:]:
                engine.submit(request)
            with arrived:
                if not arrived.wait_for(partial(_has_all, answers, sent), 1200.0):
                    raise TimeoutError(f"the engine ended {len(answers)} of {len(sent)} rollouts in 20 minutes")
    finally:
        engine.stop()
    return [(prompts[i], answers[request]) for i, request in enumerate(requests)]


def sampled_by_vllm(path: Path, model: Decoder, rollouts: int) -> list[tuple[list[int], Output]]:
    """The same, of a real vLLM in bfloat16: prompts are sent twice, and come from its prefix cache the second time."""
    write_character_tokenizer(path)
    write_model(path, model, torch.bfloat16)
    half, settings = rollouts // 2, ("engine.dtype=bfloat16", "engine.return_routed_experts=true", "engine.replicas=1")
    answers = []
    with started_engines(path, path, *settings, f"engine.max_model_len={PROMPT + SAID}") as (engine,):
        for i in range(rollouts):
            draw = random.Random(i % half)
            prompt = [draw.randrange(7, 100) for _ in range(PROMPT)]
            params = {"max_tokens": SAID, "seed": i, "logprobs": 0, "temperature": 1.0, "ignore_eos": True}
            before = engine.metrics()[_CACHED]
            choice = engine.generate(prompt, **params)
            rows = read_rows(base64.b64decode(choice["routed_experts"]))
            scores = [token["logprob"] for token in choice["logprobs"]["content"]]
            cached = round(engine.metrics()[_CACHED] - before)
            answers.append(
                (prompt, Output(choice["token_ids"], scores, [], [], routed_experts=rows, num_cached_tokens=cached))
            )
    return answers


def _has_all(answers: Mapping[EngineRequest, Output], requests: Sequence[EngineRequest]) -> bool:
    return all(request in answers for request in requests)


def shard_of(rollouts: list[tuple[list[int], Output]], vocab: int) -> BatchShard:
    """One micro-batch, with the rows of experts as a conversation has them."""
    length = PROMPT + SAID
    settings = {"lengths": [length] * len(rollouts), "micro_batches": 1}
    shard = batch(settings, step=1, rank=0, world_size=1, vocab=vocab)
    mask = np.tile(np.arange(length) >= PROMPT, len(rollouts))
    rows = []
    for _, output in rollouts:
        said = output.routed_experts
        assert said is not None
        # the last token was not computed
        experts = np.concatenate((said, np.zeros_like(said[:1])))
        rows.append(RoutedExperts.of(experts, (np.arange(length) < length - 1).astype(np.uint8)))
    (micro_batch,) = shard.micro_batches
    micro_batch = msgspec.structs.replace(
        micro_batch,
        token_ids=np.concatenate([[*prompt, *output.token_ids] for prompt, output in rollouts]).astype(np.int32),
        loss_mask=mask.astype(np.uint8),
        logprobs=np.concatenate([[0.0] * PROMPT + output.logprobs for _, output in rollouts]).astype(np.float32),
        advantages=micro_batch.advantages * mask,
        routed_experts=joined(rows, settings["lengths"]),
        rollouts=[(i, 0) for i in range(len(rollouts))],
    )
    return msgspec.structs.replace(shard, micro_batches=[micro_batch])


def measure(path: Path, model: Decoder, shard: BatchShard, parallel: Parallel, rounds: int) -> dict[str, Any]:
    """Metrics with replay and without, and what they cost."""
    policies = {}
    for name, replay in (("without", "false"), ("with", "true")):
        recipe = load_recipe("quickstart", (f"model.path={path}", f"trainer.router_replay={replay}")).value
        policies[name] = TrainerPolicy(recipe, model.arch, parallel, model_dir=path)
    figures: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in policies}
    for _ in range(rounds):
        for name, policy in policies.items():
            began = time.process_time()
            metrics = policy.forward_backward(shard).reduce(parallel.world)
            seconds[name].append(time.process_time() - began)
            policy.optimizer.zero_grad()
            assert metrics.routing_mismatch is not None
            figures[name] = {
                "mismatch_kl": float(f"{metrics.mismatch_kl:.3g}"),
                "routing_mismatch": float(f"{metrics.routing_mismatch:.3g}"),
                "ess": round(metrics.ess, 4),
            }
    (micro_batch,) = shard.micro_batches
    began = time.process_time()
    experts = engine_experts(micro_batch, model.arch)
    record_cpu_s = time.process_time() - began
    assert experts is not None
    for name, values in seconds.items():
        figures[name]["step_cpu_s"] = round(statistics.median(values), 3)
    figures["replayed_share"] = metrics.replayed_share
    figures["kl_with_over_without"] = round(figures["with"]["mismatch_kl"] / figures["without"]["mismatch_kl"], 4)
    figures["step_cpu_s_with_over_without"] = round(figures["with"]["step_cpu_s"] / figures["without"]["step_cpu_s"], 3)
    figures["record_cpu_s"] = round(record_cpu_s, 4)
    figures["bytes_a_token"] = experts.experts.nbytes / len(micro_batch.token_ids)
    return figures


def record_seconds(arch: ModelArch, tokens: int) -> dict[str, float]:
    """Reading, checking and keeping the rows of one rollout of ``tokens`` tokens; nothing is trained."""
    shape = (1024, arch.num_hidden_layers, arch.routed_experts)
    drawn = np.random.default_rng(0).random(shape).argsort(-1)[..., : arch.experts_per_token].astype(np.uint8)
    rows = RoutedExperts.of(np.tile(drawn, (tokens // len(drawn), 1, 1)), np.ones(tokens, np.uint8))
    (micro_batch,) = batch(
        {"lengths": [tokens], "micro_batches": 1}, step=1, rank=0, world_size=1, vocab=100
    ).micro_batches
    micro_batch = msgspec.structs.replace(micro_batch, routed_experts=rows)
    began = time.process_time()
    experts = engine_experts(micro_batch, arch)
    assert experts is not None
    return {"cpu_s": round(time.process_time() - began, 3), "bytes_kept": experts.experts.nbytes}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=16, help="an even number")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    args = parser.parse_args()
    root, found = scratch("router-replay"), {}
    torch.set_num_threads(1)
    with distributed(timeout_s=600) as parallel:
        for family, arch in archs(root).items():
            model = trained_model(path := root / family, arch, torch.float32)
            for name, noise in (("bfloat16", 0.0), ("bfloat16_perturbed", NOISE)):
                other = served(model, noise=noise)
                if args.engine == "vllm":
                    (served_at := root / f"{family}_{name}").mkdir()
                    rollouts = sampled_by_vllm(served_at, other, args.rollouts)
                else:
                    rollouts = sampled(other, args.rollouts)
                cached = sum(output.num_cached_tokens for _, output in rollouts)
                shard = shard_of(rollouts, arch.vocab_size)
                figures = measure(path, model, shard, parallel, args.rounds)
                found[f"{family}_engine_{name}"] = {**figures, "prompt_tokens_from_prefix_cache": cached}
                print(family, name, figures, flush=True)
    glm5 = arch_from_config(json.loads(find_config("GLM-5").read_text()))
    found["glm5_record_of_131072_tokens"] = record_seconds(glm5, 131072)
    sizes = {"rollouts": args.rollouts, "tokens_of_a_rollout": PROMPT + SAID, "noise": NOISE, **SIZES}
    name = "router_replay" if args.engine == "embedded" else "router_replay_vllm"
    record(name, {"load_average": round(os.getloadavg()[0], 1), **sizes, **found})


if __name__ == "__main__":
    main()
