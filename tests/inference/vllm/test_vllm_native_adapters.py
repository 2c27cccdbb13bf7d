"""Adapters as the trainer publishes them, loaded by vLLM's own means (``--enable-lora``), which runs do not use.

Of a model without experts: vLLM computes experts by Triton's programs then, which processors have not.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from engine_helpers import forward, write_model
from vllm_environment import VLLM_PYTHON

from hpcrl.config.lora import LoraConfig
from hpcrl.config.recipe import HandoffConfig
from hpcrl.modeling.adapters import adapt, init_adapters
from hpcrl.modeling.blocks import local_part
from hpcrl.modeling.checkpoint_io.load import load_model_dir
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import adapter_parameters
from hpcrl.modeling.parallelize import parallelize_decoder
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import Qwen3Arch, load_arch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.publish.adapters import AdapterPublisher
from hpcrl.weights import HandoffStore

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
#: both compute in float32, but not in the same order
TOLERANCE = 2e-3
TOKENS = list(range(10, 50))
DENSE = Qwen3Arch(
    vocab_size=103,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    eos_token_id=2,
)

#: says the log-probabilities of a prompt: of the model alone, and with each adapter
PROGRAM = """
import json
import sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    model, tokens, adapters = json.load(sys.stdin)
    llm = LLM(model, enable_lora=True, max_lora_rank=8, dtype="float32", max_model_len=128, enforce_eager=True, seed=0,
              max_num_seqs=4, max_loras=2, enable_prefix_caching=False)
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def logprobs(adapter):
        (done,) = llm.generate({"prompt_token_ids": tokens}, asked, lora_request=adapter, use_tqdm=False)
        return [place[token].logprob for place, token in zip(done.prompt_logprobs[1:], tokens[1:])]

    requests = [LoRARequest(str(number), number, path) for number, path in enumerate(adapters, 1)]
    print("said", json.dumps([logprobs(request) for request in (None, *requests)]))
"""
VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "HPCRL_VLLM_PLUGIN": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "2",
}


def published(model_dir: Path, root: Path, targets: list[str] | None) -> tuple[Path, list[float]]:
    """Directory of an adapter version, and the log-probabilities of `TOKENS` with it."""
    config = LoraConfig.model_validate({"rank": 8, "alpha": 16.0, "targets": targets})
    with distributed(timeout_s=60) as parallel:
        model = build_model(load_arch(model_dir), device="cpu")
        load_model_dir(model, model.adapter, model_dir)
        adapt(model, config)
        init_adapters(model, 0)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in adapter_parameters(model).items():
                if name.endswith("lora_B"):
                    part = local_part(parameter)
                    part.copy_(torch.randn(part.shape, generator=draw) / 8)
        wanted = of_tokens(copy.deepcopy(model))
        parallelize_decoder(model, parallel.mesh, dtype=torch.float32)
        publisher = AdapterPublisher(
            HandoffStore(root),
            parallel,
            lora=config,
            model_dir=model_dir,
            arch=model.arch,
            dtype=torch.float32,
            attempt=1,
            settings=HandoffConfig(),
        )
        publisher.publish(model, 1)
        publisher.wait()
        return HandoffStore(root).path_of(1), wanted


def of_tokens(model: Decoder) -> list[float]:
    scores, _ = forward(model, TOKENS)
    found: list[float] = scores[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()
    return found


def error(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


def test_vllm_loads_what_the_trainer_has_published(tmp_path: Path) -> None:
    """Log-probabilities of the model alone, with adapters of attention, and with those of all matrices."""
    model_dir = tmp_path / "model"
    model = write_model(model_dir, 1, DENSE)
    versions = [published(model_dir, tmp_path / str(place), each) for place, each in enumerate((["attention"], None))]
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", PROGRAM],
        input=json.dumps([str(model_dir), TOKENS, [str(path) for path, _ in versions]]),
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("said")).removeprefix("said"))
    wanted = [of_tokens(model), *(logprobs for _, logprobs in versions)]
    assert len(said) == len(wanted)
    for found, own in zip(said, wanted, strict=True):
        assert error(found, own) < TOLERANCE
        # the test can tell them apart
        assert all(error(found, other) > 0.1 for other in wanted if other is not own)
