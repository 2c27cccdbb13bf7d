"""Tokens to their experts and back by kernels of DeepEP (github.com/deepseek-ai/DeepEP, 2.0: its ``ElasticBuffer``).

Never run on a GPU by this project: tests run DeepEP's own Python over a stand-in of its compiled part. A token travels
once to each rank that has some of its experts. What experts made of it is added up there, by weight, and travels back
once; so experts are sorted and weighted here, on the rank that has them.
"""

from __future__ import annotations

import math
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.errors import UsageError
from hpcrl.modeling.layers.dispatch import Dispatched
from hpcrl.modeling.layers.rows import RowOrder, copy_rows, mix_rows
from hpcrl.modeling.sums import count_rows


class ElasticBuffer(Protocol):
    """Used methods of DeepEP's class of this name. Kernels have completed when a call returns."""

    def dispatch(self, x: Tensor, **settings: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Any, Any]:
        """Send ``x [T, width]``, whose experts and weights are ``topk_idx`` and ``topk_weights``, ``[T, k]``.

        Rows ``[rows, width]``, experts of this rank that each goes to, ``[rows, k]`` (-1: none), weights of these, a
        handle, an event. With a ``handle`` instead: rows that go as those of that call went.
        """
        ...

    def combine(self, x: Tensor, **settings: Any) -> tuple[Tensor, Tensor | None, Any]:
        """Return the sums ``[T, width]`` of each token's rows ``[rows, width]``; the same of weights; an event.

        ``handle`` is that of the call that dispatched the rows.
        """
        ...


class MakeBuffer(Protocol):
    """A call that makes DeepEP's ``ElasticBuffer``."""

    def __call__(self, group: dist.ProcessGroup, **settings: Any) -> ElasticBuffer: ...


_WHERE = "trainer.parallelism.dispatcher: deepep"
_HINT = "    hint: set trainer.parallelism.dispatcher: all_to_all"
_NCCL = "2.30.4"
"""The oldest NCCL that DeepEP 2 works with (its README; torch 2.13 itself asks for 2.29.7)."""


def find_deepep(device: torch.device) -> MakeBuffer:
    """Return DeepEP's class of buffers.

    Raises
    ------
    UsageError
        It cannot be used here: it is not installed, does not start, is too old, or a GPU is missing.
    """
    if device.type != "cuda":
        raise UsageError(f"{_WHERE} needs GPUs of NVIDIA, and this trainer computes on {device.type}\n{_HINT}")
    try:
        package = import_module("deep_ep")
    except ImportError as error:
        install = ", or install DeepEP 2.0 from its sources in the environment of the trainer"
        raise UsageError(f"{_WHERE}: the package deep_ep is not installed here ({error})\n{_HINT}{install}") from error
    except Exception as error:
        # its import asserts versions of NCCL and CUDA, and starts its compiler
        raise _does_not_start("the package deep_ep cannot be imported here", error) from error
    try:
        made: MakeBuffer = package.ElasticBuffer
    except AttributeError as error:
        what = "the package deep_ep is older than 2.0: it has no ElasticBuffer"
        raise UsageError(f"{_WHERE}: {what}\n{_HINT}, or install DeepEP 2.0") from error
    return made


def _does_not_start(what: str, error: Exception) -> UsageError:
    """Return the error for a DeepEP that is installed but does not start: mostly NCCL or CUDA is the reason."""
    found = ""
    # absent from builds of torch without CUDA
    with suppress(Exception):
        found = f" (torch has loaded {'.'.join(map(str, torch.cuda.nccl.version()))})"  # type: ignore[no-untyped-call]
    return UsageError(
        f"{_WHERE}: {what} ({type(error).__name__}: {str(error) or 'no reason given'})\n{_HINT}, or give the trainer's "
        f"environment what DeepEP 2 needs: NCCL {_NCCL} or later, the same library for torch and DeepEP{found}: pip "
        f"install --no-deps 'nvidia-nccl-cu13>={_NCCL}' before DeepEP is built; and CUDA_HOME, a CUDA toolkit with nvcc"
    )


