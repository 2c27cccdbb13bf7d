"""Attention over a batch that ranks share, beside that of one that has all of it: whole models, and their parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_ranks import ThreadRanks
from torch import Tensor

from hpcrl.modeling.attention.balanced_chunks import head_tail, places
from hpcrl.modeling.attention.context_parallel import ContextParallelAttention, heads_problem
from hpcrl.modeling.attention.latent_gather import LatentGather
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.attention.ring import RingAttention
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.kernels.fused import FusedKernel
from hpcrl.modeling.parallel.collectives import exchange_rows, gather_rows, sum_over
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import DeepseekV3Arch, GlmMoeDsaArch, ModelArch, Qwen3Arch

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
}
LATENT = {
    **SIZES,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
#: starts of sequences; the first are shorter than there are chunks
STARTS = (0, 3, 4, 18, 36)

Sharing = Callable[[Tensor, ThreadRanks], Any]


def by_heads(starts: Tensor, ranks: ThreadRanks) -> ContextParallelAttention:
    return ContextParallelAttention(PackedAttention(starts), ranks)  # type: ignore[arg-type]


def around(starts: Tensor, ranks: ThreadRanks) -> RingAttention:
    return RingAttention(starts, ranks)  # type: ignore[arg-type]


def by_latents(starts: Tensor, ranks: ThreadRanks) -> LatentGather:
    return LatentGather(starts, ranks)  # type: ignore[arg-type]


def model_of(arch: ModelArch) -> Decoder:
    model = build_model(arch, device="cpu")
    model.init_weights(torch.Generator().manual_seed(0), std=0.3)
    return model


WAYS: dict[str, tuple[ModelArch, Sharing]] = {
    "heads": (Qwen3Arch(**SIZES, num_key_value_heads=2, head_dim=6), by_heads),
    "ring": (Qwen3Arch(**SIZES, num_key_value_heads=2, head_dim=6), around),
    "latents": (DeepseekV3Arch(**LATENT, routed_scaling_factor=1.0), by_latents),
    "chosen tokens": (
        GlmMoeDsaArch(
            **LATENT,
            routed_scaling_factor=1.0,
            index_n_heads=16,
            index_head_dim=6,
            index_topk=4,
            indexer_types=("full", "shared"),
        ),
        by_heads,
    ),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_computes_on_shared_tokens_what_it_computes_on_all(
    way: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some tokens of each rank alone, with the experts that each chose; gradients add up."""
    arch, share = WAYS[way]
    starts, draw = torch.tensor(STARTS), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, arch.vocab_size, (STARTS[-1],), generator=draw)
    weights = torch.randn(STARTS[-1], arch.vocab_size, generator=draw)
    model, whole = model_of(arch), PackedAttention(starts)
    experts: dict[int, Tensor] = {}
    logits = model(tokens, whole.context(record=experts.__setitem__))
    (logits.log_softmax(-1) * weights).sum().backward()
    ranks = ThreadRanks(size, monkeypatch)

    def on_rank() -> tuple[Tensor, Tensor, dict[int, Tensor], dict[str, Tensor]]:
        own_model, attention = model_of(arch), share(starts, ranks)
        own, chosen = torch.arange(STARTS[-1])[attention.own], dict[int, Tensor]()
        # all but the first token of this rank, so that gradients are of those alone
        select = torch.arange(1, len(own))
        context = attention.context(select, chosen.__setitem__)
        assert torch.equal(attention.sequences, whole.sequences[own])
        found = own_model(tokens[own], context)
        rest = own_model(tokens[own], attention.context())[:1]
        (torch.cat((rest, found)).log_softmax(-1) * weights[own]).sum().backward()
        gradients = {n: p.grad for n, p in own_model.named_parameters() if p.grad is not None}
        return own, found.detach(), chosen, gradients

    results = ranks.run(on_rank)
    assert torch.cat([own for own, *_ in results]).sort().values.tolist() == list(range(STARTS[-1]))
    for own, found, chosen, _ in results:
        torch.testing.assert_close(found, logits[own[1:]].detach(), rtol=1e-4, atol=1e-5)
        assert chosen.keys() == experts.keys()
        assert all(torch.equal(chosen[layer], experts[layer][own]) for layer in experts)
    for name, parameter in model.named_parameters():
        summed = [gradients[name] for *_, gradients in results if name in gradients]
        assert (parameter.grad is None) == (not summed)
        if parameter.grad is not None:
            torch.testing.assert_close(sum(summed), parameter.grad, rtol=1e-3, atol=1e-4)


