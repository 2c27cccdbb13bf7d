"""Measure kernels on this machine: matrix products, grouped ones, attention, collectives of its GPUs, by shape.

    python -m hpcrl.trainer.profile < request.json > samples.json

`hpcrl plan profile` asks for it and makes a file of tables of what it prints. On a CPU the same kernels run in small
shapes, and collectives over gloo.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing

_WARM_UP, _REPEATS = 2, 5
_CUDA_FP8 = (8, 9)
"""First compute capability with matrix products in FP8."""

Sample = dict[str, Any]


def main() -> None:
    """Read the request, measure, print what was measured."""
    request = json.load(sys.stdin)
    device = request["device"]
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU here")
    deadline = time.monotonic() + request["limit_s"]
    bench = _Bench(device, deadline)
    found: dict[str, Any] = {"name": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    found["torch"] = torch.__version__
    found["gemm"] = list(bench.gemms(request["gemm"]))
    found["grouped_gemm"] = list(bench.grouped(request["grouped_gemm"]))
    found["attention"] = list(bench.attention(request["attention"]))
    found["memory_bytes_s"] = bench.memory()
    ranks = request["ranks"]
    found["collectives"] = _collectives(device, ranks, request["bytes"], deadline) if ranks > 1 else []
    found["left_out"] = bench.left_out
    json.dump(found, sys.stdout)


class _Bench:
    """One device and the time until which it may be measured."""

    def __init__(self, device: str, deadline: float) -> None:
        self.device = device
        self._deadline = deadline
        self.left_out: list[str] = []

    def gemms(self, shapes: list[Sample]) -> Iterator[Sample]:
        """Measure matrix products."""
        for shape in shapes:
            run = self._product(**shape)
            yield from self._timed(f"gemm {shape}", shape, run)

    def grouped(self, shapes: list[Sample]) -> Iterator[Sample]:
        """Measure many matrix products of equal shapes in one kernel."""
        for shape in shapes:
            yield from self._timed(f"grouped gemm {shape}", shape, self._grouped(**shape))

    def attention(self, shapes: list[Sample]) -> Iterator[Sample]:
        """Measure causal attention of one sequence."""
        for shape in shapes:
            yield from self._timed(f"attention {shape}", shape, self._attend(**shape))

    def memory(self) -> float:
        """Measure the bytes per second of a copy, read and written."""
        source = torch.empty((1 << 30) if self.device == "cuda" else (1 << 25), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self._seconds(lambda: target.copy_(source))

    def _timed(self, name: str, shape: Sample, run: Callable[[], Any] | None) -> Iterator[Sample]:
        if run is None:
            self.left_out.append(f"{name}: no kernel for it on {self.device}")
        elif time.monotonic() > self._deadline:
            self.left_out.append(f"{name}: out of time")
        else:
            try:
                yield {**shape, "seconds": self._seconds(run)}
            except (RuntimeError, torch.OutOfMemoryError) as error:
                self.left_out.append(f"{name}: {str(error).splitlines()[0]}")

    def _seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds of a call: the median on a GPU, the shortest on a CPU."""
        for _ in range(_WARM_UP):
            run()
        if self.device != "cuda":
            # others on the machine only make it longer
            return min(_clocked(run) for _ in range(_REPEATS))
        event: Any = torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(_REPEATS)]
        for begin, end in pairs:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(float(begin.elapsed_time(end)) for begin, end in pairs) / 1e3

    def _product(self, dtype: str, m: int, n: int, k: int) -> Callable[[], Any] | None:
        if dtype == "fp8":
            if self.device != "cuda" or torch.cuda.get_device_capability() < _CUDA_FP8:
                return None
            a = torch.randn(m, k, device=self.device).to(torch.float8_e4m3fn)
            b = torch.randn(n, k, device=self.device).to(torch.float8_e4m3fn).t()
            one = torch.ones((), device=self.device)
            return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        kind = getattr(torch, dtype)
        left, right = (torch.randn(size, device=self.device, dtype=kind) for size in ((m, k), (k, n)))
        return lambda: torch.mm(left, right)

    def _grouped(self, dtype: str, groups: int, m: int, n: int, k: int) -> Callable[[], Any] | None:
        if dtype == "fp8":
            return None
        kind = getattr(torch, dtype)
        a = torch.randn(groups, m, k, device=self.device, dtype=kind)
        b = torch.randn(groups, k, n, device=self.device, dtype=kind)
        if self.device == "cuda" and dtype == "bfloat16" and hasattr(torch, "_grouped_mm"):
            rows = a.reshape(groups * m, k)
            ends = torch.arange(m, groups * m + 1, m, device=self.device, dtype=torch.int32)
            return lambda: torch._grouped_mm(rows, b, offs=ends)
        return lambda: torch.bmm(a, b)

    def _attend(self, **shape: Any) -> Callable[[], Any]:
        heads, kv_heads, head_dim = (shape[name] for name in ("heads", "kv_heads", "head_dim"))
        queries, context, kind = shape["queries"], shape["context"], getattr(torch, shape["dtype"])
        q = torch.randn(1, heads, queries, head_dim, device=self.device, dtype=kind)
        k, v = (torch.randn(1, kv_heads, context, head_dim, device=self.device, dtype=kind) for _ in range(2))
        whole = queries == context
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(q, k, v, is_causal=whole, enable_gqa=heads != kv_heads)


def _clocked(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _collectives(device: str, ranks: int, sizes: list[int], deadline: float) -> list[Sample]:
    """Measure collectives of ``ranks`` processes of this node; rank 0 returns the samples."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(_rank, (_Ring(device, ranks, sizes, port, deadline - time.monotonic()), answers), nprocs=ranks)
    found: list[Sample] = answers.get()
    return found


class _Ring(NamedTuple):
    """Arguments of each process of a collective."""

    device: str
    ranks: int
    sizes: list[int]
    port: int
    left_s: float


def _rank(rank: int, ring: _Ring, answers: Any) -> None:
    device, ranks, sizes, port, left_s = ring
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if device == "cuda":
        torch.cuda.set_device(rank)
    deadline = time.monotonic() + left_s
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=ranks)
    try:
        bench = _Bench(device, deadline)
        found = []
        for size in sizes:
            for kind, run in _collective_calls(device, ranks, size).items():
                # all ranks stop together: rank 0's clock decides
                go = torch.tensor(float(time.monotonic() < deadline), device=device)
                dist.broadcast(go, 0)
                if go.item():
                    seconds = bench._seconds(run)
                    found.append({"kind": kind, "ranks": ranks, "per_node": ranks, "bytes": size, "seconds": seconds})
        if rank == 0:
            answers.put(found)
    finally:
        dist.destroy_process_group()


def _collective_calls(device: str, ranks: int, size: int) -> dict[str, Callable[[], Any]]:
    whole = torch.zeros(size, dtype=torch.uint8, device=device)
    part = torch.zeros(size // ranks, dtype=torch.uint8, device=device)
    values = torch.zeros(size // 4, dtype=torch.float32, device=device)
    out = torch.empty_like(whole)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(out, part),
        "all_reduce": lambda: dist.all_reduce(values),
        "all_to_all": lambda: dist.all_to_all_single(out, whole),
    }
    if device == "cuda":
        share = torch.zeros(size // 4 // ranks, dtype=torch.float32, device=device)
        calls["reduce_scatter"] = lambda: dist.reduce_scatter_tensor(share, values)
    return calls


if __name__ == "__main__":
    main()
