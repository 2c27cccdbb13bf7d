"""The trainer's side of the dock: plain blocking HTTP with deadlines (rank processes have no event loop).

Endpoints that the orchestrator serves (`hpcrl.rollouts.batches.http`):

=============================================== ==================================================================
``GET /health``                                 200 as soon as it serves
``GET /dock/batch/{step}?rank=R&world_size=W``  200 shard; 204 not ready yet (after waiting up to ``wait_s``);
                                                409 the step or number of ranks does not fit; 410 stopping. With
                                                ``ahead=1`` the step before is not trained yet
``POST /dock/trained/{step}``                   the step is trained, and the batch of the next is waited for
``POST /dock/published/{version}``              a version is on the shared filesystem
``POST /dock/snapshot/{step}``                  200 the orchestrator's state after step ``step``, opaque bytes
``POST /dock/finish/{version}``                 200 the last version was evaluated; 204 not yet
``POST /dock/evaluate/{key}?set=S&seed=N``      200 the result, JSON, of an evaluation that the first request of this
                                                name begins at the version that engines serve; 204 not yet; 409 not now
                                                (asked by `hpcrl.runs.running_evaluation`)
=============================================== ==================================================================

Each needs the run's token: 401 without it, 403 for a trainer of another attempt.
"""

from __future__ import annotations

import http.client
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

from hpcrl.dock.assemble import assemble_batch
from hpcrl.dock.warehouse.reading import BlockReader
from hpcrl.dock.warehouse.sharing import Sharing
from hpcrl.dock.wire import BatchShard, ReferencedShard, decode_answer
from hpcrl.errors import DeadlineError, FencedError, PeerLostError
from hpcrl.network.credentials import Credentials
from hpcrl.network.http_body import read_body

_log = logging.getLogger(__name__)

_POLL_S = 5.0
"""Maximum seconds for which the server holds a request that cannot be answered yet."""
_MAX_BYTES = 16 << 30
"""Maximum size of an answer: a shard names its rollouts, and the orchestrator's state holds texts of waiting ones."""
_RETRY_S = 0.1
"""Between two requests to a dock that does not answer."""


class _UnreachableError(Exception):
    """One request did not get through. Another one may."""


