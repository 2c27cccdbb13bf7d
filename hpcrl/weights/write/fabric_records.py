"""Records of what a trainer serves over the fabric, in its own hidden directory of the store.

One process writes them, before the version has its name. With an announcement next to it, a record counts before the
version is durable. A newer attempt takes the directory away, and with it the
records (`hpcrl.storage.fence`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash

from hpcrl.storage.fence import Fence
from hpcrl.storage.files import atomic_write
from hpcrl.weights.format.announcement import Announcement, announced_name
from hpcrl.weights.format.fabric_record import FABRIC_DIR, FabricLayout, FabricPeer, FabricRecord, Stretch
from hpcrl.weights.format.manifest import Manifest
from hpcrl.weights.format.segments import manifest_digest

_RECORD = re.compile(r"v(\d{6,})\.json")


class FabricRecords:
    """Records of one writer. Not thread-safe."""

    def __init__(self, fence: Fence, *, protocol: str, timeout_s: float) -> None:
        """Remember ``protocol`` and ``timeout_s`` of all records; nothing is written."""
        self._fence, self._protocol, self._timeout_s = fence, protocol, timeout_s
        self._layout: tuple[Sequence[tuple[Stretch, ...]], str] | None = None
        self._layout_of: dict[int, str] = {}

    @property
    def directory(self) -> Path:
        return self._fence.path / FABRIC_DIR

    def keep_newest(self, count: int) -> None:
        """Remove all records but the newest ``count``, and layouts that none of them names (OSError if refused)."""
        with contextlib.suppress(FileNotFoundError):
            records = sorted(
                (int(match[1]), path) for path in self.directory.iterdir() if (match := _RECORD.fullmatch(path.name))
            )
            gone = records[: max(0, len(records) - count)]
            for version, path in gone:
                path.unlink(missing_ok=True)
                path.with_name(announced_name(version)).unlink(missing_ok=True)
                self._layout_of.pop(version, None)
            needed = {*self._layout_of.values(), *(() if self._layout is None else (self._layout[1],))}
            for path in self.directory.glob("layout-*.msgpack"):
                if path.name not in needed:
                    path.unlink(missing_ok=True)

    def announce(self, manifest: Manifest, companions: Mapping[str, bytes]) -> None:
        """Write the announcement of a version that is not durable; it counts once `write` has made the record.

        Raises
        ------
        OSError
            See `write`.
        """
        self._make_directory()
        announcement = Announcement(announced=manifest, companions=dict(companions))
        # not durable, as the record is not
        path = self.directory / announced_name(manifest.version)
        atomic_write(path, msgspec.json.encode(announcement), durable=False)

    def _make_directory(self) -> None:
        self.directory.mkdir(exist_ok=True)  # without its parent: a claim of a newer attempt removes that

    def write(
        self, manifest: Manifest, peers: Sequence[FabricPeer], stretches: Sequence[tuple[Stretch, ...]]
    ) -> FabricRecord:
        """Record that ranks serve a version.

        Parameters
        ----------
        manifest:
            Manifest of the version.
        peers, stretches:
            Of each rank: where it serves, and its parts of files.

        Raises
        ------
        OSError
            The filesystem refuses, or a newer attempt has taken the directory.
        """
        self._make_directory()
        if self._layout is None or list(self._layout[0]) != list(stretches):
            data = FabricLayout(stretch for own in stretches for stretch in own).encode()
            name = f"layout-{xxhash.xxh3_128_hexdigest(data)}.msgpack"
            atomic_write(self.directory / name, data, durable=False)
            self._layout = list(stretches), name
        record = FabricRecord(
            version=manifest.version,
            digest=manifest_digest(manifest),
            attempt=self._fence.token,
            nonce=self._fence.nonce,
            protocol=self._protocol,
            timeout_s=self._timeout_s,
            layout=self._layout[1],
            peers=tuple(peers),
        )
        # not durable: it means nothing once this process has ended
        atomic_write(self.directory / f"v{manifest.version:06d}.json", msgspec.json.encode(record), durable=False)
        self._layout_of[manifest.version] = record.layout
        return record

    def clear(self) -> None:
        """Remove all records; what remains is removed by the next claim."""
        with contextlib.suppress(OSError):
            self.keep_newest(0)
