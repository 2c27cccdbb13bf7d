"""Trainer and engines in turns on the same devices: a `hpcrl.trainer.publish.sync.WeightSync` without files.

::

    engines generate ──batch──> engines sleep, trainer back ──> train ──> hand over, trainer to the host ──> generate

The hand-over goes layer by layer. Each rank writes its part of a layer into memory that it shares with the engines,
these copy it, and the trainer's part leaves for the host meanwhile. So at no time there is a second copy of more than
one layer: while the engines' weights grow, those of the trainer become fewer.

Engines are processes of their own, not threads of the trainer: they have another interpreter where they are vLLM, their
HTTP answers while a rank computes, and a supervisor starts and watches them like any others. What that costs is one
copy through the host for each layer; where an engine is on the same accelerator, handles of its memory (IPC) save it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpcrl.modeling.hf import model_tensors
from hpcrl.modeling.memory.arena import Arena, memory_of
from hpcrl.trainer.memory.optimizer import HostAdamW
from hpcrl.trainer.memory.swap import HostSwap
from hpcrl.trainer.parallel.mesh import Parallel
from hpcrl.trainer.publish.colocated_engines import ColocatedEngines
from hpcrl.trainer.publish.layers import ModelLayer, fill, find_layers
from hpcrl.trainer.publish.plan import held_blocks
from hpcrl.trainer.step.muon import Muon
from hpcrl.trainer.step.phases import PhaseClock
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.handover import HandoverLayer, SharedMemory

_log = logging.getLogger(__name__)


class SwapSync:
    """Hands weights over to engines on the same devices. All ranks are on one node."""

    def __init__(
        self,
        parallel: Parallel,
        engines: ColocatedEngines,
        *,
        dtype: torch.dtype,
        emit: Callable[..., Any],
    ) -> None:
        """Prepare; no weights are moved yet.

        Parameters
        ----------
        engines:
            Engines, which rank 0 controls; closed by this object.
        dtype:
            Dtype of the engines' weights.
        emit:
            Writes events, on rank 0.
        """
        self._ranks, self._engines, self._dtype, self._emit = parallel.world, engines, dtype, emit
        self.arena = Arena()
        self._swap = HostSwap(parallel.device, self.arena)
        self._layers: list[ModelLayer] = []
        self._memory: SharedMemory | None = None
        self._next: tuple[TrainerPolicy, int, Callable[[int], None]] | None = None
        self._peak = 0

    def restored(self, policy: TrainerPolicy, step: int) -> None:
        """See `WeightSync`. The orchestrator learns the version with the request for the first batch."""

        def begin() -> None:
            self._engines.wait_reachable()
            self._engines.sleep()

        self._ranks.on_leader(begin, "waiting for the engines")
        self._hand_over(policy, step)

    def begin_step(self, clock: PhaseClock) -> None:
        """Take the devices back."""
        with clock.phase("swap"):
            self._ranks.on_leader(self._engines.sleep, "taking the devices back from the engines")
            self._swap.back()

    def publish(self, policy: TrainerPolicy, version: int, announce: Callable[[int], None]) -> None:
        """Remember the version; the hand-over waits, because a checkpoint may have to copy the weights first."""
        self._next = policy, version, announce

    def end_step(self, clock: PhaseClock) -> None:
        """Give the devices to the engines, with the weights of the step."""
        assert self._next is not None
        (policy, version, announce), self._next = self._next, None
        with clock.phase("swap"):
            self._hand_over(policy, version)
            if self._ranks.rank == 0:
                announce(version)

    def wait(self) -> None:
        """Return at once: a hand-over ends with its step."""

    def close(self) -> None:
        """Let go of threads and shared memory."""
        self._engines.close()
        if self._memory is not None:
            self._memory.close()

    def _hand_over(self, policy: TrainerPolicy, version: int) -> None:
        started = time.monotonic()
        tensors = model_tensors(policy.model)
        memory = self._shared(policy)
        others = list(_beside_weights(policy))
        found = sum(own.size for own in memory_of([*tensors.values(), *others]))
        self.arena.add(device=found - self.arena.device_bytes)
        self._peak = 0
        self._note(0, 0)
        # the engines' memory is free now: first release what they do not read
        self._swap.leave(others)
        self._swap.finish()
        for layer in self._layers:
            self._ranks.all_succeed(partial(fill, layer, tensors, memory), f"gathering {layer.name}")
            # on its way to the host while engines copy it
            self._swap.leave(tensors[shared.name] for shared in layer.tensors)
            message = HandoverLayer(memory.path, layer.tensors)
            held = self._ranks.on_leader(partial(self._engines.load, message), f"handing over {layer.name}")
            self._note(held, layer.size)
        # tensors that no engine reads, such as carried ones
        self._swap.leave(tensors.values())
        self._swap.finish()
        held = self._ranks.on_leader(lambda: self._engines.wake(version), "giving the devices to the engines")
        self._note(held, 0)
        host = sum(self._ranks.gather(self.arena.host_bytes))
        self._emit(
            "trainer.handed_over",
            version=version,
            seconds=time.monotonic() - started,
            device_peak_bytes=self._peak,
            host_bytes=host,
        )

    def _note(self, engines: int, layer: int) -> None:
        """Note what all processes have of the devices together, with a layer between them."""
        self._peak = max(self._peak, sum(self._ranks.gather(self.arena.device_bytes)) + engines + layer)

    def _shared(self, policy: TrainerPolicy) -> SharedMemory:
        """Plan once, and make the memory for the largest layer."""
        if self._memory is not None:
            return self._memory
        ranks = self._ranks
        blocks = held_blocks(model_tensors(policy.model), ranks)
        self._layers = find_layers(policy.model, blocks, ranks.rank, self._dtype)
        made: list[SharedMemory] = []

        def make() -> str:
            made.append(SharedMemory.create(max(layer.size for layer in self._layers)))
            return made[0].path

        path = ranks.on_leader(make, "making memory for layers")

        def open_it() -> None:
            if not made:
                made.append(SharedMemory.open(path))

        ranks.all_succeed(open_it, "opening the memory for layers")
        (self._memory,) = made
        _log.info("%d layers are handed over, the largest has %d bytes", len(self._layers), len(self._memory.data))
        return self._memory


def _beside_weights(policy: TrainerPolicy) -> Iterator[Tensor]:
    """Return gradients and the state of the optimizer that are on the device."""
    for parameter in policy.model.parameters():
        if parameter.grad is not None:
            yield parameter.grad
    if isinstance(policy.optimizer, HostAdamW) or (isinstance(policy.optimizer, Muon) and policy.optimizer.is_on_host):
        return
    for state in policy.optimizer.state.values():
        # counters have no memory worth moving, and may be on the host
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())
