"""The tiny models and batches that all trainers of ``bench/trainer_peers.py`` train, and how each is measured.

Nothing of hpcrl is imported here: a peer may have an interpreter of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: as config.json has them; both have weights of some hundred MB with gradients and optimizer state
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3",
        "vocab_size": 8192,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1152,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 8192,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_intermediate_size": 384,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "vocab_size": 8192,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "q_lora_rank": 192,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "intermediate_size": 1152,
        "moe_intermediate_size": 384,
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
    },
}
COMMON: dict[str, Any] = {"max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}
#: malloc's numbers of two settings (malloc.h): bytes from which memory at the heap's end is given back, and bytes from
#: which an allocation is a mapping of its own
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def case() -> dict[str, Any]:
    """What this rank is to measure: model, sequences, tokens, steps, low_memory, out."""
    return dict(json.loads(os.environ["HPCRL_BENCH_CASE"]))


def batch(spec: dict[str, Any], rank: int) -> torch.Tensor:
    """``[sequences, tokens]`` int64 of this rank: sequences of one length, so that no trainer has to pad."""
    generator = torch.Generator().manual_seed(1000 + rank)
    vocab = MODELS[spec["model"]]["vocab_size"]
    return torch.randint(0, vocab, (spec["sequences"], spec["tokens"]), generator=generator)


def measure(spec: dict[str, Any], rank: int, before_mib: float, step: Callable[[], float], parameters: int) -> None:
    """Take the peak of memory in the second step, time those behind the third, and write what this rank measured.

    Parameters
    ----------
    before_mib:
        Resident memory before the model was built: what the interpreter and its libraries take does not count.
    step:
        Makes one optimizer step and returns its loss.
    parameters:
        Of the whole model.
    """
    # what is freed is not resident; while steps are timed malloc has what it would adjust itself to
    _set_malloc(64 << 10)
    losses = [step()]
    torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    losses.append(step())
    peak_mib = status_mib("VmHWM") - before_mib
    _set_malloc(32 << 20)
    losses.append(step())
    seconds, cpu = [], []
    for _ in range(spec["steps"]):
        torch.distributed.barrier()
        began, busy = time.monotonic(), _cpu_s()
        losses.append(step())
        seconds.append(time.monotonic() - began)
        cpu.append(_cpu_s() - busy)
    result = {"parameters": parameters, "peak_mib": peak_mib, "step_s": seconds, "cpu_s": cpu, "losses": losses}
    Path(f"{spec['out']}.{rank}").write_text(json.dumps(result))
    torch.distributed.barrier()
    sys.stdout.flush()


def _set_malloc(threshold: int) -> None:
    libc = ctypes.CDLL(None)
    for name, value in ((M_MMAP_THRESHOLD, threshold), (M_TRIM_THRESHOLD, 2 * threshold)):
        if not libc.mallopt(name, value):
            raise RuntimeError(f"malloc refused {value} for its setting {name}")


def status_mib(name: str) -> float:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"the kernel does not say {name}")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
