"""Experts of a layer in one tensor, read as the matrices of each expert, in both layouts and in any blocks."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from hpcrl.errors import UsageError
from hpcrl.weights.read.model_files import ModelFiles
from hpcrl.weights.read.stacked_experts import has_inputs_first

EXPERTS, HIDDEN, WIDTH = 3, 4, 5
PREFIX = "model.language_model.layers.0.mlp.experts"


def number(expert: int, output: int, column: int) -> int:
    """What stands in the matrix of an expert: gate, then up projection."""
    return expert * 1000 + output * 20 + column


def write(path: Path, *, inputs_first: bool, more: dict[str, object] | None = None) -> Path:
    path.mkdir()
    text = {"model_type": "qwen3_vl_moe_text", "hidden_size": HIDDEN}
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": text}))
    outputs = range(2 * WIDTH)
    if inputs_first:
        shape = [EXPERTS, HIDDEN, 2 * WIDTH]
        values = [number(e, o, i) for e in range(EXPERTS) for i in range(HIDDEN) for o in outputs]
    else:
        shape = [EXPERTS, 2 * WIDTH, HIDDEN]
        values = [number(e, o, i) for e in range(EXPERTS) for o in outputs for i in range(HIDDEN)]
    data = struct.pack(f"<{len(values)}H", *values)
    entry = {"dtype": "F16", "shape": shape, "data_offsets": [0, len(data)]}
    head = json.dumps({f"{PREFIX}.gate_up_proj": entry, **(more or {})}).encode()
    (path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    return path


@pytest.mark.parametrize("inputs_first", [True, False])
@pytest.mark.parametrize(
    "block", [((0, 0), (WIDTH, HIDDEN)), ((1, 0), (3, HIDDEN)), ((2, 1), (5, 3)), ((4, 2), (5, 3))]
)
def test_blocks_of_experts(
    tmp_path: Path, block: tuple[tuple[int, int], tuple[int, int]], *, inputs_first: bool
) -> None:
    (row, column), (last_row, last_column) = block
    with ModelFiles(write(tmp_path / "model", inputs_first=inputs_first)) as files:
        assert len(files.tensors) == 2 * EXPERTS
        for expert in range(EXPERTS):
            for part, first in (("gate_proj", 0), ("up_proj", WIDTH)):
                name = f"model.layers.0.mlp.experts.{expert}.{part}.weight"
                assert files.tensors[name].shape == (WIDTH, HIDDEN)
                data = files.read(name, *block)
                wanted = [
                    number(expert, first + o, i) for o in range(row, last_row) for i in range(column, last_column)
                ]
                assert list(struct.unpack(f"<{len(wanted)}H", data)) == wanted


def test_the_layout_is_recognised_by_the_shape_as_in_transformers() -> None:
    assert has_inputs_first("a.mlp.experts.gate_up_proj", (2, 8, 12), 8) is True
    assert has_inputs_first("a.mlp.experts.gate_up_proj", (2, 12, 8), 8) is False
    assert has_inputs_first("a.mlp.experts.gate_up_proj", (2, 8, 8), 8) is False
    assert has_inputs_first("a.mlp.experts.down_proj", (2, 8, 6), 8) is False
    assert has_inputs_first("a.mlp.experts.down_proj", (2, 6, 8), 8) is True
    assert has_inputs_first("a.mlp.gate.weight", (2, 8), 8) is None


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    head = {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}
    more = {"lm_head.weight": head, "language_model.lm_head.weight": head}
    with pytest.raises(UsageError, match=r"'lm_head\.weight' of the language model is there already"):
        ModelFiles(write(tmp_path / "model", inputs_first=True, more=more))
    assert f"{PREFIX}.gate_up_proj" in ModelFiles(tmp_path / "model", whole=True).tensors
