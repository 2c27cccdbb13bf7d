"""Kernels against each other and against the reference, on the device that is here.

    python bench/kernels.py                  all kinds at the sizes of GLM-5, on a GPU
    python bench/kernels.py --kinds head     one of them
    python bench/kernels.py --tiny           small sizes, also on a processor: that it works, not how fast

What is not installed is named with its reason, and what fails with its error. Each candidate runs once to be compiled
and then a few times; seconds are the median, by the device's clock, and memory is what was allocated on top of the
inputs. FLOPs are those of the products that a candidate cannot avoid, whatever it computes: where two ways differ in
what they compute again, the time decides. Figures of a GPU go to ``bench/results/kernels-<device>.json``.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, record
from kernel_cases import KINDS
from kernel_cases.case import Case, NotHere

from hpcrl.errors import UsageError

MIB = 1 << 20


def seconds_of(run: Any, device: torch.device) -> float:
    """Of one run, by the device's clock."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


def measure(case: Case, name: str, device: torch.device, repeats: int) -> dict[str, Any]:
    """What one candidate takes, or why it is not here."""
    found: dict[str, Any] = {"candidate": name}
    try:
        run = case.candidates[name]()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        seconds = statistics.median(seconds_of(run, device) for _ in range(repeats))
    except torch.OutOfMemoryError:
        return found | {"not_here": "does not fit into the device's memory"}
    except Exception as error:  # noqa: BLE001 - it stands in the row, and the other candidates are measured
        first = (str(error).splitlines() or [""])[0]
        # hpcrl says so by a LookupError itself; those that derive from it are mistakes of a program
        if isinstance(error, NotHere | UsageError | ImportError) or type(error) is LookupError:
            return found | {"not_here": first or type(error).__name__}
        return found | {"failed": f"{type(error).__name__}: {first}"}
    found |= {"ms": round(seconds * 1e3, 4)}
    if case.flops:
        found |= {"tflops": round(case.flops / seconds / 1e12, 2)}
    if device.type == "cuda":
        found |= {"peak_mib": round((torch.cuda.max_memory_allocated(device) - before) / MIB, 1)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="default: all")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each candidate")
    parser.add_argument("--output", type=Path, help="where figures go; default: bench/results, on a GPU")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        parser.error("there is no GPU here; --tiny runs small sizes on processors")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    rows = []
    print(f"{'kind':>17} {'sizes':>44} {'candidate':>24} {'ms':>10} {'TFLOP/s':>8} {'peak MiB':>9}")
    for kind in arguments.kinds:
        for case in KINDS[kind](device, arguments.tiny):
            sizes = " ".join(f"{key}={value}" for key, value in case.sizes.items())
            for candidate in case.candidates:
                found = measure(case, candidate, device, arguments.repeats)
                rows.append({"kind": case.kind, **case.sizes, **found})
                said = found.get("not_here") or (
                    f"FAILED {found['failed']}"
                    if "failed" in found
                    else f"{found['ms']:10.3f} {found.get('tflops', 0):8.1f} {found.get('peak_mib', 0):9.1f}"
                )
                print(f"{case.kind:>17} {sizes:>44} {candidate:>24} {said}", flush=True)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    figures = {"device": name, "tiny": arguments.tiny, "versions": versions, "rows": rows}
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if arguments.output or (device.type == "cuda" and not arguments.tiny):
        record(f"kernels-{slug}", figures, arguments.output or ROOT / "bench/results" / f"kernels-{slug}.json")


if __name__ == "__main__":
    main()
