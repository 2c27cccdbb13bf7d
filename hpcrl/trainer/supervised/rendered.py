"""The conversations of a run as tokens: written once into the run directory, and mapped into memory by all ranks.

::

    <run>/sft/manifest.json   digest of the rest, counts, settings
              tokens.bin      int32: ids of all sequences, one behind the other
              said.bin        uint8: of each token, whether it is trained
              table.bin       int64 [sequences, 4]: row of the data, length, trained tokens, held out (0 or 1)

An attempt that resumes finds what the first one has written: the same rows in the same order, also where the data, the
chat template or the code has changed since.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from hpcrl.config.sft import SftConfig
from hpcrl.errors import CheckpointError, ConfigError, Finding
from hpcrl.storage.files import StagedDirectory, fsync_dir, write_json
from hpcrl.trainer.supervised.masks import ConversationRenderer, SaidTokens
from hpcrl.trainer.supervised.rows import SECTION, ConversationReader, DataConversation

FORMAT_VERSION = 1
_COLUMNS = 4
_NAMES = ("tokens.bin", "said.bin", "table.bin")


class RenderCounts(msgspec.Struct, kw_only=True):
    """Counts of rendered, dropped and truncated rows of the data.

    Attributes
    ----------
    train, held_out:
        Rows of each side in the data.
    dropped, truncated:
        Rows that are longer than ``sft.max_len``, of both sides.
    sequences, tokens, trained:
        Counts of the remaining rows, of both sides.
    longest:
        Tokens of the longest sequence of the data.
    """

    train: int = 0
    held_out: int = 0
    dropped: int = 0
    truncated: int = 0
    sequences: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0

    def add(self, row: list[SaidTokens], kept: list[SaidTokens]) -> None:
        """Count one row, and what of it is kept."""
        longest = max(len(sequence.ids) for sequence in row)
        self.longest = max(self.longest, longest)
        if not kept:
            self.dropped += 1
        elif sum(len(each.ids) for each in kept) < sum(len(each.ids) for each in row):
            self.truncated += 1
        self.sequences += len(kept)
        self.tokens += sum(len(each.ids) for each in kept)
        self.trained += sum(sum(each.said) for each in kept)


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format_version: int
    digest: str
    counts: RenderCounts
    notes: list[str]


def render_row(renderer: ConversationRenderer, row: DataConversation) -> list[SaidTokens]:
    """Return the sequences of a row (ConfigError that names the row where it cannot be rendered)."""
    try:
        return renderer.render(row.messages, row.tools)
    except ValueError as error:
        what = f"{row.source.shown}, {row.place}: {error}"
        hint = "check the chat template of the model, or remove the row"
        raise ConfigError([Finding("recipe", f"{SECTION}.{row.source.key}", what, hint)]) from error


def fit_length(row: list[SaidTokens], config: SftConfig) -> list[SaidTokens]:
    """Return what of a row is trained: nothing where it is too long and dropped, or nothing to train is left."""
    if all(len(sequence.ids) <= config.max_len for sequence in row):
        return row
    if config.over_long == "drop":
        return []
    cut = [SaidTokens(each.ids[: config.max_len], each.said[: config.max_len]) for each in row]
    return [each for each in cut if any(each.said)]


class RenderingJob:
    """Renders the data of a run into its directory, a while at a time; on one rank."""

    def __init__(self, directory: Path, config: SftConfig, renderer: ConversationRenderer, *, attempt: int) -> None:
        """Begin, without what earlier attempts have begun; ``directory`` appears when all is rendered."""
        self._stage = StagedDirectory(directory, token=f"attempt-{attempt:04d}")
        for left in directory.parent.glob(f"{self._stage.path.name.rpartition('-')[0]}-*"):
            shutil.rmtree(left, ignore_errors=True)
        self._stage.create()
        self._config, self._renderer = config, renderer
        self._reader = ConversationReader(config)
        self._rows: Iterator[tuple[int, DataConversation]] = enumerate(self._reader.read())
        self._files: dict[str, BinaryIO] = {name: (self._stage.path / name).open("wb") for name in _NAMES}
        self._digest = xxhash.xxh3_128()
        self.counts = RenderCounts()

    def work(self, seconds: float) -> bool:
        """Render for some time; returns whether all is done, and the directory is there.

        Raises
        ------
        ConfigError
            Rows are wrong or cannot be rendered, or none is left.
        """
        deadline = time.monotonic() + seconds
        for number, row in self._rows:
            rendered = render_row(self._renderer, row)
            kept = fit_length(rendered, self._config)
            self.counts.add(rendered, kept)
            for sequence in kept:
                self._write(number, sequence, held_out=row.held_out)
            if time.monotonic() > deadline:
                return False
        self._finish()
        return True

    def discard(self) -> None:
        """Remove what was begun."""
        for file in self._files.values():
            file.close()
        self._stage.discard()

    def _write(self, number: int, sequence: SaidTokens, *, held_out: bool) -> None:
        ids, said = np.array(sequence.ids, "<i4"), np.array(sequence.said, "u1")
        table = np.array([number, len(ids), int(said.sum()), int(held_out)], "<i8")
        for name, values in zip(_NAMES, (ids, said, table), strict=True):
            data = values.tobytes()
            self._digest.update(data)
            self._files[name].write(data)

    def _finish(self) -> None:
        self.counts.train, self.counts.held_out = self._reader.train, self._reader.held_out
        if not self.counts.trained:
            what = (
                f"none of {self.counts.train + self.counts.held_out} conversations has at most "
                f"{self._config.max_len} tokens; the longest has {self.counts.longest}"
            )
            raise ConfigError([Finding("recipe", f"{SECTION}.max_len", what, "raise it, or set over_long: truncate")])
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        manifest = _Manifest(
            format_version=FORMAT_VERSION,
            digest=self._digest.hexdigest(),
            counts=self.counts,
            notes=self._reader.notes(),
        )
        write_json(self._stage.path / "manifest.json", msgspec.to_builtins(manifest))
        fsync_dir(self._stage.path)
        self._stage.commit()


class RenderedConversations:
    """Conversations that `RenderingJob` has written.

    Attributes
    ----------
    digest:
        Digest of all the data.
    counts, notes:
        Counts of rows, and notes about rows that were left out.
    lengths, trained:
        ``[sequences]`` int64: tokens of each sequence, and those of them that are trained.
    """

    def __init__(self, directory: Path) -> None:
        """Map the files.

        Raises
        ------
        CheckpointError
            They are not whole, or of another version of hpcrl.
        """
        try:
            manifest = msgspec.json.decode((directory / "manifest.json").read_bytes(), type=_Manifest)
            if manifest.format_version != FORMAT_VERSION:
                raise ValueError(f"it has format {manifest.format_version}, not {FORMAT_VERSION}")
            table = np.fromfile(directory / "table.bin", "<i8").reshape(-1, _COLUMNS)
            self._tokens = np.memmap(directory / "tokens.bin", "<i4", mode="r")
            self._said = np.memmap(directory / "said.bin", "u1", mode="r")
            total = int(table[:, 1].sum())
            if len(self._tokens) != total or len(self._said) != total:
                raise ValueError(f"{len(self._tokens)} tokens and {len(self._said)} flags, the table has {total}")
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise CheckpointError(
                f"the rendered conversations in {directory} cannot be read: {error}\n"
                "    hint: restore them, or submit a new run with the weights of the newest checkpoint (--from)"
            ) from error
        self.digest, self.counts, self.notes = manifest.digest, manifest.counts, manifest.notes
        self._rows, self.lengths, self.trained, held_out = (table[:, column] for column in range(_COLUMNS))
        self._starts = np.concatenate(([0], np.cumsum(self.lengths)))
        self._held_out = held_out.astype(bool)

    def by_row(self) -> list[list[int]]:
        """Return the sequences of each training row that is kept, in the order of the data."""
        found: dict[int, list[int]] = {}
        for sequence in np.flatnonzero(~self._held_out & (self.trained > 0)):
            found.setdefault(int(self._rows[sequence]), []).append(int(sequence))
        return list(found.values())

    def held_out(self) -> list[int]:
        """Return the held-out sequences."""
        return [int(sequence) for sequence in np.flatnonzero(self._held_out & (self.trained > 0))]

    def row_of(self, sequence: int) -> int:
        """Return the number of the row of a sequence, from 0."""
        return int(self._rows[sequence])

    def tokens(self, sequence: int) -> NDArray[np.int32]:
        """Return the ids of a sequence, ``[length]``."""
        return np.asarray(self._tokens[self._starts[sequence] : self._starts[sequence + 1]])

    def said(self, sequence: int) -> NDArray[np.uint8]:
        """Return the flags of a sequence, ``[length]``."""
        return np.asarray(self._said[self._starts[sequence] : self._starts[sequence + 1]])
