"""Pydantic's errors as findings: file and line, key, what is wrong, a hint."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hpcrl.config.absent import absent, called_elsewhere
from hpcrl.config.keys import alternatives, keys_of
from hpcrl.config.meanings import meanings_of
from hpcrl.config.secret_values import hide_value
from hpcrl.config.yamltree import KeyPath, Origins
from hpcrl.errors import Finding

__all__ = ["explain_errors", "without_unknown_keys"]

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "list_type": "a list",
    "finite_number": "a finite number",
}


_CLOSE = 0.55
"""How similar a word must be to one that is known to be taken for it, of 1."""


def explain_errors(model: type[BaseModel], error: ValidationError, origins: Origins, source: Path) -> list[Finding]:
    """One finding for each error of a validation: what is wrong with which key, where it stands, and a hint.

    Parameters
    ----------
    origins:
        File and line of each key; what is missing is told by the mapping that lacks it.
    source:
        The file for those that have no origin of their own.
    """
    return [
        _explain(model, details, origins, source) for details in error.errors(include_url=False) if _is_own(details)
    ]


def without_unknown_keys(model: type[BaseModel], error: ValidationError, tree: dict[str, Any]) -> dict[str, Any] | None:
    """Return a tree without its unknown keys, so that its rules can be told as well; None where more is wrong.

    An unknown key that is nearly another one, which is not there, is taken for it: rules about its default would be
    about what nobody wrote.
    """
    found = [details for details in error.errors(include_url=False) if _is_own(details)]
    if any(details["type"] != "extra_forbidden" for details in found):
        return None
    repaired = deepcopy(tree)
    for details in found:
        path, owner = _resolve(model, details["loc"])
        holder: Any = repaired
        for part in path[:-1]:
            holder = holder[part]
        value = holder.pop(path[-1])
        known = list(owner.model_fields) if owner is not None else []
        close = [] if absent(path) is not None else get_close_matches(str(path[-1]), known, n=1, cutoff=_CLOSE)
        if close and close[0] not in holder:
            holder[close[0]] = value
    return repaired


def _is_own(details: ErrorDetails) -> bool:
    """Pydantic calls a list too short when its items were refused; those have findings of their own."""
    return not (details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"])


def _explain(model: type[BaseModel], details: ErrorDetails, origins: Origins, source: Path) -> Finding:
    path, owner = _resolve(model, details["loc"])
    kind, context, given = details["type"], details.get("ctx", {}), details["input"]
    shown = hide_value(path, _show(given))
    what, hint = f"{details['msg'][:1].lower()}{details['msg'][1:]} (it is {shown})", ""
    if kind == "extra_forbidden":
        known = list(owner.model_fields) if owner is not None else []
        if (reason := absent(path)) is not None:
            return _finding(path, origins, source, "hpcrl has no such setting", reason)
        what = "unknown key"
        hint = _elsewhere(model, path) or _did_you_mean(str(path[-1]), known) or f"keys here: {', '.join(known)}"
    elif kind == "missing":
        what, hint = "is required", f"add it: {_doc(owner, str(path[-1]))}"
    elif kind in _WANTED:
        what = f"must be {_WANTED[kind]}, is {shown}"
        hint = f"{path[-1]}: {_doc(owner, str(path[-1]))}" if path else ""
        if kind.startswith(("int", "float")) and isinstance(given, str) and given.strip():
            hint = "write the number without quotes" if _is_number(given) else hint
    elif kind == "literal_error":
        what = f"must be one of {context['expected']}, is {shown}"
        known = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        hint = called_elsewhere(path, given) or _value_elsewhere(model, path, given) or _did_you_mean(str(given), known)
    elif kind == "union_tag_invalid":
        tags = str(context["expected_tags"]).replace("'", "").split(", ")
        what = f"kind must be one of {', '.join(tags)}, is {_show(context['tag'])}"
        hint = _did_you_mean(str(context["tag"]), tags)
    elif kind == "union_tag_not_found":
        what, hint = "has no 'kind'", "say which kind it is, for example `kind: words`"
    elif kind == "string_pattern_mismatch":
        what = f"{shown} does not have the right form"
        hint = f"it must match {context['pattern']}"
    return _finding(path, origins, source, what, hint)


def _finding(path: KeyPath, origins: Origins, source: Path, what: str, hint: str) -> Finding:
    """At the line of the value, or of what holds it."""
    where = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), str(source))
    return Finding(where, ".".join(str(part) for part in path), what, hint)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1, cutoff=_CLOSE)
    return f"did you mean {close[0]!r}?" if close else ""


def _elsewhere(model: type[BaseModel], path: KeyPath) -> str:
    """Where a key stands that was written without what stands before it: ``steps`` is ``trainer.steps``."""
    ending = "." + ".".join(map(str, path))
    found = [key.name for key in keys_of(model) if f".{key.name}".endswith(ending)]
    found.sort(key=lambda name: name.count("."))  # stable: what stands higher is meant more often
    return f"did you mean {' or '.join(map(repr, found[:3]))}?" if found else ""


def _value_elsewhere(model: type[BaseModel], path: KeyPath, given: object) -> str:
    """Name the key of the same section whose value this one is: ``grpo`` is an advantage and no loss."""
    section = f"{path[0]}." if len(path) > 1 else ""
    found = [key.name for key in keys_of(model) if key.name.startswith(section) and str(given) in key.values]
    return (
        f"{given!r} is a value of {' or '.join(found[:3])}" if section and found and given not in (True, None) else ""
    )


def _doc(owner: type[BaseModel] | None, name: str) -> str:
    """The documentation of a field, as a hint."""
    return " ".join(meanings_of(owner).get(name, "").split()) if owner is not None else ""


def _resolve(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[KeyPath, type[BaseModel] | None]:
    """The key path that a person wrote, and the model that owns its last part.

    Pydantic's locations also hold the tags of discriminated unions, which are no keys.
    """
    path: list[str | int] = []
    current: Any = model
    owner: type[BaseModel] | None = None
    for part in loc:
        tagged = _by_tag(current, part)
        if tagged is not None:
            current = tagged
            continue
        path.append(part)
        owner, current = _step(current, part)
    return tuple(path), owner


def _step(current: Any, part: str | int) -> tuple[type[BaseModel] | None, Any]:
    for candidate in alternatives(current):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            field = candidate.model_fields.get(str(part))
            return candidate, field.annotation if field is not None else None
        if get_origin(candidate) in (tuple, list):
            return None, get_args(candidate)[0]
        if get_origin(candidate) is dict:
            return None, get_args(candidate)[1]
    return None, None


def _by_tag(annotation: Any, part: str | int) -> Any:
    """The member of a union of models whose ``kind`` is ``part``."""
    members = list(alternatives(annotation))
    if len(members) < 2:
        return None
    for member in members:
        if isinstance(member, type) and issubclass(member, BaseModel) and "kind" in member.model_fields:
            kind = member.model_fields["kind"].annotation
            if get_origin(kind) is Literal and part in get_args(kind):
                return member
    return None
