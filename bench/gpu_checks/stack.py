"""Whole steps of a few layers of published models: tokens a second, the share of the card's arithmetic, and memory.

The share (MFU) counts what the model wants and nothing that is computed again: three times the products of a forward
pass (`hpcrl.models.flops`; those of an indexer once, which has no gradient), by the seconds of forward and backward
pass, by the dense bfloat16 peak of the datasheet, also where products are in FP8. Attention that chooses tokens is
counted as it is computed, in latents.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import ROOT
from planning import memory_worker
from planning.memory import FAMILIES
from torch.profiler import ProfilerActivity, profile

from gpu_checks.check import Check, Row, Session
from gpu_checks.compiled import CompileCounter
from hpcrl.config.load import load_recipe
from hpcrl.config.recipe import Recipe
from hpcrl.models.arch import ModelArch, arch_from_config
from hpcrl.models.flops import layer_fixed, sequence_scores
from hpcrl.models.layers import Mla
from hpcrl.planning.memory.fit import trainer_memory
from hpcrl.planning.memory.trainer import trainer_moments
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.step.policy import TrainerPolicy

GIB = 1 << 30
PEAK_TFLOPS = 989.4
"""Dense bfloat16 of H100 and H200 (SXM), by NVIDIA's datasheet."""
CONFIGS = ROOT / "hpcrl/models/configs"
FULL = "trainer.memory.activation_checkpointing=full"
PIECES = "trainer.memory.lm_head_chunk_tokens=auto"
HOST_OPTIMIZER = "trainer.memory.optimizer_offload=true"
HOST_INPUTS = "trainer.memory.activation_offload=true"


