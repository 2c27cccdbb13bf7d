"""Wheels of a few bytes, and one that stands for hpcrl's own: installations that take a second."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from hpcrl.sites.installation.environment import EnvironmentContents
from hpcrl.sites.installation.locks import LockedPackage
from hpcrl.sites.installation.staging import Stage

TINY_LOCK = "# pythons: 3.11, 3.12, 3.13\n# machines: x86_64, aarch64\n# wheel-bytes: 5000\n"


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tiny_wheel(
    directory: Path, name: str, version: str = "1.0", *, code: str = "", files: dict[str, str] | None = None
) -> Path:
    """Write a wheel with one package, and a command of its name."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version.partition('+')[0]}.dist-info"
    path = directory / f"{name}-{version}-py3-none-any.whl"
    members = {
        f"{name}/__init__.py": code,
        **(files or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    record = "".join(f"{member},,\n" for member in (*members, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in {**members, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(member), text)
    return path


def own_tiny_wheel(directory: Path, *, files: dict[str, str] | None = None) -> Path:
    """Write what stands for hpcrl's own wheel."""
    return tiny_wheel(directory, "hpcrl", "0.1.0", code="def main(): print('tiny hpcrl')\n", files=files)


def tiny_lock(wheels: list[Path], *, unhashed: tuple[str, ...] = ()) -> str:
    """Return the text of a lock for wheels."""
    lines = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        digest = "" if name in unhashed else f" \\\n    --hash=sha256:{digest_of(wheel)}"
        lines.append(f"{name.replace('_', '-')}=={version.partition('+')[0]}{digest}\n")
    return TINY_LOCK + "".join(lines)


def tiny_contents(
    wheels: Path, stage: Stage, *, imports: tuple[str, ...] = ("hpcrl", "tiny_one")
) -> EnvironmentContents:
    """Return contents of all wheels of a directory."""
    packages = tuple(
        LockedPackage(path.name.split("-")[0].replace("_", "-"), path.name.split("-")[1], (digest_of(path),))
        for path in sorted(wheels.glob("*.whl"))
    )
    return EnvironmentContents("tiny", packages, own_tiny_wheel(stage.wheels), imports, 5000, wheels)
