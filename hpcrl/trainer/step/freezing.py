"""Parameters that are not trained: without gradient and optimizer state; loaded, saved and published all the same."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.errors import UsageError
from hpcrl.modeling.decoder import Decoder
from hpcrl.models.freezing import freeze_matcher, freeze_patterns, freeze_problems

_HINT = "\n    hint: trainer.freeze takes patterns of published names, such as '*.mlp.gate.weight'"


def freeze_parameters(model: Decoder, patterns: Sequence[str] | None) -> None:
    """Freeze the parameters of ``trainer.freeze``, in a model that is not sharded yet.

    Parameters
    ----------
    patterns:
        Patterns of published names; None for the family's default.

    Raises
    ------
    UsageError
        A pattern matches nothing or some experts of a layer alone, nothing is left to train, or what no gradient
        reaches is not frozen.
    """
    problems = list(freeze_problems(model.arch.facts, patterns))
    if problems:
        raise UsageError(f"trainer.freeze: {'; '.join(problems)}{_HINT}")
    is_frozen = freeze_matcher(freeze_patterns(model.arch.facts, patterns))
    for name, parameter in model.named_parameters():
        regions = [region.name for region in model.adapter.regions(name, parameter.shape)]
        frozen = [is_frozen(region) for region in regions]
        if any(frozen) and not all(frozen):
            published = regions[frozen.index(True)]
            raise UsageError(
                f"trainer.freeze matches {published}, but not all of the {len(regions)} tensors that are one parameter "
                f"with it ({name}){_HINT}"
            )
        parameter.requires_grad_(not any(frozen))
