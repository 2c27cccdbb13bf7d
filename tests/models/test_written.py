"""What a config.json says beside weights that this project wrote is true of these weights."""

from __future__ import annotations

import pytest

from hpcrl.models.written import is_true_of_copies, written_config

START = {
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "torch_dtype": "float8_e4m3fn",
    "quantization_config": {"quant_method": "fp8"},
    "compression_config": {"quant_method": "compressed-tensors"},
    "text_config": {"dtype": "float16", "hidden_size": 8, "quantization_config": {"quant_method": "fp8"}},
    "rope_scaling": {"type": "yarn"},
}


def test_storage_of_the_start_model_does_not_stay() -> None:
    assert written_config(START, ["a"], dtype="bfloat16") == {
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "hidden_size": 8},
        "rope_scaling": {"type": "yarn"},
    }


def test_storage_of_what_is_written_is_reported() -> None:
    written = written_config(START, ["a"], dtype="bfloat16", quantisation={"quant_method": "own"})
    assert written["quantization_config"] == {"quant_method": "own"}


@pytest.mark.parametrize(
    ("file", "copied"),
    [
        ("tokenizer.json", True),
        ("generation_config.json", True),
        ("special_tokens_map.json", True),
        ("hf_quant_config.json", False),
        ("quantize_config.json", False),
        ("quant_config.json", False),
        ("adapter_config.json", False),
        ("pytorch_model.bin.index.json", False),
    ],
)
def test_files_that_describe_other_weights_are_not_copied(file: str, copied: bool) -> None:
    assert is_true_of_copies(file) is copied
