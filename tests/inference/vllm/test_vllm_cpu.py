"""A real vLLM on CPUs with our plugin: capability is proved by log-probabilities, never by a 200."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from adapter_helpers import EXPERTS, OUTPUT, QUERY, factors, flip_last_byte, merged, publish_factors
from engine_helpers import (
    SERVED_NAME,
    Server,
    decode_experts,
    forward,
    logprob_error,
    publish,
    random_model,
    start_server,
    tensors_of,
)
from vllm_environment import VLLM_PYTHON

from hpcrl.config.recipe import HandoffConfig
from hpcrl.inference.embedded.engine.sampler import SamplingBatch, TokenSampler
from hpcrl.modeling.checkpoint_io.load import load_model_dir
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.parallelize import parallelize_decoder
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import load_arch
from hpcrl.rollouts.engines.client import EngineClient, EngineError, SamplingParams
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsRows, RoutedExpertsSettings
from hpcrl.rollouts.weights.exchange import begin, exchange
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.weights import Handoff, HandoffStore
from hpcrl.weights.format.manifest import FORMAT_VERSION

ROOT = Path(__file__).resolve().parents[3]
#: both compute in float32, but not in the same order
TOLERANCE = 2e-3
FLAGS = (
    *("--max-model-len", "1024", "--max-num-seqs", "16", "--block-size", "32", "--dtype", "float32", "--seed", "0"),
    *("--enable-scale-out", "--enforce-eager", "--enable-prompt-tokens-details", "--enable-return-routed-experts"),
    *("--weight-transfer-config", '{"backend": "hpcrl"}', "--served-model-name", SERVED_NAME),
    *("--worker-extension-cls", "hpcrl.inference.vllm.weights.StagingWorker"),
    # as a plan has it
    *("--logprobs-mode", "processed_logprobs"),
)
#: requests around an update, some more than run at once, and tokens of each: the pause comes with the first of them
FLYING, TOKENS = 20, 600
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HPCRL_VLLM_PLUGIN": "1",
    # compiling takes longer than these tests
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}


@pytest.fixture(scope="module")
def server(tiny: tuple[Path, Decoder], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path, model = tiny
    path = publish_as_trainer(path, tmp_path_factory.mktemp("published") / "weights")
    log = tmp_path_factory.mktemp("log") / "server.log"
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", *FLAGS]
    running = start_server(command, path, model, log, kind="vllm", ready_s=1500, environment=ENVIRONMENT)
    running.timeout_s = 300.0
    yield running
    running.stop()


def publish_as_trainer(model_dir: Path, root: Path) -> Path:
    """Publish a start model as version 0, as the trainer does; its directory."""
    with distributed(timeout_s=60) as parallel:
        model = build_model(load_arch(model_dir), device="cpu")
        load_model_dir(model, model.adapter, model_dir)
        parallelize_decoder(model, parallel.mesh, dtype=torch.float32)
        publisher = Publisher(
            HandoffStore(root),
            parallel,
            arch=model.arch,
            model_dir=model_dir,
            dtype=torch.float32,
            attempt=1,
            settings=HandoffConfig(),
        )
        publisher.publish(model, 0)
        publisher.wait()
    return HandoffStore(root).path_of(0)


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(7, 103) for _ in range(length)]


def error_against(server: Server, model: Decoder, seed: int, length: int = 40) -> float:
    prompt = prompt_of(length, seed)
    choice = server.generate(prompt, max_tokens=20, logprobs=0, seed=1, ignore_eos=True)["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return logprob_error(model, prompt, choice["token_ids"], logprobs)


def update(server: Server, path: Path, version: int, *, expect: int = 200) -> None:
    server.ok("/start_weight_update", {})
    server.ok("/update_weights", {"update_info": {"path": str(path), "stage": True}})
    staged = {"method": "staged_handoff", "args": [str(path)]}
    server.wait_for(lambda: server.call("/collective_rpc", staged)[1] == {"results": ["True"]}, "the staged version")
    server.ok("/pause?mode=keep&clear_cache=false")
    try:
        status, answer = server.call("/update_weights", {"update_info": {"path": str(path)}})
        assert status == expect, answer
        if status == 200:
            server.ok("/finish_weight_update", {"weight_version": str(version)})
    finally:
        server.ok("/resume")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_published_version_is_a_model_that_vllm_loads(server: Server) -> None:
    """The server was started on the version directory; its log-probabilities are those of the trainer's model."""
    assert server.model_dir.name == "v000000"
    handoff = Handoff.open(server.model_dir)
    assert (handoff.manifest.format_version, handoff.manifest.kind) == (FORMAT_VERSION, "full")
    for seed in (11, 12, 13):
        assert error_against(server, server.model, seed=seed) < TOLERANCE


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8}])
def test_what_is_reported_is_of_what_tokens_were_drawn_from(server: Server, how: dict[str, Any]) -> None:
    """The embedded engine's sampler keeps the same tokens: engines differ in nothing that held-out rollouts see."""
    prompt, temperature = prompt_of(40, 7), 0.7
    sampling = {"max_tokens": 20, "logprobs": 0, "seed": 1, "ignore_eos": True, "temperature": temperature, **how}
    choice = server.generate(prompt, **sampling)["choices"][0]
    token_ids = choice["token_ids"]
    rows = forward(server.model, [*prompt, *token_ids])[0][len(prompt) - 1 : -1]
    n, vocab = rows.shape
    batch = SamplingBatch(
        temperature=np.full(n, temperature, np.float32),
        top_k=np.full(n, how.get("top_k", vocab)),
        top_p=np.full(n, how.get("top_p", 1.0), np.float32),
        min_p=np.full(n, how.get("min_p", 0.0), np.float32),
        seed=np.arange(n),
        positions=np.zeros(n, np.int64),
        suppressed=[],
        wants_logprobs=True,
        num_top=vocab,
    )
    kept = TokenSampler(vocab, "processed_logprobs")(rows.clone(), batch)
    assert kept.top_ids is not None
    assert kept.top_logprobs is not None
    wanted = [kept.top_logprobs[i][kept.top_ids[i] == token][0] for i, token in enumerate(token_ids)]
    reported = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert reported == pytest.approx(wanted, abs=TOLERANCE)
    whole = (rows / temperature).log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    assert float((torch.tensor(reported) - whole).mean()) > 0.05  # what was left out is in none of them


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_update_in_place_gives_the_log_probabilities_of_the_new_model(server: Server, tmp_path: Path) -> None:
    """Experts included: their packed form is made anew. A request in flight goes on, and knows its versions."""
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    assert error_against(server, server.model, seed=1) < TOLERANCE
    store = HandoffStore(tmp_path / "weights")
    for version in (1, 2):  # the second finds what the first has left
        new = random_model(server.model.arch, seed=10 + version)
        handoff = publish(store, version, server.model_dir, tensors_of(new))
        # the test can tell the models apart
        assert error_against(server, new, seed=2) > 50 * TOLERANCE
        with ThreadPoolExecutor(FLYING) as pool:
            server.wait_idle()
            before = server.metrics()["vllm:generation_tokens_total"]
            flying = [
                pool.submit(server.generate, prompt_of(20, 90 + i), max_tokens=TOKENS, ignore_eos=True)
                for i in range(FLYING)
            ]
            server.wait_for(
                # a sum does not fall again: a busy machine cannot miss it
                lambda before=before: server.metrics()["vllm:generation_tokens_total"] > before,
                "a token of a running request",
                timeout_s=120.0,
            )
            # all that follows may take longer than what is in flight lasts
            server.ok("/pause?mode=keep&clear_cache=false")
            update(server, handoff.path, version)
            answers = [each.result()["choices"][0]["weight_versions"] for each in flying]
        # those before had ended, those behind had not begun
        through = [spans for spans in answers if len(spans) > 1]
        assert through
        for spans in through:
            assert [span["version"] for span in spans][1:] == [str(version)]
            assert spans[-1]["end"] == TOKENS
        for seed in (3, 4):
            prompt_seed = 100 * version + seed  # nothing of it is in the prefix cache
            assert error_against(server, new, seed=prompt_seed) < TOLERANCE


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_adapters_are_merged_into_their_base(server: Server, tmp_path: Path) -> None:
    """One after the other, in both layouts: what a module of the first changed is back at the base in the second.

    From the second on, only blocks of layers that adapters change are loaded; the others must be what they were.
    """
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    store = HandoffStore(tmp_path / "weights")
    start = random_model(server.model.arch, seed=40)
    base = publish(store, 40, server.model_dir, tensors_of(start))
    tensors = tensors_of(start)
    adapters = {
        41: factors(tensors, 1, QUERY, OUTPUT, EXPERTS),  # onto weights of which nothing is known: all are loaded
        42: factors(tensors, 2, QUERY),
        43: factors(tensors, 3, EXPERTS, "model.layers.0.mlp.experts"),
    }
    for version, given in adapters.items():
        update(
            server,
            publish_factors(store, version, base, given, "fused" if version == 43 else "per_expert").path,
            version,
        )
        kept = [int(number) for number in re.findall(rf"v{version:06d}: .* kept (\d+)", server.log.read_text())]
        assert kept == [0] if version == 41 else 0 < min(kept) < len(tensors)
        new = merged(start, given)
        for seed in (1, 2):
            assert error_against(server, new, seed=100 * version + seed) < TOLERANCE
        assert error_against(server, start, seed=100 * version + 3) > 50 * TOLERANCE
    wrong = factors(tensors, 4, QUERY)._replace(linear={"model.layers.7.self_attn.q_proj": adapters[42].linear[QUERY]})
    update(server, publish_factors(store, 44, base, wrong).path, 44, expect=500)
    torn = publish_factors(store, 45, base, adapters[42])
    flip_last_byte(torn.path / "adapter_model.safetensors")
    update(server, torn.path, 45, expect=500)
    assert server.get("/weight_info")[1] == {"weight_version": "43"}
    assert error_against(server, new, seed=4500) < TOLERANCE
    # the base again, whole, and an adapter onto it: nothing but its blocks is loaded
    update(server, base.path, 40)
    assert error_against(server, start, seed=4600) < TOLERANCE
    update(server, publish_factors(store, 46, base, adapters[42]).path, 46)
    assert error_against(server, merged(start, adapters[42]), seed=4700) < TOLERANCE
    assert "Failed to load weights" not in server.log.read_text()


