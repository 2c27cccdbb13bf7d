"""What vLLM makes of weights in bfloat16 when it loads them in block FP8: every bit is that of our quantiser."""

from __future__ import annotations

import subprocess

import pytest
from vllm_environment import VLLM_PYTHON

SCRIPT = """
import torch
from vllm.utils.deep_gemm import per_block_cast_to_fp8
from hpcrl.modeling.fp8.quantiser import quantise_blocks

generator = torch.Generator().manual_seed(0)
# ordinary weights, a matrix below the floor of scales, zeros; some with blocks that are not whole
for scale in (1.0, 0.02, 1e-5, 0.0):
    for rows, columns in ((576, 256), (130, 300), (256, 512)):
        weight = (torch.randn(rows, columns, generator=generator) * scale).bfloat16()
        values, scales = per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)
        own = quantise_blocks(weight)
        assert torch.equal(own.scales, scales), (scale, rows)
        mine = own.values[:rows, :columns].contiguous()
        assert torch.equal(mine.view(torch.uint8), values.view(torch.uint8)), (scale, rows)
print("equal")
"""


@pytest.mark.vllm
@pytest.mark.timeout(600)  # vLLM's function is compiled, beside engines that start
def test_online_quantisation_makes_the_same_bits() -> None:
    """`per_block_cast_to_fp8` is what ``quantization: fp8_per_block`` calls for linear layers and for each expert."""
    command = [str(VLLM_PYTHON), "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("equal\n")
