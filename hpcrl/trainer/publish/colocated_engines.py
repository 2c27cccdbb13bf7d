"""Control of the engines on the trainer's own devices by rank 0, by blocking HTTP with deadlines."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec

from hpcrl.errors import HandoffError, PeerLostError
from hpcrl.network.http_body import read_body
from hpcrl.processes.daemon_threads import DaemonExecutor
from hpcrl.storage.msgspec_types import decode_json
from hpcrl.weights.handover import HandoverLayer

_RETRY_S = 0.2


_MAX_BYTES = 1 << 20
"""Maximum size of an answer of an engine."""


class _DeviceBytes(msgspec.Struct, frozen=True):
    device_bytes: int


class ColocatedEngines:
    """All engines of the attempt; each call ends when all have answered."""

    def __init__(
        self,
        urls: Sequence[str],
        headers: dict[str, str],
        *,
        timeout_s: float,
        start_timeout_s: float,
        on_wait: Callable[[], None],
    ) -> None:
        """Send nothing yet.

        Parameters
        ----------
        headers:
            Headers with the run's token.
        timeout_s:
            Timeout in seconds for one answer.
        start_timeout_s:
            Timeout in seconds until engines can be reached for the first time.
        on_wait:
            Called periodically meanwhile.
        """
        self._urls, self._headers, self._timeout_s = list(urls), headers, timeout_s
        self._start_timeout_s, self._on_wait = start_timeout_s, on_wait
        self._pool = DaemonExecutor(max(1, len(self._urls)), thread_name_prefix="engines")

    def wait_reachable(self) -> None:
        """Wait until all of them answer (PeerLostError where one does not in time, HandoffError where one refuses)."""
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            try:
                self._all("GET", "/health")
                return
            except PeerLostError:
                if time.monotonic() > deadline:
                    raise
                self._on_wait()
                time.sleep(_RETRY_S)

    def sleep(self) -> int:
        """Freeze requests and release weights and KV; return the bytes of device memory that engines still hold.

        Raises
        ------
        PeerLostError
            An engine does not answer within ``timeout_s`` (also of `load` and `wake`).
        HandoffError
            An engine refuses (also of `load` and `wake`).
        """
        return self._bytes("/sleep?level=2")

    def load(self, layer: HandoverLayer) -> int:
        """Copy a layer from shared memory; return the bytes of device memory that engines hold afterwards."""
        return self._bytes("/load_layer", msgspec.json.encode(layer))

    def wake(self, version: int) -> int:
        """Allocate memory for KV after all weights are loaded; return the bytes of device memory that engines hold.

        Requests stay paused until the orchestrator knows the version.
        """
        return self._bytes(f"/wake_up?version={version}")

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False)

    def _bytes(self, path: str, body: bytes = b"") -> int:
        answers = self._all("POST", path, body)
        try:
            return sum(decode_json(answer, _DeviceBytes).device_bytes for answer in answers)
        except msgspec.DecodeError as error:
            raise HandoffError(f"an engine's answer to {path} cannot be read: {error}") from error

    def _all(self, method: str, path: str, body: bytes = b"") -> list[bytes]:
        return list(self._pool.map(lambda url: self._one(url, method, path, body), self._urls))

    def _one(self, url: str, method: str, path: str, body: bytes) -> bytes:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=self._timeout_s)
        try:
            connection.request(method, path, body=body, headers=self._headers)
            answer = connection.getresponse()
            data = read_body(answer, _MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise PeerLostError(f"the engine at {url} cannot be reached: {error}") from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            text = data.decode(errors="replace").strip()
            raise HandoffError(f"the engine at {url} answered {path} with {answer.status}: {text}")
        return data
