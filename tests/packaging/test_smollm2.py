"""The converter of the model of ``make demo``, on a model of the same kind with a few kilobytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from small_gguf import CHAT_TEMPLATE, converter, write_small_gguf

pytest.importorskip("gguf", reason="gguf is not installed (tools/bootstrap.py dev)")
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return converter()


def run(tool: ModuleType, source: Path, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tool.__file__), str(output), "--gguf", str(source), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def model(tool: ModuleType, small_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("models") / "small"
    tool.convert(small_gguf, output)
    return output


def test_the_directory_is_whole(tool: ModuleType, model: Path) -> None:
    names = {path.name for path in model.iterdir()}
    assert names == tool.FILES
    assert {path.stat().st_mode & 0o777 for path in model.iterdir()} == {0o644}
    config = json.loads((model / "config.json").read_text())
    wanted = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "bfloat16"}
    assert {key: config[key] for key in wanted} == wanted
    assert json.loads((model / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    generation = json.loads((model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


def test_each_digit_is_a_token_of_its_own_also_behind_blanks(model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert tokenizer.tokenize("in  21") == ["in", "ĠĠ", "2", "1"]


def test_hpcrl_computes_what_transformers_computes_of_the_gguf(model: Path, small_gguf: Path) -> None:
    from hpcrl.inference.embedded.weights.loading import load_model
    from hpcrl.modeling.attention.packed import PackedAttention
    from hpcrl.modeling.context import BatchContext
    from hpcrl.models.tokenizer import ChatTokenizer

    messages = [{"role": "user", "content": "What is 21+8?"}]
    ids = ChatTokenizer(model).render_ids(messages, add_generation_prompt=True)
    reader = transformers.AutoTokenizer.from_pretrained(model)
    assert ids == reader.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids[0] == 1
    assert ids.count(2) == 1
    read = transformers.AutoModelForCausalLM.from_pretrained(
        small_gguf.parent, gguf_file=small_gguf.name, dtype=torch.float32
    )
    ours = load_model(model, "float32")
    tokens = torch.tensor(ids)
    with torch.no_grad():
        wanted = read(tokens[None]).logits[0]
        found = ours(tokens, BatchContext(torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)]))))
    # weights were rounded to bfloat16 on the way
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.02)


def test_a_directory_that_is_there_stays(tool: ModuleType, small_gguf: Path, model: Path, tmp_path: Path) -> None:
    said = run(tool, small_gguf, model)
    assert said.returncode == 1
    assert f"{model} exists" in said.stderr
    other = tmp_path / "notes"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    said = run(tool, small_gguf, other, "--replace")
    assert said.returncode == 1
    assert "has other files" in said.stderr
    assert (other / "mine.txt").read_text() == "mine"


def test_a_model_that_cannot_add_is_not_kept(tool: ModuleType, small_gguf: Path, tmp_path: Path) -> None:
    said = run(tool, small_gguf, tmp_path / "model")
    assert said.returncode == 1, said.stderr
    assert "does not answer 12" in said.stderr
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_named(tool: ModuleType, tmp_path: Path) -> None:
    said = run(tool, tmp_path / "none.gguf", tmp_path / "model")
    assert said.returncode == 1
    assert said.stderr.endswith("none.gguf is missing\n    hint: python3 tools/bootstrap.py demo --smollm2\n")
