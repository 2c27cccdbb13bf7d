"""Ranks of one group as threads of this process: collectives of `torch.distributed` meet at a barrier.

What a rank computes, forward and backward, is what it would compute in a process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.modeling.parallel import collectives

T = TypeVar("T")
_TIMEOUT_S = 60.0


class Operation(NamedTuple):
    """In place of `torch.distributed.P2POp`."""

    op: Any
    tensor: Tensor
    peer: int
    group: Any
    tag: int = 0


class Transfer:
    """What is being sent or received: rows are there once it is waited for, as on devices."""

    def __init__(self, rank: int, calls: list[tuple[int, str, int]], operation: Operation, rows: Tensor | None) -> None:
        self._rank, self._calls, self._operation, self._rows = rank, calls, operation, rows

    def wait(self) -> None:
        if self._rows is not None:
            self._calls.append((self._rank, "received", self._operation.tag))
            self._operation.tensor.copy_(self._rows)
            self._rows = None


class ThreadRanks:
    """A group; `run` calls a function once for each of its ranks. It stands in for a `ProcessGroup`."""

    group_name = "threads"

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = size
        self._own = threading.local()
        self._barrier = threading.Barrier(size)
        self._brought: list[Any] = [None] * size
        self.calls: list[tuple[int, str, int]] = []
        """Sends, and receives that were waited for: rank, "sent" or "received", and tag."""
        replaced: dict[str, Any] = {
            "get_rank": lambda group: self._own.rank,
            "get_world_size": lambda group: self.size,
            "get_global_rank": lambda group, rank: rank,
            # the name of torch 2.13, and that of earlier ones
            "all_gather_single": self._all_gather,
            "all_gather_into_tensor": self._all_gather,
            "all_reduce": self._all_reduce,
            "all_to_all_single": self._all_to_all,
            "batch_isend_irecv": self._send_and_receive,
            "P2POp": Operation,
        }
        for name, function in replaced.items():
            monkeypatch.setattr(dist, name, function, raising=name != "all_gather_single")
        monkeypatch.setattr(collectives, "_resolve_process_group", lambda name: self)

    def run(self, target: Callable[[], T]) -> list[T]:
        """Results of ``target`` by rank; the error of the first rank that failed by itself."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def on(rank: int) -> None:
            self._own.rank = rank
            try:
                results[rank] = target()
            except threading.BrokenBarrierError:
                pass  # of another rank that failed
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=on, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert not self._barrier.broken
        return results

    def _meet(self, value: Any) -> list[Any]:
        """What all ranks have brought."""
        self._brought[self._own.rank] = value
        self._barrier.wait(_TIMEOUT_S)
        found = list(self._brought)
        self._barrier.wait(_TIMEOUT_S)
        return found

    def _all_gather(self, into: Tensor, tensor: Tensor, group: object) -> None:
        # NCCL and gloo take contiguous tensors
        assert into.is_contiguous()
        assert tensor.is_contiguous()
        into.copy_(torch.cat(self._meet(tensor.detach().clone())))

    def _all_reduce(self, tensor: Tensor, group: object) -> None:
        tensor.copy_(torch.stack(self._meet(tensor.detach().clone())).sum(0))

    def _all_to_all(
        self,
        into: Tensor,
        rows: Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
        *,
        group: object,
    ) -> None:
        equal = [len(rows) // self.size] * self.size
        parts = [each[self._own.rank] for each in self._meet(rows.detach().clone().split(sent or equal))]
        assert [len(part) for part in parts] == (received or equal)
        into.copy_(torch.cat(parts))

    def _send_and_receive(self, operations: Sequence[Operation]) -> list[Transfer]:
        sent = {each.peer: (each.tag, each.tensor.detach().clone()) for each in operations if each.op is dist.isend}
        self.calls += [(self._own.rank, "sent", each.tag) for each in operations if each.op is dist.isend]
        brought, transfers = self._meet(sent), list[Transfer]()
        for each in operations:
            rows = None
            if each.op is dist.irecv:
                tag, rows = brought[each.peer][self._own.rank]
                assert (tag, rows.shape) == (each.tag, each.tensor.shape)
                each.tensor.fill_(float("nan"))
            transfers.append(Transfer(self._own.rank, self.calls, each, rows))
        return transfers
