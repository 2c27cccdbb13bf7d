"""Wheels of the installed pytest, for archives of tools that need no network."""

from __future__ import annotations

import sysconfig
import zipfile
from pathlib import Path


def installed_wheels(directory: Path) -> list[Path]:
    """Return wheels of the installed pytest and of what it needs, for the archive of tools."""
    site = Path(sysconfig.get_path("purelib"))
    wheel = directory / "pytest-installed-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            for path in sorted((site / name).rglob("*.py")):
                archive.write(path, path.relative_to(site).as_posix())
        if (site / "py.py").exists():
            archive.write(site / "py.py", "py.py")
        for pattern in ("pytest-*.dist-info", "pluggy-*.dist-info"):
            for path in sorted(site.glob(f"{pattern}/*")):
                if path.is_file():
                    archive.write(path, path.relative_to(site).as_posix())
    return [wheel]
