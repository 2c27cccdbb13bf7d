"""The weight-update session: init, start, update, finish, in this order.

New weights are read into a second copy of the model while generation continues with the first; finishing
exchanges the two between steps. So a hand-off that is torn, missing or of another shape changes nothing, and
the engine stands still only for the exchange. What adapters change of their base is in memory a third time, so
that each version after the first reads its own few bytes alone.

Each call does its work in one thread, whose end does not depend on whether its caller still waits. Weights and their
label change together, and are recorded in the same call. A session that is never ended is ended by the next one
(`hpcrl.weights.session`).
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hpcrl.errors import HandoffError
from hpcrl.inference.adapters import Adapter, KeptBase
from hpcrl.inference.embedded.weights.loading import adapted_tensors, check_fits, model_bytes, read_model_tensors
from hpcrl.inference.embedded.weights.sessions import Session, Sessions, UpdateOrderError
from hpcrl.inference.finite import finite_tensors
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import load_hf_tensors, published_tensors
from hpcrl.network.auth import Gate
from hpcrl.weights import HandoffStore, Manifest, TensorRecord
from hpcrl.weights.read.adapters import Contents, contents_of
from hpcrl.weights.read.assemble import ServedVersion
from hpcrl.weights.read.registration import check_same_reader
from hpcrl.weights.read.subscriber import LoadedVersion, ReaderSettings, Reading, SkippedVersion, Subscriber
from hpcrl.weights.session import SessionOwner

Exchange = Callable[[Decoder, str], Decoder]
"""Serves a model under a label from the next step on, and returns the model that was served before."""

_log = logging.getLogger(__name__)


class ReaderConfig(NamedTuple):
    """Identity of this engine among the readers of a run.

    Attributes
    ----------
    root:
        Directory in which hand-offs must lie; None for anywhere.
    name:
        Name to register under; None: read without registration and leases.
    settings:
        Settings of reads.
    """

    root: Path | None
    name: str | None
    settings: ReaderSettings


class Update(NamedTuple):
    """Result of `UpdateSession.update`.

    Attributes
    ----------
    version:
        The version that is ready, or served already.
    kind:
        Kind of the publication.
    bytes:
        Bytes of the publication.
    skipped:
        Newer versions that could not be loaded, with the reasons.
    loaded:
        False if the version is served already, so that there is nothing to exchange.
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
    """A model, what is in it, and the owner of the session that has put it there."""

    version: _Version
    model: Decoder
    owner: SessionOwner | None


