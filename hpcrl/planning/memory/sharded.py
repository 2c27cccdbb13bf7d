"""Numbers of a model's parameters that a rank holds, gathers and reduces."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import accumulate

from hpcrl.models.facts import ModelFacts
from hpcrl.models.tensors import Part
from hpcrl.planning.memory.padding import layer_padding, model_padding, outer_padding


def of_all_layers(facts: ModelFacts, of_one: Callable[[int], int]) -> list[int]:
    """Return a number for each layer, asked for once for those that are equal."""
    found = {index: of_one(index) for index in set(facts.alike)}
    return [found[index] for index in facts.alike]


class ShardedParameters:
    """Parameters of a model that is sharded over ``shards`` ranks, with its experts divided over ``ep`` ranks.

    Attributes
    ----------
    all:
        Parameters of the whole model.
    head:
        Parameters of last norm and head, which are gathered and reduced separately; 0 where the head is the embedding.
    root:
        Outside of layers.
    """

    def __init__(self, facts: ModelFacts, *, shards: int, ep: int) -> None:
        self._facts, self._shards, self._ep = facts, shards, ep
        self.all = facts.num_parameters()
        head = facts.parameters_by_part().get(Part.LM_HEAD, 0)
        self.head = head + facts.hidden_size if head else 0
        self._own = of_all_layers(facts, lambda i: sum(facts.layer_parameters(i).values()))
        self.root = self.all - sum(self._own)

    @cached_property
    def gathered(self) -> list[int]:
        """Return the parameters of each layer as a rank gathers it."""

        def of_one(index: int) -> int:
            experts = self._experts(index)
            return sum(self._facts.layer_parameters(index).values()) - experts + -(-experts // self._ep)

        return of_all_layers(self._facts, of_one)

    @cached_property
    def wide(self) -> list[int]:
        """Return `gathered` with the padding by which FSDP2 gives all ranks equal parts."""
        facts, shards, ep = self._facts, self._shards, self._ep
        more = of_all_layers(facts, lambda i: layer_padding(facts, i, shards=shards, ep=ep).gathered)
        return [p + padding for p, padding in zip(self.gathered, more, strict=True)]

    @cached_property
    def wide_head(self) -> int:
        """Return `head` with its padding."""
        return self.head + self._outer(Part.NORM, Part.LM_HEAD) if self.head else 0

    @cached_property
    def wide_root(self) -> int:
        """Return `root` with its padding."""
        return self.root + self._outer(Part.EMBEDDING, Part.NORM, Part.LM_HEAD)

    def _outer(self, *parts: Part) -> int:
        return sum(outer_padding(self._facts, part, shards=self._shards) for part in parts)

    @cached_property
    def padding(self) -> int:
        """Return the padding on all ranks of a copy of the model together."""
        return model_padding(self._facts, shards=self._shards, ep=self._ep)

    @cached_property
    def above(self) -> list[int]:
        """Return the parameters of all that lies above each layer."""
        whole = sum(self._own) + self.head
        return [whole - upto for upto in accumulate(self._own)]

    def travelling(self, p: int, layer: int | None = None) -> int:
        """Return those of ``p`` gathered parameters (of a layer) whose gradients are reduced over ranks.

        Where a rank alone has a parameter, as with expert parallelism over all ranks, its gradient is not reduced.
        """
        if self._shards == 1:
            return 0
        if layer is None or self._ep < self._shards:
            return p
        return p - -(-self._experts(layer) // self._ep)

    def _experts(self, layer: int) -> int:
        return self._facts.layer_parameters(layer).get(Part.EXPERT, 0)
