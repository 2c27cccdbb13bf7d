"""What tests of supervised training share: conversations, templates, tiny recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config.recipe import OptimizerConfig, Recipe, TrainerConfig
from hpcrl.config.sft import SftConfig
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.runs.role import Endpoints, RoleContext
from hpcrl.runs.rundir import RunDir

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "say a"},
    {"role": "assistant", "content": "a!"},
    {"role": "user", "content": "and b"},
    {"role": "assistant", "content": "b"},
]


def chat_tokenizer(path: Path, template: str) -> ChatTokenizer:
    """The character tokenizer with another template."""
    write_character_tokenizer(path)
    (path / "chat_template.jinja").write_text(template)
    return ChatTokenizer(path)


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def conversations(count: int) -> list[dict[str, Any]]:
    """Short ones, each of its own, of different lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"say {i}" + "!" * (i % 5)},
                {"role": "assistant", "content": str(i) * (1 + i % 3)},
            ]
        }
        for i in range(count)
    ]


def sft_recipe(model_dir: Path, data: Path, *, steps: int, ranks: int = 1, **sft: Any) -> Recipe:
    settings = {"conversations_per_step": 4, "max_len": 64, "evaluate_every_steps": 0, **sft}
    trainer = TrainerConfig(
        steps=steps, ranks=ranks, micro_batch_tokens=64, optimizer=OptimizerConfig(learning_rate=5e-3)
    )
    return Recipe.model_validate(
        {
            "name": "sft",
            "model": {"path": str(model_dir)},
            "sft": SftConfig(data=str(data), **settings).model_dump(),
            "trainer": trainer.model_dump(),
            "checkpoint": {"every_steps": 2, "keep_last": 10},
        }
    )


def begin_attempt(run: RunDir) -> RoleContext:
    """The next attempt of a run that has no other role than its trainer."""
    attempt = run.start_attempt()
    Endpoints(urls={}).write(run, attempt)
    return RoleContext(run, attempt=attempt, role="trainer", replica=0, rank=0)
