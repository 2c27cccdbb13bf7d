"""What ranks that share a context must not lose or hold: digits of sums, and memory for keys and values."""

import pytest
import torch
from test_context_parallel import attention_of
from trainer_testing import run_ranks

from hpcrl.modeling.attention import latent_gather
from hpcrl.modeling.attention.latent_gather import LatentGather
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.attention.ring import RingAttention
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.trainer.parallel.mesh import distributed

RANKS = 4
TOKENS, HEADS, KEY_HEADS, WIDTH = 256, 4, 2, 16
#: of latents: channels that are not rotated, that are, of values, of a latent
UNROTATED, ROTARY, VALUE, LATENT = 6, 4, 8, 8


def group_of_all():
    mesh = ParallelDims(world_size=RANKS, cp=RANKS)
    mesh.build_mesh("cpu")
    return mesh.get_mesh("cp").get_group()


def errors_of_ring(rank):
    """Squared errors in bfloat16 of output and gradients, of the ring and of one rank, at this rank's tokens."""
    with distributed(timeout_s=120):
        ring = RingAttention(torch.tensor([0, TOKENS]), group_of_all())
        torch.manual_seed(0)
        sizes = ((HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, WIDTH))
        inputs = [torch.randn(TOKENS, *size).bfloat16() for size in sizes]
        sinks, weights = torch.randn(HEADS), torch.randn(TOKENS, HEADS, WIDTH).bfloat16()
        whole = slice(None)
        plain = PackedAttention(torch.tensor([0, TOKENS]))
        exact = attention_of(plain, whole, [each.double() for each in inputs], sinks.double(), weights.double())
        one = attention_of(plain, whole, inputs, sinks, weights)
        own = attention_of(ring, ring.own, inputs, sinks, weights)
        return [
            [float((x.detach().double() - y[ring.own]).square().sum()) for x, y in zip(part, exact[:4], strict=True)]
            for part in (own[:4], [each[ring.own] for each in one[:4]])
        ]


def test_a_ring_in_bfloat16_is_as_exact_as_one_rank():
    """What is added up around the ring has more digits than what is added: but for the rounding of the parts that
    ranks compute, of which a gradient of queries has one a turn."""
    ranks = run_ranks(RANKS, errors_of_ring)
    # each lies half-way between what is found and what sums in bfloat16 make of it
    for number, (name, most) in enumerate({"output": 1.12, "queries": 1.2, "keys": 1.02, "values": 0.9}.items()):
        own, one = (sum(found[which][number] for found in ranks) ** 0.5 for which in (0, 1))
        assert own < most * one, (name, own / one)


def largest_expansion(rank):
    """Numbers of the largest keys and values that are made at once, forward and backward."""
    sizes = []
    expand = latent_gather._expand

    def watched(*arguments):
        made = expand(*arguments)
        sizes.append(made.k.numel() + made.v.numel())
        return made

    with distributed(timeout_s=120), pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_gather, "_expand", watched)
        gather = LatentGather(torch.tensor([0, TOKENS]), group_of_all())
        own = len(gather.own)
        q = torch.randn(own, HEADS, UNROTATED + ROTARY, requires_grad=True)
        latents = torch.randn(own, LATENT + ROTARY, requires_grad=True)
        matrix = torch.randn(HEADS * (UNROTATED + VALUE), LATENT, requires_grad=True)
        out = gather.attend_latents(0, q, latents, matrix, scale=0.3)
        forward = max(sizes)
        sizes.clear()
        out.sum().backward()
        return own, forward, max(sizes)


def test_gathered_latents_are_never_expanded_for_all_heads_at_once():
    """No rank makes more keys and values at once than those of all heads of its own tokens."""
    for own, forward, backward in run_ranks(RANKS, largest_expansion):
        most = own * HEADS * (UNROTATED + ROTARY + VALUE)
        assert 0 < forward <= most
        assert 0 < backward <= most
