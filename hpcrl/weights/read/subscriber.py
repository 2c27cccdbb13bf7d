"""Reading versions: find them, lease them, read them verified and once a node, acknowledge them.

A `Subscriber` is one reader of a run (a rank of an engine). What it reads comes, in this order, from the node's cache,
from another node, from the memory of the trainer's ranks, or from the share; see docs/handoff.md, "Reader protocol".
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hpcrl.errors import HandoffError, HpcrlError
from hpcrl.network.auth import Gate
from hpcrl.network.credentials import TOKEN_FILE, ensure_token, read_token
from hpcrl.processes.daemon_threads import DaemonExecutor
from hpcrl.weights.format.announcement import AnnouncedVersion
from hpcrl.weights.format.manifest import MANIFEST, Handoff, OpenedVersion
from hpcrl.weights.format.segments import Segment, SegmentMap
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.lifetime.readers import ReadSources, Registration
from hpcrl.weights.read.announced import announced_versions, find_announced
from hpcrl.weights.read.fabric_reader import FabricReader
from hpcrl.weights.read.fanout import FanoutServer, Peers
from hpcrl.weights.read.nodecache import NodeCache
from hpcrl.weights.read.ownership import OwnerLock
from hpcrl.weights.read.reading import LoadedVersion, ReaderSettings, Reading, SkippedVersion
from hpcrl.weights.read.segment_memory import SegmentMemory
from hpcrl.weights.read.share import ShareReader, read_small
from hpcrl.weights.store import HandoffStore
from hpcrl.weights.visibility import missing_names

__all__ = ["LoadedVersion", "ReaderSettings", "Reading", "SkippedVersion", "Subscriber"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_LIST_S = 0.25
_URLS_S = 1.0
_MAPS_KEPT = 8


class Subscriber:
    """Reader of a store; a context manager. Methods may be called from any thread.

    Attributes
    ----------
    share:
        Reader of the shared filesystem, which counts its bytes.
    fabric:
        Reader of the memory of the trainer's ranks, which counts its bytes.
    """

    def __init__(
        self,
        root: Path,
        reader: str | None,
        settings: ReaderSettings,
        *,
        node: str | None = None,
        gate: Gate | None = None,
    ) -> None:
        """Prepare; nothing is written.

        Parameters
        ----------
        root:
            The directory of versions.
        reader, node:
            See `hpcrl.weights.lifetime.readers.Registration`. None: read without a registration and leases; what is
            read is verified all the same, but it may be collected meanwhile.
        gate:
            Gate of the server for other nodes. None: it accepts every client, on loopback only.

        Raises
        ------
        ValueError
            The name is none, or fan-out is asked for without a cache.
        """
        if settings.fanout_host is not None and (settings.cache_dir is None or reader is None):
            raise ValueError("serving other nodes needs a node cache and a registration: set cache_dir and reader")
        self.root, self._settings, self._store = root, settings, HandoffStore(root)
        self.registration = (
            None
            if reader is None
            else Registration(root, reader, expiry_s=settings.expiry_s, node=node, sources=self._sources)
        )
        self.share = ShareReader(settings.pace)
        self.fabric = FabricReader(
            root,
            secret=self._fabric_secret,
            streams=max(1, settings.streams),
            segment_bytes=settings.segment_bytes,
        )
        self._gate = gate or Gate("fanout", None)
        self.peers: Peers | None = None
        self.cache: NodeCache | None = None
        self._watch = ReaderWatch(root, expiry_s=settings.expiry_s)
        self._urls: tuple[float, dict[str, str]] = (-_URLS_S, {})
        self._maps: dict[str, SegmentMap] = {}
        self._server: FanoutServer | None = None
        self._server_lock: OwnerLock | None = None
        self._mutex = threading.Lock()
        self._pool = DaemonExecutor(max(1, settings.streams), thread_name_prefix="weights")

    def open(self) -> Subscriber:
        """Register, and join the node's cache and the fan-out.

        Raises
        ------
        HandoffError
            The readers directory cannot be written.
        """
        settings = self._settings
        if self.registration is not None:
            self.registration.open()
        if settings.cache_dir is not None:
            try:
                self.cache = NodeCache(
                    settings.cache_dir,
                    self.root,
                    secret=self._secret(),
                    limit_bytes=settings.cache_bytes,
                    segment_limit_s=settings.pace.limit_s,
                    verify=settings.verify,
                )
            except (OSError, HpcrlError) as error:
                _log.warning("%s cannot be used; this process reads for itself: %s", settings.cache_dir, error)
        if self.cache is not None and settings.fanout_host is not None and self.registration is not None:
            self.peers = Peers(
                self.registration.node,
                headers=self._gate.headers,
                pace=settings.pace,
                degree=settings.fanout_degree,
                urls=self._peer_urls,
            )
            self._serve()
        return self

    def _secret(self) -> str:
        """Return the secret shared by the readers of this store: the run's token; outside of a run the store's own."""
        if self._gate.credentials is not None:
            return self._gate.credentials.token
        self.root.mkdir(parents=True, exist_ok=True)
        ensure_token(self.root)
        return read_token(self.root / TOKEN_FILE)

    def _fabric_secret(self) -> str:
        """Return the token that seals headers (RunDirError where there is none)."""
        credentials = self._gate.credentials
        return read_token(self.root / TOKEN_FILE) if credentials is None else credentials.token

    def close(self) -> None:
        """Unregister, stop serving and leave the cache."""
        if self._server is not None:
            self._server.close()
        if self._server_lock is not None:
            self._server_lock.release()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.fabric.close()
        if self.cache is not None:
            self.cache.close()
        if self.registration is not None:
            self.registration.close()

    def __enter__(self) -> Subscriber:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- finding

    def versions(self) -> list[int]:
        """Return the versions that are durable or announced, ascending, also through stale caches."""
        return sorted({*self._store.versions(), *announced_versions(self.root)})

    def wait_for(self, version: int, *, timeout_s: float) -> bool:
        """Wait until ``version`` is durable or announced, or a newer one; False where none comes in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            versions = self.versions()
            if versions and versions[-1] >= version:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_LIST_S, left))

    # -- reading

    @contextmanager
    def reading(self, version: int) -> Iterator[Reading]:
        """Lease a version and the versions that it needs, for as long as the context lasts.

        Raises
        ------
        HandoffError
            It is neither durable nor announced, was withdrawn or collected, or its manifest cannot be read.
        """
        with contextlib.ExitStack() as stack:
            missing = self._lease(stack, [version])
            announced = find_announced(self.root, version) if missing else None
            if missing and announced is None:
                raise self._gone(missing[0])
            handoff = announced or self._open(version)
            if handoff.manifest.needs and (missing := self._lease(stack, handoff.manifest.needs)):
                raise self._gone(missing[0])
            maps: dict[int, SegmentMap] = {}
            for needed in (*handoff.manifest.needs, version):
                found = handoff if needed == version else self._open(needed)
                maps[needed] = self._remember(SegmentMap(found, self._settings.segment_bytes))
            if announced is not None:
                self.fabric.try_again(maps[version])  # it has no other way
            if self.cache is not None:
                self.cache.drop_others({segments.key for segments in maps.values()})
                for segments in maps.values():
                    stack.enter_context(self.cache.reading(segments))
            if self.peers is not None:
                self._serve()
            reading = Reading(
                maps,
                settings=self._settings,
                pool=self._pool,
                cache=self.cache,
                load=self.load_segment,
                keep=self._keep,
            )
            stack.callback(reading.close)
            yield reading

    def load_newest(
        self,
        load: Callable[[Reading], _T],
        *,
        at_most: int | None = None,
        served: tuple[int, _T] | None = None,
    ) -> LoadedVersion[_T]:
        """Load the newest version that can be loaded; the way of a reader that comes late or starts again.

        It stays leased until a version is acknowledged (`Reading.keep`).

        Parameters
        ----------
        load:
            Loads one version; `HandoffError` means that the next older one is to be tried.
        at_most:
            Newest version that counts.
        served:
            Version and value that the caller has: the result where no newer version can be loaded.

        Raises
        ------
        HandoffError
            None can be loaded; says why not, for each.
        """
        skipped: list[SkippedVersion] = []
        for version in reversed(self.versions()):
            if at_most is not None and version > at_most:
                continue
            if served is not None and version < served[0]:
                break
            try:
                with self.reading(version) as reading:
                    value = load(reading)
                    reading.keep()
            except HandoffError as error:
                _log.warning("version %d is skipped: %s", version, error)
                skipped.append(SkippedVersion(version, str(error)))
            else:
                return LoadedVersion(version, value, skipped)
        if served is not None:
            return LoadedVersion(*served, skipped)
        why = "; ".join(f"{version}: {reason}" for version, reason in skipped) or "there is none"
        raise HandoffError(f"{self.root}: no version can be loaded: {why}")

    def _keep(self, version: int) -> None:
        if self.registration is not None:
            self.registration.keep(version)

    def acknowledge(self, version: int) -> None:
        """Acknowledge that ``version`` is loaded: a delta may refer to it now, and older ones may be removed."""
        if self.registration is not None:
            self.registration.acknowledge(version)

    def load_segment(
        self, segments: SegmentMap, segment: Segment, into: SegmentMemory, via: Sequence[str] = ()
    ) -> None:
        """Fill ``into`` from another node, over the fabric, or from the share, verified.

        A version that is announced is on the share once it is durable, with the same content.

        Raises
        ------
        HandoffError
            It cannot be had.
        """
        announced = isinstance(segments.handoff, AnnouncedVersion)
        # adapters of all nodes read the trainer's memory faster than one node passes it on; over TCP the trainer sends
        # each byte once
        fabric = self.fabric.protocol(segments) if self._settings.fabric or announced else None
        if fabric == "rdma" and self.fabric.fetch(segments, segment, into):
            return
        if self.peers is not None and self.peers.fetch(segments, segment, into, via):
            return
        if fabric == "tcp" and self.fabric.fetch(segments, segment, into):
            return
        if announced and segments.handoff.version not in self._store.versions():
            if self.registration is not None:
                self.registration.want(segments.handoff.version)
            why = self.fabric.problem or "its memory has another use now"
            raise HandoffError(f"version {segments.handoff.version} is not durable, and cannot be pulled: {why}")
        self.share.read(segments.handoff.path, segment, into.room(), verify=self._settings.verify or announced)

    def _sources(self) -> ReadSources:
        fabric = self.fabric
        return ReadSources(
            share_bytes=self.share.bytes_read,
            node_bytes=0 if self.peers is None else self.peers.bytes_read,
            fabric_bytes=fabric.bytes_read,
            fabric_s=fabric.seconds,
            fabric_failures=fabric.failures,
            fabric_problem=fabric.problem,
        )

    def _lease(self, stack: contextlib.ExitStack, versions: Sequence[int]) -> list[Path]:
        """Take leases: steps L and N of the protocol of `hpcrl.weights.lifetime.collector`; return what is missing."""
        if self.registration is not None:
            self.registration.lease(versions)
            stack.callback(self.registration.release, versions)
        return missing_names([self._store.path_of(version) for version in versions])

    def _gone(self, path: Path) -> HandoffError:
        there = ", ".join(map(str, self.versions())) or "none"
        return HandoffError(f"{path} does not exist (any more); published are: {there}")

    def _open(self, version: int) -> Handoff:
        path = self._store.path_of(version)
        return Handoff.decoded(path, read_small(path / MANIFEST))

    # -- sharing

    def _remember(self, segments: SegmentMap) -> SegmentMap:
        with self._mutex:
            if isinstance(segments.handoff, Handoff):
                self._maps.pop(segments.key, None)  # it may be remembered as announced
            self._maps.setdefault(segments.key, segments)
            while len(self._maps) > _MAPS_KEPT:
                del self._maps[next(iter(self._maps))]
            return self._maps.get(segments.key, segments)

    def _serve(self) -> None:
        """Serve this node's cache, where no other process of it does."""
        host, cache = self._settings.fanout_host, self.cache
        if self._server is not None or host is None or cache is None or self.peers is None or not self.registration:
            return
        lock = OwnerLock(cache.directory / "server")
        try:
            if not lock.acquire():
                return
            server = FanoutServer(host, gate=self._gate, node=self.peers.node, fetch=self._segment_file)
            self.registration.serve_at(server.start())
        except (OSError, HandoffError) as error:
            _log.warning("this node does not serve versions to others: %s", error)
            lock.release()
            return
        self._server, self._server_lock = server, lock

    def _segment_file(self, key: str, file: str, index: int, via: Sequence[str]) -> Path | None:
        """Return the file of a segment that another node requests; None where it is not available."""
        cache, segments = self.cache, self._maps.get(key)
        if segments is None:
            version = next((v for v in self.versions() if key.startswith(f"{self._store.path_of(v).name}-")), None)
            if version is None:
                return None
            found: OpenedVersion | None = find_announced(self.root, version)
            if found is None or version in self._store.versions():
                found = self._open(version)
            segments = self._remember(SegmentMap(found, self._settings.segment_bytes))
        if cache is None or segments.key != key or file not in segments.files or index >= len(segments.of(file)):
            return None
        segment = segments.of(file)[index]
        return cache.file_of(segments, segment, lambda into: self.load_segment(segments, segment, into, via))

    def _peer_urls(self) -> dict[str, str]:
        with self._mutex:
            asked_s, urls = self._urls
            if time.monotonic() - asked_s > _URLS_S:
                try:
                    urls = {record.node: record.url for record in self._watch.observe() if record.url}
                except HandoffError as error:
                    _log.warning("other nodes cannot be asked: %s", error)
                    urls = {}
                self._urls = time.monotonic(), urls
            return urls
