"""An export in the form of its start model that also sees: around the trained language model all else is as it was."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcrl.errors import UsageError
from hpcrl.models.configfile import read_config
from hpcrl.models.mtp import config_of_tensors
from hpcrl.models.written import written_config
from hpcrl.weights.read.model_files import ModelFiles
from hpcrl.weights.read.stacked_experts import has_inputs_first
from hpcrl.weights.read.stored_weights import HEAD
from hpcrl.weights.read.towers import uncarried_problem
from hpcrl.weights.read.wrapped_names import STACKED_EXPERTS, language_model_name, text_config, wrapped_name
from hpcrl.weights.write.copied_tensors import write_copied_tensors

_TOWER_FILE = "model-vision.safetensors"
_EXPERT = re.compile(r"(?P<stack>.+\.experts)\.\d+\.(?P<part>gate_proj|up_proj|down_proj)\.weight")

_LEAVES = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
"""Tensors of all experts by the matrices of an expert that they hold, in the order in which they hold them."""


class WrappedExport:
    """Names, layout and configuration of a start model that also sees, for the weights of its language model."""

    def __init__(self, model_dir: Path) -> None:
        """Read the heads of the start model's files.

        Raises
        ------
        UsageError
            It has no tensors other than a language model's, or they are quantised.
        """
        self._model_dir = model_dir
        wrapped = text_config(model_dir) or {}
        may_stack = wrapped.get("model_type") in STACKED_EXPERTS
        with ModelFiles(model_dir, whole=True) as files:
            own = {name: language_model_name(name) for name in files.tensors}
            self._tower = {name: files.tensors[name] for name, part in own.items() if part is None}
            hidden_size = wrapped.get("hidden_size", 0)
            layouts = {
                name: has_inputs_first(name, block.shape, hidden_size)
                for name, block in files.tensors.items()
                if may_stack
            }
            self._stacks = {name: layout for name, layout in layouts.items() if layout is not None}
            """Tensors of all experts of a layer, and whether their layout is ``[experts, in, out]``."""
        named = [name for name, part in own.items() if part is not None and part != HEAD]
        if not wrapped or not self._tower or not named:
            raise UsageError(
                f"{model_dir} has no vision tower, which model.vision: carry puts into exports\n"
                "    hint: --model-dir, the model with the vision tower"
            )
        if problem := uncarried_problem(self._tower):
            raise UsageError(problem)
        self._like = named[0]

    def place(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the language model by the names and in the layout of the start model's files.

        All experts of a layer come together, as published matrices ``[out, in]``.
        """
        found: dict[str, Tensor] = {}
        stacks: dict[str, dict[str, list[Tensor]]] = {}
        for name, tensor in tensors.items():
            expert = _EXPERT.fullmatch(name)
            stack = f"{wrapped_name(expert['stack'], like=self._like)}.{_LEAVES[expert['part']]}" if expert else ""
            if expert is None or stack not in self._stacks:
                found[wrapped_name(name, like=self._like)] = tensor
            else:
                stacks.setdefault(stack, {}).setdefault(expert["part"], []).append(tensor)
        for name, parts in stacks.items():
            # parts in the order of _LEAVES: gates before ups
            stacked = torch.cat([torch.stack(parts[part]) for part in _LEAVES if part in parts], dim=1)
            found[name] = stacked.transpose(1, 2).contiguous() if self._stacks[name] else stacked
        return found

    def write_tower(self, directory: Path) -> tuple[str, dict[str, int]]:
        """Copy tower and projector by the byte; returns the name of their file, and the bytes of each tensor."""
        write_copied_tensors(directory / _TOWER_FILE, self._tower)
        return _TOWER_FILE, {name: block.nbytes for name, block in self._tower.items()}

    def config(self, names: Iterable[str], dtype: str, *, tied: bool) -> dict[str, Any]:
        """Return the ``config.json`` of an export.

        Parameters
        ----------
        names:
            Tensors of the language model, by the names of its family.
        dtype:
            Dtype of these tensors.
        tied:
            Whether head and embedding are one.
        """
        config = read_config(self._model_dir / "config.json")
        text = {**config_of_tensors(config["text_config"], names), "tie_word_embeddings": tied}
        return written_config({**config, "text_config": text, "tie_word_embeddings": tied}, (), dtype=dtype)
