"""Images of tasks, as the backend of sandboxes names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcrl.swe.image_tree import find_in_image
from hpcrl.swe.task import SweTask, SweTaskError

_FILES = ("", ".sif", ".sqsh", ".squashfs")
"""Suffixes of an image in the directory of images; Apptainer reads files, bubblewrap directories alone."""


def locate_images(
    tasks: Sequence[SweTask], *, backend: str, images: Path | None = None
) -> tuple[list[SweTask], list[str]]:
    """Return the tasks whose images the backend can use, with their paths, and notes on those that are left out.

    A task without a tree has its files in its image, which must be an unpacked root filesystem then.

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
    empty: list[SweTask] = []
    for task in tasks:
        place = _place(task.image, backend, images)
        if place is None:
            missing.append(task)
        elif place and not task.tree and not _has_files(place, task.directory, backend):
            empty.append(task)
        else:
            found.append(msgspec.structs.replace(task, image=place))
    notes = []
    if missing:
        example = f"{missing[0].id} with {missing[0].image or 'none'}, for example"
        hint = _hint(missing[0].image, backend, images)
        if not found and not empty:
            raise SweTaskError(f"no task has an image that {backend} can use: {example}\n    hint: {hint}")
        notes.append(f"{len(missing)} tasks have no image that {backend} can use, and are left out: {example} ({hint})")
    if empty:
        example = f"{empty[0].id} with {empty[0].image} and {empty[0].directory}, for example"
        hint = _tree_hint(empty[0], backend)
        if not found:
            raise SweTaskError(f"no task has files that hpcrl can read: {example}\n    hint: {hint}")
        what = f"{len(empty)} tasks have no tree, and their images no files that hpcrl can read"
        notes.append(f"{what}; they are left out: {example} ({hint})")
    return found, notes


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


def _has_files(place: str, directory: str, backend: str) -> bool:
    """Return whether the work directory of an image can be read here: Docker and Podman keep theirs to themselves."""
    return backend not in ("docker", "podman") and find_in_image(Path(place), directory) is not None


def _tree_hint(task: SweTask, backend: str) -> str:
    """Return how a task without a tree gets its files: a sandbox hides the work directory of its image."""
    itself = "make an empty directory tree if the task begins with no files"
    if backend in ("docker", "podman"):
        copied = f"`{backend} create {task.image}`, then `{backend} cp CONTAINER:{task.directory} TASK/tree`"
        return f"copy {task.directory} out of the image: {copied}; or {itself}"
    unpacked = "" if backend == "bubblewrap" else "unpack the image to a directory, "
    return f"{unpacked}name the directory of its files in it (environment.workdir), or {itself}"


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
