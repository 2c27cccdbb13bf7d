"""vLLM's weight transfer engine for hand-offs: read, verify, then load in place, requests in flight included.

The order of calls is vLLM's: init, start, update, finish. An update with ``stage`` only begins to read, into the host's
memory, while the engine generates; `StagingWorker` says when all is there and verified. The update after that loads in
place, for which requests are frozen. Until all bytes of a hand-off were read and verified nothing is changed, so that a
torn or missing one leaves the served weights as they are. A failure after that leaves a model of two versions, which
must not serve: the worker ends, and its engine is started again on the newest version.

An adapter is merged while it is staged. Where the base is that of the served weights, only blocks of layers that it
changes, or that the one before had changed, are loaded: vLLM loads what it has fused as a whole. Of the base these
blocks are read once, and kept as far as ``kept_base_bytes`` of the command line's ``--additional-config`` goes.

Memory of the host: what each worker loads, from the first byte read to the end of the update. That is a version; of an
adapter the changed blocks; if experts are distributed, a rank's own and all other tensors. Plus the cached base.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hpcrl.inference.adapters import KeptBase
from hpcrl.inference.proof import Proofs
from hpcrl.inference.vllm.running import RunningModel
from hpcrl.inference.vllm.staging import Staged
from hpcrl.inference.vllm.version_memory import VersionMemory
from hpcrl.runs.refusals import gate_from_env
from hpcrl.weights.proof import WeightsProof
from hpcrl.weights.read.adapters import Contents
from hpcrl.weights.read.registration import ReaderIdentity, check_same_reader
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber
from hpcrl.weights.session import SessionOwner, read_owner

_log = logging.getLogger("vllm.hpcrl")
_BROKEN_EXIT = 86
"""Exit code of a worker whose model mixes two versions."""
_NOT_LOADED = "{}: Failed to load weights"
"""vLLM's error message about a layer."""


@dataclass
class HandoffInit(WeightTransferInitInfo):
    """The caller's view of the reader, which must match the one that the engine was started with.

    Attributes
    ----------
    root:
        The only directory that hand-offs are taken from.
    reader:
        Settings and name of the reader, see `hpcrl.weights.read.registration`.
    """

    root: str | None = None
    reader: dict[str, Any] | None = None


@dataclass
class HandoffUpdate(WeightTransferUpdateInfo):
    """Arguments of a call of ``/update_weights``: the version that a worker loads.

    Attributes
    ----------
    path:
        The version directory.
    fallback:
        For engines that can choose an older version; this one cannot.
    stage:
        Only begin to read it.
    session:
        Its owner, see `hpcrl.weights.session`.
    """

    path: str
    fallback: bool = False
    stage: bool = False
    session: list[int] | None = None


