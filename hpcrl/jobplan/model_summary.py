"""A model directory in a few lines, with everything that keeps a run from starting from it; no weights are read."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.jobplan.start_model import look_at_directory
from hpcrl.jobplan.towers import tower_problems
from hpcrl.models import ModelArch
from hpcrl.models.chat_template import ChatTemplate, ChatTemplateError
from hpcrl.weights.format.mxfp4 import MXFP4_DTYPE
from hpcrl.weights.read.model_files import ModelFiles
from hpcrl.weights.read.stored_weights import quantised_weight
from hpcrl.weights.read.towers import read_tower

_BILLIONS = 100_000_000


@dataclass(frozen=True)
class ModelSummary:
    """Contents of a model directory.

    Attributes
    ----------
    path:
        The directory.
    facts:
        Texts by their labels, as they are shown.
    notes, problems:
        As in `hpcrl.jobplan.start_model.DirectoryReport`.
    """

    path: Path
    facts: dict[str, str]
    notes: tuple[str, ...]
    problems: tuple[tuple[str, str], ...]

    @property
    def is_good(self) -> bool:
        """Return whether trainer and embedded engine can start from it."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        problems = [{"what": what, "hint": hint} for what, hint in self.problems]
        return {"path": str(self.path), "good": self.is_good, **self.facts, "notes": self.notes, "problems": problems}


def summarise_model(model_dir: Path, vision: str | None = None) -> ModelSummary:
    """Look at a model directory as trainer and engines will (`hpcrl.jobplan.start_model`).

    Parameters
    ----------
    vision:
        ``model.vision`` of the recipe; None refuses a model that also sees.
    """
    if not (model_dir / "config.json").is_file():
        what = f"{model_dir} holds no model (no config.json)"
        return ModelSummary(model_dir, {}, (), ((what, "give the path of a Hugging Face model directory"),))
    report = look_at_directory(model_dir, vision=vision)
    facts = {} if report.arch is None else _sizes(report.arch)
    facts |= {"weights": _weights(model_dir), "tokenizer": _tokenizer(model_dir)}
    problems = [*report.problems, *tower_problems(model_dir, vision)]
    if vision is not None and (tower := _tower(model_dir)):
        facts["vision tower"] = f"{tower}, {'left out of exports' if vision == 'drop' else 'carried into exports'}"
    try:
        facts["chat template"] = _template(model_dir)
    except ChatTemplateError as error:
        # the error of the tokenizer's loader says the same
        if not any("tokenizer cannot be used" in what for what, _ in problems):
            problems.append((str(error), "take the template of the published model"))
    return ModelSummary(model_dir, facts, report.notes, tuple(problems))


def _sizes(arch: ModelArch) -> dict[str, str]:
    try:
        count = arch.num_parameters()
        parameters = f", {count / 1e9:,.2f}B parameters" if count >= _BILLIONS else f", {count:,} parameters"
    except ValueError:
        parameters = ""
    experts = f", experts: {arch.routed_experts}" if arch.routed_experts else ""
    return {
        "family": f"{arch.model_type} ({arch.ARCHITECTURE})",
        "size": f"layers: {arch.num_hidden_layers}{experts}{parameters}, {arch.max_position_embeddings:,} positions",
    }


def _weights(model_dir: Path) -> str:
    """Return a text with the bytes of the tensors by their storage."""
    sizes: Counter[str] = Counter()
    try:
        with ModelFiles(model_dir) as files:
            stored = {name: block for name, block in files.tensors.items() if block.dtype != MXFP4_DTYPE}
            for name, block in stored.items():
                own = quantised_weight(name, files.tensors)
                dtype = block.dtype if own is None else files.tensors[own].dtype
                sizes[dtype] += block.nbytes
            count = len({block.file for block in stored.values()})
    except (HpcrlError, OSError, ValueError):
        return "cannot be read"
    parts = ", ".join(f"{size / 1e9:,.3f} GB in {dtype}" for dtype, size in sizes.most_common())
    return f"{parts}; tensors: {len(stored):,}, files: {count}"


def _tower(model_dir: Path) -> str:
    """Return a text about tensors outside the language model; empty where there are none."""
    try:
        tower = read_tower(model_dir)
    except (HpcrlError, OSError, ValueError):
        return ""
    size = sum(block.nbytes for block in tower.values())
    return f"{size / 1e9:,.3f} GB, tensors: {len(tower):,}" if tower else ""


def _tokenizer(model_dir: Path) -> str:
    names = ("tokenizer.json", "tiktoken.model", "tokenizer_config.json", "generation_config.json")
    found = ", ".join(name for name in names if (model_dir / name).is_file()) or "none"
    loaded = importlib.util.find_spec("tokenizers") is not None
    return found if loaded else f"{found} (read as JSON alone: tokenizers is not installed here)"


def _template(model_dir: Path) -> str:
    """Return the file of the chat template (ChatTemplateError where it is not valid)."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        ChatTemplate(path.read_text(encoding="utf-8"), str(path))
        return path.name
    path = model_dir / "tokenizer_config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8-sig")).get("chat_template")
    except (OSError, ValueError, AttributeError, RecursionError):
        given = None
    if isinstance(given, str):
        ChatTemplate(given, str(path))
    if given is None:
        raise ChatTemplateError(f"{model_dir} has no chat template (chat_template.jinja or tokenizer_config.json)")
    return path.name
