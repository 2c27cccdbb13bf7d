"""An engine in this process, as its server sees it: submits requests and collects what comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.engine.outputs import Delivery
from hpcrl.inference.embedded.engine.params import SamplingParams
from hpcrl.inference.embedded.engine.request import EngineRequest, Output


class Client:
    """Submits to an engine and collects."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[EngineRequest, list[Output]] = {}
        self._changed = threading.Condition()

    def deliver(self, delivery: Delivery) -> None:
        with self._changed:
            for request, output in delivery:
                self.outputs.setdefault(request, []).append(output)
            self._changed.notify_all()

    def submit(
        self, prompt: list[int], *, salt: str | None = None, stream: bool = False, priority: int = 0, **params: Any
    ) -> EngineRequest:
        request = EngineRequest(
            "r",
            prompt,
            SamplingParams(**{"max_tokens": 8, "logprobs": 0, **params}),
            lambda _: None,
            cache_salt=salt,
            stream=stream,
            priority=priority,
        )
        self.engine.submit(request)
        return request

    def wait(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), self.engine.failure

    def result(self, request: EngineRequest) -> Output:
        """The last output, with the tokens of all."""
        self.wait(lambda: bool(self.outputs.get(request)) and self.outputs[request][-1].finish_reason is not None)
        parts = self.outputs[request]
        last = parts[-1]
        last.token_ids = [token for part in parts for token in part.token_ids]
        last.logprobs = [value for part in parts for value in part.logprobs]
        self.outputs[request] = [last]
        return last

    def run(self, prompts: list[list[int]], **params: Any) -> list[Output]:
        requests = [self.submit(prompt, **params) for prompt in prompts]
        return [self.result(request) for request in requests]
