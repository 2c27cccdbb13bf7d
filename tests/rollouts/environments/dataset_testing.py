"""Files of questions for tests, and environments made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config.environments import DatasetEnv
from hpcrl.rollouts.environments import Message, Reply
from hpcrl.rollouts.environments.dataset.environment import DatasetEnvironment

EXACT = {"kind": "exact"}


class OneReply:
    """A policy that says one text."""

    def __init__(self, text: str, *, tokens: int | None = None, finished: bool = True) -> None:
        self.seed, self._reply = 0, Reply(text=text, finished=finished, tokens=tokens)

    async def reply(self, messages: Sequence[Message]) -> Reply:
        return self._reply


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def questions(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {i} plus 1?", "answer": str(i + 1), **more} for i in range(count)]


def config_of(file: Path, *rewards: dict[str, Any], **changes: Any) -> DatasetEnv:
    value = {"name": "asked", "kind": "dataset", "path": str(file), "rewards": list(rewards or [EXACT])}
    return DatasetEnv.model_validate({**value, **changes})


def make_dataset(file: Path, *rewards: dict[str, Any], **changes: Any) -> DatasetEnvironment:
    return DatasetEnvironment(config_of(file, *rewards, **changes))


def asked(environment: DatasetEnvironment, split: Any, count: int) -> list[str]:
    """The last messages of the first prompts of a split."""
    return [environment.prompt(split, index).messages[-1]["content"] for index in range(count)]
