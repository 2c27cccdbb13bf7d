"""What config.json says of a version in FP8."""

from __future__ import annotations

from hpcrl.weights.format.layout import PublishedTensor
from hpcrl.weights.format.quantise import FP8_DTYPE, quantization_config


def test_matrices_that_are_not_quantised_are_named() -> None:
    tensors = [
        PublishedTensor("model.layers.0.up_proj.weight", FP8_DTYPE, (256, 256)),
        PublishedTensor("model.layers.0.up_proj.weight_scale_inv", "float32", (2, 2)),
        PublishedTensor("model.layers.0.gate.weight", "bfloat16", (8, 256)),
        PublishedTensor("model.layers.0.norm.weight", "bfloat16", (256,)),
        PublishedTensor("model.layers.0.conv.weight", "bfloat16", (4, 1, 4)),
        PublishedTensor("model.layers.0.sinks", "bfloat16", (4, 4)),
    ]
    found = quantization_config(tensors)
    assert found["modules_to_not_convert"] == ["model.layers.0.gate"]
    assert found["weight_block_size"] == [128, 128]
