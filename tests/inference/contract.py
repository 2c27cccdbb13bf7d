"""The engine that tests of the contract ask: the embedded one, or a real vLLM.

By default the embedded engine is started. With ``HPCRL_TEST_ENGINE=vllm`` the same tests run against vLLM (of
``HPCRL_VLLM_PYTHON``, else of ``.venv-vllm``): what holds here, an orchestrator may rely on.
"""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import SERVED_NAME, Server, embedded_command, publish, start_server, tensors_of
from patience import patience
from vllm_environment import SKIPPED, VLLM_PYTHON

from hpcrl.modeling.decoder import Decoder
from hpcrl.weights import HandoffStore

KIND = os.environ.get("HPCRL_TEST_ENGINE", "embedded")
EMBEDDED = KIND == "embedded"
MAX_MODEL_LEN = 1024
#: tokens of a request that is still running when something is done to it
LONG = 500
MAX_NUM_SEQS = 16
BLOCK = 32
#: both compute in float32, but not in the same order
TOLERANCE = 1e-4 if EMBEDDED else 2e-3
EOS = 2
FLAGS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS), "--block-size", str(BLOCK)),
    *("--dtype", "float32", "--seed", "0", "--enable-scale-out", "--enforce-eager", "--enable-prompt-tokens-details"),
)
GENERATE = "/inference/v1/generate"


def start(path: Path, model: Decoder, log: Path) -> Server:
    """The server of a model directory, ready."""
    if EMBEDDED:
        command = embedded_command(*FLAGS, "--enable-return-routed-experts")
        running = start_server(command, path, model, log)
    else:
        if VLLM_PYTHON is None:
            pytest.skip(f"{SKIPPED}: python3 tools/bootstrap.py --vllm, or HPCRL_VLLM_PYTHON")
        python = str(VLLM_PYTHON)
        running = start_server(
            [
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", SERVED_NAME, *FLAGS),
                *("--enable-return-routed-experts", "--weight-transfer-config", '{"backend": "hpcrl"}'),
            ],
            path,
            model,
            log,
            kind="vllm",
            ready_s=1500,
            environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "HPCRL_VLLM_PLUGIN": "1"},
        )
    running.call("/v1/completions", {"prompt": [1], "max_tokens": 1, "model": SERVED_NAME})  # warm up
    return running


def label(server: Server, version: str) -> None:
    """Bring the weights of the server's own model to a number, where it is one. The embedded engine takes no label
    without the weights that it names, and so gets them as a version."""
    if server.kind == "vllm":
        server.ok("/update_weight_version", {"new_version": version})
    elif version.isdecimal():
        store = HandoffStore(server.log.parent / "weights")
        if int(version) not in store.versions():
            publish(store, int(version), server.model_dir, tensors_of(server.model))
        server.ok("/init_weight_transfer_engine", {"init_info": {}})
        server.ok("/start_weight_update")
        server.ok("/update_weights", {"update_info": {"path": str(store.path_of(int(version)))}})
        server.ok("/finish_weight_update", {"weight_version": version})


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(7, 103) for _ in range(length)]


def in_background(pool: ThreadPoolExecutor, server: Server, request: dict[str, Any], **sampling: Any) -> Any:
    return pool.submit(server.generate, prompt_of(20, seed=99), request=request, **sampling)


def settled(tokens: list[int]) -> int:
    """Wait until the tokens that a paused engine has sampled have arrived; return their number."""
    while True:
        count = len(tokens)
        time.sleep(0.3 * patience())
        if len(tokens) == count:
            return count


def follow(server: Server, pool: ThreadPoolExecutor, name: str) -> tuple[list[int], Any]:
    """Stream a long request in the background; returns the growing token list and the future of its last chunk."""
    tokens: list[int] = []

    def run() -> Any:
        body = {
            "model": SERVED_NAME,
            "token_ids": prompt_of(10, seed=5),
            "sampling_params": {"max_tokens": LONG, "ignore_eos": True},
            "stream": True,
            "request_id": name,
        }
        last = None
        for event in server.stream(GENERATE, body):
            for choice in event["choices"]:
                tokens.extend(choice["token_ids"])
                last = choice
        return last

    future = pool.submit(run)
    server.wait_for(lambda: len(tokens) >= 3 or future.done(), "the first tokens")
    return tokens, future
