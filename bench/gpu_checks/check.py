"""One thing to look at on a GPU, and what it is told."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import kernels
import torch

Row = dict[str, Any]


@dataclass
class Session:
    """What checks are told.

    Attributes
    ----------
    tiny:
        Small sizes, which a processor computes as well.
    scratch:
        A directory for files.
    until:
        Where a check ends by itself, by `time.monotonic`.
    """

    tiny: bool
    scratch: Path
    until: float = float("inf")

    @property
    def device(self) -> torch.device:
        """The GPU, or the processor where there is none and sizes are small. The first use starts the device."""
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        if not self.tiny:
            raise SystemExit("there is no GPU here; --tiny runs small sizes on processors")
        return torch.device("cpu")

    @property
    def late(self) -> bool:
        """Whether a check should begin nothing more."""
        return time.monotonic() > self.until


class Check(NamedTuple):
    """``name`` is ``part.check``; ``env`` is set in its process before the device is started."""

    name: str
    run: Callable[[Session], Iterator[Row]]
    limit_s: float
    env: Mapping[str, str] = MappingProxyType({})


def seconds_of(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Seconds of a call: the median of ``repeats`` behind one that is not counted, by the device's clock."""
    run()
    return statistics.median(kernels.seconds_of(run, device) for _ in range(repeats))
