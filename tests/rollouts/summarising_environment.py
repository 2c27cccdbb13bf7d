"""An environment with the conversations of ``swe`` and tools without a sandbox, for tests in its own process."""

from __future__ import annotations

from typing import Any

from hpcrl.config.environments import SweEnv
from hpcrl.rollouts.environments import Outcome, Policy, Prompt, Split
from hpcrl.rollouts.environments.swe.swe_work import SweWork
from hpcrl.rollouts.environments.swe.tools import SWE_TOOLS


class _Tools:
    async def call(self, name: str, arguments: Any, *, timeout_s: float) -> str:
        return f"{arguments['command']} is done. " + "." * 80


class Summarising:
    """Works with summaries. Every second rollout is said to have interfered with its judge."""

    name = "summarising"

    def __init__(self, **settings: Any) -> None:
        self._config = SweEnv(name="mend", kind="swe", tasks="none", **settings)

    def prompt(self, split: Split, index: int) -> Prompt:
        question = {"role": "user", "content": f"Mend {split} {index}."}
        return Prompt(split=split, index=index, messages=(question,), tools=SWE_TOOLS)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        work = SweWork(self._config, _Tools())  # type: ignore[arg-type]
        await work.run(prompt, policy)
        parts = {"summaries": float(work.summaries), "judge_tampered": float(policy.seed % 2)}
        return Outcome(reward=float(policy.seed % 3), parts=parts)

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: object) -> list[dict[str, str]]:
        raise NotImplementedError
