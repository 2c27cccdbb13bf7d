"""Publishing measured: against raw writing of the same bytes, against one rank that gathers, memory, and deltas.

    python bench/handoff_publish.py [--gib 0.25] [--disk DIR] [--memory /dev/shm] [--only disk|memory|delta]

Every comparison is made in one run, in turns, in the same directory: one of a disk, and one of memory, where the disk
does not hide what the publisher itself costs. Results go to ``bench/results/handoff_publish.json``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from harness import record
from publish_cases.deltas import deltas
from publish_cases.models import arch_of, make_model_dir, publisher_of
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from hpcrl.modeling.hf import HfAdapter
from hpcrl.modeling.parallelize import parallelize_decoder
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import ModelArch
from hpcrl.trainer.parallel.mesh import Parallel, distributed

ROUNDS = 3
BLOCK = 4 << 20


class Stage:
    """Runs things on all ranks at once, and measures from the first to the last."""

    def __init__(self, parallel: Parallel, root: Path) -> None:
        self.parallel, self.root = parallel, root

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds until all ranks are through. What earlier rounds left is removed, and written back, before."""
        if self.parallel.world.rank == 0:
            # publishers keep their own directories: who has lost his may not publish any more
            for path in (*self.root.glob("*/v*"), *self.root.glob("raw*"), *self.root.glob("model*")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        dist.barrier()
        started = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - started

    def raw(self, size: int) -> None:
        """As many bytes from memory into one file a rank."""
        data = memoryview(bytearray(os.urandom(1 << 20) * (BLOCK >> 20)))
        share = size // self.parallel.world.size
        with (self.root / f"raw-{self.parallel.world.rank}").open("wb", buffering=0) as stream:
            for begin in range(0, share, BLOCK):
                stream.write(data[: min(BLOCK, share - begin)])
            os.fsync(stream.fileno())

    def gathered(self, model: torch.nn.Module, arch: ModelArch, *, sync: bool) -> None:
        """One rank gathers the model, saves it with safetensors, and touches a marker."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if self.parallel.world.rank == 0:
                tensors.update((n, t.to(torch.bfloat16).contiguous()) for n, t in HfAdapter(arch).to_hf(name, full))
        if self.parallel.world.rank == 0:
            path = self.root / "model.safetensors"
            save_file(tensors, path)
            if sync:
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
            (self.root / "STABLE").touch()


def peak_above(action: Callable[[], object]) -> int:
    """Bytes of resident memory that ``action`` needed at its peak, above what there was before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = psutil.Process().memory_info().rss
    action()
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return peak * 1024 - before


def rank_main(rank: int, *, world_size: int, port: int, root: str, layers: int, results: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    arch = arch_of(layers)
    with distributed(timeout_s=280) as parallel:
        with torch.device("meta"):
            model = build_model(arch, device="cpu").to(torch.bfloat16)
        parallelize_decoder(model, parallel.mesh, dtype=torch.bfloat16)
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for parameter in model.parameters():
                local = parameter.to_local()
                local.view(torch.int16).random_(generator=generator)
        results.put((rank, measure(model, parallel, arch, Path(root))))


def measure(model: torch.nn.Module, parallel: Parallel, arch: ModelArch, root: Path) -> dict[str, Any]:
    model_dir = root / "start"
    stage = Stage(parallel, root / "work")
    size = 2 * arch.num_parameters()
    figures: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        figures.setdefault(name, []).append(seconds)

    plain, direct, overlapped = (
        publisher_of(stage.root / name, parallel, model_dir, arch, max_shard_gib=0.125, **settings)
        for name, settings in (
            ("plain", {"overlap": False}),
            ("direct", {"overlap": False, "direct_io": True}),
            ("overlapped", {}),
        )
    )
    # one to plan and to touch memory
    peaks = {"whole": peak_above(lambda: stage.timed(lambda: (overlapped.publish(model, 0), overlapped.wait())))}
    windowed = publisher_of(
        stage.root / "windowed", parallel, model_dir, arch, overlap=False, max_shard_gib=0.03125, staging_gib=0.03125
    )
    peaks["windowed"] = peak_above(lambda: stage.timed(lambda: windowed.publish(model, 0)))
    plain.publish(model, 1)
    direct.publish(model, 2)
    for _ in range(ROUNDS):
        note("raw", stage.timed(lambda: stage.raw(size)))
        note("publish", stage.timed(lambda: plain.publish(model, 0)))
        note("publish_direct", stage.timed(lambda: direct.publish(model, 0)))
        note("pause_with_overlap", stage.timed(lambda: overlapped.publish(model, 0)))
        overlapped.wait()
        note("gather_save_marker", stage.timed(lambda: stage.gathered(model, arch, sync=False)))
        note("gather_save_fsync_marker", stage.timed(lambda: stage.gathered(model, arch, sync=True)))
    share = sum(p.to_local().nbytes for p in model.parameters())
    return {
        "bytes": size,
        "share_bytes": share,
        "seconds": figures,
        "peak_bytes": peaks,
    }


def publishing(root: Path, gib: float) -> dict[str, Any]:
    layers = max(1, round(gib * 2**30 / (2 * (arch_of(2).num_parameters() - arch_of(1).num_parameters()))))
    make_model_dir(root / "start", arch_of(layers))
    result: dict[str, Any] = {}
    context = mp.get_context("spawn")
    for writers in (1, 4):
        shutil.rmtree(root / "work", ignore_errors=True)
        (root / "work").mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        queue = context.Queue()
        processes = [
            context.Process(
                target=rank_main,
                args=(rank,),
                kwargs={"world_size": writers, "port": port, "root": str(root), "layers": layers, "results": queue},
            )
            for rank in range(writers)
        ]
        for process in processes:
            process.start()
        answers = dict(queue.get(timeout=280) for _ in processes)
        for process in processes:
            process.join()
        result[str(writers)] = summary(answers)
        print(writers, json.dumps(result[str(writers)]), flush=True)
    return result


def summary(answers: dict[int, dict[str, Any]]) -> dict[str, Any]:
    first = answers[0]
    median = {name: statistics.median(seconds) for name, seconds in first["seconds"].items()}
    raw = median["raw"]
    best_publish = min(median["publish"], median["publish_direct"])
    return {
        "gib": first["bytes"] / 2**30,
        "seconds": {name: [round(s, 3) for s in seconds] for name, seconds in first["seconds"].items()},
        "median_s": {name: round(s, 3) for name, s in median.items()},
        "gib_per_s": {name: round(first["bytes"] / 2**30 / s, 3) for name, s in median.items()},
        "publish_over_raw": round(raw / median["publish"], 3),
        "direct_publish_over_raw": round(raw / median["publish_direct"], 3),
        "speedup_over_gather_save_marker": round(median["gather_save_marker"] / best_publish, 3),
        "speedup_over_gather_save_fsync_marker": round(median["gather_save_fsync_marker"] / best_publish, 3),
        "peak_above_model_in_shares": {
            kind: round(max(a["peak_bytes"][kind] for a in answers.values()) / first["share_bytes"], 3)
            for kind in ("whole", "windowed")
        },
        "peak_above_model_mib": {
            kind: round(max(a["peak_bytes"][kind] for a in answers.values()) / 2**20) for kind in ("whole", "windowed")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--only", choices=("disk", "memory", "delta"))
    arguments = parser.parse_args()
    path = Path(__file__).parent / "results/handoff_publish.json"
    figures = json.loads(path.read_text()) if arguments.only and path.exists() else {}
    for name, directory in (("disk", arguments.disk), ("memory", arguments.memory), ("delta", arguments.memory)):
        if arguments.only not in (None, name):
            continue
        root = Path(tempfile.mkdtemp(prefix="hpcrl-publish-", dir=directory))
        try:
            figures[name] = deltas(root) if name == "delta" else publishing(root, arguments.gib)
        finally:
            shutil.rmtree(root)
    record("handoff_publish", {name: figures[name] for name in ("disk", "memory", "delta") if name in figures})


if __name__ == "__main__":
    main()
