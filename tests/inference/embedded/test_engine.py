"""The engine in this process: what it computes equals the plain model, whatever it had to do on the way."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_client import Client
from engine_helpers import (
    forward,
    logprob_error,
    random_model,
    tiny_glm_arch,
    tiny_gpt_oss_arch,
    tiny_nemotron_arch,
    tiny_qwen3_next_arch,
)
from torch import Tensor

from hpcrl.inference.embedded.engine.config import EngineSettings
from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.engine.params import SamplingParams
from hpcrl.inference.embedded.engine.request import EngineRequest, Output
from hpcrl.inference.metrics import EngineMetrics, Registry
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.layers.dsa import SparseLatentAttention
from hpcrl.modeling.sparse_kernels.reference import ReferenceKernel
from hpcrl.models.arch import ModelArch

TOLERANCE = 1e-4


StartEngine = Callable[..., Client]


@pytest.fixture
def start(tiny: tuple[Path, Decoder]) -> Iterator[StartEngine]:
    engines: list[Engine] = []

    def make(model: Decoder | None = None, **changes: Any) -> Client:
        sizes = {"max_num_seqs": 16, "max_model_len": 256, "max_num_batched_tokens": 128, "block_size": 4}
        config = EngineSettings(**{**sizes, "num_blocks": 1024, "return_routed_experts": True, **changes})
        engine = Engine(model or tiny[1], config, EngineMetrics(Registry({})))
        client = Client(engine)
        engine.start(client.deliver)
        engines.append(engine)
        return client

    yield make
    for engine in engines:
        engine.stop()
        assert engine.failure is None


def prompts_of(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(103) for _ in range(rng.randint(low, high))] for _ in range(count)]


def in_use(client: Client) -> float:
    return client.engine.call(lambda: client.engine._pool.usage).result()


def check_outputs(model: Decoder, prompts: list[list[int]], outputs: list[Output]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert logprob_error(model, prompt, output.token_ids, output.logprobs) < TOLERANCE
        _, experts = forward(model, [*prompt, *output.token_ids])
        assert output.routed_experts is not None
        assert output.routed_experts.dtype == np.uint8
        assert (output.routed_experts == experts[:-1]).all()


def test_abandoned_requests_are_completed_all_the_same(start: StartEngine) -> None:
    """As when the connection of a call ends before the model thread has come to it."""
    engine, busy, done = start().engine, threading.Event(), threading.Event()
    first = engine.call(busy.wait)
    calls = [engine.call(done.set), engine.pause("keep", clear_cache=False), engine.resume()]
    assert not any(call.cancel() for call in calls)
    busy.set()
    assert first.result(5.0)
    assert engine.call(done.is_set).result(5.0)
    assert engine.failure is None


def test_log_probabilities_and_routes_are_those_of_the_plain_forward_pass(
    start: StartEngine, tiny: tuple[Path, Decoder]
) -> None:
    prompts = prompts_of(24, 1, 60)
    check_outputs(tiny[1], prompts, start().run(prompts, max_tokens=12))


@pytest.mark.parametrize("budget", [16, 17, 100])
def test_chunked_prefill(start: StartEngine, tiny: tuple[Path, Decoder], budget: int) -> None:
    client = start(max_num_batched_tokens=budget)
    prompts = prompts_of(6, 90, 200)
    check_outputs(tiny[1], prompts, client.run(prompts, max_tokens=6))


def test_prefix_hits_keep_values_and_routes(start: StartEngine, tiny: tuple[Path, Decoder]) -> None:
    client = start()
    base = prompts_of(1, 50, 50)[0]
    client.run([base])
    prompts = [base + tail for tail in prompts_of(5, 0, 9)] + [base[:30], base]
    outputs = client.run(prompts)
    # whole blocks, and never the last token: its logits are needed
    assert [output.num_cached_tokens for output in outputs][-2:] == [28, 48]
    check_outputs(tiny[1], prompts, outputs)
    rows = sum(len(output.routed_experts) for output in outputs if output.routed_experts is not None)
    cached = sum(output.num_cached_tokens for output in outputs)
    computed = len(base) + 8 - 1 + rows - cached
    assert counted_rows(client) == {"computed": computed, "prefix_cache": cached, "fetched": 0}


def counted_rows(client: Client) -> dict[str, float]:
    """Rows of experts that an engine returned, by where it had them from."""
    text = client.engine._metrics.registry.render()
    found = re.findall(r'hpcrl_engine_routed_experts_rows_total\{source="(\w+)"\} (\S+)', text)
    return {source: float(count) for source, count in found}


def test_routes_can_start_behind_a_known_prefix(start: StartEngine, tiny: tuple[Path, Decoder]) -> None:
    prompt = prompts_of(1, 20, 20)[0]
    (output,) = start().run([prompt], max_tokens=5, routed_experts_prompt_start=20)
    assert output.routed_experts is not None
    assert output.routed_experts.shape == (4, 2, 2)
    _, experts = forward(tiny[1], [*prompt, *output.token_ids])
    assert (output.routed_experts == experts[20:-1]).all()


def test_preemption_loses_nothing(start: StartEngine, tiny: tuple[Path, Decoder]) -> None:
    """Far more sequences than blocks: each is computed again now and then, and ends as if alone."""
    plain, tight = start(), start(num_blocks=64, enable_prefix_caching=False)
    prompts = prompts_of(16, 10, 60, seed=3)
    expected = plain.run(prompts, max_tokens=50, seed=7)
    outputs = tight.run(prompts, max_tokens=50, seed=7)
    assert tight.engine._scheduler.num_preemptions > 5
    assert [len(output.token_ids) for output in outputs] == [50] * 16
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    check_outputs(tiny[1], prompts, outputs)
    assert in_use(tight) == 0


def test_chosen_tokens_are_those_of_the_plain_forward_pass(start: StartEngine) -> None:
    """GLM-5: latents and keys of the indexer come from the cache, with chunked prefill, prefix hits and preemption."""
    model = random_model(tiny_glm_arch(), 1)
    client = start(model, num_blocks=64, max_num_batched_tokens=24)
    base = prompts_of(1, 30, 30)[0]
    prompts = [base + tail for tail in prompts_of(8, 1, 40, seed=6)]
    outputs = client.run(prompts, max_tokens=30)
    assert client.engine._scheduler.num_preemptions
    assert client.engine._scheduler.prefix_hits
    check_outputs(model, prompts, outputs)


def test_scores_of_the_indexer_are_those_of_the_kernel_of_its_layer(start: StartEngine) -> None:
    """With the kernel of another, an engine would ignore `engine.kernels` in silence."""
    asked = list[int]()

    class Asked(ReferenceKernel):
        name = "asked"

        def index_scores(self, q: Tensor, k: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
            asked.append(len(q))
            return super().index_scores(q, k, weights, visible)

    model = random_model(tiny_glm_arch(), 1)
    for layer in model.modules():
        if isinstance(layer, SparseLatentAttention):
            layer.kernel = Asked()
    prompts = prompts_of(2, 20, 30)
    outputs = start(model).run(prompts, max_tokens=5)
    check_outputs(model, prompts, outputs)
    assert sum(asked) >= sum(map(len, prompts))


@pytest.mark.parametrize("arch", [tiny_nemotron_arch(), tiny_qwen3_next_arch()], ids=lambda arch: arch.model_type)
def test_states_are_those_of_the_plain_forward_pass(start: StartEngine, arch: ModelArch) -> None:
    """Rows are used again, prompts come in pieces, and who lost its blocks is computed again."""
    model = random_model(arch, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # states that last for some hundred tokens
                parameter.fill_(-5.0)
    client = start(model, num_blocks=80, max_num_batched_tokens=24, max_num_seqs=6)
    base = prompts_of(1, 30, 30)[0]
    prompts = [base + tail for tail in prompts_of(12, 1, 40, seed=6)]
    outputs = client.run(prompts, max_tokens=30)
    assert client.engine._scheduler.num_preemptions
    # a block has keys and values, and no state
    assert not client.engine._scheduler.prefix_hits
    check_outputs(model, prompts, outputs)


def test_windows_and_sinks_are_those_of_the_plain_forward_pass(start: StartEngine) -> None:
    """gpt-oss: prompts longer than the window, in pieces, with prefix hits and preemption."""
    arch = tiny_gpt_oss_arch()
    model = random_model(arch, 1)
    client = start(model, num_blocks=64, max_num_batched_tokens=24)
    base = prompts_of(1, 30, 30)[0]
    prompts = [base + tail for tail in prompts_of(8, 1, 40, seed=6)]
    outputs = client.run(prompts, max_tokens=30)
    assert client.engine._scheduler.num_preemptions
    assert client.engine._scheduler.prefix_hits
    check_outputs(model, prompts, outputs)


def test_distributions_are_the_models(start: StartEngine, tiny: tuple[Path, Decoder]) -> None:
    """Whole distributions, with chunked prefill, prefix hits and preemption at once: KL below 1e-5."""
    client = start(num_blocks=64, max_num_batched_tokens=24)
    base = prompts_of(1, 40, 40)[0]
    prompts = [base + tail for tail in prompts_of(12, 1, 40, seed=6)]
    outputs = client.run(prompts, max_tokens=40, logprobs=-1)
    assert client.engine._scheduler.num_preemptions
    assert client.engine._scheduler.prefix_hits
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = forward(tiny[1], [*prompt, *output.token_ids])[0][len(prompt) - 1 : -1].double().numpy()
        served = np.empty_like(expected)
        for i, top in enumerate(output.top):
            served[i, top.token_ids] = top.logprobs
        kl = (np.exp(expected) * (expected - served)).sum(-1)
        assert np.abs(kl).max() < 1e-5


def test_many_requests_of_all_kinds_end_and_leave_no_block(start: StartEngine) -> None:
    client, rng = start(num_blocks=80, max_num_batched_tokens=40), random.Random(1)
    requests = [
        client.submit(
            prompt,
            max_tokens=rng.randint(1, 60),
            temperature=rng.choice([0.0, 1.0]),
            salt=rng.choice([None, "1"]),
            stream=rng.random() < 0.3,
            logprobs=rng.choice([None, 0, 3]),
            prompt_logprobs=rng.choice([None, None, 1]),
            eos_token_id=rng.choice([None, 2]),
        )
        for prompt in prompts_of(120, 1, 180, seed=9)
    ]
    for request in requests[::7]:
        client.engine.abort([request])
    outputs = [client.result(request) for request in requests]
    for request, output in zip(requests, outputs, strict=True):
        if output.finish_reason == "length":
            assert len(output.token_ids) == request.params.max_tokens
        elif output.finish_reason == "stop":
            assert output.token_ids[-1] == 2
        else:
            assert request in requests[::7]
        if request.params.logprobs is not None:
            assert len(output.logprobs) == len(output.token_ids)
        if output.prompt_logprobs is not None and output.finish_reason != "abort":
            assert len(output.prompt_logprobs) == request.num_prompt - 1
    assert in_use(client) == 0
    assert not client.engine._scheduler.has_requests


def test_seeded_sequences_do_not_depend_on_their_company(start: StartEngine) -> None:
    client = start(enable_prefix_caching=False)
    prompts = prompts_of(8, 5, 50, seed=4)
    alone = [client.run([prompt], max_tokens=40, seed=i)[0].token_ids for i, prompt in enumerate(prompts)]
    noise = [client.submit(prompt, max_tokens=60) for prompt in prompts_of(20, 5, 90, seed=5)]
    together = [client.submit(prompt, max_tokens=40, seed=i) for i, prompt in enumerate(prompts)]
    assert [client.result(request).token_ids for request in together] == alone
    for request in noise:
        client.result(request)


def test_a_cut_sequence_continues_as_it_would_have(start: StartEngine) -> None:
    client, prompt = start(), prompts_of(1, 10, 10)[0]
    (whole,) = client.run([prompt], max_tokens=30, seed=5)
    (head,) = client.run([prompt], max_tokens=11, seed=5)
    (tail,) = client.run([[*prompt, *head.token_ids]], max_tokens=19, seed=5)
    assert head.token_ids + tail.token_ids == whole.token_ids


def test_unseeded_sequences_differ_and_repeat_with_the_engine_seed(start: StartEngine) -> None:
    first, second = (start(seed=3).run([[5, 6, 7]] * 4, max_tokens=20) for _ in range(2))
    assert len({tuple(output.token_ids) for output in first}) == 4
    assert [o.token_ids for o in first] == [o.token_ids for o in second]
    assert start(seed=4).run([[5, 6, 7]], max_tokens=20)[0].token_ids != first[0].token_ids


def test_prompt_logprobs(start: StartEngine, tiny: tuple[Path, Decoder]) -> None:
    client = start(max_num_batched_tokens=32)
    prompts = prompts_of(5, 1, 100)
    client.run(prompts)  # a cached prefix must not shorten them
    for prompt, output in zip(prompts, client.run(prompts, prompt_logprobs=2), strict=True):
        expected, _ = forward(tiny[1], prompt)
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt) - 1
        for i, score in enumerate(output.prompt_logprobs):
            assert abs(score.logprob - float(expected[i, prompt[i + 1]])) < TOLERANCE
            assert score.top.token_ids == expected[i].topk(2).indices.tolist()


def test_new_weights_between_two_tokens(start: StartEngine, tiny: tuple[Path, Decoder]) -> None:
    """Tokens before and after carry their versions; the KV of the prompt stays that of the old weights."""
    new = random_model(tiny[1].arch, seed=2)
    client = start(weight_version="1")
    prompt = prompts_of(1, 30, 30)[0]
    request = client.submit(prompt, max_tokens=60, stream=True)
    client.wait(lambda: len(client.outputs.get(request, [])) >= 5)
    assert client.engine.exchange_weights(new, "2").result() is tiny[1]
    output = client.result(request)
    first, second = output.weight_versions
    assert (first.version, first.start, second.version, second.end) == ("1", 0, "2", 60)
    cut = first.end
    assert second.start == cut
    assert 5 <= cut < 60
    assert logprob_error(tiny[1], prompt, output.token_ids[:cut], output.logprobs[:cut]) < TOLERANCE
    # on the old KV the new weights say something else than they would on their own
    mixed = logprob_error(new, prompt, output.token_ids, output.logprobs)
    assert mixed > 0.1
    with pytest.raises(AssertionError):
        check_outputs(tiny[1], [prompt], [output])
    check_outputs(new, [prompt], client.run([prompt], salt="2"))


def test_a_new_salt_never_sees_an_old_prefix(start: StartEngine, tiny: tuple[Path, Decoder]) -> None:
    new = random_model(tiny[1].arch, seed=2)
    client = start()
    prompt = prompts_of(1, 60, 60)[0]
    client.run([prompt], salt="1")
    client.engine.exchange_weights(new, "2").result()
    (fresh,) = client.run([prompt], salt="2")
    assert fresh.num_cached_tokens == 0
    check_outputs(new, [prompt], [fresh])
    # without a new salt the old prefix is found, as in vLLM: that is why rollouts are salted
    (stale,) = client.run([prompt], salt="1")
    assert stale.num_cached_tokens == 56
    assert logprob_error(new, prompt, stale.token_ids, stale.logprobs) > 0.1
    assert client.engine.reset_prefix_cache(reset_running_requests=False).result()
    check_outputs(new, [prompt], client.run([prompt], salt="1"))


def test_preemption_across_new_weights_keeps_old_versions(start: StartEngine, tiny: tuple[Path, Decoder]) -> None:
    client = start(weight_version="1")
    request = client.submit(prompts_of(1, 30, 30)[0], max_tokens=40, stream=True)
    client.wait(lambda: len(client.outputs.get(request, [])) >= 3)
    client.engine.pause("keep", clear_cache=False).result()
    done = len(client.outputs[request])
    client.engine.exchange_weights(random_model(tiny[1].arch, seed=2), "2").result()
    assert client.engine.reset_prefix_cache(reset_running_requests=True).result()
    client.engine.resume().result()
    output = client.result(request)
    spans = [(span.version, span.start, span.end) for span in output.weight_versions]
    assert spans == [("1", 0, done), ("2", done, 40)]


@pytest.mark.parametrize("forget", [True, False])
def test_a_waiting_request_loses_what_old_weights_computed_elsewhere(
    start: StartEngine, tiny: tuple[Path, Decoder], forget: bool
) -> None:
    """Unless the pause keeps all KV, as it keeps that of requests that run."""
    (prompt,) = prompts_of(1, 24, 24, seed=5)
    other, client = start(), start()
    other.run([prompt], salt="1", max_tokens=1)
    request = EngineRequest("r", prompt, SamplingParams(max_tokens=4, logprobs=0), lambda _: None, cache_salt="1")
    request.extend_hashes(request.tokens, 4)
    names = request.hashes[:5]
    contents = other.engine.call(lambda: other.engine.cached.read(names)).result()
    assert len(contents) == len(names)
    client.engine.pause("keep", clear_cache=False).result()
    request.fetched = dict(zip(names, contents, strict=True))
    client.engine.submit(request)
    client.engine.pause("keep", clear_cache=forget).result()
    updated = random_model(tiny[1].arch, seed=9)
    client.engine.exchange_weights(updated, "2").result()
    client.engine.resume().result()
    output = client.result(request)
    error = logprob_error(updated, prompt, output.token_ids, output.logprobs)
    assert (error < TOLERANCE) is forget, error
    assert request.num_fetched_tokens == (0 if forget else 4 * len(names))


def test_pause_keep_freezes(start: StartEngine) -> None:
    client = start()
    request = client.submit([1, 2, 3], max_tokens=200, stream=True)
    client.wait(lambda: len(client.outputs.get(request, [])) >= 3)
    client.engine.pause("keep", clear_cache=False).result()
    late = client.submit([4, 5, 6], max_tokens=3)
    frozen = len(client.outputs[request])
    time.sleep(0.05)
    assert len(client.outputs[request]) == frozen
    assert late not in client.outputs
    client.engine.resume().result()
    assert len(client.result(request).token_ids) == 200
    assert len(client.result(late).token_ids) == 3


def test_pause_wait_lets_started_ones_finish(start: StartEngine) -> None:
    client = start(num_blocks=66, max_model_len=256)
    started = [client.submit(prompt, max_tokens=100, stream=True) for prompt in prompts_of(3, 30, 40)]
    client.wait(lambda: all(client.outputs.get(request) for request in started))
    paused = client.engine.pause("wait", clear_cache=True)
    late = client.submit([1, 2, 3])
    paused.result(20)
    assert all(client.outputs[request][-1].finish_reason == "length" for request in started)
    assert late not in client.outputs
    assert client.engine.call(lambda: client.engine._pool.num_cached).result() == 0
    client.engine.resume().result()
    client.result(late)


def test_pause_abort_ends_all(start: StartEngine) -> None:
    client = start()
    requests = [client.submit(prompt, max_tokens=200) for prompt in prompts_of(20, 20, 40)]
    client.engine.pause("abort", clear_cache=True).result()
    outputs = [client.result(request) for request in requests]
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert in_use(client) == 0
    client.engine.resume().result()
    assert client.run([[1, 2]])[0].finish_reason == "length"


def test_abort_frees_blocks_and_reports_what_there_is(start: StartEngine, tiny: tuple[Path, Decoder]) -> None:
    client = start()
    prompt = prompts_of(1, 20, 20)[0]
    request = client.submit(prompt, max_tokens=200, stream=True)
    client.wait(lambda: len(client.outputs.get(request, [])) >= 4)
    client.engine.abort([request]).result()
    output = client.result(request)
    assert output.finish_reason == "abort"
    check_outputs(tiny[1], [prompt], [output])
    assert in_use(client) == 0
    client.engine.abort([request]).result()  # again: nothing happens


def test_priority_decides_who_waits(start: StartEngine) -> None:
    client = start(max_num_seqs=1)
    client.engine.pause("keep", clear_cache=False).result()
    requests = [client.submit([1, 2], max_tokens=2, priority=p) for p in (5, 0, -1, 0)]
    client.engine.resume().result()
    for request in requests:
        client.result(request)
    assert list(client.outputs) == [requests[2], requests[1], requests[3], requests[0]]


def test_stop_tokens_and_minimum(start: StartEngine) -> None:
    client = start()
    (free,) = client.run([[1, 2, 3]], max_tokens=30, temperature=0.0)
    stop = free.token_ids[3]
    at = free.token_ids.index(stop)
    (stopped,) = client.run([[1, 2, 3]], max_tokens=30, temperature=0.0, stop_token_ids=frozenset({stop}))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.token_ids == free.token_ids[: at + 1]
    (ended,) = client.run([[1, 2, 3]], max_tokens=30, temperature=0.0, eos_token_id=stop)
    assert (ended.finish_reason, ended.stop_reason, ended.token_ids) == ("stop", None, stopped.token_ids)
    (later,) = client.run(
        [[1, 2, 3]], max_tokens=30, min_tokens=at + 3, temperature=0.0, eos_token_id=stop,
        suppressed_token_ids=frozenset({stop}),
    )  # fmt: skip
    assert stop not in later.token_ids[: at + 3]
