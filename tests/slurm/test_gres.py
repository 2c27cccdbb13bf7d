"""GPUs of a node, from what Slurm writes of its generic resources."""

from __future__ import annotations

import pytest

from hpcrl.slurm.gres import gpus_by_type


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("", {}),
        ("(null)", {}),
        ("gpu", {"": 1}),
        ("gpu:8", {"": 8}),
        ("gpu:h200", {"h200": 1}),
        ("gpu:h200:8", {"h200": 8}),
        ("gpu:h200:8(S:0-1)", {"h200": 8}),
        ("gpu:h200:4(S:0,2-3),nvme:1", {"h200": 4}),
        ("gpu:h200:4,gpu:a100:2,gpu:h200:3", {"h200": 7, "a100": 2}),
        ("gres:gpu:h200:8", {"h200": 8}),
        ("gres/gpu:h200:8, gres/gpu:2", {"h200": 8, "": 2}),
        ("gpu:1g.10gb:7", {"1g.10gb": 7}),
        ("gpu:1g.10gb", {"1g.10gb": 1}),
        ("gpu:h200:no_consume:8", {"h200": 8}),
        ("gpu:no_consume:8", {"": 8}),
        ("gpu:h200:no_consume", {"h200": 1}),
        ("gpu:h200:1K", {"h200": 1024}),
        ("gpu:h200:2m", {"h200": 2 << 20}),
        ("gpu:h200:0", {}),
        ("gpu:0", {}),
        ("shard:h200:8,mps:100,gpu_mem:4", {}),
        # a count too long to be one is a type
        ("gpu:1234567890", {"1234567890": 1}),
    ],
)
def test_gpus_of_a_node(text: str, gpus: dict[str, int]) -> None:
    assert gpus_by_type(text) == gpus
