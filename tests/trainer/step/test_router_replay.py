"""Training with the experts that engines chose: each family, memory tools, and ranks that share the work."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from test_checkpoint import whole
from test_meshes import ARCHS, GRADIENT_TOLERANCE
from trainer_testing import Rollouts, gradient_distance, make_recipe, run_ranks, tiny_arch, tiny_model, write_model_dir

from hpcrl.dock.ledger.digest import digest_of
from hpcrl.dock.routes import RoutedExperts
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.layers.moe import ChosenSoftmaxRouter, SigmoidRouter, SoftmaxRouter, SparseMLP
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.step.policy import TrainerPolicy

FAMILIES = {
    **ARCHS,
    "qwen3_moe": replace(ARCHS["qwen3_moe"], norm_topk_prob=False, num_hidden_layers=3, mlp_only_layers=(1,)),
    "deepseek_v3": replace(ARCHS["deepseek_v3"], n_group=3, topk_group=2, routed_scaling_factor=2.5),
    # of two experts a token cannot be sent to others than its two
    "glm4_moe": replace(ARCHS["glm4_moe"], n_routed_experts=4, num_experts_per_tok=2, routed_scaling_factor=1.7),
}


def biased(model):
    """A correction bias decides over choices, and must not get into weights."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(0.2, -0.2, len(buffer)))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("replay")
    return {family: write_model_dir(root / family, arch, change=biased) for family, arch in FAMILIES.items()}


def with_rows(shard, rows_of, *, missing=None):
    """The shard with a row of experts for each token but the last of a rollout, and every so many more."""
    batches = []
    for number, batch in enumerate(shard.micro_batches):
        present = np.ones(len(batch.token_ids), np.uint8)
        present[batch.cu_seqlens[1:] - 1] = 0
        if missing is not None:
            present[::missing] = 0
        batches.append(msgspec.structs.replace(batch, routed_experts=RoutedExperts.of(rows_of(number, batch), present)))
    return msgspec.structs.replace(shard, micro_batches=batches)


def own_rows(arch):
    """What the routers of the start model choose."""
    model = tiny_model(arch)
    biased(model)

    def rows(number, batch):
        found = np.zeros((len(batch.token_ids), arch.num_hidden_layers, arch.experts_per_token), np.uint8)

        def record(layer, experts):
            found[:, layer] = experts.numpy()

        attention = PackedAttention(torch.from_numpy(batch.cu_seqlens.astype(np.int64)))
        with torch.no_grad():
            model(torch.from_numpy(batch.token_ids.astype(np.int64)), attention.context(record=record))
        return found

    return rows


def other_rows(arch):
    """Experts that have nothing to do with the model."""

    def rows(number, batch):
        shape = (len(batch.token_ids), arch.num_hidden_layers, arch.routed_experts)
        drawn = np.random.default_rng(number).random(shape).argsort(-1)
        return drawn[..., : arch.experts_per_token].astype(np.uint8)

    return rows


def train(model_dir, parallel, shard, *, replay=True, **trainer):
    """Metrics of a step, and its gradients."""
    recipe = make_recipe(model_dir, steps=9, router_replay=replay, **trainer)
    policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
    metrics = policy.forward_backward(shard).reduce(parallel.world)
    gradients = {n: whole(p.grad) for n, p in policy.model.named_parameters() if p.requires_grad}
    return metrics, gradients


def assert_close(found, wanted):
    (metrics, gradients), (other, others) = found, wanted
    assert metrics.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-6)
    assert metrics.mismatch_kl == pytest.approx(other.mismatch_kl, rel=1e-4)
    assert gradients.keys() == others.keys()
    for name in gradients:
        message = f"{name}: {{}}".format
        torch.testing.assert_close(gradients[name], others[name], **GRADIENT_TOLERANCE, msg=message)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_own_choice_changes_no_bit(models, family):
    arch = FAMILIES[family]
    shard = with_rows(Rollouts(4).shard(), own_rows(arch))
    with distributed(timeout_s=120) as parallel:
        (metrics, gradients), (plain, others) = (
            train(models[family], parallel, shard, replay=replay) for replay in (True, False)
        )
    assert metrics.replayed_share == pytest.approx(metrics.routed_tokens / Rollouts(4).tokens)
    assert metrics.routing_mismatch == plain.routing_mismatch == 0.0
    assert metrics.loss == plain.loss
    assert [name for name in others if not torch.equal(gradients[name], others[name])] == []


