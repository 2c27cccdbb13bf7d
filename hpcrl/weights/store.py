"""Directory of published policy versions: find them and open them.

One trainer publishes (`hpcrl.weights.write.handoff_writer`) and one orchestrator collects; any number of engines read.
A version directory is complete or does not exist, and is a Hugging Face model directory that transformers and vLLM load
as it is::

    weights/v000012/
      manifest.json                      content and hashes (hpcrl.weights.format.manifest)
      model-00001-of-00002.safetensors   tensors by their Hugging Face names
      model.safetensors.index.json
      config.json  tokenizer.json …      copied from the start model
"""

from __future__ import annotations

from pathlib import Path

from hpcrl.errors import HandoffError
from hpcrl.storage.files import NumberedDirectories
from hpcrl.weights.format.manifest import Handoff


class HandoffStore:
    """All versions of a run, in one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._directories = NumberedDirectories(root, "v")
        self._newest: int | None = None

    def path_of(self, version: int) -> Path:
        return self._directories.path_of(version)

    def version_of(self, path: Path) -> int:
        """Return the version whose directory ``path`` is, by its name alone.

        Raises
        ------
        ValueError
            The name is not that of a version.
        """
        return self._directories.number_of(path)

    def versions(self) -> list[int]:
        """Return the published versions, ascending. New ones are visible at once, also through a stale NFS cache."""
        return self._directories.numbers()

    def newest(self) -> int | None:
        """Return the highest published version; None where there is none.

        A directory whose manifest is missing, torn or that of another version is not published: it may be made by hand,
        or by an unfinished copy. Each directory above the version found last is checked again.
        """
        for version in reversed(self.versions()):
            if version == self._newest or self.is_published(version):
                self._newest = version
                return version
        return None

    def is_published(self, version: int) -> bool:
        """Return whether the directory of a version is complete, as far as it is visible now."""
        try:
            self.open(version)
        except HandoffError as error:
            # an error of the filesystem may be transient
            passing = isinstance(error.__cause__, OSError)
            return passing and not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)
        return True

    def open(self, version: int) -> Handoff:
        """Open a version (see `Handoff.open`)."""
        return Handoff.open(self.path_of(version))