class Exchange:
    """The buffer that all layers share; it is made when the first tokens leave, on all ranks of the group at once."""

    def __init__(self, make: MakeBuffer, group: dist.ProcessGroup, *, most_tokens: int, timeout_s: float) -> None:
        """Remember how to make the buffer.

        Parameters
        ----------
        most_tokens:
            Maximum tokens of one rank in one pass, the same on all ranks.
        timeout_s:
            Timeout in seconds of a rank's wait for the others in one exchange. They may compile kernels meanwhile, so
            it is not shorter than the timeout of collectives. DeepEP's own defaults are 100 s on the GPU, after which
            the kernel traps, and 300 s on the host.
        """
        self._make, self._group, self.most_tokens = make, group, most_tokens
        self._timeout_s = math.ceil(timeout_s)
        self._buffers: dict[tuple[int, int], ElasticBuffer] = {}

    def buffer(self, width: int, experts_per_token: int, device: torch.device) -> ElasticBuffer:
        """Return the buffer for rows of ``width`` on ``device``; the first time all ranks make it together.

        Raises
        ------
        UsageError
            DeepEP does not start with this network, NCCL or driver.
        """
        wanted = (width, experts_per_token)
        if wanted not in self._buffers:
            # DeepEP takes the group's communicator, which torch makes in the group's first collective on a device. A
            # `device_id` of the process group would make it earlier, but splits it for mesh groups, which the Gloo half
            # of these groups does not support
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
            self._buffers[wanted] = self._made(width, experts_per_token)
        return self._buffers[wanted]

    def _made(self, width: int, experts_per_token: int) -> ElasticBuffer:
        try:
            return self._make(
                self._group,
                num_max_tokens_per_rank=self.most_tokens,
                hidden=width,
                num_topk=experts_per_token,
                # else rows arrive in another order each time, and sums of gradients differ
                deterministic=True,
                num_cpu_timeout_secs=self._timeout_s,
                num_gpu_timeout_secs=self._timeout_s,
            )
        except (dist.DistError, torch.OutOfMemoryError):
            # another rank went away, or the plan was wrong: neither is the fault of DeepEP's installation
            raise
        except Exception as error:
            # assertions of its Python, exceptions of its C++
            raise _does_not_start("DeepEP's buffer cannot be made here", error) from error


class DeepEPDispatcher:
    """See `hpcrl.modeling.layers.dispatch.Dispatcher`. Experts are distributed in equal runs over ranks."""

    def __init__(self, experts: int, ranks: int, exchange: Exchange) -> None:
        """Prepare a dispatcher for a layer with ``experts``, a multiple of ``ranks``."""
        assert experts % ranks == 0
        self._experts, self._here, self._exchange = experts, experts // ranks, exchange

    def dispatch(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Dispatched:
        """See `Dispatcher`. The host waits for the device, to learn how many rows arrive.

        Raises
        ------
        ValueError
            More tokens than the buffer has room for.
        """
        if len(x) > self._exchange.most_tokens:
            raise ValueError(f"{len(x)} tokens in a pass; DeepEP's buffer was made for {self._exchange.most_tokens}")
        way = _Way(self._exchange.buffer(x.shape[1], chosen.shape[1], x.device), self._experts)
        rows, shares, experts = _Leave.apply(way, x, weights, chosen)  # type: ignore[no-untyped-call]
        places = experts.flatten()
        # rows of other ranks' experts are sorted last, and left out
        key = torch.where(places < 0, self._here, places)
        counts = count_rows(key, self._here + 1)[: self._here]
        # the exchange has synchronised with the device already: `int` costs no further wait
        here = key.argsort(stable=True)[: int(counts.sum())]
        order = RowOrder.of(here, *experts.shape)

        def combine(y: Tensor) -> Tensor:
            mixed: Tensor = _Return.apply(way, mix_rows(y, order, shares))  # type: ignore[no-untyped-call]
            return mixed

        return Dispatched(copy_rows(rows, order), counts, combine)


class _Way:
    """Handle of the dispatch of one layer in one pass, for the tokens that return."""

    def __init__(self, buffer: ElasticBuffer, experts: int) -> None:
        self.buffer, self.experts = buffer, experts
        self.handle: Any = None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, way: _Way, x: Tensor, weights: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows, experts, shares, way.handle, _ = way.buffer.dispatch(
            x.contiguous(), topk_idx=chosen, topk_weights=weights.contiguous(), num_experts=way.experts
        )
        ctx.way = way
        ctx.mark_non_differentiable(experts)
        return rows, shares, experts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor | None, None]:
        way, (of_rows, of_shares, _) = ctx.way, gradients
        of_x, of_weights, _ = way.buffer.combine(
            of_rows.contiguous(), handle=way.handle, topk_weights=of_shares.contiguous()
        )
        return None, of_x, of_weights, None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, rows: Tensor) -> Tensor:
        ctx.way = way
        return way.buffer.combine(rows.contiguous(), handle=way.handle)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        way = ctx.way
        # without num_sms DeepEP computes it from num_experts, before it takes that from the handle
        return None, way.buffer.dispatch(gradients[0].contiguous(), handle=way.handle, num_sms=way.handle.num_sms)[0]
