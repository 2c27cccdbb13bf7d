"""How far vLLM's log-probabilities are from the trainer's, at the same version, by dtype.

The trainer publishes version 0 and version 1 as in a run; one vLLM engine starts from the first and takes the second in
place. Tokens that it samples from version 1 are computed by the trainer's sharded model. ``mismatch_kl`` is the metric
of the same name of a run: the mean over sampled tokens of ``r - 1 - log r`` with ``r`` = trainer over engine. Writes
``bench/results/mismatch.json``.

    HPCRL_VLLM_PYTHON=.venv-vllm/bin/python python bench/mismatch.py
"""

from __future__ import annotations

import argparse
import os
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
from harness import record, scratch
from vllm_lab import Engine, make_arch, random_model, started_engines, write_model
from vllm_pause import update

from hpcrl.config.recipe import HandoffConfig
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.parallelize import parallelize_decoder
from hpcrl.models.arch import ModelArch
from hpcrl.trainer.batch.tensors import token_logprobs
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.weights import HandoffStore

SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "moe_intermediate_size": 128, "num_experts": 16}
PROMPT, SAID = 64, 192
STD = 0.08
"""Of the weights: distributions are neither uniform nor certain."""
TRAINERS = {"float32": ("float32",), "bfloat16": ("bfloat16", "float32")}
"""Dtypes of the trainer's forward pass, by that of the engine."""


def make_trainer(arch: ModelArch, parallel: Parallel, version: int, dtype: torch.dtype) -> Decoder:
    """The trainer's model: float32 masters, forward passes in ``dtype``."""
    model = random_model(arch, version, std=STD)
    parallelize_decoder(model, parallel.mesh, dtype=dtype)
    return model


@torch.no_grad()
def become(model: Decoder, version: int) -> None:
    """Give it the weights of a version, before its first forward pass; one rank has all of each parameter."""
    other = dict(random_model(model.arch, version, std=STD).named_parameters())
    for name, parameter in model.named_parameters():
        parameter.to_local().copy_(other[name])


def sampled(engine: Engine, rollouts: int) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts, what the engine said, and its log-probabilities."""
    prompts = [[random.Random(i).randrange(7, 103) for _ in range(PROMPT)] for i in range(rollouts)]

    def one(i: int) -> tuple[list[int], list[int], list[float]]:
        choice = engine.generate(prompts[i], max_tokens=SAID, seed=i, temperature=1.0, logprobs=1, ignore_eos=True)
        assert {span["version"] for span in choice["weight_versions"]} == {"1"}
        return prompts[i], choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, range(rollouts)))


@torch.no_grad()
def compare(model: Decoder, rollouts: list[tuple[list[int], list[int], list[float]]]) -> dict[str, float]:
    """Distances over all sampled tokens; one packed batch."""
    ids = [torch.tensor(prompt + said) for prompt, said, _ in rollouts]
    ends = torch.tensor([0, *(len(row) for row in ids)]).cumsum(0)
    attention = PackedAttention(ends)
    select = torch.cat([torch.arange(begin + PROMPT - 1, end - 1) for begin, end in pairwise(ends)])
    logits = model(torch.cat(ids), attention.context(select))
    targets = torch.cat([torch.tensor(said) for _, said, _ in rollouts])
    trainer, entropy = token_logprobs(logits, targets, 1.0)
    engine = torch.tensor([value for *_, values in rollouts for value in values], dtype=torch.float64)
    log_ratio = trainer.double() - engine
    k3 = log_ratio.exp() - 1.0 - log_ratio
    return {
        "mismatch_kl": float(f"{k3.mean():.3g}"),
        "mean_abs": float(f"{log_ratio.abs().mean():.3g}"),
        "p99_abs": float(f"{log_ratio.abs().quantile(0.99):.3g}"),
        "max_abs": float(f"{log_ratio.abs().max():.3g}"),
        "entropy": round(float(entropy.mean()), 3),
        "tokens": len(targets),
    }


def measure(root: Path, engine_dtype: str, rollouts: int) -> dict[str, dict[str, float]]:
    """One engine, by dtype of the trainer."""
    path, dtype = root / engine_dtype, getattr(torch, engine_dtype)
    arch = make_arch(path / "model", **SIZES)
    write_model(path / "model", random_model(arch, 0, std=STD), dtype)
    with distributed(timeout_s=600) as parallel:
        store = HandoffStore(path / "weights")
        model = make_trainer(arch, parallel, 0, torch.float32)
        publisher = Publisher(
            store, parallel, arch=arch, model_dir=path / "model", dtype=dtype, attempt=1, settings=HandoffConfig()
        )
        for version in (0, 1):
            become(model, version)
            publisher.publish(model, version)
            publisher.wait()
        publisher.close()
        settings = (f"engine.dtype={engine_dtype}", "engine.replicas=1", "engine.max_model_len=512")
        with started_engines(store.path_of(0), path, *settings) as (engine,):
            engine.call("/init_weight_transfer_engine", {"init_info": {}})
            update(engine, store.path_of(1), 1)
            said = sampled(engine, rollouts)
        figures = {}
        for trainer_dtype in TRAINERS[engine_dtype]:
            right, wrong = (make_trainer(arch, parallel, v, getattr(torch, trainer_dtype)) for v in (1, 0))
            # the control: another version is far away
            figures[trainer_dtype] = {**compare(right, said), "other_version_kl": compare(wrong, said)["mismatch_kl"]}
        return figures


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=32)
    rollouts = parser.parse_args().rollouts
    root, figures = scratch("mismatch"), {}
    torch.set_num_threads(1)
    for engine_dtype in TRAINERS:
        for trainer_dtype, values in measure(root, engine_dtype, rollouts).items():
            figures[f"engine_{engine_dtype}_trainer_{trainer_dtype}"] = values
        print(figures, flush=True)
    record("mismatch", {"load_average": round(os.getloadavg()[0], 1), **SIZES, **figures})


if __name__ == "__main__":
    main()
