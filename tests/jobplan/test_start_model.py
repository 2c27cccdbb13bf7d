"""The directory of a start model, looked at before a submit, against what the trainer says when it loads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from start_models import TINY_CONFIG, write_safetensors, write_tiny_model

from hpcrl.config.load import load_recipe
from hpcrl.jobplan.start_model import report_model
from hpcrl.models.arch import arch_from_config

CONFIGS = Path(__file__).parents[2] / "hpcrl/models/configs"
#: one of each family that can be trained
FAMILIES = (
    *("DeepSeek-V3", "GLM-4.5-Air", "GLM-5", "MiniMax-M2", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    *("Qwen3-8B", "Qwen3-30B-A3B", "gpt-oss-20b"),
    *("Qwen2.5-7B", "Llama-3.2-1B-Instruct", "Mistral-7B-v0.1", "SmolLM2-135M-Instruct"),
)


def problems(model: Path) -> list[str]:
    report = report_model(load_recipe("quickstart", [f"model.path={model}"]), model)
    assert report.unmade is None
    return [finding.what for finding in report.findings]


def head_of(model: Path) -> dict[str, Any]:
    data = (model / "model.safetensors").read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def rewrite(model: Path, change: Callable[[dict[str, Any]], None]) -> None:
    head = head_of(model)
    change(head)
    write_safetensors(model / "model.safetensors", head, max(entry["data_offsets"][1] for entry in head.values()))


def test_a_whole_model_is_good(tmp_path: Path) -> None:
    assert problems(write_tiny_model(tmp_path / "model")) == []
    assert problems(write_tiny_model(tmp_path / "fp8", fp8=True)) == []


def test_what_loading_takes_is_good(tmp_path: Path) -> None:
    """The heads that are written here are those of files that the modelling code loads, and it refuses the same."""
    torch = pytest.importorskip("torch")
    from hpcrl.modeling.checkpoint_io.load import load_model_dir
    from hpcrl.modeling.spec import build_model, spec_of

    model = write_tiny_model(tmp_path / "model")
    arch = arch_from_config(TINY_CONFIG)
    with torch.no_grad():
        load_model_dir(build_model(arch, device="cpu"), spec_of(arch).adapter(arch), model)
    rewrite(model, lambda head: head.pop("model.norm.weight"))
    with pytest.raises(ValueError, match="tensors are missing"):
        load_model_dir(build_model(arch, device="cpu"), spec_of(arch).adapter(arch), model)
    assert "1 tensors are missing, the first is 'model.norm.weight'" in problems(model)[0]


def shape_changes(head: dict[str, Any]) -> None:
    head["model.norm.weight"]["shape"] = [4, 2]


def dtype_changes(head: dict[str, Any]) -> None:
    head["model.norm.weight"]["dtype"] = "I4"


def comes_with_more(head: dict[str, Any]) -> None:
    end = max(entry["data_offsets"][1] for entry in head.values())
    head["model.layers.7.mlp.gate.weight"] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda head: head.pop("model.embed_tokens.weight"), "1 tensors are missing, the first is 'model.embed_tokens"),
        (shape_changes, "'model.norm.weight' has shape 4 x 2, by config.json it is 8"),
        (dtype_changes, "'model.norm.weight' has dtype I4, which cannot be read"),
        (comes_with_more, "'model.layers.7.mlp.gate.weight' of model.safetensors is not part of this model"),
    ],
)
def test_tensors_that_are_not_those_of_the_config_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    model = write_tiny_model(tmp_path / "model")
    rewrite(model, change)
    (what,) = problems(model)
    assert said in what


def test_fp8_without_its_scales_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", fp8=True)
    rewrite(model, lambda head: head.pop("model.layers.0.self_attn.q_proj.weight_scale_inv"))
    (what,) = problems(model)
    assert "q_proj.weight' is in FP8, but its scales" in what


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert "ends before its tensor" in problems(model)[0]
    for torn in (b"", whole[:5], whole[:40], b"\xff" * 64, (1 << 40).to_bytes(8, "little") + b"{}"):
        weights.write_bytes(torn)
        assert "is not a safetensors file" in problems(model)[0]
    weights.unlink()
    weights.symlink_to("../../blobs/gone")
    assert "is a link to ../../blobs/gone, which does not exist" in problems(model)[0]
    weights.unlink()
    assert "has no *.safetensors" in problems(model)[0]
    # the index names two shards, of which one came
    write_tiny_model(model)
    weights.rename(model / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert problems(model) == [f"{model} lacks model-00002-of-00002.safetensors, which its index names"]


def test_tokenizers_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    tokenizer = model / "tokenizer.json"
    for text in ("", "{", "{}", "[]"):
        tokenizer.write_text(text)
        assert "the tokenizer cannot be used" in problems(model)[0]
    tokenizer.unlink()
    (model / "qwen.tiktoken").write_bytes(b"IQ== 0\n")
    assert "has no tokenizer.json (there is qwen.tiktoken" in problems(model)[0]
    (model / "tiktoken.model").write_bytes(b"IQ== 0\n")
    assert "tiktoken.model alone makes no tokenizer: the Python file" in problems(model)[0]
    tokenizer.symlink_to("gone")
    assert "a broken link" in problems(model)[0]


def test_a_generation_config_that_engines_refuse_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    for text in ("", "[]", '{"temperature": "hot"}', '{"eos_token_id": [1, null]}'):
        (model / "generation_config.json").write_text(text)
        (what,) = problems(model)
        assert "engines refuse" in what
        assert str(model / "generation_config.json") in what
    (model / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2]}')
    assert problems(model) == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '"x"', "null", "{}", '{"model_type": "llama"}', '{"model_type": [1]}', "[" * 10_000]
)
def test_configs_that_are_none_are_refused_with_the_file(tmp_path: Path, text: str) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / "config.json").write_text(text)
    (what,) = problems(model)
    assert str(model / "config.json") in what


def test_a_model_that_is_not_there_is_made_or_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def hint(recipe: str, path: str) -> tuple[str, bool]:
        report = report_model(load_recipe(recipe, [f"model.path={path}"]), tmp_path / path)
        (found,) = [*report.findings, *([report.unmade] if report.unmade else [])]
        return found.hint, report.unmade is not None

    for path, wanted in {
        "Qwen/Qwen3-8B": "hpcrl model get Qwen/Qwen3-8B",
        "models/qwen3-8b": "hpcrl model get Qwen/Qwen3-8B --output models/qwen3-8b",
        "/shared/meta-llama/Llama-9": "hpcrl model get meta-llama/Llama-9 --output /shared/meta-llama/Llama-9",
        "someone/finetune": "hpcrl model get someone/finetune",
        "someone/finetune@v1.2": "hpcrl model get someone/finetune@v1.2",
    }.items():
        assert hint("quickstart", path) == (f"download it: {wanted}", False)
    assert hint("quickstart", "models/mine")[0].startswith("make it: hpcrl warmup ")
    assert hint("quickstart", "models/mine")[1]
    (tmp_path / "someone").mkdir()
    assert "hpcrl warmup" in hint("quickstart", "someone/finetune")[0]
    # a recipe without a warm-up has nothing to make it with
    assert hint("qwen3_30b_a3b", "models/mine") == ("give the path of a Hugging Face model directory", False)


def test_a_second_copy_in_the_format_of_mistral_is_not_what_vllm_reads(tmp_path: Path) -> None:
    """Mistral publishes both in one directory; vLLM would start from another config than the trainer."""
    model = write_tiny_model(tmp_path / "model")
    write_safetensors(model / "consolidated.safetensors", {}, 0)
    assert problems(model) == []

    def found(**flags: str) -> list[str]:
        settings = [
            f"model.path={model}",
            *(f"engine.vllm_args.{name.replace('_', '-')}={flags[name]}" for name in flags),
        ]
        report = report_model(load_recipe("quickstart_vllm", settings), model)
        return [finding.what for finding in report.findings if "consolidated" in finding.what]

    assert len(found()) == 1
    assert "vLLM prefers it and params.json" in found(config_format="hf", load_format="hf")[0]
    assert found(config_format="hf", load_format="hf", tokenizer_mode="hf") == []


def test_vllm_engines_take_versions_as_the_start_model_is_stored(tmp_path: Path) -> None:
    """They build their layers by its configuration: FP8 for FP8, and nothing is published in MXFP4."""
    model = write_tiny_model(tmp_path / "model", fp8=True)

    def found(recipe: str, *settings: str, **changes: Any) -> list[str]:
        own = {} if "model_type" in changes else TINY_CONFIG
        (model / "config.json").write_text(json.dumps({**own, **changes}))
        report = report_model(load_recipe(recipe, [f"model.path={model}", *settings]), model)
        return [finding.what for finding in report.findings if "vLLM keeps them so" in finding.what]

    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert found("quickstart_vllm") == []
    (what,) = found("quickstart_vllm", **fp8)
    assert "are in FP8: vLLM keeps them so, and versions of handoff.kind: full have no scales" in what
    assert found("quickstart_vllm", "handoff.kind=fp8", "engine.memory.weights=fp8", **fp8) == []
    assert found("quickstart", **fp8) == []
    oss = json.loads((CONFIGS / "gpt-oss-20b.json").read_text())
    write_tiny_model(model, oss)
    (what,) = found("quickstart_vllm", **oss)
    assert "are in MXFP4: vLLM keeps them so" in what
    assert found("quickstart", **oss) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_published_models_that_can_be_trained_are_good(tmp_path: Path, name: str) -> None:
    """Their weights are zeros that take no room."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    config.pop("quantization_config", None)
    assert problems(write_tiny_model(tmp_path / "model", config)) == []