# -- heads for tokens, and the ring


def inputs(heads: int, key_heads: int, key_dim: int, value_dim: int, tokens: int = STARTS[-1]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    sizes = ((heads, key_dim), (key_heads, key_dim), (key_heads, value_dim))
    return [torch.randn(tokens, *size, dtype=torch.float64, generator=draw) for size in sizes]


def check_parts(
    share: Sharing, ranks: ThreadRanks, made: list[Tensor], sinks: Tensor | None = None, **how: Any
) -> None:
    """Output, and gradients of queries, keys, values and sinks, as of one rank."""
    starts = torch.tensor(STARTS)
    weights = torch.randn(len(made[0]), made[0].shape[1], made[2].shape[2], dtype=torch.float64)

    def attend(run: Any, own: Any) -> list[Tensor]:
        leaves = [x[own].clone().requires_grad_() for x in made]
        if sinks is not None:
            leaves.append(sinks.clone().requires_grad_())
        out = run(0, *leaves[:3], sinks=None if sinks is None else leaves[3], **how)
        return [out, *torch.autograd.grad(out, leaves, weights[own])]

    expected = attend(PackedAttention(starts), slice(None))

    def on_rank() -> tuple[Any, list[Tensor]]:
        run = share(starts, ranks)
        return run.own, attend(run, run.own)

    results = ranks.run(on_rank)
    for own, found in results:
        for ours, theirs in zip(found[:4], expected[:4], strict=True):
            torch.testing.assert_close(ours, theirs[own], rtol=1e-9, atol=1e-11)
    if sinks is not None:
        torch.testing.assert_close(sum(found[4] for _, found in results), expected[4], rtol=1e-9, atol=1e-11)


SINKS = torch.linspace(-1.0, 2.0, 6, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_heads_are_dealt_out_with_their_keys_and_sinks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ThreadRanks(size, monkeypatch)
    for how in ({}, {"scale": 0.7}, {"window": 3}, {"sinks": SINKS}):
        check_parts(by_heads, ranks, inputs(6, 3, 5, 4), **how)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_keys_go_around_a_ring(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ThreadRanks(size, monkeypatch)
    for how in ({}, {"scale": 0.7}, {"sinks": SINKS}):
        check_parts(around, ranks, inputs(6, 3, 5, 4), **how)


def test_gradients_of_keys_travel_while_the_next_ones_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank sends the gradients of a turn, computes the next turn, and only then waits for what it adds to."""
    ranks = ThreadRanks(3, monkeypatch)
    backward = FusedKernel.backward

    def computed(*given: Any) -> Any:
        # the one that has all tokens is no rank
        ranks.calls.append((getattr(ranks._own, "rank", -1), "computed", 0))
        return backward(*given)

    monkeypatch.setattr(FusedKernel, "backward", computed)
    check_parts(around, ranks, inputs(6, 3, 5, 4))
    gradients = 1
    for rank in range(3):
        calls = [(what, tag) for who, what, tag in ranks.calls if who == rank and (what == "computed" or tag == 1)]
        turn = [("computed", 0), ("received", gradients), ("sent", gradients)]
        # at the first turn there is nothing to receive; at the end each rank receives the gradients of its own keys
        assert calls == [turn[0], turn[2], *turn, *turn, turn[1]]


def test_heads_that_cannot_be_dealt_out_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heads_problem(12, 4, 3) == heads_problem(12, 4, 1) == heads_problem(12, 4, 12) == ""
    assert heads_problem(12, 4, 8) == "12 query heads on 4 key heads cannot be distributed over cp 8"
    assert heads_problem(10, 5, 4) == "10 query heads on 5 key heads cannot be distributed over cp 4"
    with pytest.raises(ValueError, match="6 query heads on 3 key heads cannot be distributed over cp 4"):
        check_parts(by_heads, ThreadRanks(4, monkeypatch), inputs(6, 3, 5, 4))


def test_what_a_way_cannot_do_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no window; .*cp_scheme: ulysses"):
        check_parts(around, ThreadRanks(2, monkeypatch), inputs(6, 3, 5, 4), window=4)
    with pytest.raises(ValueError, match=r"layer 0 has none .*cp_scheme: ulysses"):
        check_parts(by_latents, ThreadRanks(2, monkeypatch), inputs(6, 3, 5, 4))


# -- latents


@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("size", [2, 3])
def test_keys_and_values_are_made_of_gathered_latents(heads: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one rank that makes those of all heads at once."""
    starts, draw = torch.tensor(STARTS), torch.Generator().manual_seed(3)
    unrotated, rotary, value, latent = 6, 4, 7, 9
    sizes = (
        (STARTS[-1], heads, unrotated + rotary),
        (STARTS[-1], latent + rotary),
        (heads * (unrotated + value), latent),
    )
    made = [torch.randn(*each, dtype=torch.float64, generator=draw) for each in sizes]
    weights = torch.randn(STARTS[-1], heads, value, dtype=torch.float64, generator=draw)

    def whole(q: Tensor, latents: Tensor, expand: Tensor) -> Tensor:
        kv = torch.einsum("tl,hcl->thc", latents[:, :latent], expand.view(heads, -1, latent))
        k = torch.cat((kv[..., :unrotated], latents[:, None, latent:].expand(-1, heads, -1)), -1)
        return PackedAttention(starts)(0, q, k, kv[..., unrotated:], scale=0.3)

    def attend(run: Callable[..., Tensor], own: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (made[0][own], made[1][own], made[2])]
        out = run(*leaves)
        return [out, *torch.autograd.grad(out, leaves, weights[own])]

    expected = attend(whole, slice(None))
    ranks = ThreadRanks(size, monkeypatch)

    def on_rank() -> tuple[Tensor, list[Tensor]]:
        gather = by_latents(starts, ranks)
        return gather.own, attend(lambda *each: gather.attend_latents(0, *each, scale=0.3), gather.own)

    results = ranks.run(on_rank)
    for own, found in results:
        for ours, theirs in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(ours, theirs[own], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(sum(found[3] for _, found in results), expected[3], rtol=1e-9, atol=1e-11)


def test_a_frozen_matrix_of_latents_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a model of which low-rank adapters alone are trained."""
    ranks, starts = ThreadRanks(2, monkeypatch), torch.tensor([0, 8])

    def on_rank() -> tuple[Tensor | None, Tensor | None]:
        gather = by_latents(starts, ranks)
        q, latents = torch.ones(4, 2, 5, requires_grad=True), torch.ones(4, 4, requires_grad=True)
        expand = torch.ones(2 * (3 + 2), 2)
        gather.attend_latents(0, q, latents, expand, scale=0.3).sum().backward()
        return latents.grad, expand.grad

    for of_latents, of_matrix in ranks.run(on_rank):
        assert of_latents is not None
        assert of_matrix is None


# -- how sequences are cut


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_chunks_have_every_token_once_and_equal_work(ranks: int) -> None:
    starts = (0, 1000, 1001, 1640, 9640)
    chunks = [head_tail(starts, rank, ranks) for rank in range(ranks)]
    assert sorted(token for part in chunks for token in part.tokens) == list(range(starts[-1]))
    position = [token - start for start, end in itertools.pairwise(starts) for token in range(start, end)]
    # keys that a query sees, up to itself
    work = [sum(position[token] + 1 for token in part.tokens) for part in chunks]
    assert max(work) < 1.01 * min(work)


def test_chunks_by_hand() -> None:
    """Two ranks: sequences of 8 and of 5 in four chunks each."""
    first, second = (head_tail((0, 8, 13), rank, 2) for rank in range(2))
    assert first == ([range(2), range(8, 9)], [range(6, 8), range(11, 13)])
    assert second == ([range(2, 4), range(9, 10)], [range(4, 6), range(10, 11)])
    assert (first.tokens, first.starts) == ([0, 1, 6, 7, 8, 11, 12], (0, 4, 7))
    assert places(first, tails=False).tolist() == [0, 1, 4]
    assert places(first, tails=True).tolist() == [2, 3, 5, 6]


# -- collectives that gradients go through


def test_rows_are_exchanged_and_their_gradients_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: rank 0 keeps one row and gives two, rank 1 gives one and keeps none."""
    ranks = ThreadRanks(2, monkeypatch)
    sent, received = ([1, 2], [1, 0]), ([1, 1], [2, 0])

    def on_rank() -> tuple[list[float], list[float]]:
        rank = torch.distributed.get_rank(ranks)  # type: ignore[arg-type]
        rows = (torch.arange(sum(sent[rank]), dtype=torch.float64)[:, None] + 10 * rank).requires_grad_()
        found = exchange_rows(rows, sent[rank], received[rank], ranks)  # type: ignore[arg-type]
        (found[:, 0] * (torch.arange(len(found)) + 100 * (rank + 1))).sum().backward()
        assert rows.grad is not None
        return found[:, 0].tolist(), rows.grad[:, 0].tolist()

    assert ranks.run(on_rank) == [([0.0, 10.0], [100.0, 200.0, 201.0]), ([1.0, 2.0], [101.0])]


@pytest.mark.parametrize("beside", [True, False])
def test_rows_are_gathered_and_their_gradients_added(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ThreadRanks(2, monkeypatch)

    def on_rank() -> tuple[list[float], Any, list[float]]:
        rank = torch.distributed.get_rank(ranks)  # type: ignore[arg-type]
        rows = (torch.arange(2, dtype=torch.float64)[:, None] + 10 * rank).requires_grad_()
        others = torch.full((2, 2), 7 + rank, dtype=torch.float32, requires_grad=True) if beside else None
        found, also = gather_rows(rows, ranks, beside=others)  # type: ignore[arg-type]
        (found[:, 0] * (torch.arange(4) + 100 * (rank + 1))).sum().backward()
        assert rows.grad is not None
        assert others is None or others.grad is None
        assert also is None or (also.dtype, also.requires_grad) == (torch.float32, False)
        return found[:, 0].tolist(), None if also is None else also.tolist(), rows.grad[:, 0].tolist()

    both = [[7.0, 7.0], [7.0, 7.0], [8.0, 8.0], [8.0, 8.0]] if beside else None
    assert ranks.run(on_rank) == [([0.0, 1, 10, 11], both, [300.0, 302]), ([0.0, 1, 10, 11], both, [304.0, 306])]


def test_gradients_of_gathered_rows_are_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 one by one, 256 and then twice 1 would stay 256."""
    ranks = ThreadRanks(3, monkeypatch)

    def on_rank() -> tuple[torch.dtype, float]:
        rank = torch.distributed.get_rank(ranks)  # type: ignore[arg-type]
        rows = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
        found, _ = gather_rows(rows, ranks)  # type: ignore[arg-type]
        (found[:1] * (256 if rank == 0 else 1)).sum().backward()
        (gradient,) = [rows.grad] if rows.grad is not None else [torch.zeros(1, 1)]
        return gradient.dtype, float(gradient)

    assert ranks.run(on_rank)[0] == (torch.bfloat16, 258.0)


def test_a_sum_over_ranks_counts_the_losses_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ThreadRanks(3, monkeypatch)

    def on_rank() -> tuple[float, float, float]:
        rank = torch.distributed.get_rank(ranks)  # type: ignore[arg-type]
        own = torch.tensor(1.0 + rank, requires_grad=True)
        total = sum_over(own, ranks)  # type: ignore[arg-type]
        (total * (rank + 2)).backward()
        assert own.grad is not None
        return float(total.detach()), float(own.detach()), float(own.grad)

    assert ranks.run(on_rank) == [(6.0, 1.0, 9.0), (6.0, 2.0, 9.0), (6.0, 3.0, 9.0)]
