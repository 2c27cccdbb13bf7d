"""A version of the weights that is damaged on the share, as soon as it is there."""

from __future__ import annotations

import random
import time

from hpcrl.runs.rundir import RunDir


def damage_next_version(run: RunDir, rng: random.Random, limit_s: float) -> str:
    """Flip some bytes of the next version that is published, and return its name.

    Engines may have read a part of it by then.

    Raises
    ------
    AssertionError
        No version came within ``limit_s`` seconds.
    """
    known, deadline = set(run.weights_dir.glob("v*/manifest.json")), time.monotonic() + limit_s
    while not (new := set(run.weights_dir.glob("v*/manifest.json")) - known):
        assert time.monotonic() < deadline, f"no new version within {limit_s:g} s"
        time.sleep(0.02)
    version = new.pop().parent
    largest = max(version.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as stream:
        size = largest.stat().st_size
        for _ in range(16):
            # behind its head, which names the tensors
            at = rng.randrange(size // 2, size)
            stream.seek(at)
            (byte,) = stream.read(1)
            stream.seek(at)
            stream.write(bytes([byte ^ 0xFF]))
    return version.name
