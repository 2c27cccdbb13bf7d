"""Versions of a model that is really trained, as deltas."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcrl.config.recipe import OptimizerConfig
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.spec import build_model
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step.optim import clip_gradients, make_optimizer
from hpcrl.weights import HandoffStore
from hpcrl.weights.read.reconstruct import read_tensors
from publish_cases.models import arch_of, make_model_dir, publisher_of


def train_step(model: Decoder, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    """A step on random tokens: next-token loss with random advantages, as a policy gradient has them."""
    tokens = torch.randint(0, model.arch.vocab_size, (64,), generator=generator)
    attention = PackedAttention(torch.tensor([0, 32, 64]))
    logprobs = model(tokens, attention.context()).log_softmax(-1)
    advantages = torch.randn(63, generator=generator)
    (-(logprobs[:-1].gather(1, tokens[1:, None])[:, 0] * advantages).mean()).backward()
    clip_gradients(model.parameters(), 1.0, None)
    optimizer.step()
    optimizer.zero_grad()


def deltas(root: Path, learning_rate: float = 1e-6) -> dict[str, Any]:
    """Real optimizer steps of a Qwen3-MoE at an RL learning rate, published as deltas of 1, 2 and 4 steps."""
    arch = arch_of(2, hidden_size=768, num_experts=16)
    model_dir = make_model_dir(root / "delta-start", arch)
    store = HandoffStore(root / "deltas")
    model = build_model(arch, device="cpu")
    model.init_weights(torch.Generator().manual_seed(0))
    optimizer = make_optimizer(model.named_parameters(), OptimizerConfig(learning_rate=learning_rate))
    generator = torch.Generator().manual_seed(1)
    rows = []
    with distributed(timeout_s=200) as parallel:
        for _ in range(10):
            train_step(model, optimizer, generator)  # moments of Adam that are no longer the first step's
        publisher = publisher_of(store.root, parallel, model_dir, arch, delta_chain=8, delta_max_share=1.0)
        version, previous = 0, b""
        for steps in (0, 1, 2, 4):
            for _ in range(steps):
                train_step(model, optimizer, generator)
            version += steps
            started = time.perf_counter()
            publisher.publish(model, version)
            publisher.wait()
            seconds = time.perf_counter() - started
            started = time.perf_counter()
            current = b"".join(bytes(t.data) for t in read_tensors(store, version))
            read_s = time.perf_counter() - started
            manifest = store.open(version).manifest
            written = sum(
                record.bytes for name, record in manifest.files.items() if name.startswith(("delta", "model-"))
            )
            row: dict[str, Any] = {
                "kind": manifest.kind,
                "chain": len(manifest.needs),
                "steps": steps,
                "publish_s": round(seconds, 3),
                "read_s": round(read_s, 3),
            }
            if previous:
                old, new = (np.frombuffer(data, np.uint16) for data in (previous, current))
                changed = int((old != new).sum())
                pages = np.add.reduceat(old != new, np.arange(0, len(old), 2048)) > 0
                row |= {
                    "changed_share": round(changed / len(old), 5),
                    "changed_bytes": 2 * changed,
                    "delta_bytes": written,
                    "delta_over_changed": round(written / (2 * changed), 4),
                    "delta_over_full": round(written / len(current), 5),
                    "changed_4k_blocks_share": round(float(pages.mean()), 4),
                }
            rows.append(row)
            previous = current
            print(json.dumps(row), flush=True)
    return {"learning_rate": learning_rate, "parameters": arch.num_parameters(), "versions": rows}
