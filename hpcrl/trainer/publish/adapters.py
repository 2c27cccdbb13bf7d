"""Publishing adapters: the weights that they change once, as version 0, then versions of kind ``lora``."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Unpack

from torch import nn

from hpcrl.config.lora import LoraConfig
from hpcrl.modeling.adapters import AdapterNames
from hpcrl.modeling.decoder import Decoder
from hpcrl.models.adapting import unread_by_peft
from hpcrl.trainer.parallel.mesh import Parallel
from hpcrl.trainer.publish.published import OnPublished, PublisherSettings
from hpcrl.trainer.publish.publisher import Publisher
from hpcrl.trainer.publish.version_writer import AdapterForm
from hpcrl.weights.read.adapters import ADAPTER_CONFIG, ADAPTER_MODEL, CANARY
from hpcrl.weights.store import HandoffStore
from hpcrl.weights.write.lora import adapter_config

BASE_VERSION = 0
"""The start model, which is what adapters of every version are merged into."""

_log = logging.getLogger(__name__)


class AdapterPublisher(Publisher):
    """A `Publisher` of adapters. All ranks call every method together.

    The version of the model itself is published by a publisher of its own, before the first adapter, and its memory is
    given back; it stays in the store for as long as an adapter needs it. Adapters are published in the dtype of
    versions, by all ranks, like weights.
    """

    def __init__(
        self,
        store: HandoffStore,
        parallel: Parallel,
        *,
        lora: LoraConfig,
        model_dir: Path,
        canary: Callable[[nn.Module, int], bytes | None] = lambda model, version: None,
        **settings: Unpack[PublisherSettings],
    ) -> None:
        """As `Publisher`, with its ``settings``; collective.

        Parameters
        ----------
        lora:
            Rank and scale of the adapters.
        model_dir:
            See `Publisher`.
        canary:
            Makes what engines are to be compared with once they have a version (`hpcrl.weights.format.canary`); None
            where nothing is to be compared. Called on all ranks, before the version is copied.
        """
        super().__init__(store, parallel, model_dir=model_dir, **settings)
        self._lora, self._canary, self._model_dir = lora, canary, model_dir
        # the base is read once: its share of memory is given back, and not registered
        base_settings: PublisherSettings = {**settings, "fabric": None}
        self._base_publisher = partial(Publisher, store, parallel, model_dir=model_dir, **base_settings, beside=self)
        self._kind, self._only_file = "lora", ADAPTER_MODEL
        self._has_base = False

    def publish(
        self,
        model: nn.Module,
        version: int,
        on_published: OnPublished = lambda published: None,
        *,
        durable: bool = True,
    ) -> None:
        """See `Publisher.publish`; version 0 is the model without adapters, for which it waits."""
        self.wait()
        if version == BASE_VERSION:
            self._publish_base(model, on_published)
            return
        self._provide_base(model)
        if not isinstance(self._names, AdapterNames):
            assert isinstance(model, Decoder)
            self._names = AdapterNames(model)
            self._tell_unread(model)
        self._prepare(model)
        assert self._writer is not None
        files = {ADAPTER_CONFIG: self._config()}
        if (canary := self._canary(model, version)) is not None:
            files[CANARY] = canary
        self._writer.adapter = AdapterForm(BASE_VERSION, files)
        super().publish(model, version, on_published, durable=durable)

    def _tell_unread(self, model: Decoder) -> None:
        """Log which adapters of the versions PEFT would ignore; engines of this project merge all of them."""
        unread = unread_by_peft(model.arch.facts, self._lora.targets)
        if unread and self._ranks.rank == 0:
            _log.warning(
                "PEFT leaves out the adapters of %s in published versions of this model (huggingface/peft#3711); "
                "engines read all of them, and hpcrl checkpoint export writes the merged model for others",
                " and ".join(unread),
            )

    def _publish_base(self, model: nn.Module, on_published: OnPublished) -> None:
        publisher = self._base_publisher()
        publisher.publish(model, BASE_VERSION, on_published)
        publisher.wait()
        self._has_base = True

    def _provide_base(self, model: nn.Module) -> None:
        """Publish version 0 again if it is damaged or missing: a run can continue in a store that was emptied."""
        if self._has_base:
            return

        def look() -> bool:
            if self.is_intact(BASE_VERSION):
                return True
            self.output.put_aside(BASE_VERSION)
            return False

        self._has_base = self._ranks.on_leader(look, "looking for the version that adapters change")
        if not self._has_base:
            self._publish_base(model, lambda published: None)

    def _config(self) -> bytes:
        assert isinstance(self._names, AdapterNames)
        config = adapter_config(
            rank=self._lora.rank,
            alpha=self._lora.alpha,
            modules=self._names.modules,
            base_model=str(self._model_dir),
        )
        return json.dumps(config, indent=2).encode() + b"\n"
