"""Activation checkpointing: of a layer its input is kept, and the rest computed again for the backward pass.

`torch.utils.checkpoint` does the work. Added here is what the second computation sees: the experts that tokens went
to and the tokens that indexers chose are those of the first (else ranks might exchange other rows than they expect),
and a router's choice is recorded only once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, noop_context_fn

from hpcrl.modeling.compile.saved_ops import KEPT
from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.decoder import BlockFn
from hpcrl.modeling.rope import RotaryTables

Hold = Callable[[Tensor], Callable[[], Tensor]]
"""Keeps the input of a layer; the returned function gives it back, once."""


def hold_here(x: Tensor) -> Callable[[], Tensor]:
    """Keep the tensor, of any shape, where it is: what is returned may be called more than once."""
    return lambda: x


class Recomputation:
    """A `hpcrl.modeling.decoder.RunBlock` that keeps little of a layer."""

    def __init__(self, *, selective: bool, hold: Hold = hold_here) -> None:
        """Choose what is kept for the backward pass.

        Parameters
        ----------
        selective:
            Whether outputs that are expensive to compute (`hpcrl.modeling.compile.saved_ops`) are kept in addition to
            the layer's input.
        hold:
            Function that keeps the input.
        """
        self._selective, self._hold = selective, hold

    def __call__(self, block: BlockFn, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """See `RunBlock`."""
        if not torch.is_grad_enabled():
            return block(x, rotary, context)
        # a dict for this layer and pass: reading it does not consume it, so that the layer can be recomputed repeatedly
        context = replace(context, taken={})
        first: Tensor | None = x
        held: Callable[[], Tensor] | None = None

        def run(tables: RotaryTables) -> Tensor:
            nonlocal first
            if first is not None:
                begin, first = first, None
                return block(begin, tables, context)
            assert held is not None
            return block(held(), tables, replace(context, record=None))

        y: Tensor = checkpoint(
            run,
            rotary,
            use_reentrant=False,
            preserve_rng_state=False,  # a layer uses no random numbers
            context_fn=_keep_and_give if self._selective else noop_context_fn,
        )
        # after the layer, so that an offloaded input is copied while the next layer computes
        held = self._hold(x)
        return y


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers what operators of `KEPT` return."""

    def __init__(self, kept: dict[str, deque[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in KEPT:
            # without the graph, which would keep all that is not to be kept
            self._kept.setdefault(name, deque()).append(tree_map_only(Tensor, Tensor.detach, out))
        return out


class _Give(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns that, in the same order, in place of running them."""

    def __init__(self, kept: dict[str, deque[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        return self._kept[name].popleft() if name in KEPT else func(*args, **(kwargs or {}))


def _keep_and_give() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    kept: dict[str, deque[Any]] = {}
    return _Keep(kept), _Give(kept)
