"""Matrices of a model that a recipe keeps out of FP8, and the problems of that choice, checked before a model is built.

The trainer checks again when it starts, on the matrices that its own modules multiply together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.models.facts import ModelFacts
from hpcrl.models.freezing import freeze_matcher
from hpcrl.models.tensors import Part


def fp8_problems(
    facts: ModelFacts, *, linears: bool, experts: bool, keep: Sequence[str]
) -> Iterator[tuple[str | None, str]]:
    """Yield the problems of ``trainer.precision.fp8`` for this model: the setting in it (None: all of it), and a text.

    Parameters
    ----------
    linears, experts, keep:
        As in `hpcrl.config.precision.Fp8Config`.
    """
    chosen: dict[str, tuple[Part, str]] = {}
    fused = False
    for weight, prefix, _ in facts.placed(mtp=False):
        if not weight.quantised or not (experts if weight.part is Part.EXPERT else linears):
            continue
        module, _, leaf = (prefix + weight.name).rpartition(".")
        # experts of a layer that are one tensor are never in FP8
        if leaf != "weight":
            fused = True
            continue
        # where no pattern distinguishes experts of a layer, one represents all
        for expert in range(weight.copies if keep else 1):
            chosen[module.format(expert)] = weight.part, module.partition(".experts.")[0]
    if fused:
        yield "experts", f"experts of a layer of {facts.name} are published as one tensor, which no version has in FP8"
    for pattern in keep:
        if not any(map(freeze_matcher([pattern]), chosen)):
            yield "keep", f"{pattern!r} keeps nothing of {facts.name} that would be in FP8"
    kept = freeze_matcher(keep)
    groups: dict[str, set[bool]] = {}
    for module, (part, layer) in chosen.items():
        if part is Part.EXPERT:
            groups.setdefault(layer, set()).add(kept(module))
    if half := next((layer for layer, answers in groups.items() if len(answers) > 1), None):
        yield "keep", f"has some experts of {half} of {facts.name}, which are multiplied together, and not the others"
    if not fused and all(map(kept, chosen)):
        yield None, f"nothing of {facts.name} is left to be multiplied in FP8"
