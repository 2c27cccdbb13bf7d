"""Pydantic's errors as findings: file and line, key, what is wrong, a hint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hpcrl.config.absent import absent, called_elsewhere
from hpcrl.config.keys import alternatives, keys_of
from hpcrl.config.meanings import meanings_of
from hpcrl.config.secret_values import hide_value
from hpcrl.config.yamltree import KeyPath, Origins
from hpcrl.errors import Finding

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "dict_type": "a mapping",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "list_type": "a list",
    "finite_number": "a finite number",
}


_LEFT_OUT = ("extra_forbidden", "no_effect")
"""Errors of keys that a model does not have."""
_PYTHON_ERROR = re.compile(r"^(Value error|Assertion failed), ")
"""Begin of a message in which pydantic hands on that of a Python error."""
_CLOSE = 0.55
"""Minimum similarity (of 1) at which an unknown word is taken for a known one."""


def explain_errors(model: type[BaseModel], error: ValidationError, origins: Origins, source: Path) -> list[Finding]:
    """Return one finding for each error of a validation: the key, the problem, its line, and a hint.

    Parameters
    ----------
    origins:
        File and line of each key; a missing key gets those of the mapping that lacks it.
    source:
        The file for those that have no origin of their own.
    """
    return [
        _explain(model, details, origins, source) for details in error.errors(include_url=False) if _is_own(details)
    ]


def without_wrong_values(
    model: type[BaseModel], error: ValidationError, tree: dict[str, Any]
) -> tuple[dict[str, Any], list[KeyPath]]:
    """Return a tree without its unknown keys and wrong values, so that its rules can be checked as well.

    An unknown key that is nearly another one, which is not there, is taken for it: rules about its default would report
    a value that was never written.

    Returns
    -------
    tree, wrong:
        The rest of the tree, and the paths of the keys whose values were wrong.
    """
    repaired, wrong = deepcopy(tree), list[KeyPath]()
    for details in error.errors(include_url=False):
        if not _is_own(details):
            continue
        path, owner = _resolve(model, details["loc"])
        while path and isinstance(path[-1], int):
            # without one of its items a list says something else
            path, owner = path[:-1], None
        holder = _holder(repaired, path)
        if holder is None or path[-1] not in holder:
            continue
        value = holder.pop(path[-1])
        if details["type"] not in _LEFT_OUT:
            wrong.append(path)
            if owner is not None:
                holder |= _required_value(owner, path[-1])
            continue
        known = list(owner.model_fields) if owner is not None else []
        misspelt = details["type"] == "extra_forbidden" and absent(path) is None
        close = get_close_matches(str(path[-1]), known, n=1, cutoff=_CLOSE) if misspelt else []
        if close and close[0] not in holder:
            holder[close[0]] = value
    return repaired, wrong


def _required_value(owner: type[BaseModel], name: str | int) -> dict[str | int, Any]:
    """Return a valid value of a field that has no default, so that the rest is whole; empty where it has one."""
    field = owner.model_fields.get(str(name))
    if field is None or not field.is_required():
        return {}
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field])  # type: ignore[arg-type]
    for value in (1, 0.5, "x", True, [], {}, *get_args(field.annotation)):
        try:
            adapter.validate_python(value)
        except ValidationError:
            continue
        return {name: value}
    return {}


def _holder(tree: dict[str, Any], path: KeyPath) -> dict[Any, Any] | None:
    """Return the mapping that has the last key of a path; None where a part of the path is gone."""
    holder: Any = tree if path else None
    for part in path[:-1]:
        try:
            holder = holder[part]
        except (LookupError, TypeError):
            return None
    return holder if isinstance(holder, dict) else None


def _is_own(details: ErrorDetails) -> bool:
    """Return whether an error is not a consequence of another one.

    Pydantic reports a list as too short when its items were refused; the items have their own findings.
    """
    return not (details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"])


def _explain(model: type[BaseModel], details: ErrorDetails, origins: Origins, source: Path) -> Finding:
    path, owner = _resolve(model, details["loc"])
    kind, context, given = details["type"], details.get("ctx", {}), details["input"]
    shown = hide_value(path, _show(given))
    what, hint = f"{plain_message(details)} (it is {shown})", ""
    if kind == "extra_forbidden":
        known = list(owner.model_fields) if owner is not None else []
        if (reason := absent(path)) is not None:
            return _finding(path, origins, source, "hpcrl has no such setting", reason)
        what = "unknown key"
        hint = _elsewhere(model, path) or _did_you_mean(str(path[-1]), known) or f"keys here: {', '.join(known)}"
    elif kind == "missing":
        what, hint = "is required", f"add it: {_doc(owner, str(path[-1]))}"
    elif kind in _WANTED:
        what = f"{plain_message(details)}, is {shown}"
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
        at, tag = (*path, "kind"), str(context["tag"])
        hint = called_elsewhere(at, tag) or _value_elsewhere(model, at, tag) or _did_you_mean(tag, tags)
    elif kind == "union_tag_not_found":
        what, hint = "has no 'kind'", "say which kind it is, for example `kind: words`"
    elif kind == "no_effect":
        what, hint = details["msg"], "remove the setting or choose the loss that reads it"
    elif kind == "extension":
        what, hint = str(context["what"]), str(context["hint"])
    elif kind == "string_pattern_mismatch":
        what = f"{shown} does not have the right form"
        hint = f"it must match {context['pattern']}"
    return _finding(path, origins, source, what, hint)


def plain_message(details: ErrorDetails) -> str:
    """Return pydantic's message about one value, without the value, as the end of a sentence.

    Pydantic writes "Value error, ..." where code refused the value, and "unable to parse string as an integer".
    """
    if (wanted := _WANTED.get(details["type"])) is not None:
        return f"must be {wanted}"
    message = _PYTHON_ERROR.sub("", details["msg"], count=1)
    return f"{message[:1].lower()}{message[1:]}"


def _finding(path: KeyPath, origins: Origins, source: Path, what: str, hint: str) -> Finding:
    """Return a finding at the line of the value, or of the mapping that holds it."""
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
    """Return a hint with the full key of a key that lacks its sections: ``steps`` is ``trainer.steps``."""
    given = ".".join(map(str, path))
    # an entry of another kind may have the key at the same place, and several kinds may
    found = list(dict.fromkeys(key.name for key in keys_of(model) if f".{key.name}".endswith(f".{given}")))
    found = [name for name in found if name != given]
    found.sort(key=lambda name: name.count("."))  # a stable sort: keys at a higher level are more likely meant
    return f"did you mean {' or '.join(map(repr, found[:3]))}?" if found else ""


def _value_elsewhere(model: type[BaseModel], path: KeyPath, given: object) -> str:
    """Name the key of the same section whose value this one is: ``grpo`` is an advantage and no loss."""
    section = f"{path[0]}." if len(path) > 1 else ""
    found = [key.name for key in keys_of(model) if key.name.startswith(section) and str(given) in key.values]
    return (
        f"{given!r} is a value of {' or '.join(found[:3])}" if section and found and given not in (True, None) else ""
    )


def _doc(owner: type[BaseModel] | None, name: str) -> str:
    """Return the documentation of a field, as a hint."""
    return " ".join(meanings_of(owner).get(name, "").split()) if owner is not None else ""


def _resolve(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[KeyPath, type[BaseModel] | None]:
    """Return the key path as written, and the model that owns its last part.

    Pydantic's locations also hold the tags of discriminated unions, which are not keys.
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
    """Return the member of a union of models whose ``kind`` is ``part``; of names and a section, the given one."""
    members = list(alternatives(annotation))
    if len(members) < 2:
        return None
    if part in ("name", "section") and get_origin(members[0]) is Literal:
        return members[0] if part == "name" else members[1]
    for member in members:
        if isinstance(member, type) and issubclass(member, BaseModel) and "kind" in member.model_fields:
            kind = member.model_fields["kind"].annotation
            if get_origin(kind) is Literal and part in get_args(kind):
                return member
    return None
