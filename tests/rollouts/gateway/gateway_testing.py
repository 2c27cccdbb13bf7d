"""A gateway with one rollout behind it, a stub engine, and a small model directory with thinking and tools."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import aiohttp
from chat_lab import byte_tokenizer, write_model
from harness import make_recipe
from openai import AsyncOpenAI
from stub_engine import StubEngine
from tokenizers import AddedToken

from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Rollout
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.environments import Outcome, PolicyEndpoint
from hpcrl.rollouts.gateway import Gateway
from hpcrl.rollouts.gateway.recorder import RolloutRecorder
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling.sampler import Sampler
from hpcrl.rollouts.sampling.turn_sampler import TurnSampler

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: as Qwen's: thinking is written behind the last message of the user alone
TEMPLATE = """
{%- set at = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set at.user = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > at.user %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_chat_model(path: Path) -> Path:
    """Write a model directory without weights, of the format qwen3."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    write_model(path, TEMPLATE, tokenizer, eos_token="<|im_end|>")
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return path


class GatewayBench:
    """One rollout, its endpoint and what the stub says in each turn."""

    def __init__(self, tokenizer: ChatTokenizer, stub: StubEngine, turns: TurnSampler, counters: Counters) -> None:
        self.tokenizer, self.stub, self.turns, self.counters = tokenizer, stub, turns, counters
        self.endpoint: PolicyEndpoint
        self.recorder: RolloutRecorder
        self.said: list[str] = []
        self.clients: list[AsyncOpenAI] = []
        stub.answer = lambda token_ids, seed: tokenizer.encode(self.said[len(stub.requests) - 1])

    def client(self, **settings: Any) -> AsyncOpenAI:
        made = {"base_url": self.endpoint.url, "api_key": self.endpoint.key, "max_retries": 0, **settings}
        self.clients.append(AsyncOpenAI(**made))
        return self.clients[-1]

    async def rollout(self) -> Rollout:
        made = await self.turns.rollout(0, Outcome(reward=1.0), seconds=1.0)
        assert made is not None
        return made

    def prompts(self) -> list[list[int]]:
        """Token ids that the engine was given, request by request."""
        return [request["token_ids"] for request in self.stub.requests]

    def text(self, token_ids: Any) -> str:
        return self.tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=False)


def sequences(rollout: Rollout) -> list[tuple[list[int], list[bool]]]:
    """Tokens of each sequence, and which of them are trained on."""
    found, start = [], 0
    for length in rollout.lengths:
        part = slice(start, start + length)
        found.append((rollout.token_ids[part].tolist(), rollout.sampled[part].astype(bool).tolist()))
        start += length
    return found


@contextlib.asynccontextmanager
async def gateway_bench(
    path: Path,
    *,
    thinking: Literal["kept", "cut"] = "kept",
    max_model_len: int = 6000,
    max_branches: int = 16,
    max_retries: int = 0,
    change: Callable[[StubEngine], None] = lambda stub: None,
    host: str = "127.0.0.1",
    **sampling: Any,
) -> AsyncIterator[GatewayBench]:
    """Serve one rollout."""
    tokenizer, stub, counters = ChatTokenizer(write_chat_model(path)), StubEngine(), Counters()
    change(stub)
    await stub.start()
    gateway = Gateway(counters, host=host)
    try:
        async with aiohttp.ClientSession() as http:
            client = EngineClient(http, name="engine-0", url=stub.url)
            pool = EnginePool([client], counters=counters, request_timeout_s=30.0, max_retries=max_retries)
            pool.engines[0].serve(3, proved_s=0.0)
            pool.engines[0].end_exchange()
            stub.version = "3"
            drawn = make_recipe(Path(), rollouts={"sampling": {"max_new_tokens": 500, **sampling}}).rollouts.sampling
            sampler = Sampler(
                pool,
                Renderer.of_model(path, thinking=thinking),
                temperature=1.0,
                sampling=drawn,
                max_model_len=max_model_len,
                max_branches=max_branches,
                gateway=gateway,
            )
            turns = TurnSampler(sampler, pool.session("group-0"), seed=11)
            bench = GatewayBench(tokenizer, stub, turns, counters)
            async with gateway.serve(turns) as (bench.endpoint, recorder):
                bench.recorder = recorder
                try:
                    yield bench
                finally:
                    for each in bench.clients:
                        await each.close()
    finally:
        await gateway.aclose()
        await stub.stop()