def looped(self, x, context):
    """`SparseMLP.forward` as the papers write it, a token and an expert at a time."""
    gate = self.gate
    logits = x @ gate.weight.T + (0.0 if gate.bias is None else gate.bias)
    own = gate.prefer(gate.scores(x))
    narrow = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
    rows = []
    for token in range(len(x)):
        replayed = context.replay is not None and bool(context.replay.known[token])
        experts = (context.replay.of(self.layer) if replayed else own)[token].tolist()
        match gate:
            case SoftmaxRouter():
                weights = [logits[token].exp()[e] / logits[token].exp().sum() for e in experts]
                total, scale = sum(weights) if gate.normalise else 1.0, 1.0
            case ChosenSoftmaxRouter():
                weights = [logits[token, e].exp() for e in experts]
                total, scale = sum(weights), 1.0
            case SigmoidRouter():
                weights = [1.0 / (1.0 + (-logits[token, e]).exp()) for e in experts]
                total, scale = sum(weights) if gate.normalise else 1.0, gate.scale
        mixed = 0.0
        for expert, weight in zip(experts, weights, strict=True):
            alone = torch.zeros(gate.out_features, dtype=torch.int64)
            alone[expert] = 1
            mixed = mixed + scale * weight / total * self.experts(narrow[token : token + 1], alone)
        rows.append(mixed)
    y = torch.cat(rows)
    y = y if self.fc2_latent_proj is None else self.fc2_latent_proj(y)
    if self.shared_expert_gate is not None:
        return y + torch.sigmoid(x @ self.shared_expert_gate.weight.T) * self.shared_experts(x)
    return y if self.shared_experts is None else y + self.shared_experts(x)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_experts_are_weighed_by_the_routers_scores(models, family, monkeypatch):
    """Rows that no router would choose, some of them unknown, beside a plain loop."""
    shard = with_rows(Rollouts(4, count=3).shard(micro_batches=1), other_rows(FAMILIES[family]), missing=3)
    with distributed(timeout_s=120) as parallel:
        found, plain = (train(models[family], parallel, shard, replay=replay) for replay in (True, False))
        monkeypatch.setattr(SparseMLP, "forward", looped)
        wanted = train(models[family], parallel, shard)
    assert_close(found, wanted)
    # the router learns from experts that it would not have chosen
    assert found[0].loss != pytest.approx(plain[0].loss, rel=1e-3)
    gates = [name for name in found[1] if name.endswith(("mlp.gate.weight", "mixer.gate.weight"))]
    assert gates
    assert all(float(found[1][name].abs().max()) > 1e-5 for name in gates)
    # what the trainer would have chosen is compared, not what it took
    assert found[0].routing_mismatch > 0.1


@pytest.mark.parametrize("tool", ["full", "selective"])
def test_a_layer_that_is_computed_again_sees_the_same_experts(models, tool):
    with distributed(timeout_s=120) as parallel:
        for family in ("qwen3_moe", "glm_moe_dsa"):
            shard = with_rows(Rollouts(4).shard(), other_rows(FAMILIES[family]))
            wanted, found = (
                train(models[family], parallel, shard, memory={"activation_checkpointing": how})
                for how in ("none", tool)
            )
            assert found[0] == wanted[0]
            assert [name for name in wanted[1] if not torch.equal(found[1][name], wanted[1][name])] == []


