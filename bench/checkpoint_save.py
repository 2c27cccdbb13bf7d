"""What a checkpoint costs: time of a save, and how long the training stands still for it, synchronous and beside it.

Two ranks train a small model for a while, save every few steps, and write down how long each step took. In one run:
steps without a save, steps with a synchronous one, steps with one beside the training; and a plain write and fsync of
as many bytes by as many processes, to compare the save with.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, Literal

import torch
from harness import record

from hpcrl.checkpoints import CheckpointLedger, CheckpointWriter
from hpcrl.config.recipe import CheckpointConfig
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.parallelize import parallelize_decoder
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import ModelArch, Qwen3MoeArch
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.state.saver import CheckpointSaver

RANKS = 2
STEPS, EVERY = 8, 4
MODES: tuple[Literal["none", "sync", "async"], ...] = ("none", "sync", "async")
_PORT = 29671


def make_policy(arch: ModelArch, parallel: Parallel) -> Any:
    """A sharded model with an optimizer that has moments."""
    model = build_model(arch, device="cpu")
    model.init_weights(torch.Generator().manual_seed(0), std=0.02)
    parallelize_decoder(model, parallel.mesh, dtype=torch.float32)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))


def train_step(policy: Any, tokens: torch.Tensor, attention: PackedAttention) -> None:
    logits = policy.model(tokens, attention.context())
    logits.logsumexp(-1).mean().backward()
    policy.optimizer.step()
    policy.optimizer.zero_grad()


def measure(rank: int, arch: ModelArch, root: Path, mode: Literal["none", "sync", "async"], answers: Any) -> None:
    """Train and save; rank 0 answers with seconds of each step, and whether it saved."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_PORT))
    with distributed(timeout_s=300) as parallel:
        policy = make_policy(arch, parallel)
        tokens = torch.randint(arch.vocab_size, (512,), generator=torch.Generator().manual_seed(rank))
        attention = PackedAttention(torch.tensor([0, 256, 512]))
        writer = parallel.world.on_leader(partial(CheckpointWriter.claim, root, 1), "claiming")
        config = CheckpointConfig(mode="async" if mode == "none" else mode, keep_last=2)
        events: list[dict[str, Any]] = []
        emit = lambda kind, **data: events.append({"kind": kind, **data})  # noqa: E731
        saver = CheckpointSaver(writer, parallel.world, config, emit)
        train_step(policy, tokens, attention)  # makes the moments
        seconds = []
        for step in range(1, STEPS + 1):
            started = time.monotonic()
            train_step(policy, tokens, attention)
            if mode != "none" and step % EVERY == 0:
                saver.start(policy, step, orchestrator_state=lambda: b"state")
            parallel.world.sum(torch.zeros(1))
            seconds.append(time.monotonic() - started)
        saver.wait(300.0)
        if rank == 0:
            answers.put((seconds, events))


def run_mode(arch: ModelArch, root: Path, mode: Literal["none", "sync", "async"]) -> tuple[list[float], list[Any]]:
    context = get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=measure, args=(rank, arch, root, mode, answers)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    answer: tuple[list[float], list[Any]] = answers.get(timeout=280)
    for process in processes:
        process.join(60)
    failed = [event for event in answer[1] if event["kind"] != "trainer.checkpoint_saved"]
    assert not failed, failed
    return answer


def write_raw(path: Path, size: int, begin: Any, times: Any) -> None:
    block = os.urandom(8 << 20)
    begin.wait(60)
    started = time.monotonic()
    with path.open("wb", buffering=0) as stream:
        for _ in range(size // len(block)):
            stream.write(block)
        stream.write(block[: size % len(block)])
        os.fsync(stream.fileno())
    times.put((started, time.monotonic()))


def raw_seconds(root: Path, total: int) -> float:
    """The same bytes by as many processes: write, fsync. Their start does not count."""
    root.mkdir()
    context = get_context("spawn")
    begin, times = context.Barrier(RANKS), context.Queue()
    processes = [
        context.Process(target=write_raw, args=(root / str(i), total // RANKS, begin, times)) for i in range(RANKS)
    ]
    for process in processes:
        process.start()
    spans = [times.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    shutil.rmtree(root)
    return max(end for _, end in spans) - min(start for start, _ in spans)


def summary(seconds: list[float], saves: bool) -> dict[str, float]:
    """Seconds of a step: those that saved, those beside which a save may have run, all of them."""
    saving = [s for i, s in enumerate(seconds, start=1) if saves and i % EVERY == 0]
    others = [s for i, s in enumerate(seconds, start=1) if not saves or i % EVERY]
    result = {"total_s": sum(seconds), "step_median_s": statistics.median(others), "step_max_s": max(others)}
    if saving:
        result["saving_step_median_s"] = statistics.median(saving)
    return {name: round(value, 3) for name, value in result.items()}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    arch = Qwen3MoeArch(
        vocab_size=4096,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        moe_intermediate_size=512,
        num_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    result: dict[str, Any] = {
        "ranks": RANKS,
        "parameters": arch.num_parameters(),
        "steps": STEPS,
        "saves": STEPS // EVERY,
    }
    for name, directory in (("disk", arguments.disk), ("memory", arguments.memory)):
        root = Path(mkdtemp(prefix="hpcrl-checkpoint-save-", dir=directory))
        try:
            result[name] = measure_in(root, arch)
        finally:
            shutil.rmtree(root)
        print(name, result[name], flush=True)
        record("checkpoint_save", result)


def measure_in(root: Path, arch: ModelArch) -> dict[str, Any]:
    """All figures of one directory."""
    result: dict[str, Any] = {}
    for mode in MODES:
        seconds, events = run_mode(arch, root / mode, mode)
        figures: dict[str, float] = summary(seconds, mode != "none")
        if events:
            entry = CheckpointLedger(root / mode).newest_verified().entry
            assert entry is not None
            result["bytes"] = entry.manifest.total_bytes
            figures["save_s"] = round(statistics.median(event["seconds"] for event in events), 3)
            figures["blocked_s"] = round(statistics.median(event["blocked_s"] for event in events), 3)
        result[mode] = figures
        print(root, mode, figures, flush=True)
    result["raw_write_fsync_s"] = round(
        statistics.median(raw_seconds(root / f"raw{i}", result["bytes"]) for i in range(3)), 3
    )
    result["sync_save_over_raw"] = round(result["raw_write_fsync_s"] / result["sync"]["save_s"], 3)
    result["async_blocked_over_sync_blocked"] = round(result["async"]["blocked_s"] / result["sync"]["blocked_s"], 3)
    return result


if __name__ == "__main__":
    main()
