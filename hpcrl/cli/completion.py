"""Completions of a shell: recipes, clusters, roles, states of runs, and settings with their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_YAML = (".yaml", ".yml")
_HELP_WIDTH = 80


def complete_recipes(incomplete: str) -> list[str]:
    """Return packaged recipes by name and recipe files of the current directory by path."""
    from hpcrl.config.resources import list_recipes

    names = [name for name in list_recipes() if name.startswith(incomplete)]
    return names + list(_files(incomplete, "recipes"))


def complete_clusters(incomplete: str) -> list[str]:
    """Return the cluster profiles by name, those of the current directory by path."""
    from hpcrl.config.resources import list_clusters

    names = [name for name in list_clusters() if name.startswith(incomplete)]
    return names + list(_files(incomplete, "clusters"))


def complete_roles(incomplete: str) -> list[str]:
    """Return the roles that have logs."""
    from hpcrl.config.plan import Role

    return [role for role in [*(role.value for role in Role), "supervisor"] if role.startswith(incomplete)]


def complete_states(incomplete: str) -> list[str]:
    """Return the states of runs; small letters are accepted."""
    from hpcrl.runs.status import RunState

    small = incomplete.islower()
    states = [state.lower() if small else state.value for state in RunState]
    return [state for state in states if state.startswith(incomplete)]


def complete_settings(incomplete: str) -> list[tuple[str, str]]:
    """Return ``key=`` for all keys of a recipe that begin so, ``key=value`` where few are left with listed values."""
    from hpcrl.config.keys import keys_of
    from hpcrl.config.recipe import Recipe

    wanted, typed, _ = incomplete.partition("=")
    keys = {key.name: key for key in keys_of(Recipe) if key.name.startswith(wanted)}
    if typed:
        keys = {name: key for name, key in keys.items() if name == wanted}
    found: list[tuple[str, str]] = []
    for key in keys.values():
        offered = [f"{key.name}={value}" for value in key.values] if len(keys) == 1 else []
        found += [
            (text, key.meaning[:_HELP_WIDTH]) for text in offered or [f"{key.name}="] if text.startswith(incomplete)
        ]
    return found


def bash_values(environ: Mapping[str, str]) -> list[str] | None:
    """Return the values for the word that bash completes after ``--set key=``; None for other words.

    Bash breaks words at ``=``, so that the value is a word of its own and replaced alone.
    """
    if environ.get("_HPCRL_COMPLETE") != "complete_bash":
        return None
    words, at = environ.get("COMP_WORDS", "").split("\n"), int(environ.get("COMP_CWORD", 0))
    if len(words) == 1:
        words = words[0].split()
    words = words[: at + 1] + [""] * (at + 1 - len(words))
    if words[at] == "=":
        words.append("")
    if len(words) < 4 or words[-2] != "=" or words[-4] != "--set":
        return None
    setting = f"{words[-3]}={words[-1]}"
    return [text.partition("=")[2] for text, _ in complete_settings(setting)]


def _files(incomplete: str, folder: str) -> Iterator[str]:
    """Yield the YAML files of the directory that is being typed, and those of ``folder`` where nothing is typed yet."""
    import os
    from pathlib import Path

    head = incomplete.rpartition(os.sep)[0]
    for place in dict.fromkeys([head, *([folder] if not incomplete else [])]):
        directory = Path(place or (os.sep if incomplete.startswith(os.sep) else "."))
        if not directory.is_dir():
            continue
        for path in sorted(directory.iterdir()):
            text = f"{place}{os.sep}{path.name}" if place or incomplete.startswith(os.sep) else path.name
            if path.suffix in _YAML and text.startswith(incomplete):
                yield text
