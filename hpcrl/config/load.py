"""Loading recipes and cluster profiles: files, ``extends``, ``--set``, validation, provenance of each value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from hpcrl.config.cluster import CLUSTER_KINDS, ClusterProfile
from hpcrl.config.explain import explain_errors, without_wrong_values
from hpcrl.config.extends import with_bases
from hpcrl.config.placeholders import find_placeholders
from hpcrl.config.recipe import Recipe
from hpcrl.config.resources import find_cluster, find_cluster_below, find_recipe
from hpcrl.config.secret_values import find_secrets, hide_setting
from hpcrl.config.unusable_values import with_unusable
from hpcrl.config.yamltree import KeyPath, Origins, parse_file, parse_value
from hpcrl.errors import ConfigError, Finding

M = TypeVar("M", bound=BaseModel)
M_co = TypeVar("M_co", bound=BaseModel, covariant=True)


@dataclass(frozen=True)
class Loaded(Generic[M_co]):
    """A validated configuration and where its values came from.

    Attributes
    ----------
    value:
        The model.
    source:
        The file that was asked for.
    origins:
        ``file:line`` or ``--set`` by path; what is not in here is a default.
    """

    value: M_co
    source: Path
    origins: Origins

    def where(self, key: str) -> str:
        """Return the place where a dotted key was set: the value itself, or the nearest container that was written."""
        path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, str(self.source)) if path else str(self.source)

    def origin(self, path: KeyPath) -> str:
        """Return the origin of one resolved value: ``file:line``, ``--set`` or ``default``."""
        return self.origins.get(path, "default")


class UnreadableError(ConfigError):
    """A file has values that cannot be used.

    Attributes
    ----------
    repaired:
        The rest of it, for the rules that do not read these values; None where nothing remains.
    """

    def __init__(self, findings: Sequence[Finding], repaired: Loaded[Any] | None) -> None:
        super().__init__(findings)
        self.repaired = repaired


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Loaded[Recipe]:
    """Load a recipe by path or packaged name.

    Parameters
    ----------
    name:
        File, or name of a packaged recipe.
    overrides:
        ``a.b=value`` each, applied after the file and what it extends.

    Raises
    ------
    ConfigError
        With every finding: YAML, unknown keys, types, values, unknown overrides.
    """
    source = find_recipe(name)
    tree, origins = with_bases(source, "recipe", lambda base, _: find_recipe(base))
    return _validate(Recipe, source, tree, origins, _apply_overrides(tree, origins, overrides))


def load_cluster(name: str) -> Loaded[ClusterProfile]:
    """Load a cluster profile by path or name (ConfigError as `load_recipe`).

    A profile that ``extends`` another one, a user's own on top of the site's, is called like its file unless it says
    another name itself.
    """
    source = find_cluster(name)
    tree, origins = with_bases(source, "cluster profile", find_cluster_below)
    if origins.get(("name",), "").rpartition(":")[0] != str(source) and "name" in tree:
        tree["name"] = source.stem
    kind = tree.get("kind")
    if not isinstance(kind, str) or kind not in CLUSTER_KINDS:
        # the valid keys depend on the kind: no other check of the file is possible
        close = get_close_matches(str(kind), CLUSTER_KINDS, n=1)
        what = f"must be one of {', '.join(CLUSTER_KINDS)}, is {kind!r}" if "kind" in tree else "is required"
        hint = f"did you mean {close[0]!r}?" if close else "`local` is this machine, `slurm` a site with Slurm"
        raise ConfigError([Finding(origins.get(("kind",), str(source)), "kind", what, hint)])
    loaded: Loaded[ClusterProfile] = _validate(CLUSTER_KINDS[kind], source, tree, origins, [])
    if loaded.value.name != source.stem:
        raise ConfigError(
            [
                Finding(
                    loaded.where("name"),
                    "name",
                    f"is {loaded.value.name!r}, but the file is called {source.name!r}",
                    "give both the same name, so that --cluster finds what it says",
                )
            ]
        )
    return loaded


def load_file(model: type[M], source: Path) -> Loaded[M]:
    """Load a file of another kind, which extends no other (ConfigError as `load_recipe`)."""
    tree, origins = parse_file(source)
    return _validate(model, source, tree, origins, [])


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every scalar of a resolved configuration with its path, in order."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from leaves(getattr(value, name), (*path, name))
    elif isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    elif isinstance(value, (list, tuple)) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def _apply_overrides(tree: dict[str, Any], origins: Origins, overrides: Sequence[str]) -> list[Finding]:
    findings: list[Finding] = []
    for override in overrides:
        try:
            _apply_override(tree, origins, override)
        except ValueError as error:
            findings.append(Finding("--set", hide_setting(override), str(error), "write it as key.path=value"))
    return findings


def _validate(
    model: type[M], source: Path, tree: dict[str, Any], origins: Origins, findings: list[Finding]
) -> Loaded[M]:
    findings.extend(find_secrets(tree, origins))
    open_ = find_placeholders(tree, origins, drafted=model is not Recipe)
    findings.extend(open_)
    try:
        value = model.model_validate(tree)
    except ValidationError as error:
        # a value that is not filled in yet is reported once
        keys = {finding.key for finding in open_}
        wrong = explain_errors(model, error, origins, source)
        findings.extend(finding for finding in wrong if finding.key not in keys)
        raise UnreadableError(findings, _repaired(model, source, tree, origins, error)) from None
    if findings:
        raise UnreadableError(findings, None if open_ else Loaded(value, source, origins))
    return Loaded(value, source, origins)


def _repaired(
    model: type[M], source: Path, tree: dict[str, Any], origins: Origins, error: ValidationError
) -> Loaded[M] | None:
    """Read what is left without unknown keys and wrong values; None where that is not whole either.

    In place of wrong values it has `hpcrl.config.unusable_values.UNUSABLE`.
    """
    left, wrong = without_wrong_values(model, error, tree)
    try:
        value = model.model_validate(left)
        for path in wrong:
            value = with_unusable(value, path)
    except (ValidationError, LookupError, AttributeError):
        return None
    return Loaded(value, source, origins)


def _apply_override(tree: dict[str, Any], origins: Origins, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ValueError("has no key or no '='")
    value = parse_value(text)
    parts: list[str | int] = [int(part) if part.isdecimal() else part for part in key.split(".")]
    node: Any = tree
    for depth, part in enumerate(parts[:-1]):
        if isinstance(node, dict):
            if node.get(str(part)) is None:
                node[str(part)] = {}
                origins[tuple(parts[: depth + 1])] = "--set"
            node = node[str(part)]
        else:
            node = _item(node, part)
    last = parts[-1]
    if isinstance(node, dict):
        node[str(last)] = value
    else:
        _item(node, last)
        node[last] = value
    prefix = tuple(parts)
    for stale in [p for p in origins if p[: len(prefix)] == prefix]:
        del origins[stale]
    for path, _ in leaves(value, prefix):
        origins[path] = "--set"
    origins[prefix] = "--set"


def _item(node: Any, index: str | int) -> Any:
    if not isinstance(node, list):
        raise ValueError(f"goes into a value that has no parts ({node!r})")
    if not isinstance(index, int) or index >= len(node):
        raise ValueError(f"list has items 0 to {len(node) - 1}, not {index}")
    return node[index]
