"""Context parallelism by gathered latents beside all else that a trainer does: two ranks, against exchanged heads."""

import math

import msgspec
import pytest
import torch
from test_compiled import backend
from test_context_parallel import Collectives
from test_fp8_training import computed, soften
from test_meshes import ARCHS, GRADIENT_TOLERANCE
from test_nonfinite import poisoned
from test_router_replay import rows_of_tokens, with_rows
from trainer_testing import Rollouts, gradient_distance, make_recipe, run_ranks, write_model_dir

from hpcrl.modeling.blocks import local_part
from hpcrl.modeling.hf import adapter_parameters
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.step.canary import CanaryMaker
from hpcrl.trainer.step.nonfinite import NonFiniteGradientError
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.format.canary import Canary

FAMILY = "deepseek_v3"
LORA = {"lora": {"rank": 8, "alpha": 8.0}}
REPLAY, BFLOAT16, FP8 = {"router_replay": True}, {"dtype": "bfloat16"}, {"precision": {"fp8": {}}}
FULL, SELECTIVE = ({"memory": {"activation_checkpointing": how}} for how in ("full", "selective"))
OFFLOAD = {"memory": {"activation_checkpointing": "selective", "activation_offload": True, "parameter_offload": True}}
#: each computes in float32 what exchanged heads do
SAME = {
    "plain": {},
    "full": FULL,
    "experts of engines": REPLAY,
    "adapters": LORA,
    "adapters, experts of engines, selective": LORA | REPLAY | SELECTIVE,
}
#: within rounding
ROUNDED = {
    "bfloat16": BFLOAT16,
    "bfloat16, adapters": BFLOAT16 | LORA,
    "bfloat16, experts of engines": BFLOAT16 | REPLAY,
}
#: what changes no bit, beside what computes a layer in another way
BESIDE = {"nothing": {}, "adapters in bfloat16": BFLOAT16 | LORA, "experts of engines": REPLAY}
TOOLS = {"full": FULL, "selective": SELECTIVE, "offload": OFFLOAD}


def policy_of(model_dir, parallel, scheme, trainer):
    recipe = make_recipe(model_dir, steps=9, parallelism={"cp_scheme": scheme}, **trainer)
    policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
    if recipe.trainer.lora is not None:
        # B is zero at first, and A has no gradient then
        generator = torch.Generator().manual_seed(parallel.world.rank)
        for name, parameter in adapter_parameters(policy.model).items():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(local_part(parameter.detach()), std=0.1, generator=generator)
    return policy


def gradients_of(model_dir, parallel, scheme, trainer):
    """Loss, and the gradients of this rank, of a batch of which engines said the experts."""
    policy = policy_of(model_dir, parallel, scheme, trainer)
    shard = with_rows(Rollouts(4).shard(parallel.data.rank, parallel.data.size), rows_of_tokens(ARCHS[FAMILY]))
    loss = policy.forward_backward(shard).reduce(parallel.world).loss
    trained = [(n, p) for n, p in policy.model.named_parameters() if p.requires_grad]
    return loss, {name: parameter.grad.to_local().clone() for name, parameter in trained}


def check_same(model_dir, parallel, cases=tuple(SAME), own=None):
    """As exchanged heads; ``own`` is what is done with gathered latents alone."""
    for name in cases:
        trainer = SAME[name]
        loss, wanted = gradients_of(model_dir, parallel, "ulysses", trainer)
        found = gradients_of(model_dir, parallel, "gather", trainer | (own or {}))
        assert found[0] == pytest.approx(loss, rel=1e-4, abs=1e-6), name
        for parameter, gradient in wanted.items():
            message = f"{name}, {parameter}: {{}}".format
            torch.testing.assert_close(found[1][parameter], gradient, **GRADIENT_TOLERANCE, msg=message)


def check_rounded(model_dir, parallel, cases=tuple(ROUNDED), own=None):
    """As near to float32 as exchanged heads are."""
    for name in cases:
        trainer = ROUNDED[name]
        exact = gradients_of(model_dir, parallel, "ulysses", trainer | {"dtype": "float32"})[1]
        heads = gradients_of(model_dir, parallel, "ulysses", trainer)[1]
        latents = gradients_of(model_dir, parallel, "gather", trainer | (own or {}))[1]
        far, near = (gradient_distance(each, exact) for each in (latents, heads))
        assert 0 < far < 1.5 * near < 0.1, (name, far, near)


