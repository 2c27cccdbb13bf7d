"""DeepEP without GPUs: a stand-in of its compiled part, over collectives of torch, and of the Python above it.

`Compiled` has the calls of ``deep_ep._C.ElasticBuffer`` and refuses what that refuses
(github.com/deepseek-ai/DeepEP, ``csrc/elastic/buffer.hpp`` of commit dd758caf4518, version 2.1.0). `StandIn` has the
signature of ``deep_ep/buffers/elastic.py`` of the same commit, and decides and asserts in the same order.
`load_own_python` gives DeepEP's own classes over `Compiled`, where ``tools/bootstrap.py --deepep`` has put them.
"""

# ruff: noqa: PLR0917, RUF059 - signatures are DeepEP's

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

from hpcrl.modeling.parallel.collectives import exchange_rows

OWN_PYTHON = Path(__file__).parents[3] / ".deepep" / "deep_ep"
MULTIPROCESSORS = 132


class Compiled:
    """Non-hybrid exchange without expansion. Rows arrive in no order that a caller may count on: here backwards."""

    group: dist.ProcessGroup
    made: ClassVar[list[dict]] = []
    dtypes = (torch.bfloat16,)

    def __init__(self, rank, ranks, comm, cpu_comm, num_bytes, num_cpu_bytes, *settings):
        hybrid, multiple, overlap, service_level, queue_pairs, cpu_timeout, gpu_timeout, explicitly = settings
        # ncclTeamWorld of a NULL communicator
        assert comm != 0, "the communicator of the group was not made yet"
        assert (rank, ranks) == (dist.get_rank(self.group), dist.get_world_size(self.group))
        assert num_bytes > 0
        assert num_bytes % (2 << 20) == 0
        assert isinstance(cpu_timeout, int)
        assert isinstance(gpu_timeout, int)
        self.rank, self.ranks, self.num_bytes = rank, ranks, num_bytes
        Compiled.made.append({"bytes": num_bytes, "cpu_timeout": cpu_timeout, "gpu_timeout": gpu_timeout})

    def get_logical_domain_size(self):
        return 1, self.ranks

    def get_physical_domain_size(self):
        return 1, self.ranks

    def dispatch(self, x, sf, topk_idx, topk_weights, stats, *rest):
        cached = rest[:10]
        most, experts, alignment, num_sms, num_qps, *streams = rest[10:]
        _, _, asynchronous, on_stream, copies_handle, syncs, expands, pads, _ = streams
        is_cached = cached[6] is not None
        assert num_sms > 0
        assert not (pads and not expands)
        assert num_qps > 0
        assert x.is_contiguous()
        assert x.dtype in self.dtypes
        tokens, hidden = x.shape
        assert hidden * x.element_size() % 16 == 0
        assert tokens <= most
        rows, k = topk_idx.shape
        assert rows == tokens
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        if topk_weights is not None:
            assert topk_weights.shape == (tokens, k)
            assert topk_weights.dtype == torch.float32
            assert topk_weights.is_contiguous()
        assert experts % self.ranks == 0
        here = experts // self.ranks
        if is_cached:
            assert all(cached[place] is not None for place in (0, 1, 2, 3, 4, 6, 8))
            assert not syncs
        goes = [((topk_idx // here) == rank).any(1).nonzero()[:, 0] for rank in range(self.ranks)]
        sent = [len(indices) for indices in goes]
        coming = torch.empty(self.ranks, dtype=torch.int64)
        dist.all_to_all_single(coming, torch.tensor(sent), group=self.group)
        coming = coming.tolist()
        order = torch.arange(sum(coming) - 1, -1, -1)

        def send(values):
            return exchange_rows(values[torch.cat(goes)], sent, coming, self.group)[order]

        own = weights = None
        if not is_cached:
            own = send(topk_idx) - self.rank * here
            own = torch.where((own >= 0) & (own < here), own, -1)
        if topk_weights is not None:
            # who reads weights of experts that are elsewhere finds out
            weights = send(topk_weights).masked_fill(own < 0, float("nan"))
        sources = send((torch.arange(tokens) + self.rank * most)[:, None])
        metadata = cached[8] if is_cached else torch.cat([sources, torch.zeros(len(order), k + 1)], 1).int()
        counts = torch.tensor(coming).cumsum(0).int()
        per_expert = [] if own is None else [int((own == expert).sum()) for expert in range(here)]
        copied = topk_idx.clone() if copies_handle and not is_cached else None
        slots = torch.zeros(tokens, k, dtype=torch.int32)
        return (
            *(send(x), None, torch.full((len(order), k), -1) if is_cached else own, weights, copied),
            *(len(order), len(order), per_expert, counts, torch.tensor(per_expert).cumsum(0).int()),
            *(None, metadata, slots, None, None, None),
        )

    def combine(self, x, topk_weights, bias_0, bias_1, metadata, topk_idx, psum, forward, linked, *rest):
        experts, most, num_sms, num_qps, *_, expands = rest
        assert num_sms > 0
        assert x.is_contiguous()
        assert x.dtype in self.dtypes
        assert x.shape[1] * x.element_size() % 16 == 0
        tokens, k = topk_idx.shape
        assert topk_idx.dtype == torch.int64
        assert psum.dtype == torch.int32
        assert tokens <= most
        assert metadata.shape == (len(x), k + 2)
        assert metadata.dtype == torch.int32
        if topk_weights is not None:
            assert topk_weights.shape == (len(x), k)
            assert topk_weights.dtype == torch.float32
            assert topk_weights.is_contiguous()
        # sorted by where they came from, whichever order the caller has them in
        order = metadata[:, 0].argsort()
        sources = metadata[order, :1].long()
        back = [int((sources // most == rank).sum()) for rank in range(self.ranks)]
        coming = torch.empty(self.ranks, dtype=torch.int64)
        dist.all_to_all_single(coming, torch.tensor(back), group=self.group)
        coming = coming.tolist()
        places = exchange_rows(sources % most, back, coming, self.group)[:, 0]

        def give_back(values):
            rows = exchange_rows(values[order].contiguous(), back, coming, self.group)
            return values.new_zeros(tokens, values.shape[1]).index_add(0, places, rows)

        return give_back(x), None if topk_weights is None else give_back(topk_weights), None


def buffer_bytes(most, hidden, topk, ranks):
    """What ``calculate_elastic_buffer_size`` says for one node, with settings as they come."""

    def up(value, to):
        return -(-value // to) * to

    row, metadata = up(2 * hidden, 32), topk * 8
    dispatched = (row + up(metadata + (1 + topk) * 4, 32)) * most * ranks
    combined = (row + up(metadata, 32)) * most * min(ranks, topk)
    return up(max(dispatched, combined), 2 << 20)


@dataclass
class Handle:
    """What `StandIn` remembers of a dispatch, named as in ``EPHandle``."""

    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    parts: tuple
    recv_src_metadata: torch.Tensor
    before_sort: torch.Tensor
    psum: torch.Tensor


class StandIn:
    """``deep_ep.ElasticBuffer``: the same signature, the same order of decisions and checks."""

    communicator = 1

    def __init__(
        self,
        group,
        num_bytes=None,
        num_cpu_bytes=0,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ):
        Compiled.group = group
        self.ranks, self.deterministic = group.size(), deterministic
        self.num_allocated_qps = num_allocated_qps or 129
        if num_bytes is None:
            num_bytes = buffer_bytes(num_max_tokens_per_rank, hidden, num_topk, self.ranks)
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.runtime = Compiled(
            *(group.rank(), self.ranks, self.communicator, [], num_bytes, num_cpu_bytes, allow_hybrid_mode),
            *(allow_multiple_reduction, prefer_overlap_with_compute, sl_idx, self.num_allocated_qps),
            *(num_cpu_timeout_secs, num_gpu_timeout_secs, explicitly_destroy),
        )
        group.barrier()

    def get_theoretical_num_sms(self, num_experts, num_topk):
        assert num_experts % self.ranks == 0
        return min(max(4, 2 * num_topk), MULTIPROCESSORS)

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        check_fill()
        topk = (handle.topk_idx if topk_idx is None else topk_idx).shape[1]
        num_sms = self.get_theoretical_num_sms(num_experts, topk) if num_sms == 0 else num_sms
        num_qps = min(num_sms * 16 + 1, self.num_allocated_qps) if num_qps == 0 else num_qps
        assert num_qps <= self.num_allocated_qps
        cached = (None,) * 10
        if handle is not None:
            assert topk_idx is None
            assert not do_cpu_sync
            topk_idx, do_cpu_sync = handle.topk_idx, False
            num_max_tokens_per_rank = num_max_tokens_per_rank or handle.num_max_tokens_per_rank
            num_experts, expert_alignment = num_experts or handle.num_experts, handle.expert_alignment
            assert (num_experts, num_max_tokens_per_rank) == (handle.num_experts, handle.num_max_tokens_per_rank)
            rows, expanded, per_expert, slots = handle.parts
            cached = (rows, expanded, per_expert, handle.psum, handle.psum, None, slots, None, handle.before_sort, None)
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        syncs = True if do_cpu_sync is None else do_cpu_sync
        received = self.runtime.dispatch(
            *(x, None, topk_idx, topk_weights, cumulative_local_expert_recv_stats, *cached),
            *(most, num_experts, expert_alignment or 1, num_sms, num_qps, previous_event),
            *(previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream, do_handle_copy),
            *(syncs, do_expand, do_zero_padding, use_tma_aligned_col_major_sf),
        )
        rows, _, own, weights, copied, count, expanded, per_expert, psum, _, _, metadata, slots, *_ = received
        if handle is None:
            parts = (count, expanded, per_expert, slots)
            handle = Handle(num_experts, 1, most, num_sms, copied, parts, metadata, metadata.clone(), psum)
            if self.deterministic:
                handle.recv_src_metadata = metadata[metadata[:, 0].argsort()]
        if self.deterministic:
            order = handle.before_sort[:, 0].argsort()
            rows, own = rows[order], None if own is None else own[order]
            weights = None if weights is None else weights[order]
        return rows, own, weights, handle, None

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        check_fill()
        num_sms = handle.num_sms if num_sms == 0 else num_sms
        mixed, weights, _ = self.runtime.combine(
            *(x, topk_weights, None, None, handle.recv_src_metadata, handle.topk_idx, handle.psum, None, None),
            *(handle.num_experts, handle.num_max_tokens_per_rank, num_sms, num_sms, previous_event),
            *(previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream, False),
        )
        return mixed, weights, None


def check_fill():
    """``check_torch_deterministic``."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    assert not (torch.are_deterministic_algorithms_enabled() and filled)


def load_own_python():
    """DeepEP's own ``ElasticBuffer`` over `Compiled`, in this process, which must not want CUDA for anything else."""
    package, compiled = types.ModuleType("deep_ep"), types.ModuleType("deep_ep._C")
    package.__path__ = [str(OWN_PYTHON)]
    compiled.ElasticBuffer, compiled.EventHandle, compiled.topk_idx_t = Compiled, object, torch.int64
    compiled.Config = compiled.Buffer = object
    compiled.calculate_elastic_buffer_size = lambda comm, most, hidden, topk, *_: buffer_bytes(
        most, hidden, topk, dist.get_world_size(Compiled.group)
    )
    sys.modules.update({"deep_ep": package, "deep_ep._C": compiled})
    elastic = importlib.import_module("deep_ep.buffers.elastic")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_device_name = lambda *_: "none"
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(multi_processor_count=MULTIPROCESSORS)

    def communicator(group, force_new_comm=False):
        Compiled.group = group
        return types.SimpleNamespace(get=lambda: StandIn.communicator)

    elastic.get_nccl_comm_handle = communicator
    return elastic.ElasticBuffer
