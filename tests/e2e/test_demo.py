"""`make demo`: a published language model, its own tokenizer and template, and the held-out reward rises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import ROOT, Lab, events, processes, steps
from patience import patience, wait_for
from small_gguf import converter, write_small_gguf

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PACKAGE = ROOT / ".smollm2"


@pytest.fixture(scope="module")
def published_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PACKAGE.is_dir():
        pytest.skip("the package with SmolLM2 is not there (tools/bootstrap.py demo --smollm2)")
    model = tmp_path_factory.mktemp("models") / "smollm2"
    command = [sys.executable, str(ROOT / "tools/smollm2.py"), str(model)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert made.returncode == 0, made.stderr
    assert "What is 7+5? Answer with the number only. -> 7 + 5 = 12" in made.stdout
    return model


@pytest.fixture
def demo_lab(tmp_path: Path, published_model: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path, published_model)
    yield lab
    for path in lab.runs_root.iterdir() if lab.runs_root.is_dir() else ():
        lab.hpcrl("cancel", path.name, "--yes", check=False)


def test_a_small_model_of_its_kind_goes_through(tmp_path: Path) -> None:
    """Tokenizer, template, tied embeddings and bfloat16 of the real one, with random weights."""
    pytest.importorskip("gguf", reason="gguf is not installed (tools/bootstrap.py dev)")
    model = tmp_path / "model"
    converter().convert(write_small_gguf(tmp_path / "small.gguf"), model)
    lab = Lab(tmp_path, model)
    # the longest prompt has more tokens where each letter is one
    sizes = ("engine.max_model_len=160", "rollouts.rollouts_per_step=8", "evaluation.prompts=8")
    run = lab.submit("small", "trainer.steps=3", *sizes, recipe="smollm2", to_end=True)
    first = json.loads((run.path / "rollouts" / "step-000001.jsonl").read_text().splitlines()[0])
    opening = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is "
    assert first["text"].startswith(opening)
    assert "Answer with the number only.<|im_end|>\n<|im_start|>assistant\n" in first["text"]
    assert list(steps(run)) == [1, 2, 3]
    # trainer and engine compute the same, both in bfloat16; later rollouts may be of earlier weights
    assert steps(run)[1].mismatch_kl < 0.01


@pytest.mark.campaign
@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("recipe", ["smollm2", "smollm2_lora"])
def test_a_published_model_learns(demo_lab: Lab, recipe: str) -> None:
    run = demo_lab.submit(recipe, recipe=recipe)
    assert demo_lab.wait_end(run, 2700.0 * patience()).upper() == "COMPLETED"
    wait_for(lambda: not processes(run), 10.0, "end of all processes")
    total = run.recipe().trainer.steps
    evaluations = [event.data for event in events(run, "evaluation")]
    assert [evaluations[0]["version"], evaluations[-1]["version"]] == [0, total]
    assert all(each["failed"] == 0 and each["prompts"] == 66 for each in evaluations)
    assert evaluations[-1]["reward"] - evaluations[0]["reward"] >= 0.15
    assert list(steps(run)) == list(range(1, total + 1))
    assert steps(run)[1].mismatch_kl < 0.01
