"""Copies between device and host that overlap with computation."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from hpcrl.modeling.memory.host_memory import pinned_bytes


class StartedCopy(Protocol):
    """A copy that was started."""

    def finish(self) -> None:
        """Order later computations after the copy: they may read the target and reuse the memory of the source."""
        ...


class Copies(Protocol):
    """Starts copies of one device, which run in their order."""

    def start(self, target: Tensor, source: Tensor) -> StartedCopy:
        """Copy what was computed of ``source`` until now; it may not be changed before the copy is finished.

        ``target`` has its shape; of another dtype it is converted.
        """
        ...


def copies_of(device: torch.device) -> Copies:
    """Make copies for a device: of an accelerator on a stream of its own, of the processor in a thread."""
    return _ThreadCopies() if device.type == "cpu" else _StreamCopies(device)


def host_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return host memory for ``tensor``, which ``device`` can read and write without help of the CPU.

    Of its shape and dtype, not initialised; pinned where ``device`` is an accelerator (see `pinned_bytes`).
    """
    return pinned_bytes(tensor.nbytes, device).view(tensor.dtype).view(tensor.shape)


class _ThreadCopies:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")

    def start(self, target: Tensor, source: Tensor) -> StartedCopy:
        return _ThreadCopy(self._thread.submit(_copy, target, source.detach()))


class _ThreadCopy:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def finish(self) -> None:
        self._future.result()


@torch.no_grad()
def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


class _StreamCopies:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def start(self, target: Tensor, source: Tensor) -> StartedCopy:
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream, torch.no_grad():
            target.copy_(source.detach(), non_blocking=True)
        return _StreamCopy(self._stream.record_event())


class _StreamCopy:
    def __init__(self, done: torch.Event) -> None:
        self._done = done

    def finish(self) -> None:
        # the computing stream waits, not the host: memory that is freed now is used again behind this point
        torch.accelerator.current_stream().wait_event(self._done)
