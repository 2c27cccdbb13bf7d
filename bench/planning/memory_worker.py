"""One rank of a trainer that counts every byte it allocates; started by ``bench/planner.py memory``.

The measure is the CPU allocator's own report, as torch's profiler records it: each allocation and each free of a
tensor's memory, temporaries inside kernels included. What it leaves out is not tensors: the interpreter, libraries,
gloo's buffers, and what malloc keeps for later.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from hpcrl.config.load import load_recipe
from hpcrl.config.recipe import Recipe
from hpcrl.dock.wire import BatchShard, BatchStats, MicroBatch
from hpcrl.modeling.hf import published_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import ModelArch, load_arch
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.storage.files import write_json
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.publish.publisher import Publisher, tensor_bytes
from hpcrl.trainer.state.checkpoint import copy_to_host, state_bytes, trainer_state
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.format.shard import write_shard
from hpcrl.weights.store import HandoffStore


class AllocatedBytes:
    """How far the bytes of live tensors rise in each phase; of phases of one name the smallest rise counts.

    What a thread of gloo frees escapes the recording, so a rise may come out too high by a buffer or more, never too
    low; the smallest of several steps and ranks, which all do the same, is nearest to the truth.
    """

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        self.rises: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what is allocated inside."""
        if not self._on_gpu:
            with record_function(f"phase/{name}"):
                yield
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        self._add(name, torch.cuda.max_memory_allocated() - before)

    def _add(self, name: str, rise: int) -> None:
        self.rises[name] = min(rise, self.rises.get(name, rise))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """One recording for all phases."""
        if self._on_gpu:
            yield
            return
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        events = list(profiler.profiler.kineto_results.events())
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        spans = [(e.start_ns(), e.end_ns(), e.name()) for e in events if e.name().startswith("phase/")]
        for start, end, name in sorted(spans):
            live = begin = sum(size for at, size in changes if at < start)
            peak = live
            for at, size in changes:
                if start <= at <= end:
                    live += size
                    peak = max(peak, live)
            self._add(name.removeprefix("phase/"), peak - begin)
        if name := os.environ.get("HPCRL_BENCH_LIVE"):
            self._print_live(changes, [span for span in spans if span[2] == f"phase/{name}"][-1])

    @staticmethod
    def _print_live(changes: list[tuple[int, int]], span: tuple[int, int, str]) -> None:
        """What is held at the highest point of a phase, by size: how a formula that is off is put right."""
        live: Counter[int] = Counter()
        held = best = 0
        at_peak: Counter[int] = Counter()
        for at, size in changes:
            live[abs(size)] += 1 if size > 0 else -1
            held += size
            if span[0] <= at <= span[1] and held > best:
                best, at_peak = held, live.copy()
        for size, count in sorted(at_peak.items(), key=lambda item: -item[0] * item[1]):
            if count and size >= 4096:
                print(f"{count:6d} x {size:12,d} = {count * size:14,d}")


def batch(settings: dict[str, Any], *, step: int, rank: int, world_size: int, vocab: int) -> BatchShard:
    """Micro-batches of the given lengths; all but the first token of each sequence is trained."""
    lengths = settings["lengths"]
    tokens = sum(lengths)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    rng = np.random.default_rng([step, rank])
    mask = np.ones(tokens, np.uint8)
    mask[starts[:-1]] = 0
    micro = MicroBatch(
        token_ids=rng.integers(0, vocab, tokens).astype(np.int32),
        cu_seqlens=starts.astype(np.int32),
        loss_mask=mask,
        logprobs=np.full(tokens, -np.log(vocab), np.float32) * mask,
        versions=np.full(tokens, step - 1, np.int32),
        advantages=rng.normal(size=tokens).astype(np.float32) * mask,
    )
    stats = BatchStats.of_tokens(tokens * world_size, sampled=int(mask.sum()) * world_size)
    micro_batches = [micro] * settings["micro_batches"]
    return BatchShard(step=step, rank=rank, world_size=world_size, micro_batches=micro_batches, stats=stats)


def write_model(directory: Path, arch: ModelArch) -> None:
    """A model directory with random weights."""
    model = build_model(arch, device="cpu")
    model.init_weights(torch.Generator().manual_seed(0))
    tensors = [tensor_bytes(name, tensor, torch.float32) for name, tensor in published_tensors(model, model.adapter)]
    directory.mkdir(parents=True)
    write_character_tokenizer(directory)
    write_shard(directory / "model.safetensors", tensors)
    write_json(directory / "config.json", arch.to_hf_config())


def held(policy: TrainerPolicy) -> int:
    """Bytes of this rank's parameters, gradients and optimizer state: all that lives between two phases."""
    total = 0
    for parameter in policy.model.parameters():
        state = policy.optimizer.state.get(parameter, {})
        for tensor in (parameter.detach(), parameter.grad, *state.values()):
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                total += local.numel() * local.element_size()
    return total


def images(publisher: Publisher) -> int:
    """Bytes of the copies of versions that it keeps between two publications."""
    return publisher._images.nbytes


def main(settings_file: str) -> None:
    """Load, publish, three steps, of which those with optimizer state in place count, and one publication."""
    settings = json.loads(Path(settings_file).read_text())
    torch.set_num_threads(1)
    recipe = load_recipe(settings["recipe"], settings["set"]).value
    counter, base = AllocatedBytes(), dict[str, int]()
    with distributed(timeout_s=240, parallelism=recipe.trainer.parallelism) as parallel:
        with counter.counting():
            run(settings, counter, base, recipe, parallel)
        peaks = {name: base[name] + rise for name, rise in counter.rises.items()}
        (Path(settings["out"]) / f"rank-{parallel.world.rank}.json").write_text(json.dumps(peaks))


def run(
    settings: dict[str, Any], counter: AllocatedBytes, base: dict[str, int], recipe: Recipe, parallel: Parallel
) -> None:
    """What is measured; ``base`` gets what is held before each phase."""
    model_dir = Path(settings["model"])
    arch = load_arch(model_dir)
    base["loading"] = 0
    with counter.phase("loading"):
        policy = TrainerPolicy(recipe, arch, parallel, model_dir=model_dir)
    store = HandoffStore(Path(settings["out"]) / "weights")
    dtype = getattr(torch, recipe.handoff.dtype or recipe.trainer.dtype)
    publisher = Publisher(
        store, parallel, arch=arch, model_dir=model_dir, dtype=dtype, attempt=1, settings=recipe.handoff
    )

    def publish(version: int) -> None:
        publisher.publish(policy.model, version)
        publisher.wait()

    # as a run begins: the start model is published, and its memory kept for the next version
    for version in range(2 if recipe.handoff.delta_chain else 1):
        publish(version)
    aside: dict[str, Any] = {}
    for step in (1, 2, 3):
        data = parallel.data
        shard = batch(settings, step=step, rank=data.rank, world_size=data.size, vocab=arch.vocab_size)
        for name, work in (
            ("forward and backward", lambda shard=shard: policy.forward_backward(shard)),
            ("optimizer", lambda step=step: policy.optimizer_step(step)),
        ):
            base[name] = held(policy) + images(publisher) + state_bytes(aside) // parallel.world.size
            with counter.phase(name if step > 1 else "warm-up"):
                work()
        if settings["saves"] and step == 1:
            aside = copy_to_host(trainer_state(policy.model, policy.optimizer, step))
    base["warm-up"] = 0
    base["publishing"] = held(policy) + images(publisher) + state_bytes(aside) // parallel.world.size
    with counter.phase("publishing"):
        publish(9)


if __name__ == "__main__":
    main(sys.argv[1])
