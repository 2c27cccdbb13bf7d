"""Packages of environments: their names, paths and modules, and what may be wrong with them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class WrongSettingError(Exception):
    """A setting of the recipe is wrong: its key below the environment, the problem, and a hint."""

    def __init__(self, key: str, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.key, self.hint = key, hint


class RolloutFailedError(Exception):
    """A rollout has failed: what verifiers says about it."""


def importable(build: dict[str, Any]) -> tuple[str, ModuleType | None]:
    """Return the name of the package and its module, and make a path importable.

    Returns
    -------
    tuple
        The module is None for a taskset that is part of verifiers.

    Raises
    ------
    WrongSettingError
        It is not there, or cannot be imported.
    """
    if build["path"] is None:
        package: str = build["package"]
        name = package.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
        if importlib.util.find_spec(name) is None:
            if _is_builtin(name):
                return package, None
            hint = f"install it: {sys.executable} -m pip install …, or give path"
            raise WrongSettingError("package", f"{sys.executable} has no module {name}", hint)
        return package, _imported(name, "package")
    path = Path(build["path"])
    if not path.exists():
        raise WrongSettingError("path", f"{path} does not exist")
    # a repository of an environment has its package inside, or its module
    for inner in (path / path.name, path / f"{path.name}.py"):
        if (inner.suffix == ".py" and inner.is_file()) or (inner / "__init__.py").is_file():
            path = inner
            break
    if path.suffix != ".py" and not (path / "__init__.py").is_file():
        hint = "give a directory with __init__.py, or a file that ends with .py"
        raise WrongSettingError("path", f"{path} does not contain a package", hint)
    name = path.stem if path.suffix == ".py" else path.name
    if not name.isidentifier():
        raise WrongSettingError("path", f"{name!r} cannot be the name of a module", "rename it")
    sys.path.insert(0, str(path.parent))
    # tool servers are processes of their own and import the package, too
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(path.parent), *([before] if before else [])])
    return name, _imported(name, "path")


def _is_builtin(name: str) -> bool:
    return (
        importlib.util.find_spec("verifiers.v1") is not None
        and importlib.util.find_spec("verifiers.v1.tasksets") is not None
        and importlib.util.find_spec(f"verifiers.v1.tasksets.{name}") is not None
    )


def _imported(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        what = f"it cannot be imported by {sys.executable}: {type(error).__name__}: {error}"
        raise WrongSettingError(key, what, "install what it needs") from error
