"""Muon against torch's own on whole matrices; how a model is cut among ranks changes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_checkpoint import one_step, save, state_of, whole
from test_families import FAMILIES
from test_meshes import MODELS
from test_optim import DECAYED, ENDS
from torch import Tensor, nn
from trainer_testing import make_recipe, run_ranks, write_model_dir

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.config.recipe import OptimizerConfig
from hpcrl.errors import CheckpointError
from hpcrl.modeling.blocks import local_block, local_part
from hpcrl.modeling.hidden_matrices import WHOLE, MatrixParts, hidden_matrices
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import arch_from_config, load_arch
from hpcrl.planning.muon import muon_matrices
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.state.checkpoint import load_checkpoint
from hpcrl.trainer.step import muon
from hpcrl.trainer.step.newton_schulz import orthogonalise
from hpcrl.trainer.step.optim import make_optimizer, set_learning_rate
from hpcrl.trainer.step.policy import TrainerPolicy

CONFIG = OptimizerConfig(kind="muon", learning_rate=0.02, weight_decay=0.1, muon_momentum=0.9)
OPTIMIZER = CONFIG.model_dump()
HALVES = MatrixParts(-2, (slice(0, 10), slice(10, 20)))
IN_TURN = MatrixParts(-1, (slice(0, None, 2), slice(1, None, 2)))
UNEQUAL = MatrixParts(-2, (slice(0, 24), slice(24, 28)))
#: name: shape, and the matrices in it
SHAPES: dict[str, tuple[tuple[int, ...], MatrixParts]] = {
    "wide": ((12, 40), WHOLE),
    "tall": ((40, 12), WHOLE),
    "tall too": ((40, 12), WHOLE),
    "experts": ((3, 16, 8), WHOLE),
    "gates and ups": ((3, 20, 8), HALVES),
    "gates and ups in turn": ((3, 8, 20), IN_TURN),
    "unequal": ((28, 9), UNEQUAL),
}
#: not hidden matrices though they decay: choices of experts and of tokens, and convolutions
NOT_HIDDEN = ENDS | {
    "mlp.gate.weight",
    "mixer.gate.weight",
    "mixer.conv1d.weight",
    "linear_attn.conv1d.weight",
    "self_attn.indexer.weights_proj.weight",
}


def pieces(tensor: Tensor, parts: MatrixParts) -> list[Tensor]:
    """The matrices of a parameter, as views."""
    experts = tensor if tensor.dim() == 3 else tensor[None]
    return [own[part] if parts.dim == -2 else own[:, part] for own in experts for part in parts.slices]


def drawn(name: str, shape: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return torch.randn(tuple(shape), generator=generator)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("batch_bytes", [muon.BATCH_BYTES, 1])
def test_it_is_torchs_on_each_matrix_and_adamw_on_the_rest(
    monkeypatch: pytest.MonkeyPatch, on_host: bool, batch_bytes: int
) -> None:
    monkeypatch.setitem(muon.Muon.__init__.__kwdefaults__, "batch_bytes", batch_bytes)
    parameters = {name: nn.Parameter(drawn(name, shape, 0)) for name, (shape, _) in SHAPES.items()}
    parameters |= {"embed_tokens.weight": nn.Parameter(torch.ones(5, 4)), "norm.weight": nn.Parameter(torch.ones(4))}
    matrices = {name: parts for name, (_, parts) in SHAPES.items()}
    found = make_optimizer(parameters.items(), CONFIG, on_host=on_host, matrices=matrices)
    assert isinstance(found, muon.Muon)
    assert found.is_on_host == on_host
    copies = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    singles = {name: [nn.Parameter(x.clone()) for x in pieces(copies[name], SHAPES[name][1])] for name in SHAPES}
    oracle = torch.optim.Muon(
        [x for some in singles.values() for x in some],
        lr=CONFIG.learning_rate,
        weight_decay=CONFIG.weight_decay,
        momentum=CONFIG.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = {name: nn.Parameter(copies[name].clone()) for name in ("embed_tokens.weight", "norm.weight")}
    adamw = make_optimizer(rest.items(), OptimizerConfig(**{**OPTIMIZER, "kind": "adamw"}))
    for step, rate in ((1, 0.02), (2, 0.05), (3, 0.01)):
        for name, parameter in parameters.items():
            parameter.grad = drawn(name, parameter.shape, step)
            if name in rest:
                rest[name].grad = parameter.grad.clone()
                continue
            for one, gradient in zip(singles[name], pieces(parameter.grad, SHAPES[name][1]), strict=True):
                one.grad = gradient.clone()
        for optimizer in (found, oracle, adamw):
            set_learning_rate(optimizer, rate)
        if on_host:
            found.prefetch()
        for optimizer in (found, oracle, adamw):
            optimizer.step()
    for name, wanted in rest.items():
        torch.testing.assert_close(parameters[name], wanted, rtol=0, atol=0)
    for name, (_, parts) in SHAPES.items():
        moved = 0.08 * 0.2 * max(pieces(copies[name], parts)[0].shape) ** 0.5
        for piece, wanted in zip(pieces(parameters[name].detach(), parts), singles[name], strict=True):
            # the same matrices in one product and in several are rounded to bfloat16 otherwise
            torch.testing.assert_close(piece, wanted.detach(), rtol=0, atol=0.02 * moved)


def test_singular_values_come_near_one() -> None:
    for shape in ((4, 30, 20), (4, 20, 30)):
        found = orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16())
        values = torch.linalg.svdvals(found.float())
        assert 0.6 < float(values.min()) < float(values.max()) < 1.3
    assert orthogonalise(torch.zeros(1, 3, 4, dtype=torch.bfloat16)).abs().max() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_matrices_of_all_families(family: str) -> None:
    config = {"model_type": family, "vocab_size": 8, **FAMILIES[family], "pad_token_id": None}
    model = build_model(arch_from_config(config), device="meta")
    found = hidden_matrices(model)
    names = {re.sub(r"^layers\.\d+\.", "", name) for name in found}
    assert names == DECAYED[family] - NOT_HIDDEN
    parameters = dict(model.named_parameters())
    planned = muon_matrices(model.arch.facts)
    assert planned.parameters == sum(parameters[name].numel() for name in found)
    for name, parts in found.items():
        covered = torch.zeros(parameters[name].shape[parts.dim])
        for part in parts.slices:
            covered[part] += 1
        assert bool((covered == 1).all()), name
        if name.endswith(("gate_up_proj", "kv_a_proj_with_mqa.weight", "in_proj.weight")):
            assert len(parts.slices) > 1


def test_published_gates_and_ups_are_matrices_of_their_own() -> None:
    model = build_model(MODELS["qwen3_moe"], device="meta")
    name = "layers.0.mlp.experts.gate_up_proj"
    shape = dict(model.named_parameters())[name].shape
    first, second, *_ = model.adapter.regions(name, shape)
    assert [part.start for part in hidden_matrices(model)[name].slices] == [first.low[1], second.low[1]]


def set_gradients(policy: TrainerPolicy, step: int) -> None:
    """The same whole gradients whatever the mesh is."""
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            low, high = local_block(parameter)
            own = drawn(name, parameter.shape, step)[tuple(map(slice, low, high))]
            parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(own)


def new_policy(model_dir: Path, parallel: Parallel, **trainer: Any) -> TrainerPolicy:
    recipe = make_recipe(model_dir, steps=9, **{"optimizer": OPTIMIZER, **trainer})
    return TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)


def weights_of(policy: TrainerPolicy) -> dict[str, Any]:
    return {name: whole(parameter).numpy() for name, parameter in policy.model.named_parameters()}


def updated(rank: int, model_dir: Path, degrees: dict[str, int], memory: dict[str, Any]) -> dict[str, Any]:
    recipe = make_recipe(model_dir, steps=9, parallelism=degrees)
    with distributed(timeout_s=120, parallelism=recipe.trainer.parallelism) as parallel:
        policy = new_policy(model_dir, parallel, parallelism=degrees, memory=memory)
        for step in (1, 2):
            set_gradients(policy, step)
            policy.optimizer_step(step)
        return weights_of(policy)


CUTS = [
    # of six experts and of two some are cut by rows, of eight all lie whole
    (2, "deepseek_v3", {}, {}),
    (2, "nemotron_h", {"ep": 2}, {"optimizer_offload": True}),
    (2, "gpt_oss", {}, {"parameter_offload": True}),
    (4, "qwen3_moe", {"ep": 2}, {}),
    (4, "glm4_moe", {"ep": 2, "dp_replicate": 2}, {}),
    (4, "deepseek_v3", {"ep": 2}, {}),
    (4, "gpt_oss", {"cp": 2}, {}),
]


@pytest.mark.parametrize(("ranks", "family", "degrees", "memory"), CUTS, ids=str)
def test_a_model_that_is_cut_is_updated_as_a_whole_one(
    tmp_path: Path, ranks: int, family: str, degrees: dict[str, int], memory: dict[str, Any]
) -> None:
    model_dir = write_model_dir(tmp_path / "model", MODELS[family])
    start = start_weights(model_dir)
    wanted = updated(0, model_dir, {}, {})
    for found in run_ranks(ranks, updated, model_dir, degrees, memory):
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            # rounding in bfloat16 of the same products in other batches, far below one step
            torch.testing.assert_close(
                found[name], tensor, rtol=0, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}"
            )
    moved = [name for name in wanted if not np.array_equal(wanted[name], start[name])]
    assert len(moved) > len(wanted) // 2


def start_weights(model_dir: Path) -> dict[str, Any]:
    with distributed(timeout_s=120) as parallel:
        return weights_of(new_policy(model_dir, parallel))


def load(rank: int, model_dir: Path, root: Path, optimizer: dict[str, Any]) -> tuple[dict[str, Any], float]:
    entry = CheckpointLedger(root).newest_verified().entry
    with distributed(timeout_s=120) as parallel:
        recipe = make_recipe(model_dir, steps=9, optimizer=optimizer)
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=None)
        load_checkpoint(entry, policy.model, policy.optimizer, parallel)
        return state_of(policy), one_step(policy, parallel, entry.step + 1)


def test_its_state_is_saved_and_restored_on_other_ranks(tmp_path: Path) -> None:
    model_dir = write_model_dir(tmp_path / "model", MODELS["deepseek_v3"])
    (saved, loss), _ = run_ranks(2, save, model_dir, tmp_path / "checkpoints", optimizer=OPTIMIZER)
    matrix, vector = "layers.0.self_attn.o_proj.weight", "norm.weight"
    assert {key for key in saved if key.startswith(f"{matrix}/")} == {f"{matrix}/momentum_buffer"}
    assert {f"{vector}/exp_avg", f"{vector}/exp_avg_sq", f"{vector}/step"} <= saved.keys()
    for ranks in (1, 4):
        for state, next_loss in run_ranks(ranks, load, model_dir, tmp_path / "checkpoints", OPTIMIZER):
            assert state == saved
            assert next_loss == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize(("before", "after"), [("muon", "adamw"), ("adamw", "muon")])
def test_another_kind_of_optimizer_does_not_go_on(tmp_path: Path, before: str, after: str) -> None:
    model_dir = write_model_dir(tmp_path / "model")
    save(0, model_dir, tmp_path / "checkpoints", steps=1, optimizer={**OPTIMIZER, "kind": before})
    with pytest.raises(CheckpointError, match=f"saved with {before}, and the recipe says {after}"):
        load(0, model_dir, tmp_path / "checkpoints", {**OPTIMIZER, "kind": after})
