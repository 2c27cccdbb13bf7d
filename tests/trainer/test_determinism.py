"""What a deterministic trainer tells torch, by device; and sums that torch refuses there, in another way."""

import pytest
import torch
import torch.utils.deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrl.errors import UsageError
from hpcrl.modeling.sums import running_sums
from hpcrl.trainer.determinism import settle_determinism

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def nothing_told():
    """Torch as it is imported; and as it was, afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize(
    ("device", "wanted", "told"), [(CPU, False, True), (CPU, True, True), (GPU, False, False), (GPU, True, True)]
)
def test_torch_is_deterministic_if_requested_or_free(monkeypatch, device, wanted, told):
    monkeypatch.setenv(WORKSPACE, ":4096:8")
    settle_determinism(device, wanted=wanted)
    assert torch.are_deterministic_algorithms_enabled() == told
    # an operation that cannot is refused, and not only warned of
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory != told


@pytest.mark.parametrize(("value", "words"), [(None, "not set"), (":0:0", "variable is :0:0")])
def test_without_what_cublas_needs_a_trainer_on_gpus_does_not_start(monkeypatch, value, words):
    monkeypatch.delenv(WORKSPACE, raising=False)
    if value is not None:
        monkeypatch.setenv(WORKSPACE, value)
    with pytest.raises(UsageError, match=words) as caught:
        settle_determinism(GPU, wanted=True)
    assert "hint: " in str(caught.value)
    assert not torch.are_deterministic_algorithms_enabled()
    # a processor has no cuBLAS
    settle_determinism(CPU, wanted=True)
    settle_determinism(GPU, wanted=False)


class Called(TorchDispatchMode):
    """Names of the operations; those of a device that is not there are computed on this processor."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("told", [False, True])
def test_running_sums_of_a_deterministic_accelerator_are_products(told):
    """Their gradients, too."""
    torch.use_deterministic_algorithms(told)
    x = torch.empty(3, 7, 5, device="meta", requires_grad=True)
    with Called() as called:
        running_sums(x).sum().backward()
    assert ("cumsum" in called.names) != told


def test_products_are_the_running_sums(monkeypatch):
    x = torch.randn(3, 70, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = torch.randn(3, 70, 5, generator=torch.Generator().manual_seed(1))
    wanted = running_sums(x)
    assert torch.equal(wanted, x.cumsum(1))
    torch.use_deterministic_algorithms(True)
    # an accelerator, by its name alone
    there = x.detach().as_subclass(Elsewhere).requires_grad_()
    found = running_sums(there)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), wanted, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad((sums * weights).sum(), start)[0] for sums, start in ((wanted, x), (found, there))]
    torch.testing.assert_close(gradients[1].as_subclass(torch.Tensor), gradients[0], rtol=1e-5, atol=1e-5)


class Elsewhere(torch.Tensor):
    """A tensor of this processor that says it is on another device."""

    @property
    def device(self):
        return torch.device("meta")
