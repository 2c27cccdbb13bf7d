"""A file of measured kernel times, made on this machine by `hpcrl.trainer.profile` in a process with torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

import yaml

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.plan import Role
from hpcrl.errors import MissingExtraError, UsageError
from hpcrl.models.facts import ModelFacts
from hpcrl.models.known import load_facts
from hpcrl.models.layers import Gqa
from hpcrl.planning.hardware import node_hardware
from hpcrl.planning.tables.file import MeasuredHardware, TableFile
from hpcrl.planning.times.work import matrices
from hpcrl.processes.interpreter import module_command

_GRID = ((2048, 4096), (4096, 4096), (4096, 14336), (7168, 2048), (7168, 16384), (24576, 1536))
_ROWS = (16, 64, 256, 1024, 4096, 16384)
_EXPERTS = ((4096, 7168), (7168, 2048), (1536, 2048), (2048, 768))
_EXPERT_ROWS = (1, 16, 128, 1024, 4096)
_HEADS = ((32, 8, 128), (64, 8, 128), (128, 128, 192))
_CONTEXTS = (1024, 8192, 32768)
_SMALL = 16
"""Factor by which all sizes are smaller on a CPU, so that a measurement takes a minute."""
_GROUPS = 8
_MESSAGES = tuple(1 << power for power in range(12, 31, 3))
_GRACE_S = 120.0


def measure_kernels(
    cluster: ClusterProfile, model: str | None, *, device: str, ranks: int, limit_s: float, python: str | None = None
) -> tuple[TableFile, list[str]]:
    """Measure kernels here, and report what was left out.

    Parameters
    ----------
    cluster:
        Profile with the peaks to which measured times are compared. A CPU has none: the best measured rates replace
        them.
    model:
        Name or directory of the model whose shapes are measured; None: a grid.
    python:
        Interpreter with torch; None: this one.

    Raises
    ------
    UsageError
        No GPU is described, or the measuring failed.
    MissingExtraError
        This Python has no torch.
    """
    if device not in ("cuda", "cpu"):
        raise UsageError(f"--device {device}: cuda or cpu")
    hardware = None if device == "cpu" else _described(cluster)
    if python is None and find_spec("torch") is None:
        raise MissingExtraError("trainer", "torch")
    request = _request(None if model is None else load_facts(model), device, ranks, limit_s)
    command = module_command(python or sys.executable, "hpcrl.trainer.profile")
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=limit_s + _GRACE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"nothing was measured within {limit_s + _GRACE_S:.0f} s: a kernel hangs") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        hint = "run it on a node of the site with its GPUs free, or with --device cpu"
        raise UsageError(f"measuring on {device} failed: {last}\n    hint: {hint}")
    found = json.loads(done.stdout)
    name = "cpu" if device == "cpu" else _gpu_type(cluster)
    samples = {key: found[key] for key in ("gemm", "grouped_gemm", "attention", "collectives")}
    return TableFile.model_validate(
        {
            "format_version": 1,
            "device": name,
            "source": f"hpcrl plan profile on {found['name']}, torch {found['torch']}, {datetime.now(UTC):%Y-%m-%d}",
            "hardware": hardware or _best(found),
            **samples,
        }
    ), list(found["left_out"])


def table_yaml(table: TableFile) -> str:
    """Return the text of a file that `hpcrl.planning.tables.file.load_table` reads."""
    value = table.model_dump(mode="json", exclude_defaults=True)
    head = "# Written by `hpcrl plan profile`, for --tables or for paths.tables of the cluster profile.\n"
    return head + yaml.safe_dump(value, sort_keys=False, width=118, default_flow_style=None)


def _gpu_type(cluster: ClusterProfile) -> str:
    assert isinstance(cluster, SlurmCluster)
    return node_hardware(cluster, Role.TRAINER).node.gpu_type or "gpu"


def _described(cluster: ClusterProfile) -> MeasuredHardware:
    if not isinstance(cluster, SlurmCluster) or not node_hardware(cluster, Role.TRAINER).gpus:
        raise UsageError(
            f"cluster profile {cluster.name} describes no GPU: measured times are stored relative to its rates\n"
            "    hint: name the site with --cluster; --device cpu measures this machine's processor"
        )
    node = node_hardware(cluster, Role.TRAINER)
    return MeasuredHardware(
        memory_gb_s=node.gpu_memory_rate / 1e9,
        tflops={dtype: node.gpu_flops(dtype) / 1e12 for dtype in ("float32", "bfloat16", "fp8")},
        nvlink_gb_s=node.nvlink_rate / 1e9,
        nic_gb_s=node.nic_rate / node.gpus / 1e9,
    )


def _best(found: dict[str, Any]) -> dict[str, Any]:
    """Return the best rates that were reached, for GPUs without a data sheet."""
    flops: dict[str, float] = {}
    for sample in (*found["gemm"], *found["grouped_gemm"]):
        done = 2.0 * sample["m"] * sample["n"] * sample["k"] * sample.get("groups", 1) / sample["seconds"] / 1e12
        flops[sample["dtype"]] = max(done, flops.get(sample["dtype"], 0.0))
    links = [sample["bytes"] / sample["seconds"] / 1e9 for sample in found["collectives"]]
    return {
        "memory_gb_s": found["memory_bytes_s"] / 1e9,
        "tflops": flops,
        **({"nvlink_gb_s": max(links)} if links else {}),
    }


def _request(facts: ModelFacts | None, device: str, ranks: int, limit_s: float) -> dict[str, Any]:
    """Return the request of measurements, the shapes that matter most first."""
    small = _SMALL if device == "cpu" else 1
    dtypes = ("float32",) if device == "cpu" else ("fp8", "bfloat16")
    dense: Sequence[tuple[int, int]] = _GRID
    experts: Sequence[tuple[int, int]] = _EXPERTS
    heads = [(max(1, h // small), max(1, kv // small), d) for h, kv, d in _HEADS]
    if facts is not None:
        dense = tuple((int(n), int(k)) for n, k, _ in matrices(facts, experts=False))
        experts = tuple((int(n), int(k)) for n, k, _ in matrices(facts, experts=True))
        mixers = [layer.mixer for layer in facts.layers if isinstance(layer.mixer, Gqa)]
        heads = [(m.num_attention_heads, m.num_key_value_heads, m.head_dim) for m in mixers[:1]]

    def cut(size: int) -> int:
        # FP8 kernels require multiples of 16
        return max(16, size // small // 16 * 16)

    def rows(size: int) -> int:
        return max(1, size // small)

    gemm = [
        {"dtype": dtype, "m": cut(m), "n": cut(n), "k": cut(k)} for dtype in dtypes for n, k in dense for m in _ROWS
    ]
    grouped = [
        {"dtype": dtype, "groups": _GROUPS, "m": rows(m), "n": cut(n), "k": cut(k)}
        for dtype in dtypes
        for n, k in experts
        for m in _EXPERT_ROWS
    ]
    attention = [
        {"dtype": dtypes[-1], "queries": queries, "context": rows(context), "heads": h, "kv_heads": kv, "head_dim": d}
        for h, kv, d in heads
        for context in _CONTEXTS
        for queries in (1, rows(context))
    ]
    return {
        "device": device,
        "ranks": ranks,
        "limit_s": limit_s,
        "bytes": [size // small for size in _MESSAGES[: -1 if device == "cpu" else None] if size // small >= 8 * ranks],
        "gemm": _once(gemm),
        "grouped_gemm": _once(grouped),
        "attention": _once(attention),
    }


def _once(shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({json.dumps(shape, sort_keys=True): shape for shape in shapes}.values())
