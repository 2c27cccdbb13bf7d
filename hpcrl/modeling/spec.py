"""Families behind one interface: how a model is built, sharded, and named when it is published.

Trainer, publishing, checkpoints and embedded engine take a model from here and know no class of it. A family is one
`ModelSpec` in `SPECS`; its facts without torch are those of its `hpcrl.models.arch.ModelArch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from hpcrl.extend import ExtensionError, import_object
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.families.deepseek import deepseek_v3_block, glm4_moe_block, glm_moe_dsa_block
from hpcrl.modeling.families.dense import dense_block
from hpcrl.modeling.families.gated_delta import (
    SharedExpertNames,
    qwen3_5_block,
    qwen3_5_moe_block,
    qwen3_next_block,
)
from hpcrl.modeling.families.gpt_oss import FusedNames, gpt_oss_block
from hpcrl.modeling.families.minimax import MixtralNames, minimax_m2_block
from hpcrl.modeling.families.nemotron import BackboneNames, nemotron_h_block
from hpcrl.modeling.families.qwen3 import qwen3_moe_block
from hpcrl.modeling.hf import HfAdapter
from hpcrl.models.arch import (
    DeepseekV3Arch,
    Glm4MoeArch,
    GlmMoeDsaArch,
    GptOssArch,
    LlamaArch,
    MinimaxM2Arch,
    MistralArch,
    ModelArch,
    NemotronHArch,
    Qwen2Arch,
    Qwen3Arch,
    Qwen3MoeArch,
    Qwen3NextArch,
    Qwen35Arch,
    Qwen35MoeArch,
)
from hpcrl.models.external import external_family

if TYPE_CHECKING:
    from hpcrl.modeling.parallel.mesh import ParallelDims


class Parallelize(Protocol):
    """Shards a model in place over a mesh."""

    def __call__(self, model: nn.Module, mesh: ParallelDims, *, dtype: torch.dtype, on_host: bool = False) -> None: ...


def _parallelize_decoder(model: nn.Module, mesh: ParallelDims, *, dtype: torch.dtype, on_host: bool = False) -> None:
    # late: an engine shards nothing, and importing FSDP2 would cost half a second of its start
    from hpcrl.modeling.parallelize import parallelize_decoder  # noqa: PLC0415

    parallelize_decoder(model, mesh, dtype=dtype, on_host=on_host)


@dataclass(frozen=True)
class ModelSpec:
    """A family of models.

    Attributes
    ----------
    arch:
        Its sizes, which also read and write its ``config.json`` and give the planner's facts.
    block:
        Makes the layer of a number.
    adapter:
        Makes the map to and from published names.
    parallelize:
        Shards a model of the family.
    """

    arch: type[ModelArch]
    block: Callable[[Any, int], nn.Module]
    adapter: Callable[[ModelArch], HfAdapter] = HfAdapter
    parallelize: Parallelize = _parallelize_decoder

    def build(
        self, arch: ModelArch, *, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32
    ) -> Decoder:
        """Build a model with uninitialised weights.

        Parameters
        ----------
        arch:
            Architecture of this family.
        device:
            ``meta`` takes no memory: shard the model, then `Decoder.materialise` it.
        dtype:
            Dtype of parameters; buffers (what routers add to scores) are always float32.
        """
        assert isinstance(arch, self.arch), type(arch)
        with torch.device("meta"):
            model = Decoder(arch, self.adapter(arch), lambda layer: self.block(arch, layer))
            if dtype != torch.float32:
                model.to(dtype)
                for module in model.modules():
                    for name, buffer in module.named_buffers(recurse=False):
                        module.register_buffer(name, buffer.float())
                model.tie_weights()
        if torch.device(device).type != "meta":
            model.materialise(device)
        return model


SPECS: tuple[ModelSpec, ...] = (
    ModelSpec(DeepseekV3Arch, deepseek_v3_block),
    ModelSpec(Glm4MoeArch, glm4_moe_block),
    ModelSpec(GlmMoeDsaArch, glm_moe_dsa_block),
    ModelSpec(GptOssArch, gpt_oss_block, FusedNames),
    ModelSpec(LlamaArch, dense_block),
    ModelSpec(MinimaxM2Arch, minimax_m2_block, MixtralNames),
    ModelSpec(MistralArch, dense_block),
    ModelSpec(NemotronHArch, nemotron_h_block, BackboneNames),
    ModelSpec(Qwen2Arch, dense_block),
    ModelSpec(Qwen3Arch, dense_block),
    ModelSpec(Qwen3MoeArch, qwen3_moe_block),
    ModelSpec(Qwen3NextArch, qwen3_next_block, SharedExpertNames),
    ModelSpec(Qwen35Arch, qwen3_5_block),
    ModelSpec(Qwen35MoeArch, qwen3_5_moe_block, SharedExpertNames),
)
"""All families that can be run."""


def spec_of(arch: ModelArch) -> ModelSpec:
    """Return the family of ``arch``.

    Raises
    ------
    ExtensionError
        The family is that of another package, whose torch side cannot be imported or is of another family.
    """
    for spec in SPECS:
        if spec.arch is type(arch):
            return spec
    external = external_family(arch.MODEL_TYPES[0])
    assert external is not None, f"{type(arch)} is of no family"
    found = import_object(external.spec)
    if not isinstance(found, ModelSpec) or found.arch is not type(arch):
        raise ExtensionError(f"{external.spec} is not a ModelSpec of {type(arch).__name__}", "see docs/extending.md")
    return found


def build_model(arch: ModelArch, *, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32) -> Decoder:
    """Build the model of ``arch`` with `ModelSpec.build` of its family."""
    return spec_of(arch).build(arch, device=device, dtype=dtype)
