"""YAML with the line of every value, duplicate keys refused, and ``1e-3`` read as a number."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from hpcrl.errors import ConfigError, Finding

_MOST_BYTES = 4 << 20
"""Maximum bytes of a file: the longest real recipe is a thousandth of it."""
_MOST_VALUES = 100_000
"""Maximum values of a file, where an alias counts as its target: a few lines of aliases can stand for billions of
values."""
_MOST_LEVELS = 64
"""Maximum depth of nested lists and mappings; an alias within its own anchor would be infinite."""

KeyPath = tuple[str | int, ...]
Origins = dict[KeyPath, str]
"""``file:line`` of each value, by its path; containers have theirs too."""


class _TooMuchError(yaml.YAMLError):
    """More than any recipe says."""


_TOO_DEEP = f"lists and mappings are nested more than {_MOST_LEVELS} levels deep"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with numbers as people write them.

    YAML 1.1 requires a dot in every float, but people write ``1e-3``; and it reads ``1:30`` as ninety and ``010`` as
    eight, which is never meant. Brackets are counted while they are read: thousands in each other would take minutes.
    """

    flow_level: int

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Refuse brackets and braces beyond the maximum depth."""
        if self.flow_level >= _MOST_LEVELS:
            raise _TooMuchError(_TOO_DEEP)
        super().fetch_flow_collection_start(token)


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (_INT, _FLOAT)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(?:0|[1-9][\d_]*|0x[\da-fA-F_]+)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.inf|\.nan)$"
    ),
    list("-+0123456789."),
)

if yaml.__with_libyaml__:
    from yaml.cyaml import CParser  # type: ignore[attr-defined]

    class _QuickLoader(Composer, CParser, SafeConstructor, Resolver):
        """The same with libyaml's scanner and parser, which take a tenth of the time.

        Nodes are put together in Python: in C, a document that is deep enough ends the process.
        """

        def __init__(self, stream: str) -> None:
            CParser.__init__(self, stream)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)
            self.anchors: dict[str, yaml.Node] = {}

    _QuickLoader.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
    _QUICK: tuple[type, ...] = (_QuickLoader,)
else:
    _QUICK = ()


def parse_value(text: str) -> Any:
    """Return the value of one text of ``--set`` (ValueError where it is not YAML)."""
    try:
        value, builder = _parse(text, Path("--set"))
    except yaml.YAMLError as error:
        raise ValueError(f"not a YAML value: {_problem(error)}") from error
    if builder.findings:
        raise ValueError(builder.findings[0].what)
    return value


def parse_file(path: Path) -> tuple[dict[str, Any], Origins]:
    """Read a YAML file whose top level is a mapping.

    Raises
    ------
    ConfigError
        The file cannot be read, is not such YAML, or stands for more than any recipe; names file and line.
    """
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            hint = f"a recipe or profile has a few kilobytes, {_MOST_BYTES} bytes at most; name another file"
            raise ConfigError([Finding(str(path), "", f"has {size} bytes", hint)])
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError([Finding(str(path), "", f"cannot be read: {error}")]) from error
    try:
        value, builder = _parse(text, path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError([Finding(where, "", f"not valid YAML: {_problem(error)}")]) from error
    if value is None:
        # an empty file lacks all required keys
        value, builder.origins[()] = {}, f"{path}:1"
    if not isinstance(value, dict):
        builder.findings.append(Finding(f"{path}:1", "", "the top level must be a mapping of keys to values"))
        value = {}
    if builder.findings:
        raise ConfigError(builder.findings)
    return value, builder.origins


def _parse(text: str, path: Path) -> tuple[Any, _Builder]:
    """Return the value of one document, and the builder with its findings (YAMLError where it is not YAML)."""
    for kind in _QUICK:
        # PyYAML's own parser has the better error messages
        with suppress(yaml.YAMLError, UnicodeError):
            return _parse_by(kind, text, path)
    return _parse_by(_Loader, text, path)


def _parse_by(kind: Any, text: str, path: Path) -> tuple[Any, _Builder]:
    loader = None
    try:
        loader = kind(text)
        builder = _Builder(path, loader)
        root = loader.get_single_node()
        return (None if root is None else builder.build(root, ())), builder
    except RecursionError:
        raise _TooMuchError(_TOO_DEEP) from None
    finally:
        if loader is not None:
            loader.dispose()


def _problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]


def _shown(path: Path) -> Path:
    """Return a path for display: relative to the working directory where it lies below."""
    return path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path


class _Builder:
    """Turns YAML nodes into values and remembers where each stood."""

    def __init__(self, path: Path, loader: SafeConstructor) -> None:
        self._shown, self._loader = _shown(path), loader
        self.origins: Origins = {}
        self.findings: list[Finding] = []
        self._built = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self._built += 1
        if self._built > _MOST_VALUES:
            raise _TooMuchError(f"its aliases stand for more than {_MOST_VALUES} values")
        if len(path) + isinstance(node, yaml.CollectionNode) > _MOST_LEVELS:
            raise _TooMuchError(_TOO_DEEP)
        self.origins[path] = self._where(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*path, i)) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        return self._scalar(node, path)

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return a scalar; an invalid number or date is reported as a finding and gives None."""
        try:
            value = self._loader.construct_object(node)
        except (ValueError, OverflowError, AttributeError, LookupError, TypeError) as error:
            # with an explicit tag a text may be anything but a value of this tag
            kind = node.tag.rpartition(":")[2]
            dotted = ".".join(str(part) for part in path)
            shown = f"{node.value[:20]}…" if len(node.value) > 20 else node.value
            hint = "text is written in quotes"
            self.findings.append(Finding(self._where(node), dotted, f"{shown!r} is not a valid {kind}: {error}", hint))
            return None
        if isinstance(value, str) and any(char == "\0" or "\ud800" <= char <= "\udfff" for char in value):
            dotted = ".".join(str(part) for part in path)
            what = f"{value!a} has a character that no file name or text can have"
            self.findings.append(Finding(self._where(node), dotted, what, "remove it"))
        return value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                what = f"keys are text, a {key_node.id} is not"
                self.findings.append(Finding(self._where(key_node), ".".join(map(str, path)), what, "remove it"))
                continue
            key = self._scalar(key_node, path)
            dotted = ".".join(str(part) for part in (*path, key))
            if not isinstance(key, str):
                self.findings.append(
                    Finding(self._where(key_node), dotted, f"keys are text, {key!r} is not", f'write "{key}"')
                )
                continue
            if key in result:
                earlier = self.origins[(*path, key)].rsplit(":", 1)[1]
                self.findings.append(
                    Finding(self._where(key_node), dotted, f"appears twice (first on line {earlier})", "remove one")
                )
                continue
            result[key] = self.build(value_node, (*path, key))
            self.origins[(*path, key)] = self._where(key_node)
        return result

    def _where(self, node: yaml.Node) -> str:
        return f"{self._shown}:{node.start_mark.line + 1}"
