"""Tensors of a model that are not trained: patterns of published names, and their problems."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches

from hpcrl.models.facts import ModelFacts
from hpcrl.models.tensors import Part

_NUMBER = re.compile(r"\.\d+\.")
_INDEXER = "*.indexer.*"


def freeze_patterns(facts: ModelFacts, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the patterns of frozen weights: ``patterns``, or the default of the model's family where they are None.

    An indexer chooses tokens and has no part in the computation on them, so no gradient of the loss reaches it.
    """
    if patterns is not None:
        return tuple(patterns)
    has_indexer = any(weight.part is Part.INDEXER for layer in facts.layers for weight in layer.weights)
    return (_INDEXER,) if has_indexer else ()


def freeze_matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate: whether a published name matches one of ``patterns``.

    Patterns have ``*``, ``?`` and ``[…]``, and match the whole name.
    """
    if not patterns:
        return lambda name: False
    match = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns)).match
    return lambda name: match(name) is not None


def freeze_problems(facts: ModelFacts, patterns: Sequence[str] | None) -> Iterator[str]:
    """Yield the problems of ``trainer.freeze`` for this model, as texts."""
    wanted = freeze_patterns(facts, patterns)
    if not wanted and patterns is None:
        return
    tensors = {spec.name: spec.part for spec in facts.tensors()}
    alike = dict.fromkeys(_NUMBER.sub(".*.", name) for name in tensors)
    for pattern in wanted:
        matches = freeze_matcher([pattern])
        if not any(map(matches, tensors)):
            close = get_close_matches(_NUMBER.sub(".*.", pattern), alike, n=1, cutoff=0.3)
            near = f"; near it is {close[0]!r}" if close else ""
            yield f"no tensor of {facts.name} has a name like {pattern!r}{near}"
    frozen = freeze_matcher(wanted)
    trained = {name: part for name, part in tensors.items() if not frozen(name)}
    if all("correction_bias" in name for name in trained):
        yield f"nothing of {facts.name} is left to train"
    elif Part.INDEXER in trained.values():
        yield f"the indexer of {facts.name} is not frozen ({_INDEXER!r}), but no gradient of the loss reaches it"
