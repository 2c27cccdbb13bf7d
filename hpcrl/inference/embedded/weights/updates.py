"""The weight-update session: init, start, update, finish, in this order.

New weights are read into a second copy of the model while generation goes on with the first; finishing
exchanges the two between steps. So a hand-off that is torn, missing or of another shape changes nothing, and
the engine stands still only for the exchange. What adapters change of their base is in memory a third time, so
that each version after the first reads its own few bytes alone.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hpcrl.errors import HandoffError
from hpcrl.gate import Gate
from hpcrl.inference.adapters import Adapter, KeptBase
from hpcrl.inference.embedded.weights.loading import adapted_tensors, check_fits, model_bytes, read_tensors
from hpcrl.inference.finite import finite_tensors
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import load_hf_tensors
from hpcrl.weights import HandoffStore, Manifest
from hpcrl.weights.format.adapters import Contents, contents_of
from hpcrl.weights.read.assemble import ServedVersion
from hpcrl.weights.read.registration import check_same_reader
from hpcrl.weights.read.subscriber import LoadedVersion, ReaderSettings, Reading, SkippedVersion, Subscriber

__all__ = ["ReaderConfig", "Update", "UpdateOrderError", "UpdateSession"]

_log = logging.getLogger(__name__)


class UpdateOrderError(Exception):
    """A call of the update session came out of order; nothing was changed."""


class ReaderConfig(NamedTuple):
    """Who this engine is among the readers of a run.

    Attributes
    ----------
    root:
        Where hand-offs must lie; None for anywhere.
    name:
        Name to register under; None: read without registration and leases.
    settings:
        How to read.
    """

    root: Path | None
    name: str | None
    settings: ReaderSettings


class Update(NamedTuple):
    """What `UpdateSession.update` read.

    Attributes
    ----------
    version:
        The version that is ready, or served already.
    kind:
        Of the publication.
    bytes:
        Bytes of the publication.
    skipped:
        Newer versions that could not be taken, and why.
    loaded:
        False where the version is served already, so that there is nothing to exchange.
    """

    version: int
    kind: str
    bytes: int
    skipped: list[SkippedVersion]
    loaded: bool


class _Version(NamedTuple):
    """A version that was loaded: its manifest, and what that makes of the weights."""

    manifest: Manifest
    contents: Contents


class _Weights(NamedTuple):
    """A model and what is in it."""

    version: _Version
    model: Decoder


class UpdateSession:
    """State of the update session. Calls may come from any thread; one runs at a time."""

    def __init__(self, model: Decoder, reader: ReaderConfig, gate: Gate | None = None) -> None:
        """Start without a session; nothing is registered yet.

        Parameters
        ----------
        model:
            Shape and dtype of the weights.
        reader:
            Who reads, where and how.
        gate:
            Of the server for other nodes, where there is one.
        """
        self._gate = gate
        self._template, self._arch = model, model.arch
        self._reader = reader._replace(root=None if reader.root is None else reader.root.resolve())
        self._lock = threading.Lock()
        self._subscriber: Subscriber | None = None
        self._spare: Decoder | None = None
        self._ready: _Version | None = None
        self._served: _Weights | None = None
        self._base = KeptBase()
        self._initialised = False
        self._active = False

    def init(self, info: Mapping[str, Any] | None = None) -> None:
        """Open the door for sessions, and register as a reader. May be called again.

        Parameters
        ----------
        info:
            What the caller takes this engine for: ``root`` and ``reader`` as in `hpcrl.weights.read.registration`.
            Where an engine reads, and as whom, is said by its own command line alone.

        Raises
        ------
        HandoffError
            The readers directory cannot be written.
        ValueError
            The caller takes it for another one; nothing was changed.
        """
        reader = self._reader
        check_same_reader(info or {}, root=reader.root, name=reader.name, settings=reader.settings)
        with self._lock:
            if self._subscriber is None and self._reader.name is not None and self._reader.root is not None:
                subscriber = Subscriber(self._reader.root, self._reader.name, self._reader.settings, gate=self._gate)
                self._subscriber = subscriber.open()
            self._initialised = True

    def shutdown(self) -> None:
        """Close the door and unregister; an unfinished session and the second copy of the weights are dropped."""
        with self._lock:
            self._initialised = self._active = False
            self._spare = self._ready = None
            self._base = KeptBase()
            if self._subscriber is not None:
                self._subscriber.close()
                self._subscriber = None

    def start(self) -> None:
        """Begin a session.

        Raises
        ------
        UpdateOrderError
            `init` was not called, or a session is open.
        """
        with self._lock:
            if not self._initialised:
                raise UpdateOrderError("call /init_weight_transfer_engine before /start_weight_update")
            if self._active:
                raise UpdateOrderError("a weight update is active; call /finish_weight_update first")
            self._active, self._ready = True, None

    def update(self, info: dict[str, Any]) -> Update:
        """Read a hand-off into the second copy. A failure ends the session, as in vLLM.

        Parameters
        ----------
        info:
            ``{"path": <version directory>}``. With ``"fallback": true`` the newest version up to that one that can
            be loaded is taken: for an engine that comes late or was started again.

        Raises
        ------
        UpdateOrderError
            No session is open.
        HandoffError
            The hand-off is missing, torn, or does not fit; the served weights are untouched.
        ValueError
            ``info`` has no path, or it lies outside of the allowed root.
        """
        with self._lock:
            if not self._active:
                raise UpdateOrderError("call /start_weight_update before /update_weights")
            self._ready = None
            try:
                root, version = self._place(info)
                if self._subscriber is not None:
                    return self._load_from(self._subscriber, version, fallback=bool(info.get("fallback")))
                with Subscriber(root, None, self._reader.settings, gate=self._gate) as subscriber:
                    return self._load_from(subscriber, version, fallback=bool(info.get("fallback")))
            except BaseException:
                self._active = False
                raise

    def take(self) -> Decoder | None:
        """End the session and hand out the loaded copy; None where nothing was loaded.

        The version is acknowledged: from now on deltas may refer to it.

        Raises
        ------
        UpdateOrderError
            No session is open.
        """
        with self._lock:
            if not self._active:
                raise UpdateOrderError("call /start_weight_update before /finish_weight_update")
            self._active = False
            if self._ready is None or self._spare is None:
                return None
            model, self._spare = self._spare, None
            self._served, self._ready = _Weights(self._ready, model), None
            if self._subscriber is not None:
                self._subscriber.acknowledge(self._served.version.manifest.version)
            return model

    def give_back(self, model: Decoder) -> None:
        """Receive the model that is no longer served, as room for the next update."""
        with self._lock:
            self._template = self._spare = model

    def _load_from(self, subscriber: Subscriber, version: int, *, fallback: bool) -> Update:
        if fallback:
            result = subscriber.load_newest(self._load, at_most=version)
        else:
            with subscriber.reading(version) as reading:
                result = LoadedVersion(version, self._load(reading), [])
                reading.keep()
        new, loaded = result.value
        self._ready = new if loaded else None
        manifest = new.manifest
        return Update(result.version, manifest.kind, manifest.total_bytes, result.skipped, loaded)

    def _load(self, reading: Reading) -> tuple[_Version, bool]:
        """Bring the second copy to a version; False where the first one is it."""
        manifest = reading.handoff.manifest
        if self._served is not None and self._served.version.manifest == manifest:
            return self._served.version, False
        if manifest.kind == "lora":
            return self._load_adapter(reading), True
        check_fits(reading.handoff, self._arch)
        new = _Version(manifest, contents_of(reading.handoff))
        served = self._known_to(reading)
        if served is not None:
            try:
                self._fill(read_tensors(reading, served), reading)
            except HandoffError as error:
                _log.warning("version %d is read whole: %s", manifest.version, error)
            else:
                return new, True
        self._fill(read_tensors(reading), reading)
        return new, True

    def _load_adapter(self, reading: Reading) -> _Version:
        """Merge an adapter into its base, in the second copy. What it does not change comes from the first."""
        check_fits(reading.chain[-2], self._arch)
        adapter = Adapter(reading.chain, reading.tensors())
        served = () if self._served is None else (self._served.version.contents, self._served.model)
        self._fill(adapted_tensors(reading, adapter, self._base, *served), reading)
        return _Version(reading.handoff.manifest, adapter.contents)

    def _fill(self, tensors: Iterable[tuple[str, Tensor]], reading: Reading) -> None:
        """Load all tensors into the second copy (HandoffError where they are not those of the model)."""
        if self._spare is None:
            self._spare = copy.deepcopy(self._template)
        try:
            load_hf_tensors(self._spare, self._spare.adapter, finite_tensors(tensors, reading.handoff.path))
        except ValueError as error:
            raise HandoffError(f"{reading.handoff.path}: {error}") from error

    def _known_to(self, reading: Reading) -> ServedVersion | None:
        """The served weights, where a delta leads from them to the version."""
        if self._served is None:
            return None
        for handoff in reading.chain[:-1]:
            if handoff.manifest == self._served.version.manifest:
                return ServedVersion(handoff.version, model_bytes(self._served.model))
        return None

    def _place(self, info: dict[str, Any]) -> tuple[Path, int]:
        value = info.get("path")
        if not isinstance(value, str) or not value:
            raise ValueError("update_info must hold 'path', the directory of a published version")
        path = Path(value).resolve()
        root = self._reader.root
        if root is not None and path.parent != root:
            raise ValueError(f"{value} is outside of the weight transfer root {root}")
        return path.parent, HandoffStore(path.parent).version_of(path)