def prove(server: Server, path: Path, before: Path | None, number: int = 1) -> dict[str, Any]:
    """What the one worker answers when it has read what it compares."""
    call = {"method": "prove_weights", "args": [str(path), "" if before is None else str(before), str(number)]}
    found: list[dict[str, Any]] = []

    def answered() -> bool:
        found[:] = server.ok("/collective_rpc", call)["results"]
        return found[0]["state"] != "reading"

    server.wait_for(answered, "a proof")
    (proof,) = found
    return proof


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_worker_proves_what_it_runs(server: Server, tmp_path: Path) -> None:
    """Whatever its label says."""
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    store = HandoffStore(tmp_path / "weights")
    one, two = (
        publish(store, version, server.model_dir, tensors_of(random_model(server.model.arch, seed=50 + version))).path
        for version in (61, 62)
    )
    looked_at = set()
    for path, other, version in ((one, two, 61), (two, one, 62)):
        update(server, path, version)
        for number in range(6):
            right, wrong = prove(server, path, other, number), prove(server, other, path, number)
            assert (right["state"], right["wrong"], right["decisive"]) == ("compared", [], True)
            # norms are the same in both: those that differ are looked at first
            assert {"model.embed_tokens.weight", "lm_head.weight"} & set(wrong["wrong"])
            looked_at |= set(right["compared"])
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= looked_at
    server.ok("/update_weight_version", {"new_version": "61"})  # as nobody can in a run
    assert prove(server, one, two)["wrong"]
    assert prove(server, tmp_path / "weights" / "v000099", one)["state"] == "unknown"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_session_without_an_end_is_ended_by_the_next(server: Server, tmp_path: Path) -> None:
    """Also one whose weights were loaded; and a call of an older session is refused."""
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    store = HandoffStore(tmp_path / "weights")
    one, two = (
        publish(store, version, server.model_dir, tensors_of(random_model(server.model.arch, seed=50 + version))).path
        for version in (71, 72)
    )
    async with aiohttp.ClientSession() as session:
        client = EngineClient(session, name="engine-0", url=server.url)
        await begin(client, limit_s=60.0, session=[1, 1])
        info = {"path": str(one), "session": [1, 1]}
        await client.control("/update_weights", {"update_info": info}, timeout_s=60.0)
        for number in (2, 3):  # one after the other, and nobody ends either
            await begin(client, limit_s=60.0, session=[1, number])
        info = {"path": str(two), "session": [1, 3]}
        await exchange(client, info, 72, pause=True, in_place=True, limit_s=60.0)
        await begin(client, limit_s=60.0, session=[1, 4])
        late = {"path": str(one), "session": [1, 1]}
        with pytest.raises(EngineError, match="answered 500"):
            await client.control("/update_weights", {"update_info": late}, timeout_s=60.0)
        await begin(client, limit_s=60.0, session=[1, 5])
        await client.control("/finish_weight_update", {"weight_version": "72", "session": [1, 5]}, timeout_s=60.0)
    proof = prove(server, two, one)
    assert (proof["state"], proof["wrong"], proof["decisive"]) == ("compared", [], True)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_torn_hand_off_changes_nothing(server: Server, tmp_path: Path) -> None:
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    info = server.get("/weight_info")[1]
    store = HandoffStore(tmp_path / "weights")
    good = random_model(server.model.arch, seed=20)
    update(server, publish(store, 7, server.model_dir, tensors_of(good)).path, 7)
    assert server.get("/weight_info")[1] == {"weight_version": "7"} != info
    torn = publish(store, 8, server.model_dir, tensors_of(random_model(server.model.arch, seed=21)))
    flip_last_byte(next(torn.path.glob("*.safetensors")))
    update(server, torn.path, 8, expect=500)
    assert server.get("/weight_info")[1] == {"weight_version": "7"}
    assert error_against(server, good, seed=700) < TOLERANCE


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_routed_experts_are_those_of_the_served_weights(server: Server, tmp_path: Path) -> None:
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    new = random_model(server.model.arch, seed=30)
    update(server, publish(HandoffStore(tmp_path / "weights"), 9, server.model_dir, tensors_of(new)).path, 9)
    prompt = prompt_of(70, seed=61)
    for start in (0, 0, 70):  # the second time the prompt comes from the cache
        choice = server.generate(prompt, max_tokens=9, ignore_eos=True, routed_experts_prompt_start=start)["choices"][0]
        experts = decode_experts(choice["routed_experts"])
        _, expected = forward(new, [*prompt, *choice["token_ids"]])
        assert experts.shape == (70 + 9 - 1 - start, 2, 2)
        assert experts.dtype == "uint8"
        assert (experts == expected[start:-1]).all()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rows_of_two_turns_join(server: Server, tmp_path: Path) -> None:
    """Through our own client: the second turn asks for what the first one could not have, whole or in parts."""
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    new = random_model(server.model.arch, seed=40)
    update(server, publish(HandoffStore(tmp_path / "weights"), 10, server.model_dir, tensors_of(new)).path, 10)

    async def converse(seed: int, stream_interval: int) -> tuple[list[int], RoutedExpertsRows]:
        rows, sequence = RoutedExpertsRows(RoutedExpertsSettings(layers=2, width=2, experts=8)), prompt_of(45, seed)
        async with aiohttp.ClientSession() as http:
            client = EngineClient(http, name="engine-0", url=server.url)
            for turn in range(2):
                before = len(sequence)
                sequence += prompt_of(7 * turn, seed + 1)
                start = rows.start(len(sequence))
                assert start == turn * (before - 1)
                params = SamplingParams(
                    temperature=1.0,
                    max_tokens=9,
                    seed=turn,
                    stop_token_ids=[],
                    stream_interval=stream_interval or msgspec.UNSET,
                    routed_experts_prompt_start=start,
                )
                answer = await client.generate(
                    sequence, params, cache_salt="10", session_id=f"s-{seed}", timeout_s=300.0
                )
                sequence += answer.token_ids.tolist()
                assert answer.experts is not None
                assert answer.experts.shape[1:] == (2, 2)
                rows.add(len(sequence) - 1, answer.experts)
        return sequence, rows

    for seed, stream_interval in ((70, 0), (80, 4)):
        sequence, rows = asyncio.run(converse(seed, stream_interval))
        routes = rows.aligned(len(sequence))
        assert routes is not None
        assert routes.experts.dtype == np.uint8
        assert routes.known.tolist() == [True] * (len(sequence) - 1) + [False]
        assert (routes.experts[:-1] == forward(new, sequence)[1][:-1]).all()


def test_corrections_name_tests_that_exist() -> None:
    """Read as text: the module itself needs vLLM's environment."""
    text = (ROOT / "hpcrl/inference/vllm/cpu.py").read_text()
    named = re.findall(r'^        f?"(?:\{(_\w+)\}|(tests/\S+?))::(test_\w+)"', text, re.MULTILINE)
    files = dict(re.findall(r'^(_\w+) = "(tests/\S+)"$', text, re.MULTILINE))
    assert len(named) == 8
    for name, file, test in named:
        source = (ROOT / (files[name] if name else file)).read_text()
        assert f"def {test}(" in source