def test_replayed_experts_are_multiplied_in_fp8(models):
    """With the rows of an engine, as in float32 but for rounding; the same again where layers are computed again."""
    fp8, again = {"precision": {"fp8": {}}}, {"memory": {"activation_checkpointing": "full"}}
    with distributed(timeout_s=120) as parallel:
        for family in ("qwen3_moe", "glm_moe_dsa"):
            shard = with_rows(Rollouts(4).shard(), other_rows(FAMILIES[family]), missing=3)
            plain, found, repeated, routed = (
                train(models[family], parallel, shard, replay=replay, **settings)
                for replay, settings in ((True, {}), (True, fp8), (True, fp8 | again), (False, fp8))
            )
            assert found[0].replayed_share == plain[0].replayed_share > 0.5
            assert repeated[0] == found[0]
            assert [name for name in found[1] if not torch.equal(repeated[1][name], found[1][name])] == []
            rounding, rerouting = (gradient_distance(other[1], found[1]) for other in (plain, routed))
            assert 0.001 < rounding < rerouting / 2


def test_an_engine_with_other_routers_comes_close(tmp_path):
    """Its log-probabilities are far from the trainer's where experts differ, and near where these are replayed."""
    arch = tiny_arch(num_experts=16, num_hidden_layers=3)
    engine, generator = tiny_model(arch), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in engine.layers:
            weight = layer.mlp.gate.weight
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    batches = []
    for batch in Rollouts(4, count=24, lags=0).shard().micro_batches:
        chosen = []
        attention = PackedAttention(torch.from_numpy(batch.cu_seqlens.astype(np.int64)))
        ids = torch.from_numpy(batch.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = engine(ids, attention.context(record=lambda _, experts, into=chosen: into.append(experts)))
        said = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        logprobs = np.concatenate(([0.0], said)) * batch.loss_mask
        rows = RoutedExperts.of(torch.stack(chosen, 1).numpy().astype(np.uint8), np.ones(len(ids), np.uint8))
        batches.append(msgspec.structs.replace(batch, logprobs=logprobs.astype(np.float32), routed_experts=rows))
    shard = msgspec.structs.replace(Rollouts(4, count=24, lags=0).shard(), micro_batches=batches)
    with distributed(timeout_s=120) as parallel:
        model_dir = write_model_dir(tmp_path / "model", arch)
        found, plain = (train(model_dir, parallel, shard, replay=replay)[0] for replay in (True, False))
    assert plain.routing_mismatch > 0.02
    assert found.mismatch_kl < plain.mismatch_kl / 3
    assert found.ess > plain.ess


def test_batches_without_a_record_are_routed_and_counted(models):
    rollouts = Rollouts(4)
    with distributed(timeout_s=120) as parallel:
        metrics, gradients = train(models["qwen3_moe"], parallel, rollouts.shard())
        _, others = train(models["qwen3_moe"], parallel, rollouts.shard(), replay=False)
    assert all(torch.equal(gradients[name], others[name]) for name in others)
    assert metrics.replayed_share == 0.0
    assert sum(metrics.unknown_routing.values()) == pytest.approx(1.0)


#: family, degrees, settings of the trainer
SHARED = [
    ("qwen3_moe", {"ep": 2}, {}),
    ("qwen3_moe", {"cp": 2}, {"parallelism": {"cp_scheme": "ring"}}),
    ("glm_moe_dsa", {"cp": 2}, {"memory": {"activation_checkpointing": "full"}}),
    ("deepseek_v3", {"cp": 2, "ep": 2}, {"memory": {"activation_checkpointing": "selective"}}),
]


def on_ranks(rank, models):
    results = []
    with distributed(timeout_s=60) as start:
        for family, degrees, settings in SHARED:
            mesh = ParallelDims(world_size=start.world.size, **degrees)
            mesh.build_mesh("cpu")
            parallel = Parallel(mesh, start.device)
            shard = Rollouts(4, count=5).shard(parallel.data.rank, parallel.data.size)
            # a rollout has the same rows whichever rank has it
            rows = with_rows(shard, rows_of_tokens(FAMILIES[family]))
            found = train(models[family], parallel, rows, replay_probe_steps=1, **settings)
            results.append((found[0], {name: gradient.tolist() for name, gradient in found[1].items()}))
    return results


def rows_of_tokens(arch):
    """Experts by token and position, so that it does not matter how rollouts are packed."""

    def rows(number, batch):
        lengths = np.diff(batch.cu_seqlens)
        positions = np.concatenate([np.arange(length) for length in lengths] or [np.zeros(0, np.int64)])
        layers, width = np.arange(arch.num_hidden_layers)[:, None], np.arange(arch.experts_per_token)
        first = (batch.token_ids + positions)[:, None, None] + layers
        return ((first + width) % arch.routed_experts).astype(np.uint8)

    return rows


def test_ranks_that_share_the_work_replay_as_one(models):
    ranks = run_ranks(2, on_ranks, models)
    with distributed(timeout_s=120) as parallel:
        for number, (family, degrees, _) in enumerate(SHARED):
            shard = with_rows(Rollouts(4, count=5).shard(), rows_of_tokens(FAMILIES[family]))
            wanted = train(models[family], parallel, shard)
            for rank in ranks:
                metrics, gradients = rank[number]
                assert_close((metrics, {name: torch.tensor(value) for name, value in gradients.items()}), wanted)
                for name in ("replayed_share", "unknown_routing", "routed_tokens", "routes_bytes"):
                    assert getattr(metrics, name) == pytest.approx(getattr(wanted[0], name)), (family, degrees, name)
                # also where ranks share rollouts: each is counted once
                assert metrics.rollouts_digest == digest_of((4, number) for number in range(5))
                assert metrics.unreplayed_mismatch_kl > 0
                # a near tie may be decided otherwise
                assert metrics.routing_mismatch == pytest.approx(wanted[0].routing_mismatch, abs=0.01)


def test_a_probe_says_what_replay_is_good_for(models):
    """The same tokens with the engine's experts and without, and nothing else of the step is different."""
    arch = FAMILIES["qwen3_moe"]
    shard = with_rows(Rollouts(4).shard(), other_rows(arch))
    first = msgspec.structs.replace(shard, micro_batches=shard.micro_batches[:1])
    with distributed(timeout_s=120) as parallel:

        def metrics(shard, **trainer):
            return train(models["qwen3_moe"], parallel, shard, **trainer)

        (found, gradients), (plain, others) = metrics(shard, replay_probe_steps=shard.step), metrics(shard)
        in_pieces, _ = metrics(shard, replay_probe_steps=shard.step, memory={"lm_head_chunk_tokens": 16})
        unreplayed, _ = metrics(first, replay=False)
        replayed, _ = metrics(first)
        off, _ = metrics(shard, replay_probe_steps=shard.step + 1)
    assert (plain.unreplayed_mismatch_kl, plain.replayed_mismatch_kl) == (None, None)
    assert (off.unreplayed_mismatch_kl, off.replayed_mismatch_kl) == (None, None)
    assert found.replayed_mismatch_kl == pytest.approx(replayed.mismatch_kl, rel=1e-5)
    assert found.unreplayed_mismatch_kl == pytest.approx(unreplayed.mismatch_kl, rel=1e-5)
    assert found.unreplayed_mismatch_kl != pytest.approx(found.replayed_mismatch_kl, rel=1e-2)
    assert in_pieces.unreplayed_mismatch_kl == pytest.approx(found.unreplayed_mismatch_kl, rel=1e-4)
    assert (found.loss, found.mismatch_kl, found.routing_mismatch) == (
        plain.loss,
        plain.mismatch_kl,
        plain.routing_mismatch,
    )
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    rows = sum(batch.routed_experts.data.nbytes for batch in shard.micro_batches)
    assert found.routes_bytes == plain.routes_bytes == rows > 0
