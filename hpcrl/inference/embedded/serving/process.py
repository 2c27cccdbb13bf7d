"""``python -m hpcrl.inference.embedded.server``: the embedded engine behind vLLM's HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import torch
from aiohttp import web

from hpcrl.errors import ExitCode, HpcrlError, UsageError
from hpcrl.inference.embedded.engine.attention import KVCache
from hpcrl.inference.embedded.engine.config import EngineSettings
from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.engine.outputs import Delivery
from hpcrl.inference.embedded.engine.states import RecurrentStates
from hpcrl.inference.embedded.kv.fetching import KvFetcher
from hpcrl.inference.embedded.kv.pool import KvPool
from hpcrl.inference.embedded.serving.api_control import ControlApi
from hpcrl.inference.embedded.serving.api_generate import GenerateApi
from hpcrl.inference.embedded.serving.api_kv import KvApi
from hpcrl.inference.embedded.serving.api_text import TextApi
from hpcrl.inference.embedded.serving.api_turns import TurnsApi
from hpcrl.inference.embedded.serving.errors import error_middleware
from hpcrl.inference.embedded.serving.serving import ServedModel, Serving
from hpcrl.inference.embedded.serving.settings import ServerSettings, parse_settings
from hpcrl.inference.embedded.weights.loading import load_model
from hpcrl.inference.embedded.weights.turns import Turns
from hpcrl.inference.embedded.weights.updates import UpdateSession
from hpcrl.inference.metrics import EngineMetrics, Registry
from hpcrl.modeling.decoder import Decoder
from hpcrl.models.generation_config import GenerationConfig
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.network.auth import Gate
from hpcrl.network.connection_limits import raise_descriptor_limit
from hpcrl.network.http_server import listen, make_runner
from hpcrl.processes.daemon_threads import run_bounded, run_process
from hpcrl.processes.signals import handle_signals
from hpcrl.reporting.log_format import start_logging
from hpcrl.runs.refusals import gate_from_env

_log = logging.getLogger(__name__)
_MAX_BODY_BYTES = 256 << 20
_SHUTDOWN_GRACE_S = 0.5
_CLOSE_S = 2.0
"""Timeout in seconds for each part that is closed at the end."""


def engine_config(settings: ServerSettings, model: Decoder) -> EngineSettings:
    """Return the sizes of the engine.

    Raises
    ------
    UsageError
        They do not fit each other or the model.
    """
    arch, size = model.arch, settings.block_size
    max_model_len = settings.max_model_len or arch.max_position_embeddings
    if max_model_len > arch.max_position_embeddings:
        raise UsageError(
            f"--max-model-len {max_model_len} is more than the model's {arch.max_position_embeddings} positions"
        )
    batched = settings.max_num_batched_tokens or max(2048, settings.max_num_seqs)
    if batched < settings.max_num_seqs:
        raise UsageError(f"--max-num-batched-tokens {batched} is less than --max-num-seqs {settings.max_num_seqs}")
    per_sequence = -(-max_model_len // size)
    num_blocks = settings.num_gpu_blocks_override
    if num_blocks is None:
        block_bytes = KVCache.bytes_per_block(arch, size, model.embed_tokens.weight.dtype)
        states = settings.max_num_seqs * RecurrentStates.bytes_per_row(arch, model.embed_tokens.weight.dtype)
        memory = max(0, settings.kv_cache_memory_bytes - states)
        num_blocks = min(memory // max(1, block_bytes), per_sequence * settings.max_num_seqs)
    if num_blocks < per_sequence:
        raise UsageError(
            f"{num_blocks} KV blocks of {size} tokens cannot hold one sequence of --max-model-len {max_model_len}: "
            f"{per_sequence} are needed"
        )
    return EngineSettings(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=batched,
        block_size=size,
        num_blocks=num_blocks,
        enable_prefix_caching=settings.enable_prefix_caching,
        return_routed_experts=settings.enable_return_routed_experts,
        logprobs_mode=settings.logprobs_mode,
        seed=settings.seed,
        weight_version=settings.weight_version,
    )


def _tokenizer(settings: ServerSettings) -> ChatTokenizer | None:
    files = ("tokenizer.json", "tiktoken.model")
    if settings.skip_tokenizer_init or not any((settings.model / name).is_file() for name in files):
        return None
    try:
        return ChatTokenizer(settings.model)
    except (ValueError, OSError, KeyError) as error:
        raise UsageError(f"{settings.model}: the tokenizer cannot be loaded: {error}") from error


def _facts(settings: ServerSettings, model: Decoder, tokenizer: ChatTokenizer | None) -> ServedModel:
    """Return end-of-sequence tokens and sampling defaults from vLLM's sources (UsageError if invalid)."""
    try:
        config = GenerationConfig.read(settings.model)
    except (ValueError, OSError) as error:
        raise UsageError(f"{error}\n    hint: copy or download the model again, whole") from error
    listed = config.eos_token_ids
    if not listed and (named := model.arch.eos_token_id) is not None:
        listed = (named,) if isinstance(named, int) else tuple(named)
    eos = tokenizer.eos_token_id if tokenizer is not None else next(iter(listed), None)
    defaults = config if settings.generation_config == "auto" else GenerationConfig()
    return ServedModel(
        names=settings.served_model_name,
        root=str(settings.model),
        eos_token_id=eos,
        further_eos_token_ids=frozenset(listed) - {eos},
        # 0 asks for the likeliest token, and is not the lack of a value
        default_temperature=1.0 if defaults.temperature is None else defaults.temperature,
        default_top_p=defaults.top_p or 1.0,
        default_top_k=max(defaults.top_k or 0, 0),
        default_min_p=defaults.min_p or 0.0,
        max_logprobs=settings.max_logprobs,
        prompt_tokens_details=settings.enable_prompt_tokens_details,
        priority_scheduling=settings.scheduling_policy == "priority",
    )


