"""A family of another package, that of docs/extending.md: as every family of ours, it is what transformers computes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from installed_extensions import install_extensions
from model_agreement import assert_agreement, save_model

from hpcrl.extend import ExtensionError
from hpcrl.modeling.spec import build_model, spec_of
from hpcrl.models.arch import arch_from_config, load_arch, trainable_types
from hpcrl.models.families import facts_from_config

EXAMPLE = Path(__file__).parents[3] / "docs/examples/extension"
MODULES = ("hpcrl_lab_example/olmo2.py", "hpcrl_lab_example/olmo2_layers.py")
OLMO2: dict[str, Any] = {
    "model_type": "olmo2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the package."""
    points = {
        "family.olmo2": "hpcrl_lab_example.olmo2:FAMILY",
        "family.olmo9": "hpcrl_lab_example.olmo2:FAMILY",
        "family.olmo8": "hpcrl_lab_example.olmo2:facts",
        "family.llama": "nowhere:LLAMA",
    }
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(install_extensions(tmp_path / "installed", {}, points)))
    yield tmp_path / "installed"
    for name in [name for name in sys.modules if name.startswith("hpcrl_lab_example")]:
        del sys.modules[name]


def test_it_is_short() -> None:
    assert sum(len((EXAMPLE / module).read_text().splitlines()) for module in MODULES) < 150


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-4}])
def test_it_agrees(tmp_path: Path, changes: dict[str, Any]) -> None:
    arch = assert_agreement(tmp_path, {**OLMO2, **changes}).arch
    assert arch_from_config(arch.to_hf_config()) == arch


def test_its_facts_are_those_of_its_files(tmp_path: Path) -> None:
    theirs = save_model(tmp_path / "model", dict(OLMO2))
    arch = load_arch(tmp_path / "model")
    stored = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert {tensor.name: tensor.shape for tensor in arch.tensors()} == stored
    assert "olmo2" in trainable_types()
    with pytest.raises(ValueError, match="attention_bias is true"):
        arch_from_config({**arch.to_hf_config(), "attention_bias": True})
    with pytest.raises(ValueError, match="hidden_size"):
        facts_from_config({**arch.to_hf_config(), "hidden_size": -3}, name="wrong")


def test_plans_need_no_torch_of_it(tmp_path: Path) -> None:
    save_model(tmp_path / "model", dict(OLMO2))
    code = (
        "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); from pathlib import Path\n"
        "from hpcrl.models.arch import load_arch\n"
        "print(load_arch(Path(sys.argv[2])).facts.num_parameters(), 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path), str(tmp_path / "model")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(load_arch(tmp_path / "model").num_parameters()), "False"]


def test_what_is_not_a_family_is_reported(tmp_path: Path, outside: Path) -> None:
    for kind, said in {
        "olmo9": "is registered as family.olmo9, and is of olmo2",
        "olmo8": "hpcrl_lab_example.olmo2:facts is not a model family",
    }.items():
        with pytest.raises(ExtensionError, match=said):
            arch_from_config({**OLMO2, "model_type": kind, "vocab_size": 8})
    with pytest.raises(ValueError, match=r"model_type is 'olmo7'; trainer and embedded engine know .*olmo2"):
        arch_from_config({**OLMO2, "model_type": "olmo7", "vocab_size": 8})


def test_none_replaces_one_of_hpcrl(tmp_path: Path) -> None:
    config = {**OLMO2, "model_type": "llama", "vocab_size": 8}
    assert type(arch_from_config(config)).__name__ == "LlamaArch"


def test_a_torch_side_of_another_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = arch_from_config({**OLMO2, "vocab_size": 8})
    monkeypatch.setattr(
        "hpcrl_lab_example.olmo2_layers.SPEC",
        spec_of(arch_from_config({**OLMO2, "model_type": "llama", "vocab_size": 8})),
    )
    with pytest.raises(ExtensionError, match="olmo2_layers:SPEC is not a ModelSpec of Olmo2Arch"):
        build_model(arch)
