"""Packages with extensions, as an installer leaves them: modules and metadata in a directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install_extensions(
    directory: Path, modules: Mapping[str, str], points: Mapping[str, str], name: str = "lab"
) -> Path:
    """Write modules, and the metadata of a package that registers ``points`` (path by name); returns the directory."""
    directory.mkdir(exist_ok=True)
    for module, text in modules.items():
        (directory / f"{module}.py").write_text(text)
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{point} = {path}\n" for point, path in points.items())
    (info / "entry_points.txt").write_text(f"[hpcrl.extensions]\n{lines}")
    return directory
