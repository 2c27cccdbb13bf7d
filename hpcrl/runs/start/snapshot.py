"""Snapshot of what is outside of the run directory: hpcrl, Python, packages, environment modules and data at submit.

::

    snapshots/0001/snapshot.json                  of the submit; 0002 of the first resume, and so on
    snapshots/0001/hpcrl.diff                     changes of a checkout that are not committed
    snapshots/0001/environments/my_env.py         copies of the modules of custom environments

A run takes days, in which people change their working directory. So each attempt checks whether its software differs
from that of the last submit or resume by a person, and reports it. Nothing is imported for that.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import msgspec

import hpcrl
from hpcrl import __version__
from hpcrl.config.environments import CustomEnv, TaskFileEnv
from hpcrl.config.plan import Plan
from hpcrl.config.recipe import Recipe
from hpcrl.config.rewards import FunctionReward
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.task_files import data_states
from hpcrl.storage.files import atomic_write, fsync_dir, write_json
from hpcrl.storage.msgspec_types import prepared

FORMAT_VERSION = 1
_PACKAGES = frozenset(
    {"torch", "torchtitan", "vllm", "transformers", "safetensors", "numpy", "submitit", "msgspec", "pydantic"}
    | {"aiohttp", "xxhash", "deep-ep", "deep-gemm", "deepgemm", "mooncake-transfer-engine", "vllm-router", "triton"}
)
"""Packages whose versions decide what a run computes, or whether it starts."""
_GIT_TIMEOUT_S = 5.0
_MAX_DIFF_BYTES = 1 << 20
_MAX_COPY_BYTES = 4 << 20


class Checkout(msgspec.Struct, frozen=True, kw_only=True):
    """Git checkout that hpcrl is imported from.

    Attributes
    ----------
    commit:
        Commit of ``HEAD``.
    dirty:
        Whether tracked files differ from it.
    diff_sha256:
        Hash of all of these differences; empty without.
    """

    commit: str
    dirty: bool
    diff_sha256: str


class ModuleFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a custom environment's module.

    Attributes
    ----------
    path:
        File, or directory of a package; empty where it was not found.
    sha256:
        Hash over all of its Python files.
    """

    path: str
    sha256: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Software that an attempt runs, as far as it is not in the run directory.

    Attributes
    ----------
    taken_at_s:
        Seconds since the epoch.
    hpcrl_version, hpcrl_path, hpcrl_sha256:
        Version of the package, its import path, and the hash of its files (of a wheel, of its list of files with
        hashes).
    checkout:
        None where the package is not in a git checkout.
    python:
        Version of the interpreter that submits and supervises.
    packages:
        Versions by name, by interpreter of roles.
    environments:
        Modules of custom environments and of functions that judge answers, by name.
    recipe_sha256, cluster_sha256:
        Hashes of the files in the run directory.
    data:
        What identifies the files of tasks, by path: see `data_states`. Runs of earlier versions have none.
    """

    taken_at_s: float
    hpcrl_version: str
    hpcrl_path: str
    hpcrl_sha256: str
    checkout: Checkout | None
    python: str
    packages: dict[str, dict[str, str]]
    environments: dict[str, ModuleFiles]
    recipe_sha256: str
    cluster_sha256: str
    data: dict[str, str] = {}
    format_version: int = FORMAT_VERSION

    def changes_from(self, before: Snapshot) -> list[str]:
        """Return a sentence for each difference from ``before``."""
        return list(_changes(before, self))


def take_snapshot(run: RunDir, recipe: Recipe, plan: Plan, *, with_data: bool = False) -> Snapshot:
    """Return a snapshot of what an attempt of ``run`` would run now, to compare it with the one at the submit.

    Some hundred small files are read (the package, lists of installed packages, modules of environments). Nothing is
    imported, and nothing is written: see `keep_snapshot`.

    Parameters
    ----------
    with_data:
        Also read the files of tasks, which may take seconds.
    """
    package = Path(hpcrl.__file__).parent
    pythons = dict.fromkeys([plan.python or sys.executable, *(group.python or "" for group in plan.groups)])
    return Snapshot(
        taken_at_s=time.time(),
        hpcrl_version=__version__,
        hpcrl_path=str(package),
        hpcrl_sha256=_hash_of_package(package),
        checkout=_checkout(package),
        python=platform.python_version(),
        packages={python: _versions(Path(python)) for python in pythons if python},
        environments={module: _module_files(module) for module in _modules(recipe)},
        recipe_sha256=_hash_of([run.recipe_path]),
        cluster_sha256=_hash_of([run.cluster_path]),
        data=data_states(recipe) if with_data else {},
    )


def keep_snapshot(run: RunDir, snapshot: Snapshot) -> None:
    """Write a snapshot with which the next attempts are compared, with copies of files that may be lost."""
    place = run.snapshots_dir / f"{(_numbers(run) or [0])[-1] + 1:04d}"
    place.mkdir(parents=True)
    if snapshot.checkout is not None and snapshot.checkout.dirty:
        diff = _git(Path(snapshot.hpcrl_path), "diff", "HEAD", "--binary", "--", ".")
        atomic_write(place / "hpcrl.diff", diff[:_MAX_DIFF_BYTES])
    for name, module in snapshot.environments.items():
        root, size = Path(module.path), 0
        for path in _python_files(root) if module.path else ():
            size += path.stat().st_size
            if size > _MAX_COPY_BYTES:
                break
            inside = path.relative_to(root) if root.is_dir() else Path(path.name)
            target = place / "environments" / (Path(name) / inside if root.is_dir() else Path(f"{name}.py"))
            target.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(target, path.read_bytes())
    # written last: a snapshot without this file is incomplete
    write_json(place / "snapshot.json", snapshot)
    fsync_dir(place.parent)


def read_snapshot(run: RunDir) -> Snapshot | None:
    """Return the snapshot of the last submit or resume by a person; None of a run of an earlier version."""
    for number in reversed(_numbers(run)):
        try:
            path = run.snapshots_dir / f"{number:04d}" / "snapshot.json"
            return msgspec.json.decode(path.read_bytes(), type=prepared(Snapshot))
        except (OSError, msgspec.DecodeError):
            continue
    return None


def changes_since_submit(run: RunDir) -> list[str]:
    """Return a sentence for each difference between what an attempt would run now and the last submit or resume."""
    before = read_snapshot(run)
    return [] if before is None else take_snapshot(run, run.recipe(), run.plan()).changes_from(before)


def _changes(before: Snapshot, now: Snapshot) -> Iterator[str]:
    if now.hpcrl_version != before.hpcrl_version:
        yield f"hpcrl is {now.hpcrl_version}, it was {before.hpcrl_version}"
    if now.hpcrl_path != before.hpcrl_path:
        yield f"hpcrl is imported from {now.hpcrl_path}, it was from {before.hpcrl_path}"
    if now.hpcrl_sha256 != before.hpcrl_sha256:
        yield f"files of hpcrl have changed: {_state(before.checkout)} -> {_state(now.checkout)}"
    if now.python != before.python:
        yield f"Python is {now.python}, it was {before.python}"
    for python in before.packages.keys() & now.packages.keys():
        was, is_ = before.packages[python], now.packages[python]
        for name in sorted(was.keys() | is_.keys()):
            if was.get(name) != is_.get(name):
                yield f"{name} is {is_.get(name, 'gone')}, it was {was.get(name, 'not there')} ({python})"
    yield from _module_changes(before, now)
    for name in ("recipe", "cluster"):
        if getattr(now, f"{name}_sha256") != getattr(before, f"{name}_sha256"):
            yield f"{name}.yaml of the run was changed by hand"


def _module_changes(before: Snapshot, now: Snapshot) -> Iterator[str]:
    for module in sorted(before.environments.keys() & now.environments.keys()):
        old, new = before.environments[module], now.environments[module]
        if old.path and not new.path:
            yield f"the environment module {module} is not found any more; it was {old.path}"
        elif new.path != old.path:
            yield f"the environment module {module} is {new.path}, it was {old.path or 'not found'}"
        elif new.sha256 != old.sha256:
            yield f"the environment module {module} ({new.path}) has changed"


def _state(checkout: Checkout | None) -> str:
    if checkout is None:
        return "no checkout"
    return f"commit {checkout.commit[:12]}" + (" with uncommitted changes" if checkout.dirty else "")


def _numbers(run: RunDir) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(run.snapshots_dir) if name.isdecimal())
    except FileNotFoundError:
        return []


def _hash_of(paths: Iterable[Path], root: Path | None = None) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(b"" if root is None else os.fsencode(path.relative_to(root)) + b"\0")
        digest.update(path.read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()


def _python_files(root: Path) -> list[Path]:
    return [root] if root.is_file() else sorted(root.rglob("*.py"))


def _hash_of_package(package: Path) -> str:
    """Hash the list of files that an installer left, where the package came from a wheel; else its Python files."""
    try:
        listed = importlib.metadata.distribution("hpcrl").read_text("RECORD") or ""
    except importlib.metadata.PackageNotFoundError:
        listed = ""
    if not (package.parent / ".git").exists() and "\nhpcrl/errors.py," in f"\n{listed}":
        return hashlib.sha256(listed.encode()).hexdigest()
    return _hash_of(_python_files(package), package)


def _checkout(package: Path) -> Checkout | None:
    if not (package.parent / ".git").exists():
        return None
    commit = _git(package, "rev-parse", "HEAD").decode().strip()
    diff = _git(package, "diff", "HEAD", "--binary", "--", ".")
    digest = hashlib.sha256(diff).hexdigest() if diff else ""
    return Checkout(commit=commit, dirty=bool(diff), diff_sha256=digest) if commit else None


def _git(directory: Path, *arguments: str) -> bytes:
    """Return the output of git; empty where it is not installed, fails, or does not answer."""
    command = ["git", "-C", str(directory), "--no-optional-locks", *arguments]
    try:
        return subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def _versions(python: Path) -> dict[str, str]:
    """Return the versions of packages that an interpreter sees, by its directories; it is not started."""
    if str(python) == sys.executable:
        places = sys.path
    else:
        places = [str(path) for path in python.parent.parent.glob("lib*/python3*/site-packages")]
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=places):
        # versions by names of directories: reading the metadata of hundreds of packages is slow on a shared filesystem
        directory = getattr(distribution, "_path", None)
        name, _, version = Path(str(directory)).name.removesuffix(".dist-info").partition("-")
        name = name.lower().replace("_", "-")
        if name in _PACKAGES and version:
            found.setdefault(name, version)
    return dict(sorted(found.items()))


def _modules(recipe: Recipe) -> list[str]:
    """Return the modules of custom environments, and of functions that judge answers."""
    factories = [env.factory for env in recipe.environments if isinstance(env, CustomEnv)]
    datasets = [env for env in recipe.environments if isinstance(env, TaskFileEnv)]
    factories += [each.function for env in datasets for each in env.rewards if isinstance(each, FunctionReward)]
    return list(dict.fromkeys(factory.partition(":")[0] for factory in factories))


def _module_files(name: str) -> ModuleFiles:
    spec = _find(name)
    if spec is None or spec.origin is None:
        return ModuleFiles(path="", sha256="")
    path = Path(spec.origin)
    root = path.parent if path.name == "__init__.py" else path
    try:
        return ModuleFiles(path=str(root), sha256=_hash_of(_python_files(root), root if root.is_dir() else root.parent))
    except OSError:
        return ModuleFiles(path="", sha256="")


def _find(name: str) -> ModuleSpec | None:
    """Return the spec from which a module would be imported. Parent packages are searched, not imported."""
    places: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return spec