class UpdateSession:
    """State of the update session. Calls may come from any thread; one at a time reads or exchanges weights."""

    def __init__(self, model: Decoder, reader: ReaderConfig, gate: Gate | None = None) -> None:
        """Start without a session; nothing is registered yet.

        Parameters
        ----------
        model:
            Shape and dtype of the weights.
        reader:
            Identity and settings of the reader.
        gate:
            Gate of the server for other nodes, if there is one.
        """
        self.gate = gate
        self._template, self._arch = model, model.arch
        self._shapes = {name: tuple(tensor.shape) for name, tensor in published_tensors(model, model.adapter)}
        self._reader = reader._replace(root=None if reader.root is None else reader.root.resolve())
        self._sessions: Sessions[_Version] = Sessions()
        #: held while the second copy is written to or exchanged, which takes as long as the share takes
        self._copying = threading.Lock()
        self._opening = threading.Lock()
        self._subscriber: Subscriber | None = None
        self._spare: Decoder | None = None
        self._served: _Weights | None = None
        self._exchanges = False
        self._acknowledged: int | None = None
        self._base = KeptBase()
        self._initialised = False

    @property
    def root(self) -> Path | None:
        """Return the directory in which hand-offs must lie; None for anywhere."""
        return self._reader.root

    @property
    def served_version(self) -> int | None:
        """Return the version of the running weights; None before the first update."""
        served = self._served
        return None if served is None else served.version.manifest.version

    @property
    def exchanges(self) -> bool:
        """Return whether weights are being exchanged now, so that `served_version` may be older than what runs."""
        return self._exchanges

    def has_tensor(self, name: str, record: TensorRecord) -> bool:
        """Return whether the model has the published tensor ``name`` in the shape of ``record``."""
        return self._shapes.get(name) == tuple(record.shape)

    def init(self, info: Mapping[str, Any] | None = None) -> None:
        """Open the door for sessions, and register as a reader. May be called again.

        Parameters
        ----------
        info:
            Expected identity of this engine: ``root`` and ``reader`` as in `hpcrl.weights.read.registration`.
            Only the engine's own command line decides where it reads, and under which name.

        Raises
        ------
        HandoffError
            The readers directory cannot be written.
        ValueError
            The caller takes it for another one; nothing was changed.
        """
        reader = self._reader
        check_same_reader(info or {}, root=reader.root, name=reader.name, settings=reader.settings)
        with self._opening:
            if self._subscriber is None and self._reader.name is not None and self._reader.root is not None:
                subscriber = Subscriber(self._reader.root, self._reader.name, self._reader.settings, gate=self.gate)
                self._subscriber = subscriber.open()
            self._initialised = True

    def shutdown(self) -> None:
        """Close the door and unregister; an unfinished session and the second copy of the weights are dropped."""
        with self._opening:
            self._initialised = False
            self._sessions.end_all()
            with self._copying:
                self._spare, self._base = None, KeptBase()
            if self._subscriber is not None:
                self._subscriber.close()
                self._subscriber = None

    def start(self, owner: SessionOwner | None = None) -> None:
        """Begin a session; one that is open ends, and what is still being read in it is dropped.

        Raises
        ------
        UpdateOrderError
            `init` was not called, or a session of a later owner has begun before.
        """
        if not self._initialised:
            raise UpdateOrderError("call /init_weight_transfer_engine before /start_weight_update")
        self._sessions.start(owner)

    def abandon(self, owner: SessionOwner | None = None) -> None:
        """End the open session, where it is that of ``owner``: its caller does not wait for it any more."""
        self._sessions.abandon(owner)

    def end_session(self) -> None:
        """End the open session, whichever owner began it."""
        self._sessions.end_all()

    def update(self, info: dict[str, Any], owner: SessionOwner | None = None) -> Update:
        """Read a hand-off into the second copy. A failure ends the session, as in vLLM.

        Parameters
        ----------
        info:
            ``{"path": <version directory>}``. With ``"fallback": true`` the newest version up to that one that can
            be loaded is taken: for an engine that comes late or was started again.
        owner:
            Owner of the session.

        Raises
        ------
        UpdateOrderError
            No session is open, or that of another owner.
        HandoffError
            The hand-off is missing, torn, or does not fit; the served weights are untouched.
        ValueError
            ``info`` has no path, or it lies outside of the allowed root.
        """
        session = self._sessions.of(owner, "/update_weights")
        with self._copying:
            session.check_open()
            session.ready = None
            try:
                root, version = self._place(info)
                fallback = bool(info.get("fallback"))
                if self._subscriber is not None:
                    update = self._load_from(self._subscriber, session, version, owner, fallback=fallback)
                else:
                    with Subscriber(root, None, self._reader.settings, gate=self.gate) as subscriber:
                        update = self._load_from(subscriber, session, version, owner, fallback=fallback)
                session.check_open()
            except BaseException:
                self._sessions.end(session)
                raise
            return update

    def finish(self, exchange: Exchange, label: str | None = None, owner: SessionOwner | None = None) -> None:
        """End the session, and serve what was read in it under the number of its version.

        The version is acknowledged: from now on deltas may refer to it.

        Parameters
        ----------
        exchange:
            Changes weights and label in one step of the engine.
        label:
            Expected number of the version that was read, or that is served already.
            None: any version that was read.
        owner:
            Owner of the session.

        Raises
        ------
        UpdateOrderError
            No session is open, or that of another owner; or ``label`` names other weights. Nothing was changed.
        """
        session = self._sessions.of(owner, "/finish_weight_update")
        with self._copying:
            session.check_open()
            ready = session.ready
            try:
                named = self.served_version if ready is None else ready.manifest.version
                if label is not None and label != str(named):
                    raise UpdateOrderError(
                        f"the label {label!r} names other weights than those that are there: "
                        + ("the start model" if named is None else f"version {named}")
                    )
                if ready is not None:
                    self._exchange(ready, exchange, owner)
            finally:
                self._sessions.end(session)
        self._acknowledge()

    def _exchange(self, ready: _Version, exchange: Exchange, owner: SessionOwner | None) -> None:
        model, self._spare = self._spare, None
        assert model is not None
        # until it is recorded, or the exchange has failed, the running weights are unknown
        self._exchanges = True
        try:
            old = exchange(model, str(ready.manifest.version))
            self._served = _Weights(ready, model, owner)
        finally:
            self._exchanges = False
        # the weights that are no longer served become the memory for the next update
        self._template = self._spare = old

    def _acknowledge(self) -> None:
        """Tell the store what is served, behind all that the engine needs: this writes to the share, and may hang."""
        version, subscriber = self.served_version, self._subscriber
        if subscriber is not None and version is not None and version != self._acknowledged:
            subscriber.acknowledge(version)
            self._acknowledged = version

    def _load_from(
        self,
        subscriber: Subscriber,
        session: Session[_Version],
        version: int,
        owner: SessionOwner | None,
        *,
        fallback: bool,
    ) -> Update:
        def load(reading: Reading) -> tuple[_Version, bool]:
            return self._load(reading, session)

        if fallback:
            result = subscriber.load_newest(load, at_most=version, served=self._keepable(version, owner))
        else:
            with subscriber.reading(version) as reading:
                result = LoadedVersion(version, load(reading), [])
                reading.keep()
        new, loaded = result.value
        session.ready = new if loaded else None
        manifest = new.manifest
        return Update(result.version, manifest.kind, manifest.total_bytes, result.skipped, loaded)

    def _keepable(self, version: int, owner: SessionOwner | None) -> tuple[int, tuple[_Version, bool]] | None:
        """Return what is served, where it is older than ``version`` and of the same attempt; else None.

        It may be lost to others: a version that was never durable, or a version that was collected.
        """
        served = self._served
        if served is None or owner is None or served.owner is None or owner.attempt != served.owner.attempt:
            return None
        number = served.version.manifest.version
        return (number, (served.version, False)) if number < version else None

    def _load(self, reading: Reading, session: Session[_Version]) -> tuple[_Version, bool]:
        """Bring the second copy to a version; False where the first one is it."""
        manifest = reading.handoff.manifest
        if self._served is not None and self._served.version.manifest == manifest:
            return self._served.version, False
        if manifest.kind == "lora":
            return self._load_adapter(reading, session), True
        check_fits(reading.handoff, self._arch)
        new = _Version(manifest, contents_of(reading.handoff))
        served = self._known_to(reading)
        if served is not None:
            try:
                self._fill(_while_open(read_model_tensors(reading, served), session), reading)
            except HandoffError as error:
                session.check_open()
                _log.warning("version %d is read whole: %s", manifest.version, error)
            else:
                return new, True
        self._fill(_while_open(read_model_tensors(reading), session), reading)
        return new, True

    def _load_adapter(self, reading: Reading, session: Session[_Version]) -> _Version:
        """Merge an adapter into its base, in the second copy. Unchanged tensors come from the first."""
        check_fits(reading.chain[-2], self._arch)
        adapter = Adapter(reading.chain, reading.tensors())
        served = () if self._served is None else (self._served.version.contents, self._served.model)
        self._fill(_while_open(adapted_tensors(reading, adapter, self._base, *served), session), reading)
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
        """Return the served weights if a delta leads from them to the version; else None."""
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


def _while_open(tensors: Iterable[tuple[str, Tensor]], session: Session[_Version]) -> Iterator[tuple[str, Tensor]]:
    """Give ``tensors`` until the session ends (UpdateOrderError then): its caller has gone, and others wait."""
    for each in tensors:
        session.check_open()
        yield each
