"""Settings of a publisher, and its report on a version."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NotRequired, TypedDict

import torch

from hpcrl.config.handoff import HandoffConfig
from hpcrl.models.arch import ModelArch
from hpcrl.trainer.publish.fabric_serving import FabricPlace
from hpcrl.weights.format.manifest import Kind
from hpcrl.weights.format.quantise import QuantisedModules


class Published(NamedTuple):
    """A version that every reader can have.

    Attributes
    ----------
    version, kind:
        See its manifest.
    instead_of_delta:
        Reason why a full version was published instead of a delta; empty otherwise.
    off_fabric:
        Reason why it is not served over the fabric, where it should be; empty otherwise.
    durable:
        Whether it is in the store. Otherwise it is announced, and ends with the trainer.
    off_fabric_versions:
        Versions in a row, up to this one, that are not served over the fabric.
    """

    version: int
    kind: Kind
    instead_of_delta: str = ""
    off_fabric: str = ""
    durable: bool = True
    off_fabric_versions: int = 0


OnPublished = Callable[[Published], None]


class PublisherSettings(TypedDict):
    """Keywords of `hpcrl.trainer.publish.publisher.Publisher`, without the start model."""

    arch: ModelArch
    dtype: torch.dtype
    attempt: int
    settings: HandoffConfig
    quantised: NotRequired[QuantisedModules | None]
    acknowledged: NotRequired[Callable[[], int | None] | None]
    wanted: NotRequired[Callable[[], int | None] | None]
    on_wait: NotRequired[Callable[[], None]]
    on_refused: NotRequired[Callable[[str], None]]
    fabric: NotRequired[FabricPlace | None]
    chunk_bytes: NotRequired[int]
