"""Multiply small matrices on each GPU and compare with the processor. Imports nothing of hpcrl.

``python product_script.py ANSWERS QUESTION``: each device says that it begins and what came of it, as lines of JSON, so
that one that crashes or hangs is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import math
import os
import signal
import sys
import time
from typing import Any

#: PR_SET_PDEATHSIG of prctl
_DIE_WITH_PARENT = 1


def say(path: str, **answer: object) -> None:
    """Append one answer."""
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(answer) + "\n")


def difference(torch: Any, found: Any, expected: Any) -> float | None:
    """Return the norm of the difference by the norm of the expected values; None where it is not a number."""
    error = float(torch.linalg.norm((found.double() - expected).flatten()) / torch.linalg.norm(expected.flatten()))
    return error if math.isfinite(error) else None


def product(torch: Any, device: Any, size: int) -> dict[str, Any]:
    """Return how far products in float32 and bfloat16 are from those of the processor in float64."""
    random = torch.Generator().manual_seed(size)
    a, b = (torch.randn(size, size, generator=random) for _ in range(2))
    single = a.to(device) @ b.to(device)
    half = a.bfloat16().to(device) @ b.bfloat16().to(device)
    return {
        "float32": difference(torch, single.cpu(), a.double() @ b.double()),
        "bfloat16": difference(torch, half.cpu(), a.bfloat16().double() @ b.bfloat16().double()),
    }


def speed(torch: Any, device: Any, size: int, loops: int) -> float:
    """Return TFLOP/s of a large product in bfloat16."""
    a = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(loops):
        a @ a
    torch.cuda.synchronize(device)
    return loops * 2 * size**3 / (time.perf_counter() - begun) / 1e12


def copies(torch: Any, device: Any, size: int) -> dict[str, float]:
    """Return GB/s of copies of pinned memory to the device and back."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    rates = {}
    for name, target, source in (("to_gpu_gb_s", there, host), ("to_host_gb_s", host, there)):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        rates[name] = size / (time.perf_counter() - begun) / 1e9
    return rates


def alone() -> None:
    """End with the process that started this one, and import nothing from the directory of this file."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    # older Pythons put the directory of the script first
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
    faulthandler.enable()


def main() -> None:
    """Try the devices of the question."""
    path, question = sys.argv[1], json.loads(sys.argv[2])
    alone()
    faulthandler.dump_traceback_later(question["hang_s"], exit=False)
    # TF32 rounds float32 to 10 bits; images of NVIDIA turn it on by variables
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    torch: Any = importlib.import_module("torch")
    torch.set_float32_matmul_precision("highest")
    for index in question["devices"]:
        say(path, device=index, begun=True)
        answer: dict[str, Any] = {}
        try:
            if question["kind"] == "cuda":
                device = torch.device("cuda", index)
                answer["name"] = torch.cuda.get_device_name(device)
                answer |= product(torch, device, question["size"])
                answer["tflops"] = speed(torch, device, question["speed_size"], question["loops"])
                try:
                    answer |= copies(torch, device, question["pinned_bytes"])
                except Exception as error:  # noqa: BLE001 - the GPU itself works
                    answer["pinned_error"] = f"{type(error).__name__}: {error}"
            else:
                answer |= {"name": "processor", **product(torch, torch.device("cpu"), question["size"])}
        except Exception as error:  # noqa: BLE001 - whatever a device raises is its answer
            answer["error"] = f"{type(error).__name__}: {error}"
        say(path, device=index, done=True, **answer)


if __name__ == "__main__":
    main()