def _bind(settings: ServerSettings) -> socket.socket:
    """Take the port before the model is loaded; connections are refused until the server listens."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
    return listener


def _deliver(delivery: Delivery) -> None:
    for request, output in delivery:
        request.on_output(output)


def engine_app(
    gate: Gate, serving: Serving, updater: UpdateSession, metrics: EngineMetrics, turns: Turns | None = None
) -> web.Application:
    """Return the application of an engine; ``gate`` authenticates clients.

    ``turns`` belongs to an engine that shares its device with a trainer.
    """
    app = web.Application(middlewares=[gate.middleware(), error_middleware], client_max_size=_MAX_BODY_BYTES)
    control = ControlApi(serving, updater, metrics, turns)
    for api in (GenerateApi(serving), TextApi(serving), KvApi(serving.engine), control):
        app.add_routes(api.routes())
    if turns is not None:
        app.add_routes(TurnsApi(turns).routes())
    return app


async def _serve(settings: ServerSettings, gate: Gate, model: Decoder, listener: socket.socket) -> int:
    # engines accept the same credentials from each other as from the run
    async with aiohttp.ClientSession(headers=gate.headers) as session:
        return await _serve_with(session, settings, gate, model, listener)


async def _serve_with(
    session: aiohttp.ClientSession, settings: ServerSettings, gate: Gate, model: Decoder, listener: socket.socket
) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    handle_signals({signal.SIGTERM: stop.set, signal.SIGINT: stop.set})
    metrics = EngineMetrics(Registry({"model_name": settings.served_model_name[0], "engine": "0"}))
    engine = Engine(model, engine_config(settings, model), metrics)
    pool = KvPool.of_environment(engine.cached.format, lambda kind: metrics.pool_failures.inc(value=kind))
    tokenizer = _tokenizer(settings)
    facts = _facts(settings, model, tokenizer)
    serving = Serving(engine, tokenizer, facts, KvFetcher(engine, session, metrics, pool))
    updater = UpdateSession(model, settings.reader, gate_from_env("fanout", token_file=settings.token_file))

    def hand_over(delivery: Delivery) -> None:
        # the loop may be closing while the last step ends
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_deliver, delivery)
            if engine.failure is not None:
                loop.call_soon_threadsafe(stop.set)

    engine.start(hand_over, None if pool is None else pool.put_soon)
    turns = Turns(engine, model) if settings.colocated else None
    app = engine_app(gate, serving, updater, metrics, turns)
    # a disconnected client cancels its handler, which aborts its sequences
    runner = make_runner(app, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_GRACE_S)
    await runner.setup()
    await listen(runner, gate.pending, listener)
    host, port = listener.getsockname()[:2]
    _log.info(
        "serving %s on http://%s:%d: %d sequences of %d tokens, %d KV blocks of %d",
        settings.served_model_name[0],
        host,
        port,
        engine.config.max_num_seqs,
        engine.config.max_model_len,
        engine.config.num_blocks,
        engine.config.block_size,
    )
    await stop.wait()
    for site in list(runner.sites):
        await site.stop()
    engine.abort(serving.in_flight())
    await runner.cleanup()
    await asyncio.to_thread(engine.stop, _SHUTDOWN_GRACE_S)
    # each may wait for a read or a write that hangs: after the timeout, leases expire without them
    closing = [updater.shutdown, *([] if turns is None else [turns.close]), *([] if pool is None else [pool.close])]
    for close in closing:
        if not await run_bounded(close, limit_s=_CLOSE_S):
            _log.warning("%s did not end within %g s and is abandoned", close.__qualname__, _CLOSE_S)
    return ExitCode.OK if engine.failure is None else ExitCode.FAILED


def _terminated(number: int, _: object) -> None:
    """Exit on a signal that arrives before the server listens: there is nothing to clean up."""
    sys.exit(ExitCode.OK)


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM.

    Returns
    -------
    int
        0 after SIGTERM or SIGINT, 1 where the engine failed, 2 where the command line or the model is wrong or the
        port is taken.
    """
    signal.signal(signal.SIGTERM, _terminated)
    start_logging("%(levelname)s %(message)s")
    raise_descriptor_limit()
    try:
        settings = parse_settings(argv)
        gate = gate_from_env("engine", token_file=settings.token_file, open_health=settings.open_health)
        gate.check_host(settings.host)
        torch.set_num_threads(settings.torch_threads)
        with contextlib.closing(_bind(settings)) as listener:
            model = load_model(Path(settings.model), settings.dtype, empty=settings.colocated)
            return run_process(_serve(settings, gate, model, listener))
    except HpcrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
