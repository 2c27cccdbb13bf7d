"""The weights of a checkpoint of adapters: those of the start model with the products added, as engines add them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from hpcrl.checkpoints.ledger import CheckpointEntry
from hpcrl.config.lora import LoraConfig
from hpcrl.errors import CheckpointError, UsageError
from hpcrl.modeling.adapters import Adapted, AdapterNames, adapt, adapted_matrices
from hpcrl.modeling.checkpoint_io.load import read_whole
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import adapter_parameters, model_tensors
from hpcrl.modeling.low_rank import add_product
from hpcrl.trainer.state.checkpoint import BASE, load_alone
from hpcrl.trainer.step.base_digest import tensor_digest
from hpcrl.weights.read.model_files import ModelFiles


def holds_adapters(entry: CheckpointEntry) -> bool:
    """Return whether an entry holds adapters but not the weights that they change."""
    return BASE in FileSystemReader(entry.trainer_dir).read_metadata().state_dict_metadata


class MergedWeights:
    """Reads parameters of the model of an entry; bit by bit what engines serve that merge the version of its step."""

    def __init__(
        self,
        entry: CheckpointEntry,
        model: Decoder,
        model_dir: Path,
        lora: LoraConfig,
        *,
        held: torch.dtype,
        published: torch.dtype,
    ) -> None:
        """Give ``model``, which is on ``meta``, adapters; nothing is read.

        Parameters
        ----------
        model_dir:
            Start model that the adapters were trained on.
        held, published:
            Dtype of the trainer's weights, and of published versions.

        Raises
        ------
        UsageError
            The model has not what ``lora`` asks for.
        """
        self._entry, self._model, self._model_dir = entry, model, model_dir
        self._held, self._published = held, published
        # before there are adapters
        self.shapes = {name: tensor.shape for name, tensor in model_tensors(model).items()}
        self._buffers = {name: tensor.dtype for name, tensor in model.named_buffers()}
        adapt(model, lora)
        self._adapted = {adapted.base: adapted for adapted in adapted_matrices(model)}
        self._factors = {name: tensor.shape for name, tensor in adapter_parameters(model).items()}
        self._names = AdapterNames(model)
        self._digest = torch.zeros(1, dtype=torch.int64)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of the model, whole, in the dtype of published versions; buffers in their own.

        One at a time, on the host, in the order of ``names``, and with shapes and names of our parameters (UsageError
        where ``model_dir`` has no whole safetensors files, or other tensors).
        """
        with ModelFiles(self._model_dir) as files:
            for name in names:
                dtype = self._buffers.get(name, self._held)
                base = torch.empty(self.shapes[name], dtype=dtype)
                try:
                    read_whole(files, self._model.adapter, name, base)
                except ValueError as error:
                    raise UsageError(f"{self._model_dir}: {error}") from error
                self._digest += tensor_digest(name, base)
                if name in self._buffers:
                    yield name, base
                    continue
                rounded = base.to(self._published)
                yield name, rounded if name not in self._adapted else self._merged(rounded, self._adapted[name])

    def check_base(self) -> None:
        """Check that the weights read so far, which must be all, are those that the adapters were trained on.

        Raises
        ------
        CheckpointError
            They are others.
        """
        found = {BASE: torch.empty_like(self._digest)}
        load_alone(found, self._entry.trainer_dir)
        if not torch.equal(found[BASE], self._digest):
            raise CheckpointError(
                f"the adapters of checkpoint {self._entry.path} were trained on other weights than those of "
                f"{self._model_dir}\n    hint: --model-dir, a copy of the model that the run began with"
            )

    def _merged(self, base: Tensor, adapted: Adapted) -> Tensor:
        factors = {own: torch.empty(self._factors[own]) for own in (adapted.a, adapted.b)}
        load_alone({"model": factors}, self._entry.trainer_dir)
        parts = {
            region: dict(self._names.to_hf(own, factor.to(self._published)))
            for region, own, factor in (("A", adapted.a, factors[adapted.a]), ("B", adapted.b, factors[adapted.b]))
        }
        merged = torch.empty(base.shape, dtype=self._published)
        targets = dict(self._model.adapter.to_hf(adapted.base, merged))
        for (name, own), a, b in zip(
            self._model.adapter.to_hf(adapted.base, base), parts["A"].values(), parts["B"].values(), strict=True
        ):
            targets[name].copy_(add_product(own.clone(), a, b, adapted.scale))
        return merged
