"""A rollout with branches is trained as its tree says: the gradient of each loss against a tree that is walked by hand.

The reference knows nothing of sequences, shards and packing. It walks the tree, computes each node behind all that
stands before it with a plain model, and takes each sampled node once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_router_replay import rows_of_tokens
from trainer_testing import VOCAB, make_recipe, tiny_arch, tiny_model, write_model_dir

from hpcrl.config.algorithm import (
    AlgorithmConfig,
    GspoLossConfig,
    KlConfig,
    LossConfig,
    MaskedRatioLossConfig,
    TisLossConfig,
)
from hpcrl.dock.assemble import assemble_batch
from hpcrl.dock.columns import encode_columns
from hpcrl.dock.ledger.digest import digest_of
from hpcrl.dock.ledger.payload import PayloadWriter, read_payload
from hpcrl.dock.wire import ReferencedShard, decode_answer
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.models.arch import load_arch
from hpcrl.rollouts.batches.build import build_batch
from hpcrl.rollouts.core.records import Group, Rollout, StoredRollout, encode_rollout
from hpcrl.rollouts.sampling.branches import Branches
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsSettings
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step.policy import TrainerPolicy

STEP, VERSION = 3, 2
TEMPERATURE = 0.7
KL = 0.05
REWARDS = (1.0, 0.25)


@dataclass
class Node:
    """Tokens behind those of its parent; ``logprobs`` are the engine's, of a node that was sampled."""

    ids: list[int]
    logprobs: list[float] | None = None
    below: list[Node] = field(default_factory=list)


def tree(seed: int) -> Node:
    """A turn with an answer of two branches, one of which goes on, and a sequence that shares the prompt alone."""
    rng = np.random.default_rng(seed)

    def said(count: int) -> Node:
        return Node(rng.integers(0, VOCAB, count).tolist())

    def sampled(count: int) -> Node:
        return Node(rng.integers(0, VOCAB, count).tolist(), np.log(rng.uniform(0.005, 0.03, count)).tolist())

    prompt, first = said(5), sampled(4)
    for context, answer in ((said(2), sampled(3)), (said(3), sampled(4))):
        context.below.append(answer)
        first.below.append(context)
    follows = said(2)
    follows.below.append(sampled(5))
    first.below[1].below[0].below.append(follows)
    rewritten = said(4)
    rewritten.below.append(sampled(3))
    prompt.below += [first, rewritten]
    return prompt


# -- the reference


def walk(node: Node, before: list[int], found: list[tuple[list[int], Node]]) -> None:
    if node.logprobs is not None:
        found.append((before, node))
    for below in node.below:
        walk(below, before + node.ids, found)


def turns_of(root: Node) -> list[tuple[list[int], Node]]:
    """Sampled nodes, each with all tokens before it."""
    found: list[tuple[list[int], Node]] = []
    walk(root, [], found)
    return found


def leaf_of(root: Node, turn: Node) -> int:
    """The leaf at the end of the sequence that a turn was sampled in: the first one below it."""
    while turn.below:
        turn = turn.below[0]
    return id(turn)


def wanted(arch, roots, advantages, loss: LossConfig, kl: KlConfig | None):
    """Gradient of the loss of all trees in one process."""
    model, start = tiny_model(arch), tiny_model(arch, seed=0)
    terms, ratios, count = [], {}, 0
    for root, advantage in zip(roots, advantages, strict=True):
        for before, turn in turns_of(root):
            tokens = torch.tensor(before + turn.ids)
            context = PackedAttention(torch.tensor([0, len(tokens)])).context
            logits, held = model(tokens, context()), start(tokens, context()).detach()
            for place, (token, mu) in enumerate(zip(turn.ids, turn.logprobs, strict=True), start=len(before)):
                lp = (logits[place - 1] / TEMPERATURE).log_softmax(-1)[token]
                ref = (held[place - 1] / TEMPERATURE).log_softmax(-1)[token]
                terms.append((leaf_of(root, turn), lp, mu, ref, advantage))
                ratios.setdefault(leaf_of(root, turn), []).append(lp - mu)
                count += 1
    total = 0.0
    for leaf, lp, mu, ref, advantage in terms:
        if loss.kind == "gspo":
            ratio = torch.stack(ratios[leaf]).mean().exp()
            clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
            total = total - torch.minimum(ratio * advantage, clipped * advantage)
        elif loss.kind == "tis":
            weight = (lp - mu).detach().exp().clamp(max=loss.ratio_high)
            total = total - weight * (lp - lp.detach()).exp() * advantage
        else:
            total = total + loss.kl_tau * (lp - mu) ** 2 - (lp - mu).exp() * advantage
        if kl is not None:
            away = ref - lp
            total = total + kl.coefficient * (away.exp() - 1 - away)
    (total / count).backward()
    return (total / count).item(), {name: p.grad for name, p in model.named_parameters()}, count


# -- the same as rollouts: sequences in a ledger, cut into micro-batches


