"""Images of tasks, as the backend of sandboxes names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcrl.swe.task import SweTask, SweTaskError

_FILES = ("", ".sif", ".sqsh", ".squashfs")
"""Suffixes of an image in the directory of images; Apptainer reads files, bubblewrap directories alone."""


def locate_images(
    tasks: Sequence[SweTask], *, backend: str, images: Path | None = None
) -> tuple[list[SweTask], list[str]]:
    """Return the tasks whose images the backend can use, with their paths, and notes on those that are left out.

    Parameters
    ----------
    backend:
        ``bubblewrap``, ``apptainer``, ``docker`` or ``podman``. The last two have images by name.
    images:
        Directory with an unpacked root filesystem or file for each image, named as the image with ``__`` in the place
        of each ``/``, ``:`` and ``@``.

    Raises
    ------
    SweTaskError
        No task is left.
    """
    found: list[SweTask] = []
    missing: list[SweTask] = []
    for task in tasks:
        place = _place(task.image, backend, images)
        if place is None:
            missing.append(task)
        else:
            found.append(msgspec.structs.replace(task, image=place))
    if not missing:
        return found, []
    example = f"{missing[0].id} with {missing[0].image or 'none'}, for example"
    hint = _hint(missing[0].image, backend, images)
    if not found:
        raise SweTaskError(f"no task has an image that {backend} can use: {example}\n    hint: {hint}")
    return found, [f"{len(missing)} tasks have no image that {backend} can use, and are left out: {example} ({hint})"]


def _place(image: str, backend: str, images: Path | None) -> str | None:
    """Return what the backend is given as the image, empty for the node's own; None where it is not there."""
    if not image:
        return "" if backend == "bubblewrap" else None
    if backend in ("docker", "podman"):
        return image
    paths = [Path(image)] if image.startswith("/") else []
    paths += [] if images is None else [images / f"{_file_name(image)}{suffix}" for suffix in _FILES]
    for path in paths:
        if path.is_dir() or (backend == "apptainer" and path.is_file()):
            return str(path)
    return None


def _file_name(image: str) -> str:
    name = re.sub(r"[/:@]", "__", image)
    # a row must not lead out of the directory
    return name if name.strip(".") else "__"


def _hint(image: str, backend: str, images: Path | None) -> str:
    if not image:
        return f"{backend} needs an image for each task; bubblewrap does not"
    what = "unpack it to" if backend == "bubblewrap" else "put it, as a SIF or squashfs file or as a directory, at"
    where = f"{images or 'DIR'}/{_file_name(image)}"
    return f"{what} {where}" + ("" if images else ", and set images: DIR; or use sandbox_backend")
