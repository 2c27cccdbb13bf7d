"""What torch keeps of the kernels that it makes for processors is bounded: batches have other lengths each time."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hpcrl.inference.embedded import server
from hpcrl.trainer import __main__ as trainer

_GROWTH = """
import torch
from hpcrl.processes.interpreter import bound_kernel_caches
bound_kernel_caches()
torch.set_num_threads(1)
def mib():
    return int(open("/proc/self/smaps_rollup").read().split("Anonymous:")[1].split()[0]) / 1024
weight = torch.randn(64, 64).bfloat16()
def products(lengths):
    for length in lengths:
        torch.randn(length, 64).bfloat16() @ weight
products(range(1, 40))
before = mib()
products(range(40, 240))
print(mib() - before)
"""
VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        # set, so that what the code sets is taken back afterwards
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_products_of_many_lengths_leave_nothing_behind(unset: None) -> None:
    """Without the bound, 200 lengths leave 130 MiB where the processor has bfloat16."""
    child = subprocess.run([sys.executable, "-P", "-c", _GROWTH], capture_output=True, text=True, check=True)
    assert float(child.stdout) < 10.0


def test_trainer_and_engine_have_the_bound_before_torch(unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(*_: object) -> int:
        seen.append([os.environ.pop(name) for name in VARIABLES])
        return 0

    monkeypatch.setitem(sys.modules, "hpcrl.trainer.loop", SimpleNamespace(train=note))
    monkeypatch.setitem(sys.modules, "hpcrl.trainer.supervised.loop", SimpleNamespace(train_supervised=note))
    monkeypatch.setitem(sys.modules, "hpcrl.inference.embedded.serving.process", SimpleNamespace(main=note))
    for sft in (None, object()):
        run = SimpleNamespace(recipe=lambda sft=sft: SimpleNamespace(sft=sft))
        trainer.main(SimpleNamespace(run=run))  # type: ignore[arg-type]
    server.main()
    assert seen == [["16", "16"]] * 3


def test_what_the_environment_says_is_left(unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLES[0], "7")
    monkeypatch.setitem(
        sys.modules,
        "hpcrl.inference.embedded.serving.process",
        SimpleNamespace(main=lambda: int(os.environ[VARIABLES[0]])),
    )
    assert server.main() == 7
