"""YAML with the line of every value, duplicate keys refused, and ``1e-3`` read as a number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from hpcrl.errors import ConfigError, Finding

__all__ = ["KeyPath", "Origins", "parse_file", "parse_value"]

KeyPath = tuple[str | int, ...]
Origins = dict[KeyPath, str]
"""``file:line`` of each value, by its path; containers have theirs too."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 wants a dot in every float; people write ``1e-3``."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.inf|\.nan)$"
    ),
    list("-+0123456789."),
)


def parse_value(text: str) -> Any:
    """One value as ``--set`` takes it (ValueError where it is not YAML)."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not a YAML value: {_problem(error)}") from error


def parse_file(path: Path) -> tuple[dict[str, Any], Origins]:
    """Read a YAML file whose top level is a mapping.

    Raises
    ------
    ConfigError
        The file cannot be read or is not such YAML; names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Finding(str(path), "", f"cannot be read: {error}")]) from error
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        builder = _Builder(path, loader)
        value = builder.build(root, ()) if root is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError([Finding(where, "", f"not valid YAML: {_problem(error)}")]) from error
    finally:
        loader.dispose()
    if not isinstance(value, dict):
        builder.findings.append(Finding(f"{path}:1", "", "the top level must be a mapping of keys to values"))
        value = {}
    if builder.findings:
        raise ConfigError(builder.findings)
    return value, builder.origins


def _problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]


def _shown(path: Path) -> Path:
    """As a person would write it: relative to here where it lies below."""
    return path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path


class _Builder:
    """Turns YAML nodes into values and remembers where each stood."""

    def __init__(self, path: Path, loader: _Loader) -> None:
        self._path, self._loader = path, loader
        self.origins: Origins = {}
        self.findings: list[Finding] = []

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self.origins[path] = self._where(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*path, i)) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        return self._loader.construct_object(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._loader.construct_object(key_node)
            dotted = ".".join(str(part) for part in (*path, key))
            if not isinstance(key, str):
                self.findings.append(
                    Finding(self._where(key_node), dotted, f"keys are text, {key!r} is not", f'write "{key}"')
                )
                continue
            if key in result:
                earlier = self.origins[(*path, key)].rsplit(":", 1)[1]
                self.findings.append(
                    Finding(self._where(key_node), dotted, f"stands twice (first on line {earlier})", "remove one")
                )
                continue
            result[key] = self.build(value_node, (*path, key))
            self.origins[(*path, key)] = self._where(key_node)
        return result

    def _where(self, node: yaml.Node) -> str:
        return f"{_shown(self._path)}:{node.start_mark.line + 1}"