class DockClient:
    """Talks to the orchestrator.

    Attributes
    ----------
    wait_timeout_s, connect_timeout_s, on_wait, on_disk:
        As given.
    sources:
        Rollouts by where their columns came from (`hpcrl.dock.warehouse.reading.BlockReader`).
    """

    def __init__(
        self,
        url: str,
        *,
        credentials: Credentials | None = None,
        wait_timeout_s: float,
        connect_timeout_s: float = 60.0,
        on_wait: Callable[[], None] = lambda: None,
        on_disk: Callable[[int, int, str], None] = lambda step, rollouts, why: None,
        sharing: Sharing | None = None,
    ) -> None:
        """Remember the address of the dock; no request is sent.

        Parameters
        ----------
        url:
            ``http://host:port`` of the orchestrator.
        credentials:
            Credentials of this attempt; None where the dock needs none.
        wait_timeout_s:
            Longest wait for one answer that takes its time (a batch, the final evaluation), in seconds.
        connect_timeout_s:
            Maximum seconds of retries of a dock that was reached before and no longer can be. Before the
            first answer ``wait_timeout_s`` holds: the orchestrator starts when all engines are ready, which may take
            much longer than the start of a trainer.
        on_wait:
            Called every few seconds while an answer is waited for.
        on_disk:
            Called with a step's number of rollouts that were read from the shared filesystem and not from memory, and
            the first reason (empty where the run has no warehouse), from the thread that fetches the batch.
        sharing:
            With ranks of this node that train on the same shard; None where there are none.

        Raises
        ------
        ValueError
            ``url`` has no host or no port.
        """
        parts = urlsplit(url)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"dock URL {url!r} needs a host and a port")
        self.url = url
        self._host, self._port = parts.hostname, parts.port
        self.wait_timeout_s, self.connect_timeout_s = wait_timeout_s, connect_timeout_s
        self.on_wait, self.on_disk = on_wait, on_disk
        self._headers = {} if credentials is None else credentials.headers
        self._sharing = sharing
        self._reached = False
        self.sources: Counter[str] = Counter()

    def batch(self, step: int, *, rank: int, world_size: int) -> BatchShard:
        """Wait for the batch of ``step`` and return the shard of data-parallel rank ``rank``.

        Raises
        ------
        DeadlineError
            No batch came within ``wait_timeout_s``.
        PeerLostError
            The orchestrator cannot be reached, is stopping, or answered with an error.
        FencedError
            It belongs to another attempt: this one must end.
        RolloutsLostError
            Columns of a rollout are neither in memory nor on the shared filesystem.
        """
        path = _batch_path(step, rank, world_size)
        return self._shard(self._until_ready("GET", path, f"the batch of step {step}"))

    def poll(
        self, step: int, *, rank: int, world_size: int, wanted_since_s: Callable[[], float | None], ended: Event
    ) -> BatchShard | None:
        """Ask for the batch of ``step`` while the step before is trained; None where it is not ready yet.

        Parameters
        ----------
        wanted_since_s:
            Time of the monotonic clock when the trainer began to wait for it; None before: until then a dock that does
            not answer is asked again without a limit.
        ended:
            Set when the answer is not needed any more (None is returned).

        Raises
        ------
        PeerLostError, FencedError, RolloutsLostError
            As `batch`.
        """

        def send(method: str, path: str) -> tuple[int, bytes]:
            pause = partial(ended.wait, _RETRY_S)
            return self._retry_connect(method, path, self.connect_timeout_s, wanted_since_s, pause)

        status, body = self._checked("GET", f"{_batch_path(step, rank, world_size)}&ahead=1", send)
        return self._shard(body) if status == http.client.OK else None

    def _shard(self, data: bytes) -> BatchShard:
        """Return the decoded shard with its columns, which are read from their storage."""
        try:
            shard = decode_answer(data)
        except ValueError as error:
            raise PeerLostError(f"the answer of the orchestrator at {self.url} cannot be read: {error}") from error
        if not isinstance(shard, ReferencedShard):
            return shard
        authorization = self._headers.get("Authorization", "")
        reader = BlockReader(shard.location, Path(shard.payload_dir), authorization=authorization)
        try:
            if self._sharing is not None:
                reader.share(self._sharing, shard.step)
            # sequences of one rollout have one block
            reader.prepare(list(dict.fromkeys(sample.place for samples in shard.micro_batches for sample in samples)))
            return assemble_batch(shard, reader.read)
        finally:
            reader.close()
            self.sources += reader.sources
            if count := reader.sources["disk"]:
                self.on_disk(shard.step, count, next(iter(reader.problems), ""))
            if reader.problems:
                what = f"{len(reader.problems)} rollouts of step {shard.step} are read from the shared filesystem"
                _log.warning("%s, the first: %s", what, reader.problems[0])
            if reader.unshared:
                _log.warning(
                    "%d rollouts of step %d are not shared with other ranks of this node, the first: %s\n"
                    "    hint: raise rollouts.warehouse.limit_gib, or free space in rollouts.warehouse.directory: two "
                    "steps of the ranks of a node should fit",
                    len(reader.unshared),
                    shard.step,
                    reader.unshared[0],
                )

    def close(self) -> None:
        """Share nothing with other ranks of this node any more."""
        if self._sharing is not None:
            self._sharing.close()

    def trained(self, step: int) -> None:
        """Say that ``step`` is trained, and that the batch of the next is waited for.

        Raises
        ------
        PeerLostError, FencedError
            As `batch`.
        """
        self._request("POST", f"/dock/trained/{step}")

    def published(self, version: int) -> None:
        """Tell the orchestrator that ``version`` is on the shared filesystem (it would find it by itself).

        PeerLostError also where the orchestrator has restored another step than the first version that it is sent;
        FencedError as `batch`.
        """
        self._request("POST", f"/dock/published/{version}")

    def snapshot(self, step: int) -> bytes:
        """Return the encoded orchestrator's state with exactly the batches up to ``step`` consumed.

        PeerLostError is also raised where that state was removed or is of a future step; FencedError as `batch`.
        """
        return self._request("POST", f"/dock/snapshot/{step}")[1]

    def finish(self, version: int) -> None:
        """Wait until the orchestrator has evaluated the last version.

        Raises
        ------
        DeadlineError
            It did not come to that within ``wait_timeout_s``.
        PeerLostError, FencedError
            As `batch`.
        """
        path = f"/dock/finish/{version}?wait_s={_POLL_S}"
        self._until_ready("POST", path, f"the final evaluation of version {version}")

    def _until_ready(self, method: str, path: str, what: str) -> bytes:
        deadline = time.monotonic() + self.wait_timeout_s
        while True:
            status, body = self._request(method, path)
            if status == http.client.OK:
                return body
            self.on_wait()
            if time.monotonic() > deadline:
                raise DeadlineError(f"{what} did not come within {self.wait_timeout_s:g} s from {self.url}")

    def _request(self, method: str, path: str) -> tuple[int, bytes]:
        limit_s = self.connect_timeout_s if self._reached else max(self.wait_timeout_s, self.connect_timeout_s)
        now_s = time.monotonic()

        def pause() -> None:
            # engines that start slowly keep the orchestrator from starting: that is a wait, not a hang
            self.on_wait()
            time.sleep(_RETRY_S)

        def send(method: str, path: str) -> tuple[int, bytes]:
            return self._retry_connect(method, path, limit_s, lambda: now_s, pause)

        return self._checked(method, path, send)

    def _checked(self, method: str, path: str, send: Callable[[str, str], tuple[int, bytes]]) -> tuple[int, bytes]:
        status, body = send(method, path)
        if status not in (http.client.OK, http.client.NO_CONTENT):
            text = body.decode(errors="replace").strip()
            if status == http.client.FORBIDDEN:
                raise FencedError(f"the orchestrator at {self.url} refuses this attempt: {text}")
            raise PeerLostError(f"orchestrator answered {method} {path} with {status}: {text}")
        return status, body

    def _once(self, method: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_POLL_S + 60.0)
        try:
            connection.request(method, path, headers=self._headers)
            response = connection.getresponse()
            return response.status, read_body(response, _MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _UnreachableError(f"orchestrator at {self.url} cannot be reached: {error}") from error
        finally:
            connection.close()

    def _retry_connect(
        self,
        method: str,
        path: str,
        limit_s: float,
        wanted_since_s: Callable[[], float | None],
        pause: Callable[[], bool | None],
    ) -> tuple[int, bytes]:
        """Send a request until it is answered, and return the first answer.

        PeerLostError is raised after ``limit_s`` seconds without an answer, counted from the later of two times: the
        first failure, and ``wanted_since_s``. ``pause`` is called between two requests; if it returns True, the answer
        is not needed any more, and the result is 204 with an empty body.
        """
        lost_since_s: float | None = None
        while True:
            try:
                answer = self._once(method, path)
                self._reached = True
                return answer
            except _UnreachableError as error:
                now_s, wanted_s = time.monotonic(), wanted_since_s()
                lost_since_s = now_s if lost_since_s is None else lost_since_s
                if wanted_s is not None and now_s - max(wanted_s, lost_since_s) > limit_s:
                    raise PeerLostError(str(error)) from error
                if pause():
                    return http.client.NO_CONTENT, b""


def _batch_path(step: int, rank: int, world_size: int) -> str:
    return f"/dock/batch/{step}?rank={rank}&world_size={world_size}&wait_s={_POLL_S}"