def check_tools(model_dir, parallel):
    for beside, trainer in BESIDE.items():
        loss, wanted = gradients_of(model_dir, parallel, "gather", trainer)
        for tool, memory in TOOLS.items():
            found = gradients_of(model_dir, parallel, "gather", trainer | memory)
            assert found[0] == loss, (beside, tool)
            assert [n for n in wanted if not torch.equal(found[1][n], wanted[n])] == [], (beside, tool)


def check_runs_of_operators(model_dir, parallel):
    """In a layer: what is computed again, and what is kept of it."""
    for memory, times in (({}, 1), (SELECTIVE, 1), (FULL, 2)):
        policy = policy_of(model_dir, parallel, "gather", memory)
        with Collectives() as seen:
            policy.forward_backward(Rollouts(1).shard())
        layers = 2 * policy.arch.num_hidden_layers
        for name in ("all_gather", "attend_latents"):
            assert seen.seen[f"hpcrl::{name}"] == times * layers, (memory, name)
        # gradients go back once
        assert seen.seen["hpcrl::all_to_all"] == layers, memory


def check_canary(model_dir, parallel):
    """With adapters merged into their weights, and without them."""
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.02)):
        found = []
        for scheme in ("ulysses", "gather"):
            policy = policy_of(model_dir, parallel, scheme, LORA | {"dtype": dtype})
            maker = CanaryMaker(policy.recipe, policy.arch, parallel)
            found.append(msgspec.json.decode(maker(policy.model, 1), type=Canary))
        wanted, own = found
        for name in ("plain", "adapted"):
            assert getattr(own, name) == pytest.approx(getattr(wanted, name), abs=tolerance), (dtype, name)
        assert own.plain != own.adapted


def check_blame(model_dir, parallel):
    """A rollout that is not finite spoils no other's gradient."""
    for trainer in ({}, SELECTIVE):
        policy = policy_of(model_dir, parallel, "gather", trainer)
        policy.forward_backward(poisoned(Rollouts(2), 1, 4, value=math.nan).shard())
        with pytest.raises(NonFiniteGradientError) as error:
            policy.optimizer_step(2)
        named = sorted(each.split(" (")[0] for each in error.value.found.rollouts)
        assert named == ["group 2 member 1", "group 2 member 4"]


def check_fp8(model_dir, parallel):
    """Latents are not rounded, so gradients are no further from those without FP8 than with exchanged heads."""

    def gradients(scheme, trainer):
        return computed(policy_of(model_dir, parallel, scheme, trainer))[1]

    exact, heads = gradients("ulysses", {}), gradients("ulysses", FP8)
    for name, trainer in {"float32": FP8, "bfloat16": FP8 | BFLOAT16}.items():
        own, again = gradients("gather", trainer), gradients("gather", trainer | SELECTIVE)
        far, near = (gradient_distance(each, exact) for each in (own, heads))
        assert 0.001 < far < 1.3 * near, (name, far, near)
        assert [n for n in own if not torch.equal(again[n], own[n])] == [], name
    # what expands latents is rounded, though no layer multiplies with it
    kept = gradients("gather", {"precision": {"fp8": {"keep": ["*.kv_b_proj"]}}})
    assert gradient_distance(gradients("gather", FP8), kept) > 0.001


def on_ranks(rank, checks):
    with distributed(timeout_s=60) as start:
        mesh = ParallelDims(world_size=2, cp=2)
        mesh.build_mesh("cpu")
        for check, *arguments in checks:
            check(arguments[0], Parallel(mesh, start.device), *arguments[1:])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("plain") / "model", ARCHS[FAMILY])


@pytest.fixture(scope="module")
def soft(tmp_path_factory):
    """Where rounding is not mostly that of choices of experts."""
    return write_model_dir(tmp_path_factory.mktemp("soft") / "model", ARCHS[FAMILY], change=soften)


@pytest.mark.campaign
def test_it_goes_with_all_else_that_a_trainer_does(plain, soft):
    exact = [(check, plain) for check in (check_same, check_tools, check_runs_of_operators, check_blame)]
    run_ranks(
        2, on_ranks, [*exact, *((check, soft) for check in (check_rounded, check_fp8, check_canary))], timeout_s=240
    )


def compiled(model_dir, parallel):
    memory = {"memory": {"compile": True, "activation_checkpointing": "full"}}
    with backend("aot_eager") as counted:
        check_same(model_dir, parallel, ["plain", "adapters, experts of engines, selective"], memory)
        check_rounded(model_dir, parallel, ["bfloat16, adapters"], memory)
        assert counted["unique_graphs"]


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_compiled_layers_gather_latents(soft):
    run_ranks(2, on_ranks, [(compiled, soft)], timeout_s=600)
