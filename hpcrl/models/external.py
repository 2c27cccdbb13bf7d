"""Families of models that other packages bring: ``family.MODEL_TYPE`` in the entry points of `hpcrl.extend`.

A family is one `ModelFamily`. Its facts need no torch, because plans are made on login nodes; its torch side is a path
that is imported where a model is built. Packages are searched only for a ``model_type`` that hpcrl does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcrl.extend import ExtensionError, import_object, installed_extensions

if TYPE_CHECKING:
    from hpcrl.models.arch import ModelArch
    from hpcrl.models.families.common import Config, Reader


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A family of models, as another package registers it.

    Attributes
    ----------
    arch:
        Reads and writes ``config.json``, and refuses what is not computed.
    facts:
        Reads sizes for plans from a config.
    spec:
        ``package.module:NAME`` of its `hpcrl.modeling.spec.ModelSpec`, which is imported with torch.
    complete:
        Returns a config with the values of keys that a ``config.json`` may leave out; values are not checked yet.
    """

    arch: type[ModelArch]
    facts: Reader
    spec: str
    complete: Callable[[Config], Mapping[str, Any]] = dict


def external_types() -> tuple[str, ...]:
    """Return every ``model_type`` that an installed package registers."""
    return tuple(installed_extensions("family"))


def external_family(model_type: object) -> ModelFamily | None:
    """Return the family of a ``model_type``; None where no installed package registers it.

    Raises
    ------
    ExtensionError
        It cannot be imported, is not a family, or is one of another ``model_type``.
    """
    path = installed_extensions("family").get(model_type) if isinstance(model_type, str) else None
    if path is None:
        return None
    family = import_object(path)
    if not isinstance(family, ModelFamily):
        raise ExtensionError(f"{path} is not a model family", "register a hpcrl.models.external.ModelFamily")
    if model_type not in family.arch.MODEL_TYPES:
        types = ", ".join(family.arch.MODEL_TYPES)
        raise ExtensionError(f"{path} is registered as family.{model_type}, and is of {types}", "use the same name")
    return family
