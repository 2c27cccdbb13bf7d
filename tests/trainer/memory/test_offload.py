"""What waits in host memory: inputs of layers within a bound, moments of the optimizer a bucket at a time."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpcrl.config.recipe import OptimizerConfig
from hpcrl.trainer.memory import optimizer as host_optimizer
from hpcrl.trainer.memory.copies import copies_of
from hpcrl.trainer.memory.offload import ActivationOffload
from hpcrl.trainer.memory.optimizer import HostAdamW
from hpcrl.trainer.state.checkpoint import trainer_state
from hpcrl.trainer.step.optim import clip_gradients, make_optimizer, set_learning_rate

CPU = torch.device("cpu")
NUMBERS = 256
SIZE = 4 * NUMBERS


class SlowCopies:
    """Copies that are made no earlier than somebody waits for them, as on a bus that is always behind."""

    def start(self, target, source):
        return SlowCopy(target, source)


class SlowCopy:
    def __init__(self, target, source):
        self.pair = target, source

    def finish(self):
        if self.pair is not None:
            target, source = self.pair
            target.copy_(source.detach())
            self.pair = None


@pytest.mark.parametrize(("bound", "most"), [(0, 1), (SIZE, 1), (3 * SIZE + 1, 3), (100 * SIZE, 8)])
def test_no_more_than_the_bound_is_in_flight(bound, most):
    """Counted by what is alive on the device, not by what the code believes."""
    offload = ActivationOffload(CPU, bound_bytes=bound, copies=SlowCopies())
    sources, back, alive = [], [], []
    for number in range(8):
        x = torch.full((NUMBERS,), float(number), requires_grad=True) * 1.0
        sources.append(weakref.ref(x))
        back.append(offload(x))
        del x
        alive.append(sum(source() is not None for source in sources))
        assert offload.bytes_in_flight <= max(bound, SIZE)
    assert max(alive) == alive[-1] == most
    for number in reversed(range(8)):
        found = back.pop()()
        assert torch.equal(found, torch.full((NUMBERS,), float(number)))
        assert found.requires_grad
        # beside the one that is back: what has not left, or the next one on its way
        assert offload.bytes_in_flight <= max(bound, SIZE)
        assert number == 0 or offload.bytes_in_flight > 0


def test_the_next_input_is_on_its_way_while_a_layer_is_computed():
    started = []

    class Noted(SlowCopies):
        def start(self, target, source):
            started.append(float(source.detach()[0]))
            return super().start(target, source)

    offload = ActivationOffload(CPU, bound_bytes=SIZE, copies=Noted())
    back = [offload(torch.full((NUMBERS,), float(number))) for number in range(4)]
    started.clear()
    back.pop()()
    assert started == [2.0]
    back.pop()()
    assert started == [2.0, 1.0]


def test_a_pass_without_a_backward_pass_leaves_little():
    offload = ActivationOffload(CPU, bound_bytes=SIZE, copies=copies_of(CPU))
    for number in range(3):
        offload(torch.full((NUMBERS,), float(number)))
    back = offload(torch.full((NUMBERS,), 7.0))
    assert torch.equal(back(), torch.full((NUMBERS,), 7.0))
    assert offload.bytes_in_flight <= SIZE


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((30, 17), (5,), (3, 40, 5), (1, 1))]


CONFIG = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)


def named(trained):
    return [(str(number), parameter) for number, parameter in enumerate(trained)]


def steps(optimizer, trained, *, prefetch=False):
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 4):
        set_learning_rate(optimizer, CONFIG.learning_rate / step)
        for parameter in trained:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if prefetch:
            optimizer.prefetch()
        assert clip_gradients(trained, CONFIG.max_grad_norm, None) > CONFIG.max_grad_norm
        optimizer.step()
    return [parameter.detach().clone() for parameter in trained]


@pytest.mark.parametrize("bucket", [8, 8 * 150, 8 * 1000])
def test_steps_are_those_of_the_device_bit_for_bit(monkeypatch, bucket):
    wanted_of, found_of = parameters(), parameters()
    device = make_optimizer(named(wanted_of), CONFIG)
    monkeypatch.setitem(HostAdamW.__init__.__kwdefaults__, "bucket_bytes", bucket)
    host = make_optimizer(named(found_of), CONFIG, on_host=True)
    assert isinstance(host, HostAdamW)
    wanted, found = steps(device, wanted_of), steps(host, found_of, prefetch=True)
    assert all(map(torch.equal, found, wanted))
    for ours, theirs in zip(found_of, wanted_of, strict=True):
        for name, value in device.state[theirs].items():
            assert torch.equal(host.state[ours][name], value), name


class CopiesOfAStream:
    """Copies to the host end when the device is waited for, and not before: `finish` is an order to the device."""

    def __init__(self):
        self.begun = []

    def start(self, target, source):
        self.begun.append((target, source.detach().clone()))
        return SimpleNamespace(finish=lambda: None)

    def end(self):
        for target, copy in self.begun:
            target.copy_(copy)
        self.begun = []


def test_what_is_saved_waits_for_moments_that_are_on_their_way_to_the_host(monkeypatch):
    model = nn.Linear(30, 17)
    optimizer = make_optimizer(list(model.named_parameters()), CONFIG, on_host=True)
    optimizer._out = late = CopiesOfAStream()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", late.end)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert late.begun
    saved = trainer_state(model, optimizer, 1)["optimizer"]
    # after one step the mean of gradients of one is one without what the first beta keeps
    wanted = torch.tensor(1 - CONFIG.beta1)
    assert all(torch.allclose(entry["exp_avg"], wanted) for entry in saved.values())


def test_three_buckets_are_on_the_device_at_most(monkeypatch):
    monkeypatch.setitem(HostAdamW.__init__.__kwdefaults__, "bucket_bytes", 8 * 20)
    monkeypatch.setattr(host_optimizer, "copies_of", lambda device: SlowCopies())
    trained, compute, held = parameters(), HostAdamW._compute, []
    optimizer = make_optimizer(named(trained), CONFIG, on_host=True)

    def looking(self, bucket):
        held.append(sum(bool(each.moments) for each in self._buckets))
        compute(self, bucket)

    monkeypatch.setattr(HostAdamW, "_compute", looking)
    steps(optimizer, trained, prefetch=True)
    assert len(optimizer._buckets) > 5
    assert max(held) == 3
    assert not any(bucket.moments for bucket in optimizer._buckets)


def test_a_step_that_is_not_made_changes_nothing():
    """Moments that were fetched for a step that a gradient spoilt are those of the next one."""
    one, other = parameters(), parameters()
    first, second = (make_optimizer(named(trained), CONFIG, on_host=True) for trained in (one, other))
    first.prefetch()
    assert all(map(torch.equal, steps(first, one, prefetch=True), steps(second, other)))