class HandoffTransferEngine(WeightTransferEngine[HandoffInit, HandoffUpdate]):
    """Loads hand-offs into one worker's part of the model."""

    init_info_cls = HandoffInit
    update_info_cls = HandoffUpdate

    _subscriber: Subscriber | None = None
    _changed = False
    _staged: Staged | None = None
    _served: Contents | None = None
    """None: weights that no hand-off of this engine has put there."""
    _loaded: Staged | None = None
    _base: KeptBase | None = None
    _memory: VersionMemory | None = None
    _proofs: Proofs | None = None
    _running: RunningModel | None = None
    _newest: SessionOwner | None = None

    def init_transfer_engine(self, init_info: HandoffInit) -> None:
        """Register as a reader of hand-offs. May be called again.

        Raises
        ------
        HandoffError, ValueError
            The readers directory cannot be written; or the caller takes this engine for another one.
        """
        root, own = self._root, self._own_reader()
        if root is None:
            return
        given = {"root": init_info.root, "reader": init_info.reader}
        if own is not None:
            check_same_reader(given, root=root, name=own.name, settings=own.settings)
        elif init_info.reader is not None:
            # an older hpcrl made the plan without this setting: accept only parts of the call that name no other place
            reader = msgspec.convert(init_info.reader, ReaderIdentity)
            own = msgspec.structs.replace(reader, cache_dir=None, fanout_host=None)
        if own is not None and self._subscriber is None:
            gate = gate_from_env("fanout")
            self._subscriber = Subscriber(root, self._name_of(own), own.settings, gate=gate).open()

    @property
    def _root(self) -> Path | None:
        """Return the only directory that hand-offs are taken from; None outside of a run: any."""
        run_dir = os.environ.get("HPCRL_RUN_DIR")
        return None if run_dir is None else Path(run_dir, "weights").resolve()

    @property
    def _told(self) -> dict[str, Any] | None:
        """Return the plan's settings on this engine's command line (``--additional-config``); None outside of a run."""
        told: dict[str, Any] | None = self.vllm_config.additional_config.get("hpcrl")
        return told

    @property
    def _kept_base_bytes(self) -> int:
        """Return the maximum bytes of memory of this worker for the base of adapters."""
        return int((self._told or {}).get("kept_base_bytes", 0))

    def _own_reader(self) -> ReaderIdentity | None:
        """Return the reader's identity of this engine's server, from its command line.

        None: without a registration, so that what is read may be collected meanwhile; and neither shared on the node
        nor taken from another one.
        """
        own = self._told
        if own is None:
            return None
        reader = msgspec.convert(own["reader"], ReaderIdentity)
        if own["servers"] == 1:
            return reader
        return msgspec.structs.replace(reader, name=f"{reader.name}-{self.parallel_config.data_parallel_index}")

    def _name_of(self, identity: ReaderIdentity) -> str:
        """Name this worker as a reader: a server may have several, each with its part of the model."""
        rank = self.parallel_config.rank
        return f"{identity.name}-w{rank}" if self.parallel_config.world_size > 1 else identity.name

    def start_weight_update(self) -> None:
        """Begin a session; the model is not touched before the first bytes are verified."""
        self._changed = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage or load a hand-off. vLLM's own version ends with a synchronisation that the CPU build does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HandoffUpdate) -> None:
        """Begin to read the hand-off, or load it; what was not staged before is read now.

        Raises
        ------
        HandoffError, ValueError
            It is torn, missing, or lies elsewhere, or its session is older than another one; the model is as it was.
        """
        owner = read_owner(update_info.session)
        if owner is not None and self._newest is not None and owner < self._newest:
            raise ValueError(f"session {owner} is older than session {self._newest}, which has begun before")
        self._newest = owner or self._newest
        path = Path(update_info.path).resolve()
        root = self._root
        if root is not None and path.parent != root:
            raise ValueError(f"{path} is outside of {root}")
        known = self._staged is not None and self._staged.path == path and self._staged.served == self._served
        if not known or update_info.stage:
            self._drop()  # free its memory before new memory is allocated
            subscriber = self._subscriber or Subscriber(path.parent, None, ReaderSettings())
            # experts that move from rank to rank may be anywhere when they are loaded
            held = None if self.parallel_config.enable_eplb else _held_experts(self.model)
            self._base = self._base or KeptBase(self._kept_base_bytes)
            self._memory = self._memory or VersionMemory(self.device)
            loads = partial(_is_held, held)
            self._staged = Staged(path, self._served, subscriber, loads, self._base, memory=self._memory)
        if update_info.stage:
            return
        staged, self._staged = self._staged, None
        assert staged is not None
        waited = time.monotonic()
        tensors = staged.take()
        started = time.monotonic()
        try:
            self._changed, self._served, self._loaded = True, None, staged
            initialize_layerwise_reload(self.model)
            loaded = self.model.load_weights(iter(tensors))
            if loaded is not None and not loaded:
                raise ValueError("the model knows none of the tensors")
        except BaseException:  # noqa: BLE001  whatever it was, the model is half old and half new
            self._die(f"loading {path} failed half-way")
        _log.info(
            "%s: read and verified in %.3f s, waited for %.3f s, loaded %d tensors in %.3f s, kept %d, "
            "other ranks' %d, %d bytes of a base stay",
            path.name,
            staged.seconds,
            started - waited,
            len(tensors),
            time.monotonic() - started,
            staged.kept,
            staged.elsewhere,
            0 if self._base is None else self._base.bytes,
        )

    def has_staged(self, path: str) -> bool:
        """Return whether ``path`` can be loaded, or be refused, without waiting."""
        return self._staged is not None and self._staged.path == Path(path).resolve() and self._staged.done

    def staged_problem(self, path: str) -> str:
        """Return why ``path``, which was read, cannot be loaded; empty if it can."""
        if not self.has_staged(path):
            return "it was not read"
        assert self._staged is not None
        return self._staged.problem

    def prove(self, path: Path, before: Path | None, number: int) -> WeightsProof:
        """Compare samples of a version with what this worker runs, see `hpcrl.inference.proof`."""
        if self._changed:
            return WeightsProof(state="unknown", why="its weights change just now")
        if self._running is None or self._proofs is None:
            self._running = RunningModel(self.model)
            gate = None if self._told is None else gate_from_env("fanout")
            self._proofs = Proofs(self._running.can_compare, self._root, gate)
        return self._proofs.prove(path, before, number, self._running.compare)

    def finish_weight_update(self) -> None:
        """Bring the loaded weights into the form that the kernels use."""
        if not self._changed:
            return
        try:
            with _without_false_alarms(self.model, is_whole=self._loaded is None or not self._loaded.kept):
                finalize_layerwise_reload(self.model, self.vllm_config.model_config)
        except BaseException:  # noqa: BLE001  the same
            self._die("finishing a weight update failed")
        self._changed = False
        loaded, self._loaded = self._loaded, None
        assert loaded is not None
        self._served = loaded.contents
        self._wait_for_device()
        loaded.drop()
        if self._subscriber is not None:
            self._subscriber.acknowledge(loaded.version)

    def shutdown(self) -> None:
        """Drop what was staged, and unregister."""
        self._drop()
        if self._subscriber is not None:
            self._subscriber.close()
        self._subscriber = None

    def _drop(self) -> None:
        if self._staged is not None:
            self._staged.drop()
        self._staged = None

    def _die(self, what: str) -> None:
        """End this worker at once, and with it the engine, so that a model of mixed versions serves no request."""
        _log.critical("%s; the model has weights of two versions, so this engine ends", what, exc_info=True)
        os._exit(_BROKEN_EXIT)


