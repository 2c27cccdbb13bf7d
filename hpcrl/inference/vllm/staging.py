"""A version on its way into a worker's host memory, read by a thread while the engine generates.

Only what the worker will load is read: of the experts those that its rank holds, of a version with a merged adapter the
blocks that differ from what is served, as far as they were not kept from the adapter before. It comes by way of the
node's cache and of other nodes where the run says so (`hpcrl.weights.read.subscriber`), and is copied out of the cache,
which is a window that moves on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch

from hpcrl.errors import HandoffError
from hpcrl.inference.adapters import Adapter, KeptBase, as_tensor
from hpcrl.inference.finite import finite_tensors
from hpcrl.inference.vllm.version_memory import Lease, VersionMemory
from hpcrl.weights import HandoffStore
from hpcrl.weights.read.adapters import Contents, adapter_blocks, contents_of
from hpcrl.weights.read.subscriber import Reading, Subscriber


class Staged:
    """A version that a thread reads into memory.

    Attributes
    ----------
    path, version:
        The version directory, and its number.
    served:
        Contents that the worker serves, and that are therefore not read again.
    contents:
        Contents that it will serve; None until it was read.
    kept:
        Tensors of the model that stay as they are, and are not read.
    elsewhere:
        Tensors that this worker does not hold, and does not read.
    """

    def __init__(
        self,
        path: Path,
        served: Contents | None,
        subscriber: Subscriber,
        loads: Callable[[str], bool],
        base: KeptBase | None = None,
        *,
        memory: VersionMemory | None = None,
    ) -> None:
        """Begin to read.

        Parameters
        ----------
        path:
            Version directory, below the subscriber's root.
        served:
            See above; None if that is unknown.
        loads:
            Whether the worker loads the tensor of that name.
        base:
            Cache of base tensors of adapters, which also takes new ones. None: all is read.
        memory:
            Memory for the tensors. None: ordinary memory.

        Raises
        ------
        ValueError
            ``path`` is not a version directory.
        """
        self.path, self.version, self.served = path, HandoffStore(path.parent).version_of(path), served
        self.contents: Contents | None = None
        self.kept = self.elsewhere = 0
        self.seconds = 0.0
        self._subscriber, self._loads = subscriber, loads
        self._base = KeptBase(limit_bytes=0) if base is None else base
        self._memory = VersionMemory(torch.device("cpu")) if memory is None else memory
        self._lease: Lease | None = None
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._failure: Exception | None = None
        self._unwanted = threading.Event()
        self._ending = threading.Lock()
        # a daemon: a worker must be able to end while a filesystem hangs
        self._thread = threading.Thread(target=self._read, name=f"stage-{path.name}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Return whether the read has ended, successfully or not."""
        return not self._thread.is_alive()

    @property
    def problem(self) -> str:
        """Return why it cannot be loaded; empty if it can, or if that is not known yet."""
        return "" if self._failure is None else str(self._failure) or type(self._failure).__name__

    def take(self) -> list[tuple[str, torch.Tensor]]:
        """Wait for the end and hand the tensors out, once, by published names and as they are stored, on the host.

        Raises
        ------
        HandoffError
            They cannot be had; or whatever else reading them raised.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        tensors, self._tensors = self._tensors, []
        return tensors

    def drop(self) -> None:
        """Stop reading with the next tensor, and give the memory back: tensors that were handed out end with it.

        Call it once the version is abandoned, or all copies from its tensors are finished.
        """
        with self._ending:
            self._unwanted.set()
            self._tensors = []
            lease, self._lease = self._lease, None
        if lease is not None:
            self._memory.give_back(lease)

    def _read(self) -> None:
        started = time.monotonic()
        try:
            lease = self._memory.lend()
            try:
                tensors = self._read_into(lease)
            except BaseException:
                self._memory.give_back(lease)
                raise
            with self._ending:
                # until here only this thread writes to the memory, so only it can give it back
                wanted = not self._unwanted.is_set()
                if wanted:
                    self._tensors, self._lease = tensors, lease
            if not wanted:
                self._memory.give_back(lease)
        except Exception as error:  # noqa: BLE001 - raised by `take`, in the worker's own thread
            self._failure = error
        self.seconds = time.monotonic() - started

    def _read_into(self, lease: Lease) -> list[tuple[str, torch.Tensor]]:
        """Return copies of the tensors in ``lease``; fewer if the version was abandoned."""
        tensors: list[tuple[str, torch.Tensor]] = []
        with self._subscriber.reading(self.version) as reading:
            adapted = reading.handoff.manifest.kind == "lora"
            found = self._adapted(reading) if adapted else self._stored(reading)
            own = ((name, lease.copy_of(tensor)) for name, tensor in found)
            for tensor in finite_tensors(own, self.path):
                if self._unwanted.is_set():
                    return tensors
                tensors.append(tensor)
            if not tensors:
                raise HandoffError(f"{self.path} holds no tensor")
            # the version stays until a newer one is served: a delta may be made against it
            reading.keep()
        return tensors

    def _stored(self, reading: Reading) -> Iterator[tuple[str, torch.Tensor]]:
        self.contents = contents_of(reading.handoff)
        for stored in reading.tensors(only=self._held(reading.handoff.manifest.tensors)):
            yield stored.name, as_tensor(stored)

    def _adapted(self, reading: Reading) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors of the base with the adapter merged, if they may differ from those that are served."""
        adapter = Adapter(reading.chain, reading.tensors())
        names = reading.chain[-2].manifest.tensors
        different = adapter.contents.different_from(self.served)
        changed = names if different is None else adapter_blocks(different, names)
        self.kept = len(names) - len(changed)
        self.contents = adapter.contents
        again = adapter_blocks(adapter.contents.changed, names)
        tensors = self._base.tensors(reading, adapter.contents.base, self._held(changed), again)
        yield from adapter.merged(tensors)

    def _held(self, names: Collection[str]) -> Collection[str]:
        """Give those of ``names`` that the worker loads."""
        held = {name for name in names if self._loads(name)}
        self.elsewhere = len(names) - len(held)
        return held
