"""The repository of a task that its image has: the files of the work directory in an unpacked root filesystem.

A sandbox mounts an empty work directory over that of the image. So the files become the task's tree, which sandboxes
get a copy of, and which changes are compared with.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from hpcrl.swe.trees import Tree, TreeError, read_tree

_MAX_LINKS = 40


def find_in_image(image: Path, directory: str) -> Path | None:
    """Return the path on this machine of a directory of an image; None where the image has no such directory.

    Symbolic links lead to where they would inside of the image, and never out of it.

    Parameters
    ----------
    image:
        Directory with the root filesystem.
    directory:
        Absolute path inside of it.
    """
    left, found, links = [*PurePosixPath(directory).parts[1:]], PurePosixPath(), 0
    while left:
        part = left.pop(0)
        if part == "..":
            found = found.parent
            continue
        place = image / found / part
        if not place.is_symlink():
            found /= part
            continue
        links += 1
        if links > _MAX_LINKS:
            return None
        target = PurePosixPath(place.readlink())
        found = PurePosixPath() if target.is_absolute() else found
        left = [*(each for each in target.parts if each != "/"), *left]
    place = image / found
    return place if place.is_dir() else None


def read_image_tree(image: Path, directory: str) -> Tree:
    """Read the work directory of an image.

    Raises
    ------
    TreeError
        The image is not an unpacked root filesystem, has no such directory, or that cannot be read.
    """
    place = find_in_image(image, directory)
    if place is None:
        what = f"the image {image} is not a directory with {directory}, where the task's files would be"
        raise TreeError(f"{what}\n    hint: give the task a tree, or name the directory of its files")
    return read_tree(place)
