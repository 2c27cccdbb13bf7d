"""Copies between card and host: their bandwidth, a version on its way out, and one on its way in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch
from planning.memory_worker import images

from gpu_checks.check import Check, Row, Session, seconds_of
from gpu_checks.stack import FULL, PIECES, QWEN, apart, synchronize
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.storage.files import write_json
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.weights.store import HandoffStore


def bandwidth(session: Session) -> Iterator[Row]:
    """Of copies to and from memory that is pinned, and that is not."""
    device, size = session.device, (1 << 22) if session.tiny else (2 << 30)
    here = torch.empty(size, dtype=torch.uint8, device=device)
    for name, pin in (("pinned", device.type == "cuda"), ("pageable", False)):
        there = torch.ones(size, dtype=torch.uint8, pin_memory=pin)
        down = seconds_of(lambda: there.copy_(here, non_blocking=True), device)  # noqa: B023 - called at once
        up = seconds_of(lambda: here.copy_(there, non_blocking=True), device)  # noqa: B023
        yield {"memory": name, "to_host_gb_s": size / down / 1e9, "to_device_gb_s": size / up / 1e9}


def publish(session: Session, kind: str) -> Iterator[Row]:
    """How long a version keeps the trainer, by the size of what is published."""
    where = session.scratch / f"model-{kind}"
    arch = QWEN.arch(session.tiny)
    if not where.is_dir():
        where.mkdir()
        write_character_tokenizer(where)
        write_json(where / "config.json", arch.to_hf_config())
    with apart(session, QWEN, (FULL, PIECES, f"handoff.kind={kind}")) as (policy, recipe):
        dtype = getattr(torch, recipe.handoff.dtype or recipe.trainer.dtype)
        store = HandoffStore(session.scratch / f"weights-{kind}")
        publisher = Publisher(
            store, policy.parallel, arch=arch, model_dir=where, dtype=dtype, attempt=1, settings=recipe.handoff
        )
        for version in range(3):
            synchronize(session.device)
            begun = time.perf_counter()
            publisher.publish(policy.model, version)
            kept = time.perf_counter() - begun
            publisher.wait()
            size = images(publisher)
            row = {"version": version, "gb": size / 1e9, "trainer_waits_s": kept, "gb_s": size / kept / 1e9}
            yield row | {"published_s": time.perf_counter() - begun}


def update(session: Session) -> Iterator[Row]:
    """A version of 8 GB into tensors that an engine has: tensor by tensor from ordinary memory, and from pinned."""
    device, number = session.device, 3 if session.tiny else 320
    size = (64, 96) if session.tiny else (4_096, 6_144)
    targets = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(number)]
    nbytes = targets[0].nbytes
    for name in ("pageable", "pinned"):
        if name == "pinned":
            whole = torch.ones(number * nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            sources = [part.view(size) for part in whole.split(nbytes)]
        else:
            sources = [torch.frombuffer(bytearray(nbytes), dtype=torch.uint8).view(size) for _ in range(number)]
        synchronize(device)
        begun = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        synchronize(device)
        seconds = time.perf_counter() - begun
        yield {"from": name, "gb": number * nbytes / 1e9, "seconds": seconds, "gb_s": number * nbytes / seconds / 1e9}


COPIES = (
    Check("whole.bandwidth", bandwidth, 40),
    Check("whole.update", update, 40),
    *(Check(f"whole.publish {kind}", partial(publish, kind=kind), 90) for kind in ("full", "fp8")),
)
