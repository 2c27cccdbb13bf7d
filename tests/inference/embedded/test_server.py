"""The embedded server as a process: weight updates from hand-offs, faults, signals, command line."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from adapter_helpers import EXPERTS, OUTPUT, QUERY, factors, merged, publish_factors
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from engine_helpers import (
    Server,
    decode_experts,
    embedded_command,
    forward,
    logprob_error,
    publish,
    random_model,
    start_server,
    tensors_of,
)
from free_ports import free_port
from patience import patience

from hpcrl.inference.embedded.serving.errors import error_middleware
from hpcrl.inference.embedded.serving.process import main
from hpcrl.inference.embedded.serving.settings import parse_settings
from hpcrl.modeling.decoder import Decoder
from hpcrl.weights import HandoffStore

PROMPT = list(range(10, 90))
GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
SAYS: list[dict[str, Any]] = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def store(tiny: tuple[Path, Decoder], tmp_path_factory: pytest.TempPathFactory) -> HandoffStore:
    """Versions 1 and 2 (whole), and 11 to 16, each wrong in its own way."""
    path, model = tiny
    store = HandoffStore(tmp_path_factory.mktemp("run") / "weights")
    for version in (1, 2):
        publish(store, version, path, tensors_of(random_model(model.arch, seed=10 + version)))
    good = tensors_of(random_model(model.arch, seed=20))
    name = "model.layers.1.self_attn.q_proj.weight"
    publish(store, 11, path, {k: v for k, v in good.items() if k != name})
    publish(store, 12, path, {**good, "model.layers.9.extra": torch.zeros(3)})
    publish(store, 13, path, {**good, name: torch.zeros(3, 3)})
    torn = publish(store, 14, path, good).shards[0]
    torn.write_bytes(torn.read_bytes()[:-100])
    flipped = publish(store, 15, path, good).shards[0]
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    publish(store, 16, path, good).shards[0].unlink()
    return store


@pytest.fixture(scope="module")
def server(
    tiny: tuple[Path, Decoder], store: HandoffStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    command = embedded_command(
        *("--max-model-len", "512", "--max-num-seqs", "32", "--block-size", "16", "--weight-version", "0"),
        *("--enable-return-routed-experts", "--weight-transfer-root", str(store.root)),
        *("--served-model-name", "tiny", "other-name"),
    )
    running = start_server(command, *tiny, tmp_path_factory.mktemp("log") / "server.log")
    yield running
    assert running.stop() == 0


def error_of(server: Server, model: Decoder, salt: str) -> float:
    """Distance of the served log-probabilities from those of ``model``."""
    choice = server.generate(PROMPT, max_tokens=8, logprobs=0, ignore_eos=True, request={"cache_salt": salt})
    (choice,) = choice["choices"]
    values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return logprob_error(model, PROMPT, choice["token_ids"], values)


def update(server: Server, store: HandoffStore, version: int) -> None:
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    server.ok("/start_weight_update")
    server.ok("/update_weights", {"update_info": {"path": str(store.path_of(version))}})
    server.ok("/finish_weight_update", {"weight_version": str(version)})


def test_calls_out_of_order_are_refused(server: Server, store: HandoffStore) -> None:
    info = {"update_info": {"path": str(store.path_of(1))}}
    server.ok("/shutdown_weight_transfer_engine")
    assert server.call("/start_weight_update")[0] == 409
    assert server.call("/init_weight_transfer_engine", {})[0] == 400
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    assert server.call("/update_weights", info)[0] == 409
    assert server.call("/finish_weight_update", {"weight_version": "9"})[0] == 409
    server.ok("/start_weight_update")
    server.ok("/finish_weight_update")  # without an update nothing changes
    assert server.call("/finish_weight_update")[0] == 409
    assert server.get("/weight_info")[1] == {"weight_version": "0"}
    assert error_of(server, server.model, "order") < 1e-4


def test_a_label_alone_is_refused(server: Server, store: HandoffStore) -> None:
    """By every way: rollouts would be of weights that they do not say."""
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    before = server.get("/weight_info")[1]
    server.ok("/start_weight_update")
    assert server.call("/finish_weight_update", {"weight_version": "2"})[0] == 409
    assert server.call("/update_weight_version", {"new_version": "2"})[0] == 409
    server.ok("/start_weight_update")
    server.ok("/update_weights", {"update_info": {"path": str(store.path_of(1))}})
    assert server.call("/finish_weight_update", {"weight_version": "2"})[0] == 409
    assert server.get("/weight_info")[1] == before
    server.ok("/update_weight_version", {"new_version": before["weight_version"]})


def test_sessions_have_owners(server: Server, store: HandoffStore) -> None:
    """The next one ends what nobody has ended; what is older than another one is refused, and so are its late calls."""
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    info = {"path": str(store.path_of(1)), "session": [1, 1]}
    server.ok("/start_weight_update", {"session": [1, 1]})
    server.ok("/start_weight_update", {"session": [1, 2]})
    assert server.call("/update_weights", {"update_info": info})[0] == 409
    assert server.call("/start_weight_update", {"session": [0, 9]})[0] == 409
    for wrong in ("1", [1], [1, "2"], [1, 2, 3], {}):
        assert server.call("/start_weight_update", {"session": wrong})[0] == 400
    server.ok("/collective_rpc", {"method": "abandon_weight_update"})
    assert server.call("/finish_weight_update", {"weight_version": "1", "session": [1, 2]})[0] == 409
    server.ok("/start_weight_update")
    server.ok("/collective_rpc", {"method": "abandon_weight_update"})


@pytest.mark.parametrize(
    ("version", "reason"),
    [(11, "is missing"), (12, "is unknown"), (13, "has shape"), (14, "ends at byte"), (15, "content"),
     (16, "No such file"), (99, "does not exist")],
)  # fmt: skip
def test_a_bad_hand_off_changes_nothing(server: Server, store: HandoffStore, version: int, reason: str) -> None:
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    server.ok("/start_weight_update")
    status, answer = server.call("/update_weights", {"update_info": {"path": str(store.path_of(version))}})
    assert status == 400
    assert reason in answer["error"]["message"]
    # the session is over, so nothing half-read can be finished
    assert server.call("/finish_weight_update", {"weight_version": "x"})[0] == 409
    assert error_of(server, server.model, f"bad-{version}") < 1e-4


@pytest.mark.parametrize("info", [None, {}, {"path": 3}, {"path": "/"}, {"path": "{root}/../elsewhere"}])
def test_a_wrong_path_is_refused(server: Server, store: HandoffStore, info: Any) -> None:
    if info and isinstance(info.get("path"), str):
        info = {"path": info["path"].replace("{root}", str(store.root))}
    server.ok("/init_weight_transfer_engine", {"init_info": {}})
    server.ok("/start_weight_update")
    assert server.call("/update_weights", {"update_info": info})[0] == 400
    server.call("/finish_weight_update")


def test_in_flight_update(server: Server, store: HandoffStore) -> None:
    """Rollouts go on during an update: two spans, the KV stays; new rollouts see the new weights alone."""
    old, new = server.model, random_model(server.model.arch, seed=11)
    requests = 12
    sampling = {"max_tokens": 400, "ignore_eos": True, "logprobs": 0}
    with ThreadPoolExecutor(requests) as pool:
        futures = [
            pool.submit(server.generate, PROMPT, request={"cache_salt": "0"}, **sampling, seed=i)
            for i in range(requests)
        ]
        server.wait_for(lambda: server.metrics()["vllm:num_requests_running"] == requests, "running rollouts")
        server.wait_for(lambda: server.metrics()["vllm:generation_tokens_total"] > 200, "some tokens")
        update(server, store, 1)
        fresh = server.generate(PROMPT, max_tokens=8, logprobs=0, ignore_eos=True, request={"cache_salt": "1"})
        answers = [future.result() for future in futures]
    metrics = server.metrics()
    assert metrics["vllm:num_preemptions_total"] == 0
    assert metrics["hpcrl_engine_weight_swap_pause_seconds_count"] == 1
    cuts = set()
    for answer in answers:
        (choice,) = answer["choices"]
        first, second = choice["weight_versions"]
        cut = first["end"]
        assert (first["version"], first["start"], second) == ("0", 0, {"version": "1", "start": cut, "end": 400})
        cuts.add(cut)
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprob_error(old, PROMPT, choice["token_ids"][:cut], values[:cut]) < 1e-4
        assert logprob_error(new, PROMPT, choice["token_ids"], values) > 0.1  # because the KV is older
        # the routes of the prompt are those that were taken, by the old weights
        experts = decode_experts(choice["routed_experts"])
        assert (experts[: len(PROMPT) + cut - 1] == forward(old, [*PROMPT, *choice["token_ids"][:cut]])[1][:-1]).all()
    assert all(0 < cut < 400 for cut in cuts)
    (choice,) = fresh["choices"]
    assert choice["weight_versions"] == [{"version": "1", "start": 0, "end": 8}]
    values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprob_error(new, PROMPT, choice["token_ids"], values) < 1e-4


def test_updates_follow_each_other(server: Server, store: HandoffStore) -> None:
    """The old copy of the weights is room for the next update; what was served is what the hand-off says."""
    for i, version in enumerate((2, 1, 2)):
        update(server, store, version)
        expected = random_model(server.model.arch, seed=10 + version)
        assert error_of(server, expected, f"next-{i}") < 1e-4
        handoff = store.open(version)
        sums = {name: record.xxh3_128 for name, record in handoff.manifest.tensors.items()}
        answer = server.ok("/weight_checker", {"action": "compare", "baseline": sums})
        assert answer == {"match": True, "mismatches": []}
    # an old prefix is found under its old salt until the cache is reset: that is why rollouts are salted
    assert error_of(server, expected, "0") > 0.1
    server.wait_idle()
    assert server.ok("/reset_prefix_cache") == {"success": True}
    assert error_of(server, expected, "0") < 1e-4


def test_an_engine_proves_what_it_runs(server: Server, store: HandoffStore) -> None:
    def prove(version: int, before: int | None, number: int = 1) -> Any:
        args = [str(store.path_of(version)), "" if before is None else str(store.path_of(before)), str(number)]
        (found,) = server.ok("/collective_rpc", {"method": "prove_weights", "args": args})["results"]
        return found

    update(server, store, 1)
    update(server, store, 2)
    right = prove(2, 1)
    assert (right["state"], right["wrong"], right["decisive"]) == ("compared", [], True)
    wrong = prove(1, 2)
    assert (wrong["state"], wrong["wrong"]) == ("compared", wrong["compared"])
    assert prove(99, 1)["state"] == "unknown"
    for args in (["x"], ["x", "", "one"], ["x", "", 1], "x"):
        assert server.call("/collective_rpc", {"method": "prove_weights", "args": args})[0] == 400
    assert server.call("/collective_rpc", {"method": "reset_weights"})[0] == 400


def test_adapters_are_merged_into_their_base(
    server: Server, store: HandoffStore, tiny: tuple[Path, Decoder], tmp_path: Path
) -> None:
    """Two in a row: log-probabilities are those of a server that was started on the merged weights."""
    path, _ = tiny
    base = store.open(1)
    start = random_model(server.model.arch, seed=11)
    first, second = factors(tensors_of(start), 1, QUERY, EXPERTS), factors(tensors_of(start), 2, QUERY, OUTPUT)
    publish_factors(store, 3, base, first, "fused")
    publish_factors(store, 4, base, second)
    update(server, store, 3)
    assert error_of(server, merged(start, first), "adapter-3") < 1e-4
    update(server, store, 4)
    whole = publish(HandoffStore(tmp_path / "whole"), 4, path, tensors_of(merged(start, second)))
    command = embedded_command("--max-model-len", "512", "--max-num-seqs", "32", "--block-size", "16")
    fresh = start_server(command, whole.path, start, tmp_path / "fresh.log")
    try:
        body = {"max_tokens": 8, "logprobs": 0, "ignore_eos": True, "temperature": 0.0}
        found, wanted = (s.generate(PROMPT, **body, request={"cache_salt": "adapter-4"}) for s in (server, fresh))
        assert found["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]
        assert found["choices"][0]["logprobs"] == wanted["choices"][0]["logprobs"]
    finally:
        fresh.stop()
    assert error_of(server, start, "adapter-4") > 0.1  # the test can tell the base from it


def test_both_names_serve(server: Server) -> None:
    assert [card["id"] for card in server.get("/v1/models")[1]["data"]] == ["tiny", "other-name"]
    body = {"model": "other-name", "token_ids": [5], "sampling_params": {"max_tokens": 1}}
    assert server.ok(GENERATE, body)["model"] == "tiny"


@pytest.mark.parametrize(
    ("path", "changes", "field"),
    [
        ("/v1/completions", {"prompt": [1], "echo": True}, "echo"),
        ("/v1/completions", {"prompt": [1], "frequency_penalty": 0.5}, "frequency_penalty"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": SAYS, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": SAYS, "reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"messages": SAYS, "functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"messages": [*SAYS, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "messages"),
        (CHAT, {"messages": [*SAYS, {"role": "tool", "tool_call_id": "1", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "developer", "content": "x"}, *SAYS]}, "messages"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"logit_bias": {"3": 1.0}}}, "logit_bias"),
        (GENERATE, {"token_ids": [1], "sampling_params": {}, "output_mode": "text"}, "output_mode"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    server: Server, path: str, changes: dict[str, Any], field: str
) -> None:
    """A request that needs a missing feature is never answered as if it had not asked."""
    status, answer = server.call(path, changes)
    assert status == 400
    assert answer["error"]["param"] == field


def run_main(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcrl.inference.embedded.server", *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "{model}", "--no-such-flag"], "no-such-flag"),
        (["--port", "8000"], "--model"),
        (["--model", "/nowhere"], "not a model directory"),
        (["--model", "{model}", "--max-num-seqs", "0"], "at least 1"),
        (["--model", "{model}", "--max-model-len", "4096"], "1024 positions"),
        (["--model", "{model}", "--num-gpu-blocks-override", "3"], "cannot hold one sequence"),
        (["--model", "{model}", "--max-num-batched-tokens", "8"], "--max-num-seqs"),
        (["--model", "{model}", "--weight-transfer-config", '{"backend": "nccl"}'], "nccl"),
        (["--model", "{model}", "--port", "99999"], "65535"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(
    tiny: tuple[Path, Decoder],
    arguments: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    port = [] if "--port" in arguments else ["--port", str(free_port())]
    assert main([argument.replace("{model}", str(tiny[0])) for argument in (*arguments, *port)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert reason in line


def test_a_taken_port_is_one_clear_line(server: Server) -> None:
    done = run_main("--model", str(server.model_dir), "--port", server.url.rsplit(":", 1)[1])
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "cannot listen" in line


def test_flags_of_both_servers_are_taken() -> None:
    settings = parse_settings(
        ["--model", "m", "--enable-scale-out", "--enforce-eager", "--weight-transfer-config", '{"backend": "fs"}']
    )
    assert settings.served_model_name == ("m",)
    assert settings.logprobs_mode == "raw_logprobs"


def test_sigterm_ends_the_server_at_once(tiny: tuple[Path, Decoder], tmp_path: Path) -> None:
    """With requests in flight and a pause that will not end."""
    running = start_server(embedded_command("--max-num-seqs", "8"), *tiny, tmp_path / "log")
    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(running.generate, [5], max_tokens=900, ignore_eos=True) for _ in range(12)]
        running.wait_for(lambda: running.metrics()["vllm:num_requests_waiting"] == 4, "a queue")
        running.ok("/pause?mode=keep")
        running.process.send_signal(signal.SIGTERM)
        # they would not end at all
        assert running.process.wait(10 * patience()) == 0
        for future in futures:
            error = future.exception()
            if error is None:
                assert future.result()["choices"][0]["finish_reason"] == "abort"
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_processed_logprobs_and_a_small_cache(tiny: tuple[Path, Decoder], tmp_path: Path) -> None:
    command = embedded_command(
        *("--logprobs-mode", "processed_logprobs", "--max-model-len", "128", "--max-num-seqs", "8"),
        *("--num-gpu-blocks-override", "12", "--scheduling-policy", "priority", "--skip-tokenizer-init"),
    )
    running = start_server(command, *tiny, tmp_path / "log")
    try:
        prompt = PROMPT[:20]

        def one(seed: int) -> Any:
            request = {"priority": seed % 3}
            return running.generate(
                prompt, max_tokens=60, logprobs=0, temperature=0.5, seed=seed, ignore_eos=True, request=request
            )

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(one, range(16)))
        assert running.metrics()["vllm:num_preemptions_total"] > 0
        for answer in answers:
            (choice,) = answer["choices"]
            expected, _ = forward(tiny[1], [*prompt, *choice["token_ids"]])
            scaled = (expected[len(prompt) - 1 : -1] * 2).log_softmax(-1)
            wanted = scaled.gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
            values = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
            assert float((wanted - values).abs().max()) < 1e-4
        # without a tokenizer text cannot be served, token ids can
        status, answer = running.call("/v1/completions", {"prompt": "abc"})
        assert status == 400
        assert "tokenizer" in answer["error"]["message"]
    finally:
        assert running.stop() == 0


async def test_a_client_that_goes_away_is_not_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """As an orchestrator does that drops a rollout: nothing is said of it, and the next request is answered."""

    async def stream(request: web.Request) -> web.StreamResponse:
        parts = web.StreamResponse()
        await parts.prepare(request)
        await parts.write(b"begin")
        assert request.transport is not None
        request.transport.close()
        await parts.write(b"more")  # ClientConnectionResetError
        return parts

    async def fail(request: web.Request) -> web.StreamResponse:
        raise RuntimeError("a defect")

    app = web.Application(middlewares=[error_middleware])
    app.add_routes([web.get("/stream", stream), web.get("/fail", fail)])
    async with TestClient(TestServer(app)) as client:
        with pytest.raises(aiohttp.ClientPayloadError):
            await (await client.get("/stream")).read()
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        assert (await client.get("/fail")).status == 500
    assert "a request failed" in caplog.text
