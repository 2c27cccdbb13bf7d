"""hpcrl's own wheel, made without a network from what is running: a checkout, or an installed package.

Its bytes depend on the files alone, so that two wheels of one code have one digest.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import hpcrl
from hpcrl.errors import UsageError

_TIME = (2020, 2, 2, 0, 0, 0)
_WHEEL = "Wheel-Version: 1.0\nGenerator: hpcrl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def own_wheel(directory: Path) -> Path:
    """Write hpcrl's wheel into a directory and return its path.

    Raises
    ------
    UsageError
        What is running has no metadata: it is neither a checkout nor installed.
    """
    package = Path(hpcrl.__file__).resolve().parent
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file():
        project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
        files = dict(_checkout_files(checkout, project["tool"]["hatch"]["build"]["targets"]["wheel"]))
        metadata, entry_points = _metadata(project["project"]), _entry_points(project["project"])
    else:
        files = dict(_files(package, "hpcrl"))
        try:
            installed = distribution("hpcrl")
        except PackageNotFoundError:
            raise UsageError(
                f"{package} is neither a checkout of hpcrl nor an installed one\n    hint: install hpcrl from its wheel"
            ) from None
        metadata, entry_points = installed.read_text("METADATA") or "", installed.read_text("entry_points.txt") or ""
    info = f"hpcrl-{hpcrl.__version__}.dist-info"
    members = {name: path.read_bytes() for name, path in sorted(files.items())}
    members |= {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": _WHEEL.encode(),
        f"{info}/entry_points.txt": entry_points.encode(),
    }
    members[f"{info}/RECORD"] = _record(members, info)
    path = directory / f"hpcrl-{hpcrl.__version__}-py3-none-any.whl"
    path.write_bytes(_zipped(members))
    return path


def code_digest(wheel: Path) -> str:
    """Return a digest (SHA-256, hexadecimal) of the code and data in a wheel of hpcrl.

    It does not depend on who built the wheel, as metadata and compression do.
    """
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if ".dist-info/" not in name:
                digest.update(f"{name}\0{hashlib.sha256(archive.read(name)).hexdigest()}\n".encode())
    return digest.hexdigest()


def _files(directory: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Give the files below a directory with their names in the wheel, without what Python or editors leave."""
    for path in sorted(directory.rglob("*")):
        parts = path.relative_to(directory).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if path.is_file() and not hidden and path.suffix != ".pyc":
            yield "/".join((name, *parts)), path


def _checkout_files(checkout: Path, target: dict[str, dict[str, str]]) -> Iterator[tuple[str, Path]]:
    for package in target["packages"]:
        yield from _files(checkout / package, package)
    for source, name in target["force-include"].items():
        yield from _files(checkout / source, name)


def _metadata(project: dict[str, object]) -> str:
    """Return the core metadata (version 2.4) of a project table."""
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {hpcrl.__version__}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        f"Requires-Python: {project['requires-python']}",
    ]
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    assert isinstance(project["dependencies"], list)
    lines += [f"Requires-Dist: {each}" for each in project["dependencies"]]
    for extra, wanted in extras.items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {each} ; extra == '{extra}'" for each in wanted]
    return "\n".join(lines) + "\n"


def _entry_points(project: dict[str, object]) -> str:
    groups = {"console_scripts": project["scripts"]}
    declared = project["entry-points"]
    assert isinstance(declared, dict)
    groups |= declared
    lines = []
    for group, points in groups.items():
        assert isinstance(points, dict)
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    return "\n".join(lines)


def _record(members: dict[str, bytes], info: str) -> bytes:
    lines = []
    for name, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()


def _zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
