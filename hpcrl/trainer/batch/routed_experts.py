"""The engine's choice of experts beside the trainer's own.

A mixture of experts is two models where engine and trainer disagree about the experts of a token, however well their
weights agree. `RoutedExpertsComparison` counts where they do. It only looks; a forward pass that takes the engine's
choice instead would start from `EngineRoutedExperts`, which is there before the pass.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.dock.routes import RoutedExperts

__all__ = ["EngineRoutedExperts", "RoutedExpertsComparison"]


class EngineRoutedExperts(NamedTuple):
    """What engines said about ``T`` tokens.

    Attributes
    ----------
    experts:
        ``[T, layers, experts_per_token]``, uint8 or int32; means nothing where ``known`` is False.
    known:
        ``[T]`` bool.
    """

    experts: Tensor
    known: Tensor

    @classmethod
    def from_wire(cls, routes: RoutedExperts, tokens: int, device: torch.device) -> EngineRoutedExperts:
        """Tensors on ``device``.

        Raises
        ------
        ValueError
            They are of another number of tokens.
        """
        if routes.shape[0] != tokens:
            raise ValueError(f"micro-batch of {tokens} tokens has {routes.shape[0]} rows of experts")
        experts = routes.experts
        # torch sorts no wider unsigned integers; the copy is writable, which a view of a message is not
        kind = experts.dtype if experts.dtype == np.uint8 else np.dtype(np.int32)
        return cls(
            experts=torch.from_numpy(experts.astype(kind)).to(device),
            known=torch.from_numpy(routes.known.copy()).to(device),
        )

    def cut(self, own: Tensor, wanting: int) -> EngineRoutedExperts:
        """Of the tokens that ``own`` names, after ``wanting`` more of which nothing is known."""
        experts = torch.cat((self.experts, self.experts.new_zeros(wanting, *self.experts.shape[1:])))
        return EngineRoutedExperts(experts[own], torch.cat((self.known, self.known.new_zeros(wanting)))[own])


class RoutedExpertsComparison:
    """A `hpcrl.modeling.context.RoutedExpertsRecorder` that compares sets: the order of experts does not matter.

    Attributes
    ----------
    known:
        ``[T]`` bool.
    differing:
        ``[T]`` int64: layers in which the set of a known token is another one; 0 where it is not known.
    layers:
        How many are compared.
    """

    def __init__(self, routes: EngineRoutedExperts, *, dense_layers: int = 0) -> None:
        """Begin before a forward pass of the same tokens.

        Parameters
        ----------
        dense_layers:
            Layers of the model without experts: engines report them too, with nothing in them.
        """
        self._all_layers = routes.experts.shape[1]
        self.known, self.layers = routes.known, self._all_layers - dense_layers
        self._experts = routes.experts
        self._seen = 0
        self.differing = torch.zeros_like(routes.known, dtype=torch.int64)

    @torch.no_grad()
    def __call__(self, layer: int, experts: Tensor) -> None:
        """See `RoutedExpertsRecorder`.

        Raises
        ------
        ValueError
            The engine's model has other layers, or takes another number of experts a token.
        """
        if layer >= self._all_layers or experts.shape[-1] != self._experts.shape[-1]:
            raise ValueError(
                f"engines report {self._experts.shape[-1]} experts a token in {self._all_layers} layers; "
                f"layer {layer} of the trainer's model has {experts.shape[-1]}"
            )
        # a layer at a time: sorting also makes indices of eight bytes each
        other = experts.sort(-1).values != self._experts[:, layer].sort(-1).values
        self.differing += other.any(-1) & self.known
        self._seen += 1

    def finish(self) -> None:
        """Call after the forward pass (ValueError where the engine's model has more layers)."""
        if self._seen != self.layers:
            own = self._seen + self._all_layers - self.layers
            raise ValueError(f"engines report experts of {self._all_layers} layers, the trainer's model has {own}")
