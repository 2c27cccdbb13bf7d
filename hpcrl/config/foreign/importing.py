"""Reading of a foreign file, by its system, into a recipe and the fates of its settings."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from hpcrl.config.foreign.foreign_settings import ForeignSetting, Outcome, Settings
from hpcrl.config.foreign.nemo_rl import translate_nemo_rl
from hpcrl.config.foreign.prime_rl import translate_prime_rl
from hpcrl.config.foreign.slime import read_flags, translate_slime, with_values
from hpcrl.config.foreign.verl import translate_verl
from hpcrl.config.yamltree import parse_file
from hpcrl.errors import UsageError

System = Literal["prime-rl", "verl", "nemo-rl", "slime"]
_TRANSLATORS: dict[str, Callable[[Settings], None]] = {
    "prime-rl": translate_prime_rl,
    "verl": translate_verl,
    "nemo-rl": translate_nemo_rl,
    "slime": translate_slime,
}
_MOST_BYTES = 1 << 20
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_SELECT = re.compile(r"\$\{oc\.select:([\w.]+),\s*([^}]*)\}")
_PRODUCT = re.compile(r"\$\{mul:\s*([\w.]+),\s*([\w.]+)\}")
_LONGEST_NAME = 40
_MOST_VALUES = 100_000
_DEPTH = 8
"""Maximum length of a chain of references."""


@dataclass(frozen=True, slots=True)
class ImportedRecipe:
    """A recipe that was made from a foreign file.

    Attributes
    ----------
    system:
        The system of the file.
    tree:
        The recipe; it may lack what the file does not say.
    settings:
        All settings of the file, in its order.
    """

    system: str
    tree: dict[str, Any]
    settings: tuple[ForeignSetting, ...]

    def text(self, source: str) -> str:
        """Return the recipe as YAML, below a comment that lists what did not carry over, and what is not needed."""
        lost = [each for each in self.settings if each.outcome in (Outcome.LOST, Outcome.UNKNOWN, Outcome.CHANGED)]
        head = [f"# Made by `hpcrl recipe import` from {_line(source)} of {self.system}.", "# Look at these settings:"]
        notes = [f"#   {_line(each.key)}: {each.outcome}. {_line(each.note)}" for each in lost]
        reasons: dict[str, list[str]] = {}
        for each in self.settings:
            if each.outcome is Outcome.NOT_NEEDED:
                reasons.setdefault(_line(each.note), []).append(_line(each.key))
        spared = [f"#   {note}: {', '.join(keys)}" for note, keys in reasons.items()]
        head = [*head, *notes] if notes else head[:1]
        tree = yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True)
        return "\n".join([*head, *(["# These settings are not needed:"] if spared else []), *spared, tree])


def import_recipe(path: Path, system: System | None = None, *, name: str | None = None) -> ImportedRecipe:
    """Return the recipe that a foreign file becomes. Nothing of the file is executed.

    Parameters
    ----------
    system:
        System of the file; None: found from what it has.
    name:
        Name of the recipe; by default that of the file.

    Raises
    ------
    ConfigError
        A YAML file cannot be read.
    UsageError
        The file cannot be read as one of the systems.
    """
    try:
        tree = _read(path)
        resolved = _resolved(tree, path)
    except RecursionError:
        raise UsageError(f"{path} cannot be read: it is nested too deeply") from None
    chosen = system or _system_of(tree)
    if chosen is None:
        known = ", ".join(get_args(System))
        raise UsageError(f"the system of {path} cannot be recognised\n    hint: name it: --from with one of {known}")
    settings = Settings(resolved, known_keys(chosen))
    settings.put("name", name or _name_of(path))
    settings.put("model", {})
    settings.put("environments", [])
    settings.put("rollouts", {})
    _TRANSLATORS[chosen](settings)
    return ImportedRecipe(chosen, _without_empty(settings.recipe), tuple(settings.fates()))


def known_keys(system: str) -> list[str]:
    """Return the keys that a system has, by its own files: ``known/`` names them, and where they are from."""
    text = (Path(__file__).parent / "known" / f"{system}.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def _read(path: Path) -> dict[str, Any]:
    if path.suffix in (".yaml", ".yml"):
        return _with_defaults(path)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} has more than {_MOST_BYTES} bytes: files of settings are smaller")
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text) if path.suffix == ".toml" else _words(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _with_defaults(path: Path, depth: int = 0) -> dict[str, Any]:
    """Return a YAML file on top of the file that its key ``defaults`` names, as NeMo-RL reads it."""
    tree = parse_file(path)[0]
    base = tree.get("defaults")
    if not isinstance(base, str) or depth > _DEPTH:
        return tree
    source = path.parent / base
    if not source.is_file():
        raise UsageError(f"{path} starts from {base}, which does not exist\n    hint: copy {source.name} to this path")
    del tree["defaults"]
    return _merged(_with_defaults(source, depth + 1), tree)


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        below = base.get(key)
        base[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return base


def _words(text: str) -> dict[str, Any]:
    """Return settings of a script: ``key=value`` arguments of Hydra where it has any, flags otherwise."""
    text = with_values(text)
    assigned = re.findall(
        r"(?:^|\s)\+{0,2}((?:data|actor_rollout_ref|algorithm|trainer|critic)\.[\w.]+)=(\S+)", text, re.MULTILINE
    )
    if not assigned:
        return read_flags(text)
    tree: dict[str, Any] = {}
    for key, value in assigned:
        *sections, last = key.split(".")
        holder = tree
        for section in sections:
            below = holder.setdefault(section, {})
            holder = below if isinstance(below, dict) else {}
        holder[last] = _plain(value.rstrip("\\").strip("'\""))
    return tree


def _plain(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        # a name may look like YAML and be none: a date with a month 13 is a ValueError
        return text


def _system_of(tree: Mapping[str, Any]) -> str | None:
    if "actor_rollout_ref" in tree:
        return "verl"
    if "policy" in tree and ("grpo" in tree or "loss_fn" in tree):
        return "nemo-rl"
    if {"hf-checkpoint", "rollout-batch-size", "num-rollout"} & set(tree):
        return "slime"
    if {"orchestrator", "inference", "max_steps"} & set(tree) and "policy" not in tree:
        return "prime-rl"
    return None


def _resolved(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a tree in which references of OmegaConf to other keys are their values; others stay as they are.

    Dates and times of TOML become text. UsageError where the references stand for more values than any file has.
    """
    made = 0

    def at(key: str) -> Any:
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def whole_of(value: Any, depth: int = 0) -> Any:
        nonlocal made
        made += 1
        if made > _MOST_VALUES:
            raise UsageError(f"{path} cannot be read: its references stand for more than {_MOST_VALUES} values")
        if isinstance(value, Mapping):
            return {str(key): whole_of(each, depth) for key, each in value.items()}
        if not isinstance(value, str) or depth > _DEPTH:
            return _without_dates(value)
        if found := _REFERENCE.fullmatch(value):
            return whole_of(at(found[1]), depth + 1)
        if found := _SELECT.fullmatch(value):
            chosen = at(found[1])
            return whole_of(chosen, depth + 1) if chosen is not None else _plain(found[2])
        if found := _PRODUCT.fullmatch(value):
            factors = [whole_of(at(found[number]), depth + 1) for number in (1, 2)]
            return factors[0] * factors[1] if all(isinstance(each, int | float) for each in factors) else value
        return value

    resolved: dict[str, Any] = whole_of(tree)
    return resolved


def _without_dates(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_dates(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _without_dates(each) for key, each in value.items()}
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else value


def _without_empty(tree: Mapping[str, Any]) -> dict[str, Any]:
    keep = ("fp8",)
    made = {key: _without_empty(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    return {key: value for key, value in made.items() if value not in ({}, []) or key in keep}


def _name_of(path: Path) -> str:
    """Return a name of a recipe, made of a file's."""
    return re.sub(r"[^a-z0-9_]+", "_", path.stem.lower()).strip("_")[:_LONGEST_NAME].strip("_") or "imported"


def _line(text: object) -> str:
    """Return a text without line ends, which would leave its comment."""
    return " ".join(str(text).split())
