"""The adapter of DeepEP, over a stand-in of its buffer with the same interface: DeepEP itself needs GPUs."""

import sys
import types
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from test_meshes import ARCHS, train
from trainer_testing import make_recipe, run_ranks, write_model_dir

from hpcrl.errors import UsageError
from hpcrl.modeling.exchange import exchange_rows
from hpcrl.modeling.layers.deepep import DeepEPDispatcher, Exchange, find_deepep
from hpcrl.modeling.layers.dispatch import LocalDispatcher
from hpcrl.modeling.mesh import ParallelDims
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.dispatcher import use_dispatcher
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.step.policy import TrainerPolicy

RANKS = 2


class Handle(NamedTuple):
    """Where the tokens of a call went, and with how many multiprocessors."""

    tokens: torch.Tensor
    sent: list[int]
    coming: list[int]
    total: int
    topk: int
    num_sms: int


class StandIn:
    """``deep_ep.ElasticBuffer`` in its layout without expansion, over collectives of torch.

    A token goes once to each rank that has some of its experts; these are numbered as the rank has them, -1 where they
    are elsewhere. The number of multiprocessors is computed before ``num_experts`` is taken from the handle, as in
    deep_ep/buffers/elastic.py of DeepEP 2.1.0 (dd758ca), so that a call with a handle alone fails here, too.
    """

    made = 0

    def __init__(self, group, *, num_max_tokens_per_rank, hidden, num_topk, deterministic):
        self.group, self.ranks, self.most, self.sizes = (
            group,
            dist.get_world_size(group),
            num_max_tokens_per_rank,
            hidden,
        )
        assert deterministic
        assert num_topk == 2
        StandIn.made += 1

    def dispatch(self, x, *, topk_idx=None, topk_weights=None, num_experts=None, num_sms=0, handle=None):
        num_sms = num_sms or 2 * self.ranks + num_experts % self.ranks
        assert x.is_contiguous()
        assert x.shape[1] == self.sizes
        assert len(x) <= self.most
        if handle is None:
            here = num_experts // self.ranks
            goes = [((topk_idx // here) == rank).any(1).nonzero()[:, 0] for rank in range(self.ranks)]
            counts = torch.tensor([len(tokens) for tokens in goes])
            coming = torch.empty_like(counts)
            dist.all_to_all_single(coming, counts, group=self.group)
            handle = Handle(torch.cat(goes), counts.tolist(), coming.tolist(), len(x), topk_idx.shape[1], num_sms)
            own = self._send(topk_idx, handle) - dist.get_rank(self.group) * here
            own = torch.where((own >= 0) & (own < here), own, -1)
            # who reads weights of experts that are elsewhere finds out
            shares = self._send(topk_weights, handle).masked_fill(own < 0, float("nan"))
        else:
            assert topk_idx is None
            assert num_sms == handle.num_sms
            own = shares = None
        return self._send(x, handle), own, shares, handle, None

    def combine(self, x, *, handle, topk_weights=None):
        tokens, sent, coming, total, k, _ = handle
        assert len(x) == sum(coming)
        back = exchange_rows(x.contiguous(), coming, sent, self.group)
        mixed = x.new_zeros(total, x.shape[1]).index_add(0, tokens, back)
        if topk_weights is not None:
            weights = exchange_rows(topk_weights.contiguous(), coming, sent, self.group)
            topk_weights = weights.new_zeros(total, k).index_add(0, tokens, weights)
        return mixed, topk_weights, None

    def _send(self, x, handle):
        tokens, sent, coming, *_ = handle
        return exchange_rows(x[tokens], sent, coming, self.group)


def check_dispatch(rank, group):
    """Choices of every kind, ranks without tokens and without rows: as with all experts here."""
    experts, width = 2 * RANKS, 5
    exchange = Exchange(StandIn, group, most_tokens=9)
    over_ranks, here = DeepEPDispatcher(experts, RANKS, exchange), LocalDispatcher(experts)
    generator = torch.Generator().manual_seed(rank)
    scale = torch.arange(1.0, experts + 1)
    cases = ((7, (0, 1)), (1 if rank else 9, range(experts)), (0 if rank else 4, (experts - 1, 2)))
    for dtype, (tokens, choices) in product((torch.float32, torch.bfloat16), cases):
        x = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
        weights = torch.rand(tokens, 2, generator=generator, requires_grad=True)
        allowed = torch.tensor(list(choices))
        chosen, found = allowed[torch.rand(tokens, len(allowed), generator=generator).argsort(1)[:, :2]], []
        for dispatcher, own in ((over_ranks, scale.view(RANKS, -1)[rank]), (here, scale)):
            rows, counts, combine = dispatcher.dispatch(x, weights, chosen)
            assert len(rows) == int(counts.sum())
            y = combine(rows * own.to(dtype).repeat_interleave(counts)[:, None])
            found.append((y, *torch.autograd.grad(y.square().sum(), (x, weights))))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, **({} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}))
    assert StandIn.made == 1
    with pytest.raises(ValueError, match="10 tokens"):
        over_ranks.dispatch(torch.zeros(10, width), torch.zeros(10, 2), torch.zeros(10, 2, dtype=torch.int64))


def on_ranks(rank, model_dir):
    with distributed(timeout_s=60) as start:
        mesh = ParallelDims(world_size=RANKS, ep=RANKS)
        mesh.build_mesh("cpu")
        check_dispatch(rank, mesh.get_mesh("ep").get_group())
        recipe, found = make_recipe(model_dir, steps=9), []
        for make in (None, StandIn):
            policy = TrainerPolicy(recipe, load_arch(model_dir), Parallel(mesh, start.device), model_dir=model_dir)
            use_dispatcher(policy.model, mesh, recipe.trainer, make)
            found.append(train(policy))
        # one buffer for all layers
        assert StandIn.made == 2
        return found


def test_tokens_and_gradients_travel_as_by_collectives_of_torch(tmp_path):
    model_dir = write_model_dir(tmp_path / "model", ARCHS["qwen3_moe"])
    for torch_own, deepep in run_ranks(RANKS, on_ranks, model_dir, timeout_s=120.0):
        assert deepep[0] == pytest.approx(torch_own[0], rel=1e-4)
        # the norm that clips, over experts and the rest
        assert deepep[1] == pytest.approx(torch_own[1], rel=1e-4)
        for name in torch_own[2]:
            ours, theirs = torch.tensor(deepep[2][name]), torch.tensor(torch_own[2][name])
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_trainer_without_deepep_says_so_first(tmp_path):
    model_dir = write_model_dir(tmp_path / "model", ARCHS["qwen3_moe"])
    recipe = make_recipe(model_dir, steps=9, parallelism={"dispatcher": "deepep"})
    with distributed(timeout_s=120) as parallel, pytest.raises(UsageError, match=r"hint: .*all_to_all"):
        TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)


def test_what_is_wrong_with_deepep_is_named(monkeypatch):
    with pytest.raises(UsageError, match="computes on cpu"):
        find_deepep(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(UsageError, match="not installed here"):
        find_deepep(torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "deep_ep", types.ModuleType("deep_ep"))
    with pytest.raises(UsageError, match=r"older than 2\.0"):
        find_deepep(torch.device("cuda"))
    sys.modules["deep_ep"].ElasticBuffer = StandIn
    assert find_deepep(torch.device("cuda")) is StandIn


def test_a_check_of_deepep_at_its_import_is_told_with_what_it_needs(tmp_path: Path, monkeypatch):
    """It asserts that there is a toolkit of CUDA and an NCCL that is new enough."""
    (tmp_path / "deep_ep.py").write_text("assert False, 'no CUDA_HOME'\n")
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"no CUDA_HOME.*\n.*hint: .*all_to_all.*NCCL 2\.30\.4"):
        find_deepep(torch.device("cuda"))
