"""Nodes serve versions to each other, so that many nodes do not read many copies from the share.

Every node that reads has a small HTTP server over its `NodeCache`. For each segment the nodes form a tree, another
one for each, so that all of them read and forward equally much: the root of a tree reads the share, every other node
asks its parent, and a parent that has not got the segment yet gets it the same way first. Nothing has to be arranged:
the order of nodes comes from the readers directory, a late or dead node only makes another one read the share.

What comes from a peer is compared with the manifest's hashes like what comes from the share, and whatever fails ends
in a read from the share.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from hpcrl.errors import HandoffError, UsageError
from hpcrl.network.auth import Gate
from hpcrl.network.http_server import listen, make_runner, stop_serving
from hpcrl.processes.daemon_threads import DaemonExecutor
from hpcrl.weights.format.segments import Segment, SegmentMap, first_wrong_byte
from hpcrl.weights.read.segment_memory import SegmentMemory
from hpcrl.weights.read.share import Pace

if TYPE_CHECKING:
    from aiohttp import web

_log = logging.getLogger(__name__)

VIA = "X-Hpcrl-Via"
_SHUN_S = 30.0
_SERVE_THREADS = 8
_START_S = 60.0

Fetch = Callable[[str, str, int, Sequence[str]], Path | None]
"""(version key, file, segment index, nodes the request came through) → the file that holds the segment."""


def parent_of(node: str, nodes: Sequence[str], segment_number: int, *, degree: int) -> str | None:
    """Return the node that ``node`` asks for a segment; None where it reads the shared filesystem itself.

    Parameters
    ----------
    nodes:
        All participating nodes, in an order that is the same on all of them.
    segment_number:
        Rotates the tree, so that every node is the root of some segments.
    degree:
        Children of a node in a tree; 1 is a chain.
    """
    if node not in nodes:
        return None
    position = (nodes.index(node) - segment_number) % len(nodes)
    if position == 0:
        return None
    return nodes[((position - 1) // degree + segment_number) % len(nodes)]


class Peers:
    """Asks other nodes for segments.

    Attributes
    ----------
    bytes_read:
        Bytes that came from peers so far.
    failures:
        Requests that ended in a read from the share.
    """

    def __init__(
        self,
        node: str,
        *,
        headers: Mapping[str, str],
        pace: Pace,
        degree: int,
        urls: Callable[[], dict[str, str]],
    ) -> None:
        """Prepare; nothing is sent.

        Parameters
        ----------
        node:
            This node.
        headers:
            Headers of each request, with the run's token (`hpcrl.network.auth.Gate.headers`).
        pace:
            Limits of a request.
        degree:
            See `parent_of`.
        urls:
            The nodes that serve now, this one included, with their addresses.
        """
        self.node, self._headers, self._pace, self._degree, self._urls = node, headers, pace, degree, urls
        self._shunned: dict[str, float] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.failures = 0

    def fetch(self, segments: SegmentMap, segment: Segment, into: SegmentMemory, via: Sequence[str]) -> bool:
        """Fill ``into`` from the node above this one; False where the share must be read."""
        urls = self._urls()
        number = segments.number(segment)
        parent = parent_of(self.node, sorted({*urls, self.node}), number, degree=self._degree)
        if parent is None or parent in via or parent not in urls:
            return False
        with self._lock:
            if self._shunned.get(parent, 0.0) > time.monotonic():
                return False
        room = into.room()
        try:
            self._request(urls[parent], segments.key, segment, room, [*via, self.node])
        except _NotThereError:
            return False
        except (OSError, http.client.HTTPException, HandoffError) as error:
            _log.warning("node %s did not give %s segment %d: %s", parent, segment.file, segment.part, error)
            with self._lock:
                self.failures += 1
                self._shunned[parent] = time.monotonic() + _SHUN_S
            return False
        with self._lock:
            self.bytes_read += segment.bytes
        return True

    def _request(self, url: str, key: str, segment: Segment, into: memoryview, via: Sequence[str]) -> None:
        limit_s = self._pace.limit_s(segment.bytes)
        deadline = time.monotonic() + limit_s
        address = urlsplit(url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=limit_s)
        try:
            headers = {**self._headers, VIA: ",".join(via)}
            connection.request("GET", f"/segments/{key}/{quote(segment.file)}/{segment.part}", headers=headers)
            answer = connection.getresponse()
            if answer.status == 404:
                raise _NotThereError
            if answer.status != 200 or answer.length != segment.bytes:
                raise HandoffError(f"it answered {answer.status} with {answer.length} bytes, not {segment.bytes}")
            done = 0
            while done < segment.bytes:
                got = answer.readinto(into[done : segment.bytes])
                if not got:
                    raise HandoffError(f"it sent {done} of {segment.bytes} bytes")
                if time.monotonic() > deadline:
                    raise HandoffError(f"it sent {done} of {segment.bytes} bytes in {limit_s:.0f} s")
                done += got
        finally:
            connection.close()
        wrong = first_wrong_byte(segment, into)
        if wrong is not None:
            raise HandoffError(f"it sent wrong content (at byte {wrong})")


class _NotThereError(Exception):
    """Raised where a peer cannot give a segment now, which is not a failure."""


class FanoutServer:
    """Serves the segments of this node's cache; `start` it, `close` it.

    It gives nothing but segments of published versions, to whom ``gate`` lets in.
    """

    def __init__(self, host: str, *, gate: Gate, node: str, fetch: Fetch) -> None:
        """Prepare the server; it does not listen yet.

        Parameters
        ----------
        host:
            Address to listen on: that of the cluster's network, or loopback.
        fetch:
            Returns the file of a segment, loading it if missing; None where the segment does not exist.
        """
        self._host, self._gate, self._node, self._fetch = host, gate, node, fetch
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fanout", daemon=True)
        self.url = ""

    def start(self) -> str:
        """Listen on a free port; return the address.

        Raises
        ------
        HandoffError
            The address is not available, or the server would accept every client that reaches it.
        """
        try:
            self._gate.check_host(self._host)
        except UsageError as error:
            raise HandoffError(str(error)) from error
        self._thread.start()
        if not self._ready.wait(_START_S) or not self.url:
            raise HandoffError(f"versions cannot be served to other nodes at {self._host}; the log says why")
        return self.url

    def close(self) -> None:
        """Stop listening; running answers are cut."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_START_S)

    def _run(self) -> None:
        try:
            with contextlib.closing(self._loop):
                self._loop.run_until_complete(self._serve())
        except OSError as error:
            _log.error("versions are not served to other nodes: %s", error)
        finally:
            self._ready.set()

    def app(self) -> web.Application:
        """Return the web application that serves segments to accepted nodes."""
        from aiohttp import web  # noqa: PLC0415 - readers that do not serve have no use for it

        app = web.Application(middlewares=[self._gate.middleware()])
        app.router.add_get("/segments/{key}/{file}/{part}", self._segment)
        return app

    async def _serve(self) -> None:
        app = self.app()
        # the web server's threads send files; segments that must be fetched first use these threads
        self._pool = DaemonExecutor(_SERVE_THREADS, thread_name_prefix="fanout")
        runner = make_runner(app, shutdown_timeout=1.0)
        await runner.setup()
        try:
            port = await listen(runner, self._gate.pending, (self._host, 0))
            self.url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"
            self._ready.set()
            await self._stop.wait()
        finally:
            await stop_serving(runner)
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _segment(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web  # noqa: PLC0415

        via = [node for node in request.headers.get(VIA, "").split(",") if node]
        place = request.match_info
        if self._node in via or not place["part"].isdecimal():
            raise web.HTTPNotFound
        key, file, part = place["key"], place["file"], int(place["part"])
        try:
            path = await asyncio.get_running_loop().run_in_executor(self._pool, self._fetch, key, file, part, via)
        except HandoffError as error:
            _log.warning("a segment for another node cannot be fetched: %s", error)
            path = None
        if path is None:
            raise web.HTTPNotFound
        return web.FileResponse(path, chunk_size=1 << 20)
