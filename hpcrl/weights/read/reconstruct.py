"""Read the tensors of a version of any kind straight from its files, without a registration: for tools and tests."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.errors import HandoffError
from hpcrl.weights.read.assemble import StoredTensor, assemble
from hpcrl.weights.store import HandoffStore


def read_tensors(store: HandoffStore, version: int) -> Iterator[StoredTensor]:
    """Read the tensors of a version, one at a time, in the order in which its whole ancestor stores them.

    Files are read, not mapped: a mapped file that is truncated or withdrawn on a shared filesystem kills the process
    with SIGBUS, a read gives an error. Memory: one tensor and its changes. The caller ensures that the version is not
    collected meanwhile; engines read through `hpcrl.weights.read.subscriber`, which leases it.

    Parameters
    ----------
    store:
        Store that has the version.
    version:
        Its number. For an adapter the tensors are its own, not those of the merged model.

    Raises
    ------
    HandoffError
        A file is missing, short or wrong.
    """
    last = store.open(version)
    needs = () if last.manifest.kind == "lora" else last.manifest.needs
    chain = [*(store.open(needed) for needed in needs), last]
    paths = {handoff.version: handoff.path for handoff in chain}

    def read(version: int, file: str, offset: int, size: int) -> memoryview:
        path, data = paths[version] / file, bytearray(size)
        try:
            with path.open("rb", buffering=0) as stream:
                stream.seek(offset)
                view = memoryview(data)
                while view.nbytes and (got := stream.readinto(view)):
                    view = view[got:]
        except OSError as error:
            raise HandoffError(f"{path} cannot be read: {error}") from error
        if view.nbytes:
            raise HandoffError(f"{path} ends too early")
        return memoryview(data)

    yield from assemble(chain, read, check_all=True)
