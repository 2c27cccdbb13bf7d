"""Stand-in for a value that cannot be used, with which the rules that do not read it can still be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel

from hpcrl.config.yamltree import KeyPath

_T = TypeVar("_T")


class UnusableValueError(Exception):
    """A rule read a value that has a finding of its own; there is nothing to say about it until it is corrected."""


def _refuse(*_: object) -> NoReturn:
    raise UnusableValueError


class _RefusesFields(type):
    """Class of the stand-in's class: rules also ask a value's class, for ``model_fields`` of a section."""

    def __getattr__(cls, name: str) -> NoReturn:
        # Python asks for names of its own, and does without those that are absent
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnusableValueError


class _Unusable(metaclass=_RefusesFields):
    """A value of which only ``is`` tells something: any other use raises UnusableValueError."""

    __slots__ = ()


def _operators() -> Sequence[str]:
    names = "getattribute eq ne lt le gt ge bool hash len iter contains getitem call int float index str repr format"
    names += " add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs round"
    names += " ceil floor trunc and rand or ror xor rxor fspath"
    return [f"__{name}__" for name in names.split()]


_REFUSAL: Callable[..., NoReturn] = _refuse
for _name in _operators():
    setattr(_Unusable, _name, _REFUSAL)

UNUSABLE: Any = _Unusable()
"""The stand-in."""


def usable_findings(check: Callable[..., Iterable[_T]], *configurations: BaseModel) -> Iterator[_T]:
    """Yield what a rule finds; nothing where it reads a value that cannot be used."""
    try:
        yield from list(check(*configurations))
    except UnusableValueError:
        return
    except TypeError as error:
        # functions in C refuse the stand-in by its type, before they use it
        if _Unusable.__name__ not in str(error):
            raise


def with_unusable(value: Any, path: KeyPath) -> Any:
    """Return a configuration with `UNUSABLE` at a path; nothing is validated again.

    Raises
    ------
    LookupError, AttributeError
        The path leads nowhere.
    """
    if value is UNUSABLE or not path:
        return UNUSABLE
    head, rest = path[0], path[1:]
    if isinstance(value, BaseModel):
        return value.model_copy(update={str(head): with_unusable(getattr(value, str(head)), rest)})
    if isinstance(value, dict):
        return {**value, head: with_unusable(value[head], rest)}
    items = list(value)
    items[int(head)] = with_unusable(items[int(head)], rest)
    return tuple(items)