@dataclass(frozen=True)
class Stack:
    """Some layers of a published model, and one micro-batch."""

    model: str
    changes: dict[str, Any]
    lengths: tuple[int, ...]

    def arch(self, tiny: bool) -> ModelArch:
        """The model, cut; ``tiny`` makes everything small."""
        config = json.loads((CONFIGS / f"{self.model}.json").read_text())
        if tiny:
            family = config["model_type"]
            config = {"model_type": family, **FAMILIES[family], "vocab_size": 512, "num_hidden_layers": 2}
        else:
            config |= self.changes
        return arch_from_config({key: value for key, value in config.items() if not key.startswith("_")})

    def tokens(self, tiny: bool) -> tuple[int, ...]:
        """Lengths of its sequences."""
        return tuple(-(-n // 256) for n in self.lengths) if tiny else self.lengths


QWEN = Stack("Qwen3-30B-A3B", {"num_hidden_layers": 3}, (16_384, 8_192, 4_096, 4_096))
GLM5 = Stack(
    "GLM-5",
    {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        # as many experts as a rank of the reference run has
        "n_routed_experts": 32,
        "vocab_size": 16_384,
        "num_nextn_predict_layers": 0,
    },
    (32_768,),
)


def recipe_of(session: Session, settings: tuple[str, ...], tokens: int) -> Recipe:
    """The quickstart's recipe for one rank with ``settings``."""
    dtype = "float32" if session.tiny else "bfloat16"
    if session.device.type == "cpu":
        # what multiplies there
        settings = tuple(re.sub(r"(fp8\.backend)=.*", r"\1=reference", each) for each in settings)
    given = [f"trainer.dtype={dtype}", "trainer.ranks=1", f"trainer.micro_batch_tokens={tokens}", *settings]
    return load_recipe("quickstart", given).value


def policy_of(recipe: Recipe, arch: ModelArch, parallel: Parallel) -> TrainerPolicy:
    """A policy with random weights, which no file has."""
    policy = TrainerPolicy(recipe, arch, parallel, model_dir=None)
    with torch.no_grad():
        policy.model.init_weights(torch.Generator(parallel.device).manual_seed(0))
    return policy


def step_of(policy: TrainerPolicy, lengths: tuple[int, ...], step: int) -> None:
    """Forward and backward pass of one micro-batch."""
    settings = {"lengths": lengths, "micro_batches": 1}
    vocab = policy.arch.vocab_size
    policy.forward_backward(memory_worker.batch(settings, step=step, rank=0, world_size=1, vocab=vocab))


def model_flops(arch: ModelArch, lengths: tuple[int, ...]) -> float:
    """Operations that a forward and a backward pass want."""
    facts, total = arch.facts, 0.0
    for layer in facts.layers:
        absorbed = isinstance(layer.mixer, Mla) and layer.mixer.indexer is not None
        flops = layer_fixed(layer).scaled(sum(lengths))
        for length in lengths:
            flops += sequence_scores(layer, length, absorbed)
        total += 3 * (flops.total - flops.indexer) + flops.indexer
    return total + 3 * 2.0 * sum(lengths) * arch.vocab_size * arch.hidden_size


@contextmanager
def apart(session: Session, stack: Stack, settings: tuple[str, ...]) -> Iterator[tuple[TrainerPolicy, Recipe]]:
    """A policy on the one rank of this process."""
    recipe = recipe_of(session, settings, sum(stack.tokens(session.tiny)))
    with distributed(timeout_s=240, parallelism=recipe.trainer.parallelism) as parallel:
        yield policy_of(recipe, stack.arch(session.tiny), parallel), recipe


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def speed(session: Session, stack: Stack, settings: tuple[str, ...] = ()) -> Iterator[Row]:
    """Seconds of a step, its share of the card's arithmetic, and memory beside what is planned."""
    device, lengths = session.device, stack.tokens(session.tiny)
    with apart(session, stack, settings) as (policy, recipe):
        programs = CompileCounter()
        passes, updates = list[float](), list[float]()
        for step in range(1, 6):
            if device.type == "cuda" and step == 3:
                torch.cuda.reset_peak_memory_stats(device)
            synchronize(device)
            begun = time.perf_counter()
            step_of(policy, lengths, step)
            synchronize(device)
            middle = time.perf_counter()
            policy.optimizer_step(step)
            synchronize(device)
            programs.end_step()
            # the first two compile programs and take memory
            if step > 2:
                passes.append(middle - begun)
                updates.append(time.perf_counter() - middle)
        seconds = sorted(passes)[len(passes) // 2]
        wanted = model_flops(policy.arch, lengths)
        yield {
            "model": stack.model,
            "layers": policy.arch.num_hidden_layers,
            "tokens": sum(lengths),
            "kernels": policy.kernels,
            "pass_s": seconds,
            "optimizer_s": sorted(updates)[len(updates) // 2],
            "tokens_s": sum(lengths) / seconds,
            "tflops": wanted / seconds / 1e12,
            "mfu": wanted / seconds / 1e12 / PEAK_TFLOPS,
        }
        yield programs.summary()
        yield from memory(policy, recipe, device)
        if device.type == "cuda":
            yield {"host_waits": host_waits(policy, lengths)}


def memory(policy: TrainerPolicy, recipe: Recipe, device: torch.device) -> Iterator[Row]:
    """The largest memory of the card, and what a plan says of it."""
    if device.type != "cuda":
        return
    shape = replace(trainer_memory(recipe, device="cuda"), accumulates=False, expert_imbalance=1.0, handoff_dtype=None)
    moments = {ledger.name: ledger.total for ledger in trainer_moments(policy.arch.facts, shape)}
    name = max(moments, key=lambda each: moments[each])
    free, total = torch.cuda.mem_get_info(device)
    yield {
        "moment": name,
        "planned_gib": moments[name] / GIB,
        "taken_gib": (total - free) / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        "tensors_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "off_by": moments[name] / (total - free) - 1,
        "retries": torch.cuda.memory_stats(device)["num_alloc_retries"],
    }


def host_waits(policy: TrainerPolicy, lengths: tuple[int, ...]) -> dict[str, int]:
    """Places of the code at which the host waits for the device in a forward and backward pass, with their count."""
    counts: dict[str, int] = {}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step_of(policy, lengths, 9)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for warning in found:
        if "synchroniz" in str(warning.message):
            place = f"{Path(warning.filename).name}:{warning.lineno}"
            counts[place] = counts.get(place, 0) + 1
    return counts


def fragments(session: Session, stack: Stack, settings: tuple[str, ...]) -> Iterator[Row]:
    """What steps of ever other lengths reserve beside what they need, and the programs that they compile."""
    device, draw = session.device, torch.Generator().manual_seed(0)
    most = sum(stack.tokens(session.tiny))
    with apart(session, stack, settings) as (policy, _):
        programs = CompileCounter()
        for step in range(1, 4 if session.tiny else 16):
            cuts = torch.randint(most // 8, most // 3, (3,), generator=draw).tolist()
            step_of(policy, tuple(int(n) for n in cuts), step)
            policy.optimizer_step(step)
            yield {"step": step, "tokens": sum(cuts), **programs.end_step()}
        yield programs.summary()
        synchronize(device)
        if device.type == "cuda":
            held, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            row = {"tensors_gib": held / GIB, "reserved_gib": reserved / GIB, "more": reserved / held - 1}
            yield row | {"retries": torch.cuda.memory_stats(device)["num_alloc_retries"]}
        else:
            yield {"steps": 3}


def kernels(session: Session, stack: Stack, settings: tuple[str, ...], most: int = 24) -> Iterator[Row]:
    """The programs of the device in which a forward and backward pass spends its time."""
    device, lengths = session.device, stack.tokens(session.tiny)
    on_gpu = device.type == "cuda"
    with apart(session, stack, settings) as (policy, _):
        for step in (1, 2):
            step_of(policy, lengths, step)
            policy.optimizer_step(step)
        synchronize(device)
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiler:
            begun = time.perf_counter()
            step_of(policy, lengths, 3)
            synchronize(device)
            seconds = time.perf_counter() - begun
    found = {
        event.key: ((event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6, event.count)
        for event in profiler.key_averages()
    }
    busy = sum(each for each, _ in found.values())
    yield {"model": stack.model, "seconds": seconds, "busy_s": busy, "programs": sum(n for _, n in found.values())}
    for name, (each, count) in sorted(found.items(), key=lambda item: -item[1][0])[:most]:
        yield {"ms": each * 1e3, "share": each / busy, "count": count, "program": name[:110]}


_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
FP8 = "trainer.precision.fp8.backend=torch"
DEEP_GEMM = "trainer.precision.fp8.backend=deep_gemm"
_SPEEDS: dict[str, tuple[Stack, tuple[str, ...]]] = {
    "qwen3": (QWEN, (FULL, PIECES)),
    "glm5": (GLM5, (FULL, PIECES)),
    "qwen3, FP8": (QWEN, (FULL, PIECES, FP8)),
    "glm5, FP8": (GLM5, (FULL, PIECES, FP8)),
    "qwen3, kept": (QWEN, (PIECES,)),
    "qwen3, compiled": (QWEN, (FULL, PIECES, "trainer.memory.compile=true")),
    "qwen3, on the host": (QWEN, (FULL, PIECES, HOST_OPTIMIZER, HOST_INPUTS)),
    "glm5, DeepGEMM": (GLM5, (FULL, PIECES, DEEP_GEMM)),
    "qwen3, DeepGEMM": (QWEN, (FULL, PIECES, DEEP_GEMM)),
}
WHOLE = (
    *(
        Check(f"whole.{name}", partial(speed, stack=stack, settings=settings), 90, _EXPANDABLE)
        for name, (stack, settings) in _SPEEDS.items()
    ),
    Check("whole.kernels, qwen3", partial(kernels, stack=QWEN, settings=(FULL, PIECES)), 60, _EXPANDABLE),
    Check("whole.kernels, glm5", partial(kernels, stack=GLM5, settings=(FULL, PIECES)), 60, _EXPANDABLE),
    Check("whole.lengths", partial(fragments, stack=QWEN, settings=(FULL, PIECES)), 60),
    # graphs and programs of a layer must not be compiled anew for other lengths
    Check("whole.lengths, FP8", partial(fragments, stack=QWEN, settings=(FULL, PIECES, FP8)), 60, _EXPANDABLE),
    Check("whole.lengths, glm5", partial(fragments, stack=GLM5, settings=(FULL, PIECES)), 60, _EXPANDABLE),
    Check(
        "whole.lengths, compiled",
        partial(fragments, stack=QWEN, settings=(FULL, PIECES, "trainer.memory.compile=true")),
        90,
        _EXPANDABLE,
    ),
    Check("whole.lengths, expandable", partial(fragments, stack=QWEN, settings=(FULL, PIECES)), 60, _EXPANDABLE),
)
