"""Search path of recipes, cluster profiles and templates: the user's, the site's, then those of the package.

The current directory comes last, because another user may have written its files: a profile names the interpreters that
run as the caller, and a template is a shell script. A profile of ``./clusters`` is used by its name only where no other
place has one of that name, and a warning is logged; templates of ``./templates`` are used only on request.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from pathlib import Path

from hpcrl.errors import ConfigError, Finding

_log = logging.getLogger(__name__)
_YAML = (".yaml", ".yml")
_FOREIGN = (".toml", ".sh")
"""Suffixes of files that `hpcrl recipe import` reads and that are no recipes."""


def package_data(kind: str) -> Path:
    """Return the directory of packaged ``recipes``, ``clusters``, ``templates`` or ``locks``.

    In a wheel they lie inside the package, in a checkout next to it.
    """
    package = Path(__file__).resolve().parent.parent
    inside = package / "_data" / kind
    return inside if inside.is_dir() else package.parent / kind


def cluster_dirs() -> tuple[Path, ...]:
    """Return the directories of cluster profiles; a name in an earlier one hides the same name in a later one."""
    known = (*(base / "clusters" for base in _own_dirs()), package_data("clusters"))
    here = Path("clusters")
    return known if _is_one_of(here, known) else (*known, here)


def template_dirs() -> tuple[Path, ...]:
    """Return the directories of sbatch templates; each template is taken from the first directory that has it."""
    bases = (*(base / "templates" for base in _own_dirs()), package_data("templates"))
    return tuple(base / "sbatch" for base in bases)


def _own_dirs() -> tuple[Path, ...]:
    """Give the directories of the user and of the site."""
    return (user_dir(), Path("/etc/hpcrl"))


def user_dir() -> Path:
    """Return the directory of the user's own files, which may not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "hpcrl"


def _is_one_of(directory: Path, others: tuple[Path, ...]) -> bool:
    return any(directory.resolve() == other.resolve() for other in others)


def list_clusters() -> dict[str, Path]:
    """Return the profiles by name, each from the first directory that has it."""
    found: dict[str, Path] = {}
    for directory in cluster_dirs():
        for path in _yaml_files(directory):
            found.setdefault(path.stem, path)
    return found


def list_recipes() -> dict[str, Path]:
    """Return packaged recipes by name."""
    return {path.stem: path for path in _yaml_files(package_data("recipes"))}


def find_cluster(name: str) -> Path:
    """Return the file of a profile, given by name or path (ConfigError where there is none).

    A profile of the current directory's ``clusters/`` that is not given by its path is named in a warning.
    """
    path = _find("cluster profile", name, list_clusters(), "hpcrl cluster ls")
    here = Path("clusters") / path.name
    if not here.is_file() or Path(name) == path:
        return path
    if path == here:
        _log.warning("cluster profile %s: taken from %s in the current directory", path.stem, here)
    elif not _is_one_of(here, (path,)):
        _log.warning(
            "cluster profile %s: taken from %s; %s of the current directory is not used (--cluster ./%s takes it)",
            *(path.stem, path, here, here),
        )
    return path


def find_cluster_below(name: str, above: Collection[Path]) -> Path:
    """Return the file of a profile that another one extends.

    It is the first file of this name that is not in ``above`` (resolved), so that a user's ``mysite`` extends the
    site's profile of the same name.

    Raises
    ------
    ConfigError
        There is none.
    """
    if Path(name).suffix not in _YAML and os.sep not in name:
        for directory in cluster_dirs():
            path = directory / f"{name}.yaml"
            if path.is_file() and path.resolve() not in above:
                if directory == Path("clusters"):
                    _log.warning("cluster profile %s: taken from %s in the current directory", name, path)
                return path
        if name in list_clusters():
            hint = "name another one, or where the site's lies: extends: /etc/hpcrl/clusters/NAME.yaml"
            raise ConfigError([Finding(name, "", "there is no other cluster profile of this name", hint)])
    return find_cluster(name)


def find_recipe(name: str) -> Path:
    """Return the file of a recipe: a path, or the name of a packaged one (ConfigError where there is none).

    A name alone, without ``.yaml``, is never a file of the current directory.

    ``recipes/quickstart.yaml`` means the packaged recipe where this file does not exist, so that the commands of
    the documentation work outside a checkout.
    """
    return _find("recipe", name, list_recipes(), "hpcrl recipe ls")


def _yaml_files(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from sorted(directory.glob("*.yaml"))


def _find(what: str, name: str, known: dict[str, Path], command: str) -> Path:
    path = Path(name)
    is_path = path.suffix in _YAML or os.sep in name
    try:
        if what == "recipe" and path.suffix in _FOREIGN and path.is_file():
            hint = f"`hpcrl recipe import {_short(name)}` makes a recipe of it"
            raise ConfigError([Finding(_short(name), "", "no YAML: it looks like a file of another system", hint)])
        if is_path and path.is_file():
            return path
    except OSError as error:
        # a name that no filesystem takes
        problem = f"cannot be a file: {error.strerror}"
        raise ConfigError([Finding(_short(name), "", problem, f"`{command}` lists what there is")]) from error
    packaged_place = path.parent in (Path(), Path("recipes"), Path("clusters"))
    if path.stem in known and packaged_place and path.suffix in ("", ".yaml"):
        return known[path.stem]
    close = get_close_matches(path.stem, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    problem = "no such file" if is_path else f"no {what} of this name"
    raise ConfigError([Finding(_short(name), "", problem, f"{hint}`{command}` lists what there is")])


def _short(name: str) -> str:
    """Return a name, shortened where it is too long for a message."""
    return name if len(name) <= 200 else f"{name[:100]}… ({len(name)} characters)"
