"""One rank of torchtitan's own trainer (0.3.0) on CPU: four patches, each where its code takes CUDA for granted.

1. Its device type is set before anything else of it is imported, and its memory monitor gets a device to ask.
2. Its attention is flex or varlen, whose backward passes do not run on CPU: causal SDPA over equal sequences instead.
3. gloo cannot scale in a reduction: FSDP2 is told to sum.
4. Its experts are always in bfloat16: in float32 here, as all else is in each of the trainers. Without that a
   processor with instructions for bfloat16 does less work for it than for the others, any other one five times more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as titan_utils


class CpuDevice:
    """What torchtitan asks of a device's module and `torch.cpu` does not have; the rest is `torch.cpu`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def get_device_properties(self, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1)

    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, *_: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass


titan_utils.device_type, titan_utils.device_module = "cpu", CpuDevice()
from sizes import COMMON, MODELS, batch, case, measure, status_mib  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.models import deepseek_v3, qwen3  # noqa: E402
from torchtitan.models.common import (  # noqa: E402
    ComplexRoPE,
    CosSinRoPE,
    Embedding,
    Linear,
    config_utils,
    moe,
)
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.nn_modules import RMSNorm  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

INIT: dict[str, Any] = {"weight": nn.init.normal_}


def experts_in_float32(self: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``GroupedExperts.forward`` without its casts to bfloat16, and so of the same products."""
    gate, down, up = (getattr(self, name) for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
    if isinstance(gate, DTensor):
        gate, down, up = gate.to_local(), down.to_local(), up.to_local()
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    activated = functional.silu(self._grouped_mm(A=rows, B_t=gate.transpose(-2, -1), offs=ends))
    mixed = activated * self._grouped_mm(A=rows, B_t=up.transpose(-2, -1), offs=ends)
    found: torch.Tensor = self._grouped_mm(A=mixed, B_t=down.transpose(-2, -1), offs=ends)
    return found


moe.GroupedExperts.forward = experts_in_float32


class NoTokenizer(BaseTokenizer):
    """There is no text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class SameBatch(BaseDataLoader):
    """The batch of the bench, again and again."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, **_: Any) -> None:
        self._ids = batch(case(), dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        labels = torch.roll(self._ids, -1, 1)
        labels[:, -1] = -100
        positions = torch.arange(self._ids.shape[1]).expand_as(self._ids)
        while True:
            yield {"input": self._ids.clone(), "positions": positions.clone()}, labels.clone()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def model_spec(name: str) -> ModelSpec:
    """The model of the bench, in torchtitan's own builders."""
    sizes = {**MODELS[name], **COMMON}
    for module in (config_utils, qwen3, deepseek_v3):
        module.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    common: dict[str, Any] = {
        "n_layers": sizes["num_hidden_layers"],
        "dim": sizes["hidden_size"],
        "n_heads": sizes["num_attention_heads"],
        "attn_backend": "sdpa",
    }
    if name == "deepseek_v3":
        rope = ComplexRoPE.Config(dim=sizes["qk_rope_head_dim"], max_seq_len=2048, theta=sizes["rope_theta"])
        layers = deepseek_v3._build_dsv3_layers(
            **common,
            n_dense_layers=sizes["first_k_dense_replace"],
            q_lora_rank=sizes["q_lora_rank"],
            kv_lora_rank=sizes["kv_lora_rank"],
            qk_nope_head_dim=sizes["qk_nope_head_dim"],
            qk_rope_head_dim=sizes["qk_rope_head_dim"],
            v_head_dim=sizes["v_head_dim"],
            mscale=1.0,
            dense_hidden_dim=sizes["intermediate_size"],
            moe_hidden_dim=sizes["moe_intermediate_size"],
            num_experts=sizes["n_routed_experts"],
            num_shared_experts=sizes["n_shared_experts"],
            router_top_k=sizes["num_experts_per_tok"],
            router_score_func="sigmoid",
            router_num_expert_groups=sizes["n_group"],
            router_num_limited_groups=sizes["topk_group"],
            router_route_norm=True,
            moe_comm_backend="standard",
            non_blocking_capacity_factor=None,
            rope=rope,
        )
        own, kind = deepseek_v3, deepseek_v3.DeepSeekV3Model
    else:
        rope = CosSinRoPE.Config(dim=sizes["head_dim"], max_seq_len=2048, theta=sizes["rope_theta"])
        common |= {"n_kv_heads": sizes["num_key_value_heads"], "head_dim": sizes["head_dim"], "rope": rope}
        if name == "qwen3":
            layers = qwen3._build_qwen3_layers(**common, hidden_dim=sizes["intermediate_size"])
        else:
            layers = qwen3._build_qwen3_moe_layers(
                **common,
                moe_hidden_dim=sizes["moe_intermediate_size"],
                num_experts=sizes["num_experts"],
                top_k=sizes["num_experts_per_tok"],
                moe_comm_backend="standard",
            )
        own, kind = qwen3, qwen3.Qwen3Model
    dim, vocab = sizes["hidden_size"], sizes["vocab_size"]
    config = kind.Config(
        vocab_size=vocab,
        dim=dim,
        norm=RMSNorm.Config(normalized_shape=dim, eps=sizes["rms_norm_eps"], param_init={"weight": nn.init.ones_}),
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=qwen3._EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )
    known = own.model_registry("debugmodel")
    known.model, known.post_optimizer_build_fn = config, None  # RL does not move a router's bias either
    return known


def main() -> None:
    torch.set_num_threads(1)
    spec = case()
    loss = CrossEntropyLoss.Config(global_vocab_size=MODELS[spec["model"]]["vocab_size"])
    config = Trainer.Config(
        model_spec=model_spec(spec["model"]),
        dump_folder=tempfile.mkdtemp(prefix="hpcrl-bench-titan-"),
        tokenizer=NoTokenizer.Config(),
        dataloader=SameBatch.Config(),
        optimizer=default_adamw(lr=1e-4),
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=spec["sequences"],
            seq_len=spec["tokens"],
            steps=1000,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
            gc_freq=10_000,
        ),
        parallelism=ParallelismConfig(expert_parallel_degree=spec["ep"], spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=FullAC.Config() if spec["low_memory"] else None,
        loss=ChunkedLossWrapper.Config(num_chunks=8, loss_fn=loss) if spec["low_memory"] else loss,
    )
    before = status_mib("VmRSS")
    trainer = Trainer(config)
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    parameters = sum(p.numel() for p in trainer.model_parts[0].parameters())
    batches = trainer.batch_generator(trainer.dataloader)
    rank = torch.distributed.get_rank()

    def step() -> float:
        trainer.step += 1
        trainer.train_step(batches)
        return 0.0

    measure(spec, rank, before, step, parameters)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