def grown(root: Node, member: int, routes: RoutedExpertsSettings | None, rows) -> Rollout:
    """The rollout of a tree: a sequence after the other, and the second one goes on after the third has begun."""

    async def made() -> Rollout:
        branches = Branches(max_branches=8, routes=routes)

        def ids(tokens: list[int]) -> np.ndarray:
            return np.array(tokens, np.int32)

        def sample(turn: Node, sequence: int) -> None:
            own, experts = branches.rows(sequence), None
            if own is not None:
                tokens = [*branches.tokens(sequence).token_ids.tolist(), *turn.ids]
                begin = own.start(len(tokens) - len(turn.ids))
                experts = own.examined(rows(tokens)[begin:-1], None)
            branches.sampled(
                branches.turn(sampled=len(turn.ids), wait_s=0.1, reply_s=0.2, sequence=sequence),
                ids(turn.ids),
                np.array(turn.logprobs, np.float32),
                np.full(len(turn.ids), VERSION, np.int32),
                experts=experts,
            )

        first, rewritten = root.below
        one, other = first.below
        sample(first, branches.begin(ids(root.ids)))
        branches.said(ids(one.ids))
        sample(one.below[0], 0)
        sample(other.below[0], branches.begin(ids(root.ids + first.ids + other.ids)))
        sample(rewritten.below[0], branches.begin(ids(root.ids + rewritten.ids)))
        (follows,) = other.below[0].below
        branches.said(ids(follows.ids), 1)
        sample(follows.below[0], 1)
        rollout = await branches.rollout(
            member, reward=REWARDS[member], parts={}, seconds=1.0, ended_s=2.0, context_version=VERSION
        )
        assert rollout is not None
        assert rollout.shared.tolist() == [0, 9, 5]
        assert [(turn.sequence, turn.shared) for turn in rollout.turns] == [(0, 0), (0, 0), (1, 9), (2, 5), (1, 0)]
        return rollout

    return asyncio.run(made())


def shard_of(path: Path, recipe, rollouts) -> ReferencedShard:
    path.mkdir()
    writer, stored = PayloadWriter(path, 1), []
    for rollout in rollouts:
        place = writer.write([encode_columns(*encode_rollout(rollout))])[0]
        stored.append(StoredRollout.of(rollout, place))
    batch = build_batch(
        [Group(index=7, environment="toy", prompt_index=0, rollouts=stored)],
        step=STEP,
        world_size=1,
        recipe=recipe,
        counters={},
        text=lambda place: "",
        cost=float,
        location=None,
        payload_dir=path,
    )
    shard = decode_answer(batch.shards[0])
    assert isinstance(shard, ReferencedShard)
    return shard


LOSSES = [
    (MaskedRatioLossConfig(kind="masked_ratio", kl_tau=0.05, mask_low=1.0, mask_high=1.0), None),
    (GspoLossConfig(kind="gspo"), None),
    (TisLossConfig(kind="tis", ratio_high=1.2), KlConfig(coefficient=KL, estimator="k3")),
]


@pytest.mark.parametrize("budget", [24, 256])
@pytest.mark.parametrize(("loss", "kl"), LOSSES, ids=["masked_ratio", "gspo", "tis and kl"])
def test_the_gradient_is_that_of_the_tree(loss: LossConfig, kl: KlConfig | None, budget: int, tmp_path: Path) -> None:
    arch = tiny_arch()
    model_dir = write_model_dir(tmp_path / "model", arch)
    recipe = make_recipe(model_dir, steps=9, micro_batch_tokens=budget)
    sampling = recipe.rollouts.sampling.model_copy(update={"temperature": TEMPERATURE})
    algorithm = AlgorithmConfig(loss=loss, kl=kl, advantage="mean_baseline")
    recipe = recipe.model_copy(
        update={
            "rollouts": recipe.rollouts.model_copy(update={"sampling": sampling}),
            "algorithm": algorithm,
        }
    )
    roots = [tree(seed) for seed in (1, 2)]
    shard = shard_of(
        tmp_path / "payload", recipe, [grown(root, member, None, None) for member, root in enumerate(roots)]
    )
    places = [{s.member for s in each} for each in shard.micro_batches]
    # sequences of one rollout are in different micro-batches, or all in one
    assert (sum(0 in members for members in places) > 1) == (budget == 24)
    mean = sum(REWARDS) / 2
    value, gradients, count = wanted(arch, roots, [reward - mean for reward in REWARDS], loss, kl)
    assert shard.stats.total_sampled_tokens == count
    with distributed(timeout_s=120) as parallel:
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        found = assemble_batch(shard, lambda place: memoryview(read_payload(tmp_path / "payload", place)))
        metrics = policy.forward_backward(found).reduce(parallel.world)
        own = {name: parameter.grad.full_tensor() for name, parameter in policy.model.named_parameters()}
    assert metrics.tokens == count
    assert metrics.loss == pytest.approx(value, rel=1e-4)
    assert metrics.rollouts_digest == digest_of([(7, 0), (7, 1)])
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def test_rows_of_experts_go_along_with_the_tokens_of_each_sequence(tmp_path: Path) -> None:
    """Those of a shared prefix are copied, and the last token of a sequence has none, wherever it is."""
    arch = tiny_arch()
    recipe = make_recipe(write_model_dir(tmp_path / "model", arch), steps=9, micro_batch_tokens=24)
    rows = rows_of_tokens(arch)

    def of_tokens(tokens: list[int]) -> np.ndarray:
        return rows(0, SimpleNamespace(token_ids=np.array(tokens), cu_seqlens=np.array([0, len(tokens)])))

    routes = RoutedExpertsSettings(arch.num_hidden_layers, arch.experts_per_token, arch.routed_experts)
    rollouts = [grown(tree(seed), member, routes, of_tokens) for member, seed in enumerate((1, 2))]
    shard = shard_of(tmp_path / "payload", recipe, rollouts)
    found = assemble_batch(shard, lambda place: memoryview(read_payload(tmp_path / "payload", place)))
    checked = 0
    for micro_batch in found.micro_batches:
        routed = micro_batch.routed_experts
        assert routed is not None
        expected = rows(0, micro_batch)
        assert np.array_equal(routed.experts[routed.known], expected[routed.known])
        unknown = np.flatnonzero(~routed.known)
        assert unknown.tolist() == (micro_batch.cu_seqlens[1:] - 1).tolist()
        checked += len(routed.known)
    assert checked == sum(len(rollout.token_ids) for rollout in rollouts)
