"""One rank of an all-reduce and an all-to-all whose contents are verified. Imports nothing of hpcrl.

``python network_script.py ANSWERS QUESTION``: each phase is a line of JSON when it is done, so that the progress of a
rank that hangs is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

#: period of the pattern, a prime: a shift of the data is seen
_PERIOD = 1021
#: PR_SET_PDEATHSIG of prctl
_DIE_WITH_PARENT = 1


def say(path: str, **answer: object) -> None:
    """Append one answer."""
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(answer) + "\n")


class Rank:
    """One rank of a process group that exists."""

    def __init__(self, torch: Any, dist: Any, device: Any, count: int) -> None:
        """Remember the rank; ``count``: 32-bit elements of a collective, a multiple of the number of ranks."""
        self.torch, self.dist, self.device, self.count = torch, dist, device, count
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def pattern(self, count: int, factor: int) -> Any:
        """Return whole numbers that differ from place to place and by factor; sums of them stay below 2^31."""
        return (self.torch.arange(count, device=self.device, dtype=self.torch.int32) % _PERIOD + 1) * factor

    def wrong_sums(self) -> int:
        """Return how many elements of an all-reduce are not the sum of all ranks' patterns."""
        data = self.pattern(self.count, self.rank + 1)
        self.dist.all_reduce(data)
        return int((data != self.pattern(self.count, self.world * (self.world + 1) // 2)).sum().item())

    def wrong_parts(self) -> list[int]:
        """Return the ranks whose part of an all-to-all arrived wrong."""
        part = self.count // self.world
        sent = self.torch.cat([self.pattern(part, self.rank * self.world + to + 1) for to in range(self.world)])
        arrived = self.torch.zeros_like(sent)
        self.dist.all_to_all_single(arrived, sent)
        parts = arrived.view(self.world, part)
        return [
            source
            for source in range(self.world)
            if not bool((parts[source] == self.pattern(part, source * self.world + self.rank + 1)).all().item())
        ]

    def seconds(self, call: Callable[[], object], loops: int) -> float:
        """Return how long one call takes, after one that is not counted and a barrier."""
        call()
        self.dist.barrier()
        self.wait()
        begun = time.perf_counter()
        for _ in range(loops):
            call()
        self.wait()
        return (time.perf_counter() - begun) / loops

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)


def alone() -> None:
    """End with the process that started this one, and import nothing from the directory of this file."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    # older Pythons put the directory of the script first
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
    faulthandler.enable()


def main() -> None:
    """Take part."""
    path, question = sys.argv[1], json.loads(sys.argv[2])
    alone()
    faulthandler.dump_traceback_later(question["hang_s"], exit=False)
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    rank, world = question["rank"], question["world"]
    say(path, phase="imported")
    device = torch.device("cpu")
    try:
        if question["backend"] == "nccl":
            device = torch.device("cuda", question["local_rank"])
            torch.cuda.set_device(device)
        address = f"[{question['address']}]" if ":" in question["address"] else question["address"]
        dist.init_process_group(
            question["backend"],
            init_method=f"tcp://{address}:{question['port']}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=question["timeout_s"]),
        )
        say(path, phase="joined")
        count = question["elements"] // world * world
        me = Rank(torch, dist, device, count)
        wrong = me.wrong_sums()
        data = torch.zeros(count, dtype=torch.int32, device=device)
        taken = me.seconds(lambda: dist.all_reduce(data), question["loops"])
        say(path, phase="reduced", wrong=wrong, bytes=count * 4, seconds=taken)
        parts = me.wrong_parts()
        arrived = torch.empty_like(data)
        taken = me.seconds(lambda: dist.all_to_all_single(arrived, data), question["loops"])
        say(path, phase="exchanged", wrong_from=parts, bytes=count * 4, seconds=taken)
        dist.barrier()
        say(path, phase="done")
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the answer
        say(path, error=f"{type(error).__name__}: {error}")
        # threads that wait for other ranks would keep the process
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