class StagingWorker:
    """Calls that workers answer in addition to vLLM's own (``--worker-extension-cls``)."""

    weight_transfer_engine: Any
    finish_weight_update: Any

    def abandon_weight_update(self) -> None:
        """End a session that an earlier attempt has left, so that the next can begin: vLLM has one at a time.

        Weights that were loaded in it are brought into their final form; they are the next attempt's to replace.
        """
        # vLLM raises RuntimeError if no update was open; if finishing itself fails, the worker ends
        with contextlib.suppress(RuntimeError):
            self.finish_weight_update()

    def staged_handoff(self, path: str) -> bool:
        """See `HandoffTransferEngine.has_staged`."""
        return bool(self.weight_transfer_engine.has_staged(path))

    def staged_problem(self, path: str) -> str:
        """See `HandoffTransferEngine.staged_problem`; asked of wide replicas, whose ranks must all have it."""
        return str(self.weight_transfer_engine.staged_problem(path))

    def prove_weights(self, path: str, before: str, number: str) -> dict[str, Any]:
        """See `HandoffTransferEngine.prove`; asked again while the answer is ``reading``."""
        proof = self.weight_transfer_engine.prove(Path(path), Path(before) if before else None, int(number))
        return dict(msgspec.to_builtins(proof))


def _held_experts(model: torch.nn.Module) -> set[int] | None:
    """Return the experts that this rank holds, equal in all layers; None if the model has none."""
    held: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            held |= set(layer.expert_map_manager.get_local_expert_ids())
    return held or None


def _is_held(experts: set[int] | None, name: str) -> bool:
    """Return whether a rank with these experts loads the tensor ``name``, by vLLM's own rule for model files."""
    return not should_skip_weight(name, experts)


@contextlib.contextmanager
def _without_false_alarms(model: torch.nn.Module, *, is_whole: bool) -> Iterator[None]:
    """Drop vLLM's warning "Failed to load weights" of layers that have none, or were to stay as they are.

    vLLM counts all tensors of a layer as something to load, also what it computes itself when it is built: the tables
    of rotary embeddings, which no model file holds. It puts these back as they were, which is right. A layer with a
    parameter, or with a buffer that belongs to the model, is still warned about, if the whole model was loaded.
    """
    computed: set[str] = set()
    others: set[str] = set()
    for layer in model.modules():
        stored = set(layer._buffers) - layer._non_persistent_buffers_set
        (others if layer._parameters or stored else computed).add(type(layer).__name__)
    kept = computed - others if is_whole else computed | others
    false_alarms = {_NOT_LOADED.format(name) for name in kept}

    def wanted(entry: logging.LogRecord) -> bool:
        return entry.getMessage() not in false_alarms

    logger = logging.getLogger(finalize_layerwise_reload.__module__)
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
