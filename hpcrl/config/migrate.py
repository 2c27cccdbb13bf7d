"""A recipe or profile as a person wrote it, changed into the current form line by line: comments and order stay."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

from hpcrl.config.earlier import SCHEMA, Edit, FileKind, edits_of, remove_setting, take_schema, value_at
from hpcrl.config.yamltree import KeyPath, parse_file, parse_value
from hpcrl.errors import ConfigError, Finding

_Entry = tuple[yaml.MappingNode, yaml.ScalarNode, yaml.Node]
"""Mapping, key and value."""


class _NotPlainError(Exception):
    """The text around a setting is not of a kind that is changed here."""


def migrated_text(path: Path, kind: FileKind) -> tuple[str, str]:
    """Return the text of a file, and the same in the current form; both are equal where it has that already.

    Only the file itself is changed: a file that it ``extends`` is one of its own.

    Raises
    ------
    ConfigError
        The file cannot be read, is of a later version of hpcrl, or has a setting that only a person can change; all
        such settings are named.
    """
    tree, origins = parse_file(path)
    where = origins.get(("schema",), str(path))
    stated = take_schema(tree, where)
    edits = edits_of(kind, tree)
    by_hand = [_finding(origins.get(edit.path, str(path)), edit, edit.by_hand) for edit in edits if edit.by_hand]
    if by_hand:
        raise ConfigError(by_hand)
    before = text = path.read_bytes().decode("utf-8-sig")
    if not edits and stated == SCHEMA:
        return before, before
    for edit in edits:
        try:
            text = _edited(text, edit)
        except _NotPlainError as error:
            raise ConfigError([_finding(origins.get(edit.path, str(path)), edit, str(error))]) from None
        _edit_tree(tree, edit)
    if stated != SCHEMA:
        text = _with_schema(text)
    # an edit of a text is trusted only where the whole file then means what it should
    if parse_value(text) != {**tree, "schema": SCHEMA}:
        what = "is written in a form that hpcrl cannot change by itself"
        raise ConfigError(
            [Finding(str(path), "", what, "write it in lines of its own, one key in each, and try again")]
        )
    return before, text


def _finding(where: str, edit: Edit, hint: str) -> Finding:
    return Finding(where, ".".join(map(str, edit.path)), "is of an earlier form, and you must change it yourself", hint)


def _edit_tree(tree: dict[str, Any], edit: Edit) -> None:
    if edit.key is not None:
        value_at(tree, edit.section)[edit.key] = copy.deepcopy(edit.value)
    remove_setting(tree, edit.path)


def _edited(text: str, edit: Edit) -> str:
    """Return the text with one setting changed or removed; a mapping that would be left empty goes with it."""
    entries = _entries(text, edit.path)
    _, key, value = entries[-1]
    if not isinstance(value, yaml.ScalarNode):
        raise _NotPlainError("remove it: it is not a single value")
    if edit.key is None:
        return _without(text, entries)
    pair = {edit.key: edit.value}
    shown = yaml.safe_dump(pair, default_flow_style=True, sort_keys=False, width=10_000).strip()[1:-1]
    if edit.section == edit.path[:-1]:
        return text[: key.start_mark.index] + shown + text[value.end_mark.index :]
    # before the section that it was in, which may be removed with it
    mapping, before, _ = entries[len([part for part in edit.section if isinstance(part, str)])]
    place = before.start_mark
    between = ", " if mapping.flow_style else "\n" + " " * place.column
    return _edited(text[: place.index] + shown + between + text[place.index :], Edit(edit.path))


def _without(text: str, entries: list[_Entry]) -> str:
    """Return the text without the last of the entries."""
    value = entries[-1][2]
    while len(entries) > 1 and len(entries[-1][0].value) == 1 and entries[-2][2] is entries[-1][0]:
        entries.pop()
    mapping, key, _ = entries[-1]
    start, end = key.start_mark.index, value.end_mark.index
    if mapping.flow_style:
        # braces of mappings inside that are removed with their only setting
        for _ in range(text.count("{", start, end)):
            end = text.index("}", end) + 1
        after = re.compile(r"\s*,[ \t]*").match(text, end)
        if after is not None:
            return text[:start] + text[after.end() :]
        return re.sub(r",\s*$", "", text[:start]) + text[end:]
    first = text.rfind("\n", 0, start) + 1
    if text[first:start].strip():
        raise _NotPlainError("remove it: another value begins on its line")
    newline = text.find("\n", end)
    return text[:first] + (text[newline + 1 :] if newline >= 0 else "")


def _entries(text: str, path: KeyPath) -> list[_Entry]:
    """Return mapping, key and value of each key on a path, the outermost first."""
    node, entries = yaml.compose(text, yaml.SafeLoader), []
    for part in path:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
        elif isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == part]
            if len(found) != 1:
                raise _NotPlainError("change it: it comes from an anchor")
            entries.append((node, *found[0]))
            node = found[0][1]
        else:
            raise _NotPlainError("change it: it comes from an anchor")
    return entries


def _with_schema(text: str) -> str:
    """Write the number of the current form before the first key."""
    root = yaml.compose(text, yaml.SafeLoader)
    line = f"schema: {SCHEMA}\n"
    if root is None or (isinstance(root, yaml.MappingNode) and not root.flow_style):
        start = len(text) if root is None else root.start_mark.index
        return text[:start] + line + text[start:]
    return text
