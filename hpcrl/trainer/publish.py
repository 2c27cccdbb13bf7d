"""Publishing the trainer's weights as a policy version: every rank writes one shard, rank 0 completes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpcrl.errors import HandoffError
from hpcrl.fs import StagedDirectory
from hpcrl.models.arch import ModelArch
from hpcrl.trainer.models.hf import to_hf_tensors
from hpcrl.trainer.parallel import Parallel
from hpcrl.weights.shard import TensorBytes, write_shard
from hpcrl.weights.store import HandoffStore, ShardResult

__all__ = ["Publisher", "tensor_bytes"]


def tensor_bytes(name: str, tensor: Tensor, dtype: torch.dtype) -> TensorBytes:
    """``tensor`` as it is written, converted to ``dtype``; no copy is made where none is needed."""
    data = tensor.detach().to("cpu", dtype).contiguous()
    # bfloat16 has no numpy type: hand over bytes
    raw = data.reshape(-1).view(torch.uint8).numpy()
    return TensorBytes(name, str(dtype).removeprefix("torch."), tuple(data.shape), raw.data)


class Publisher:
    """Publishes versions of one run. All ranks call every method together."""

    def __init__(self, store: HandoffStore, *, arch: ModelArch, model_dir: Path, dtype: torch.dtype, attempt: int):
        """Prepare; nothing is written.

        Parameters
        ----------
        store:
            Where versions go.
        arch:
            Of the model.
        model_dir:
            Start model, whose configuration and tokenizer every version carries.
        dtype:
            Of the published tensors.
        attempt:
            Of the run; names the staging directories.
        """
        self._store, self._arch, self._model_dir, self._dtype = store, arch, model_dir, dtype
        self._attempt = attempt

    def is_intact(self, version: int) -> bool:
        """Whether ``version`` is published and every byte of it is right (a local question)."""
        try:
            self._store.open(version).verify(content=True)
        except HandoffError:
            return False
        return True

    def publish(self, model: nn.Module, version: int, parallel: Parallel) -> None:
        """Write ``version`` from a sharded ``model``; on return, every reader can see it.

        A parameter is gathered at a time, and rank ``i % world_size`` keeps the ``i``-th, so that all ranks
        write in parallel and none holds the whole model.

        Raises
        ------
        OSError, HandoffError, PeerLostError
            On every rank, when any rank failed. What was staged is removed and earlier versions are untouched.
        """
        stage = self._store.stage(version, token=f"attempt-{self._attempt:04d}")
        parallel.on_leader(stage.create, f"preparing version {version}")
        try:
            tensors = list(self._shard(model, parallel))
            name = f"model-{parallel.rank + 1:05d}-of-{parallel.world_size:05d}.safetensors"
            shards = parallel.all_succeed(
                lambda: ShardResult(name, *write_shard(stage.path / name, tensors)), f"writing version {version}"
            )
            parallel.on_leader(lambda: self._complete(stage, version, shards), f"completing version {version}")
        except BaseException:
            if parallel.rank == 0:
                stage.discard()
            raise

    def _shard(self, model: nn.Module, parallel: Parallel) -> Iterator[TensorBytes]:
        """What this rank writes; gathering is a collective for each parameter."""
        for i, (name, parameter) in enumerate(model.named_parameters()):
            full = parameter.detach()
            if isinstance(full, DTensor):
                full = full.full_tensor()
            if i % parallel.world_size == parallel.rank:
                for hf_name, tensor in to_hf_tensors(name, full, self._arch):
                    yield tensor_bytes(hf_name, tensor, self._dtype)

    def _complete(self, stage: StagedDirectory, version: int, shards: list[ShardResult]) -> None:
        config = json.loads((self._model_dir / "config.json").read_bytes())
        config.pop("torch_dtype", None)  # the name before transformers 5
        config["dtype"] = str(self._dtype).removeprefix("torch.")
        self._store.publish(
            stage,
            version=version,
            shards=shards,
            model_dir=self._model_dir,
            producer=f"trainer attempt {self._attempt}",
            metadata={"config.json": json.dumps(config, indent=2).encode() + b"\n"},
        )
