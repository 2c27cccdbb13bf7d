"""Every key that a recipe or profile may have, as ``--set`` writes it: for suggestions and for completion in shells."""

from __future__ import annotations

import types
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from hpcrl.config.meanings import meanings_of


class Key(NamedTuple):
    """One key that has a value of its own.

    Attributes
    ----------
    name:
        Dotted path, for example ``trainer.optimizer.learning_rate``; the item of a list is ``0``.
    values:
        Possible values, as written on the command line, where they can be listed; empty otherwise.
    meaning:
        Its documentation in one line.
    """

    name: str
    values: tuple[str, ...]
    meaning: str


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Return all keys of a model and of the models below it, in the order of the reference.

    Keys below a mapping with names of the user's own are left out, because they cannot be listed.
    """
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        below = list(_models(field.annotation))
        for child, item in below:
            yield from keys_of(child, f"{key}.{item}")
        values = tuple(dict.fromkeys(_values(field.annotation)))
        # a section that may also be a name has both: the name, and the keys below it
        if not below or set(values) - {"null", "true", "false"}:
            meaning = " ".join(meanings_of(model).get(name, "").replace("``", "`").split())
            yield Key(key, values, meaning)


def alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union; the type itself where it is not a union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from alternatives(argument)
    else:
        yield annotation


def _models(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the models that a value may be, each with the prefix of its keys."""
    for candidate in alternatives(annotation):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            yield candidate, ""
        elif get_origin(candidate) in (tuple, list):
            yield from ((model, f"0.{item}") for model, item in _models(get_args(candidate)[0]))


def _values(annotation: Any) -> Iterator[str]:
    for candidate in alternatives(annotation):
        if candidate is bool:
            yield from ("true", "false")
        elif candidate is type(None):
            yield "null"
        elif get_origin(candidate) is Literal:
            yield from map(str, get_args(candidate))
        elif isinstance(candidate, type) and issubclass(candidate, Enum):
            yield from (str(member.value) for member in candidate)
