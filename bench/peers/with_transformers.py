"""One rank of transformers' model under FSDP2, with the plain loop that its users write."""

from __future__ import annotations

import torch
import torch.distributed as dist
from sizes import COMMON, MODELS, batch, case, measure, status_mib
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, spec = dist.get_rank(), case()
    config = AutoConfig.for_model(**MODELS[spec["model"]], **COMMON, attn_implementation="sdpa")
    before = status_mib("VmRSS")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in model.parameters())
    if spec["low_memory"]:
        model.gradient_checkpointing_enable()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = batch(spec, rank)
    model.train()

    def step() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    measure(spec, rank, before, step, parameters)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
