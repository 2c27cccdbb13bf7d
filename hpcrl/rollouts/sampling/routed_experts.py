"""Which experts engines chose for the tokens of a conversation: asked for once a token, kept in order.

An engine makes a row for each token that goes into its model. The last sampled token has not gone in when the answer
is there, so its row is missing until the next turn, whose prompt begins with it, and for ever at the end of a rollout.
A turn asks for rows from where there are none yet (``routed_experts_prompt_start``): those of earlier tokens are known
from the engine that computed them first, with the weights of that time.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.config.recipe import Recipe
from hpcrl.dock.routes import RoutedExperts, exact_dtype
from hpcrl.models import load_facts

__all__ = ["RoutedExpertsRows", "RoutedExpertsSettings", "read_rows"]

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_rows(payload: bytes) -> NDArray[Any]:
    """Rows ``[rows, layers, experts_per_token]`` of an ``.npy`` file, as a read-only view.

    Raises
    ------
    ValueError
        It is no such file, or has no such rows.
    """
    stream = io.BytesIO(payload)
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the .npy format is not known")
    shape, fortran, dtype = _HEADERS[version](stream)
    if len(shape) != 3 or fortran or dtype.kind not in "ui":
        raise ValueError(f"experts are whole numbers [rows, layers, experts a token], not {shape} of {dtype}")
    return np.frombuffer(payload, dtype=dtype, offset=stream.tell()).reshape(shape)


@dataclass(frozen=True, slots=True)
class RoutedExpertsSettings:
    """What is to be known of routes.

    Attributes
    ----------
    dtype:
        The smallest that is exact for the model's number of experts.
    prompts:
        Whether rows of prompts may be asked for. Not beside a KV pool: an engine has no rows of tokens whose KV it
        read there, and vLLM ends when it is asked for them.
    keep:
        False where nobody wants to know (evaluations): as little as possible is asked for.
    """

    dtype: np.dtype[Any]
    prompts: bool = True
    keep: bool = True

    @classmethod
    def of(cls, recipe: Recipe) -> RoutedExpertsSettings | None:
        """None where engines do not return experts (FileNotFoundError, ValueError: the model is not known)."""
        if not recipe.returns_routed_experts:
            return None
        dtype = exact_dtype(load_facts(recipe.model.path).num_experts)
        return cls(dtype, prompts=recipe.engine.kv_store is None)

    def unkept(self) -> RoutedExpertsSettings:
        """The same for who does not want to know."""
        return replace(self, keep=False)


class RoutedExpertsRows:
    """Rows of one conversation, as they come."""

    def __init__(self, settings: RoutedExpertsSettings) -> None:
        self._settings = settings
        self._pieces: list[tuple[int, NDArray[Any]]] = []
        self._end = 0

    def start(self, prompt_length: int) -> int:
        """First token of a prompt whose row is wanted. Every engine computes the last one, so that is the least."""
        last = prompt_length - 1
        return min(self._end, last) if self._settings.keep and self._settings.prompts else last

    def add(self, end: int, rows: NDArray[Any]) -> None:
        """Rows of the tokens before token ``end``, in order.

        Raises
        ------
        ValueError
            An expert has a number that the model does not have, or rows have another form than those before.
        """
        if not self._settings.keep:
            return
        if self._pieces and self._pieces[0][1].shape[1:] != rows.shape[1:]:
            raise ValueError(f"rows of {rows.shape[1:]} after rows of {self._pieces[0][1].shape[1:]}")
        self._pieces.append((end - len(rows), self._exact(rows)))
        self._end = end

    def aligned(self, tokens: int) -> RoutedExperts | None:
        """Rows of the first ``tokens`` tokens, those that are missing included; None where there are none at all."""
        if not self._pieces:
            return None
        experts = np.zeros((tokens, *self._pieces[0][1].shape[1:]), self._settings.dtype)
        present = np.zeros(tokens, np.uint8)
        for start, rows in self._pieces:
            experts[start : start + len(rows)] = rows
            present[start : start + len(rows)] = 1
        return RoutedExperts.of(experts, present)

    def _exact(self, rows: NDArray[Any]) -> NDArray[Any]:
        dtype = self._settings.dtype
        if rows.dtype == dtype:
            return rows
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) <= np.iinfo(dtype).max:
            raise ValueError(f"expert {rows.max()} does not fit {dtype}, which holds all of the model's")
        return rows.astype(dtype)
