"""What the embedded server takes from the files of a model where requests and flags say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from delta_helpers import model
from engine_helpers import tensors_of
from safetensors.torch import save_file

from hpcrl.inference.embedded.serving.process import _facts
from hpcrl.inference.embedded.serving.settings import parse_settings
from hpcrl.inference.embedded.weights.loading import load_model


@pytest.mark.parametrize(("stored", "expected"), [({}, 1.0), ({"temperature": 0.0}, 0.0), ({"temperature": 0.7}, 0.7)])
def test_a_temperature_of_zero_is_a_value(tmp_path: Path, stored: dict[str, float], expected: float) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    settings = parse_settings(["--model", str(tmp_path)])
    assert _facts(settings, model(1), None).default_temperature == expected


def test_a_dtype_may_be_written_as_torch_prints_it(tmp_path: Path) -> None:
    own = model(1)
    config = own.arch.to_hf_config()
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "torch.bfloat16"}))
    save_file({name: tensor.contiguous() for name, tensor in tensors_of(own).items()}, tmp_path / "model.safetensors")
    assert load_model(tmp_path, "auto").norm.weight.dtype == torch.bfloat16
