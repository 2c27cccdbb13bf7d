"""An engine that takes turns on a device with a trainer: it releases weights and KV, and gets them again.

::

    asleep ──load a layer, and the next──> asleep ──wake──> frozen, with a version ──resume──> serves
       └──────────────────────────────────sleep──────────────────────────────────────────────────┘

It starts asleep, with no weights. While it is asleep it answers, and requests wait.
"""

from __future__ import annotations

import threading

import torch

from hpcrl.errors import HandoffError
from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.engine.runner import ModelRunner
from hpcrl.inference.embedded.weights.sessions import UpdateOrderError
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import model_tensors
from hpcrl.modeling.memory.arena import Arena, Memory, give_to_others, memory_of
from hpcrl.modeling.memory.shared import view_of
from hpcrl.weights.handover import HandoverLayer, SharedMemory, SharedTensor


class Turns:
    """Device sharing with a trainer: the state of turns, and the memory that this engine holds.

    Calls may come from any thread; one runs at a time.

    Attributes
    ----------
    arena:
        Counts the memory of weights and KV.
    """

    def __init__(self, engine: Engine, model: Decoder) -> None:
        """Begin asleep: the contents of ``model`` are dropped.

        Parameters
        ----------
        engine:
            Running, and not asked for anything yet.
        model:
            Model that it serves.
        """
        self._engine, self._device = engine, model.embed_tokens.weight.device
        self._tensors = model_tensors(model)
        self._weights = {name: memory_of([tensor]) for name, tensor in self._tensors.items()}
        self._kept: list[Memory] = []
        self.arena = Arena()
        self._lock = threading.Lock()
        self._missing: set[str] = set()
        self._shared: SharedMemory | None = None
        self._asleep = False
        self._version: int | None = None
        self.arena.add(device=sum(memory.size for memory in self._of_weights()))
        self._vacate()

    @property
    def is_asleep(self) -> bool:
        return self._asleep

    @property
    def version(self) -> int | None:
        """Return the policy version of the weights that it has; None while it is asleep."""
        return self._version

    def sleep(self) -> int:
        """Freeze requests and give back weights and KV, between two steps; bytes of the device that are left.

        Asleep already, it forgets what was loaded since.
        """
        with self._lock:
            self._vacate()
            return self.arena.device_bytes

    def load(self, layer: HandoverLayer) -> int:
        """Take memory for a layer and copy it; bytes of the device that this engine has now.

        Raises
        ------
        UpdateOrderError
            It is not asleep.
        HandoffError
            The layer is not of this model, or cannot be read.
        """
        with self._lock:
            if not self._asleep:
                raise UpdateOrderError("weights are loaded while requests run: call /sleep first")
            if self._shared is None or self._shared.path != layer.memory:
                self._let_go()
                self._shared = SharedMemory.open(layer.memory)
            for shared in layer.tensors:
                self._load(shared, self._shared)
            return self.arena.device_bytes

    def wake(self, version: int) -> int:
        """Take memory for KV; bytes of the device that this engine has now. Requests stay frozen until ``/resume``.

        Raises
        ------
        UpdateOrderError
            Weights are missing; or it is awake already, with another version.
        """
        with self._lock:
            if not self._asleep and version != self._version:
                raise UpdateOrderError(
                    f"the engine is awake with version {self._version}: call /sleep before version {version}"
                )
            if self._missing:
                raise UpdateOrderError(
                    f"{len(self._missing)} tensors were not loaded, the first is {min(self._missing)!r}"
                )
            if self._asleep:
                self._engine.vacate(self._take_kept).result()
                self._asleep = False
            self._version = version
            return self.arena.device_bytes

    def close(self) -> None:
        """Let go of shared memory."""
        with self._lock:
            self._let_go()

    def _of_weights(self) -> list[Memory]:
        return [memory for own in self._weights.values() for memory in own]

    def _vacate(self) -> None:
        self._asleep, self._version, self._missing = True, None, set(self._tensors)
        self._engine.vacate(self._give_back).result()

    def _give_back(self, runner: ModelRunner) -> None:
        if not self._kept:
            self._kept = memory_of(runner.kept_tensors())
            self.arena.add(device=sum(memory.size for memory in self._kept))
        for memory in (*self._of_weights(), *self._kept):
            if memory.is_there:
                memory.give_back()
                self.arena.add(device=-memory.size)
        give_to_others(self._device)

    def _take_kept(self, runner: ModelRunner) -> None:
        for memory in self._kept:
            memory.take()
            self.arena.add(device=memory.size)
        for tensor in runner.kept_tensors():
            # masked slots are multiplied by zero, and zero times a NaN in uninitialised memory is NaN
            tensor.zero_()

    @torch.no_grad()
    def _load(self, shared: SharedTensor, memory: SharedMemory) -> None:
        target = self._tensors.get(shared.name)
        if target is None:
            raise HandoffError(f"tensor {shared.name!r} is not part of this model")
        if tuple(target.shape) != shared.shape:
            raise HandoffError(f"tensor {shared.name!r} has shape {shared.shape}, not {tuple(target.shape)}")
        for own in self._weights[shared.name]:
            if not own.is_there:
                own.take()
                self.arena.add(device=own.size)
        target.copy_(view_of(memory, shared))
        self._missing.discard(shared.name)

    def _let_go(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None
