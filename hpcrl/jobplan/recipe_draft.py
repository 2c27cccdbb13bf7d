"""A first recipe from six answers: model, task, cluster, size, length and goal."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.errors import UsageError

TINY = "tiny"
"""Answer for a model that is made by `hpcrl warmup`, to try the loop."""
GOALS = {
    "try": "see the whole loop in minutes: small batches, few held-out prompts",
    "train": "learn the task: usual batches, checkpoints and evaluations",
    "compare": "find settings by a sweep: usual batches, more held-out prompts, for smaller intervals",
}
"""Goals by name, in words."""
TASKS = {
    "words": "letters of a word in reverse, one turn",
    "calculator": "arithmetic with a tool, several turns",
    "FILE": "questions and answers of a .jsonl, .csv or .tsv file",
    "MODULE:NAME": "an environment of your own, in Python",
    "gym:TASK": "a task of the library reasoning_gym, such as gym:chain_sum",
}
"""Forms of the answer about the task, in words."""
_WORDS = ("reverse", "sort", "shift")
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FILES = (".jsonl", ".csv", ".tsv")
_PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input")
_ANSWERS = ("answer", "solution", "target", "output", "label")
_NUMBER = re.compile(r"\s*-?[\d,]*\.?\d+\s*")
_MAX_LINE = 1 << 20
"""Maximum characters of the first row of a file."""


@dataclass(frozen=True, kw_only=True)
class RecipeAnswers:
    """Answers to the six questions.

    Attributes
    ----------
    model:
        Directory, id of a published model, or `TINY`.
    task:
        One of the forms of `TASKS`.
    cluster:
        The profile.
    size:
        Nodes on Slurm; GPUs of this machine elsewhere, 0 for none.
    steps:
        Optimizer steps.
    goal:
        One of `GOALS`.
    """

    model: str
    task: str
    cluster: ClusterProfile
    size: int
    steps: int
    goal: str


def draft_recipe(name: str, answers: RecipeAnswers) -> str:
    """Return the text of a recipe.

    Parameters
    ----------
    name:
        Its name.

    Raises
    ------
    UsageError
        An answer cannot be used; the message says what can.
    """
    if answers.goal not in GOALS:
        raise UsageError(f"{answers.goal!r} is not a goal\n    hint: {', '.join(GOALS)}")
    environment = _environment(answers.task)
    small, tiny = answers.goal == "try", answers.model == TINY
    task_words = {"words": "short words", "calculator": "arithmetic with a tool"}.get(answers.task, answers.task)
    sections: dict[str, Any] = {
        "name": name,
        "description": f"{'A tiny model' if tiny else answers.model} on {task_words}",
        "model": _model(name, answers),
        "environments": [environment],
        "rollouts": _rollouts(environment, small=small, tiny=tiny),
        "trainer": {"steps": answers.steps},
        "engine": {},
        "evaluation": {
            "every_steps": max(1, min(20, answers.steps // 5)),
            "prompts": {"try": 16, "train": 64, "compare": 256}[answers.goal],
        },
        "checkpoint": {"every_steps": max(1, min(20, answers.steps // 2))},
    }
    _add_shape(sections, answers)
    _add_numbers(sections, answers, environment)
    return _text({key: value for key, value in sections.items() if value != {}}, answers)


def _model(name: str, answers: RecipeAnswers) -> dict[str, Any]:
    if answers.model != TINY:
        return {"path": answers.model}
    return {"path": f"models/{name}", "warmup": {"steps": 1000, "learning_rate": 5e-3, "correct_share": 0.3}}


def _rollouts(environment: Mapping[str, Any], *, small: bool, tiny: bool) -> dict[str, Any]:
    count = 16 if small else 64 if tiny else 128
    found: dict[str, Any] = {"rollouts_per_step": count, "group_size": 4 if small else 8, "max_in_flight": 2 * count}
    if not tiny and environment["kind"] != "words":
        found["sampling"] = {"max_new_tokens": 256 if small else 1024}
    return found


def _add_shape(sections: dict[str, Any], answers: RecipeAnswers) -> None:
    """Add ranks, replicas and nodes: half of them train."""
    trainer, engine = sections["trainer"], sections["engine"]
    if isinstance(answers.cluster, SlurmCluster):
        if answers.size < 1:
            raise UsageError(f"{answers.size} nodes are too few\n    hint: 1 or more on {answers.cluster.name}")
        gpus = answers.cluster.node_of("trainer").gpus
        if answers.size == 1:
            trainer |= {"nodes": 1, "ranks": max(1, gpus // 2)}
            engine |= {"placement": "shared_node", "replicas": 1}
            if gpus == 1 and answers.model != TINY:
                engine |= {"placement": "shared_gpus", "kv_cache_gib": 4.0, "memory": {"gpu_memory_utilization": 0.35}}
        else:
            nodes = answers.size // 2
            trainer |= {"nodes": nodes, "ranks": nodes * max(1, gpus)}
            engine["replicas"] = answers.size - nodes
    elif answers.size > 1:
        trainer["ranks"] = answers.size // 2
        engine["replicas"] = answers.size - answers.size // 2


def _add_numbers(sections: dict[str, Any], answers: RecipeAnswers, environment: Mapping[str, Any]) -> None:
    """Add types of numbers, lengths, backend and learning rate."""
    trainer, engine = sections["trainer"], sections["engine"]
    if answers.model == TINY:
        trainer["optimizer"] = {"learning_rate": 7e-4, "schedule": "linear"}
        return
    trainer |= {"dtype": "bfloat16", "micro_batch_tokens": 4096, "optimizer": {"learning_rate": 1e-6}}
    trainer["memory"] = {"activation_checkpointing": "full", "lm_head_chunk_tokens": 1024}
    engine |= {"dtype": "bfloat16", "max_model_len": 2048 if environment["kind"] != "words" else 512}
    if isinstance(answers.cluster, SlurmCluster) or answers.size:
        engine["backend"] = "vllm"


def _environment(task: str) -> dict[str, Any]:
    """Return the environment of an answer (UsageError with the forms of an answer)."""
    kind, _, rest = task.partition(":")
    if task == "calculator":
        return {"name": "calculator", "kind": "calculator"}
    if kind == "words" and (rest or "reverse") in _WORDS:
        return {"name": rest or "reverse", "kind": "words", "task": rest or "reverse"}
    if kind == "gym" and rest:
        return {"name": rest, "kind": "reasoning_gym", "tasks": {rest: {}}}
    if Path(task).suffix in _FILES:
        return _dataset(Path(task))
    if _FACTORY.fullmatch(task):
        return {"name": rest.lower(), "kind": "custom", "factory": task}
    forms = "".join(f"\n    hint: {form}: {words}" for form, words in TASKS.items())
    raise UsageError(f"{task!r} is not a task{forms}")


def _dataset(path: Path) -> dict[str, Any]:
    """Return the environment of a file, with columns and checker by its first row."""
    row = _first_row(path)
    prompt = next((name for name in _PROMPTS if name in row), None)
    answer = next((name for name in _ANSWERS if name in row and name != prompt), None)
    if prompt is None or answer is None:
        missing = f"question ({', '.join(_PROMPTS)})" if prompt is None else f"answer ({', '.join(_ANSWERS)})"
        raise UsageError(
            f"{path} has no column for the {missing}; it has {', '.join(row) or 'none'}\n"
            "    hint: rename a column; or write the recipe by hand, with `columns` (docs/environments.md)"
        )
    text = str(row[answer])
    if "####" in text:
        reward = {"kind": "numeric", "extract_answer": "hashes"}
    elif "\\boxed" in text:
        reward = {"kind": "math"}
    else:
        reward = {"kind": "numeric" if _NUMBER.fullmatch(text) else "exact"}
    columns = {key: name for key, name in (("prompt", prompt), ("answer", answer)) if key != name}
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-")[:63] or "questions"
    found: dict[str, Any] = {"name": name, "kind": "dataset", "path": str(path)}
    return {**found, **({"columns": columns} if columns else {}), "rewards": [reward]}


def _first_row(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            if path.suffix == ".jsonl":
                lines = iter(lambda: stream.readline(_MAX_LINE), "")
                row = json.loads(next((line for line in lines if line.strip()), ""))
                if not isinstance(row, dict):
                    raise UsageError(f"{path}: its first line is not a mapping of columns")
                return row
            reader = csv.DictReader(stream, delimiter="\t" if path.suffix == ".tsv" else ",")
            return dict(next(iter(reader), {}))
    except (ValueError, RecursionError, csv.Error) as error:
        raise UsageError(f"{path}: its first row cannot be read: {error}") from error
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}\n    hint: name it relative to this directory") from None


def _text(sections: Mapping[str, Any], answers: RecipeAnswers) -> str:
    """Return the file: sections in their order, with the commands that come next."""
    head = [
        f"# Made by hpcrl recipe new for {answers.cluster.name}; goal: {GOALS[answers.goal]}.",
        "# Every setting: docs/configuration.md. Check it: hpcrl recipe check FILE. Does it fit: hpcrl plan FILE.",
    ]
    body = yaml.safe_dump(dict(sections), sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    # PyYAML writes 1.0e-06, which a person writes 1e-6
    body = re.sub(r"(\d)\.0e-0?(\d)", r"\1e-\2", body)
    return "\n".join(head) + "\n" + body
