"""The models in a site's directory of models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.models.configfile import read_config
from hpcrl.models.fetch import read_source


class InstalledModel(NamedTuple):
    """Directory of a model, or of an unfinished one.

    Attributes
    ----------
    name:
        Behind the directory of models: ``OWNER/NAME``, with a revision where it was asked for.
    path, bytes:
        Its directory, and the files in it.
    family, stored:
        ``model_type``, and dtype or kind of quantisation, by ``config.json``; empty where there is none.
    commit:
        Commit that it is a copy of; None where `hpcrl.models.fetch` did not make it.
    state:
        ``whole``, ``unfinished``, or ``copied`` for those without a commit.
    """

    name: str
    path: Path
    bytes: int
    family: str
    stored: str
    commit: str | None
    state: str

    def as_json(self) -> dict[str, Any]:
        """Return the model as JSON values."""
        return {**self._asdict(), "path": str(self.path)}


def list_models(root: Path) -> list[InstalledModel]:
    """Return the models below ``root``, one or two levels down, by name; none where it does not exist."""
    return sorted(_find(root), key=lambda each: each.name)


def _find(root: Path) -> Iterator[InstalledModel]:
    for path in _directories(root):
        if (path / "config.json").is_file():
            yield _describe(root, path)
            continue
        for inner in _directories(path):
            if (inner / "config.json").is_file() or inner.name.endswith(".part"):
                yield _describe(root, inner)


def _directories(path: Path) -> list[Path]:
    try:
        return [each for each in path.iterdir() if each.is_dir()]
    except OSError:
        return []


def _describe(root: Path, path: Path) -> InstalledModel:
    unfinished = path.name.startswith(".") and path.name.endswith(".part")
    source = read_source(path)
    own = path.with_name(path.name.removeprefix(".").removesuffix(".part")) if unfinished else path
    try:
        config = read_config(path / "config.json")
    except (OSError, ValueError):
        config = {}
    config = config if isinstance(config, dict) else {}
    quantised = config.get("quantization_config")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return InstalledModel(
        name=own.relative_to(root).as_posix(),
        path=path,
        bytes=_size(path),
        family=str(config.get("model_type") or ""),
        stored=str(quantised.get("quant_method") or "") if isinstance(quantised, dict) else dtype,
        commit=None if source is None else source["commit"],
        state="unfinished" if unfinished else "copied" if source is None else "whole",
    )


def _size(path: Path) -> int:
    total = 0
    for each in path.rglob("*"):
        try:
            total += each.stat().st_size if each.is_file() else 0
        except OSError:
            continue
    return total
