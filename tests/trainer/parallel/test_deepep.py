"""The adapter of DeepEP: over a stand-in of its buffer, and over its own Python with a stand-in of what is compiled."""

import inspect
import sys
import types
from itertools import product

import pytest
import torch
import torch.distributed as dist
from deepep_stand_in import OWN_PYTHON, Compiled, StandIn, load_own_python
from test_meshes import ARCHS, train
from trainer_testing import make_recipe, run_ranks, write_model_dir

from hpcrl.errors import UsageError
from hpcrl.modeling.layers.deepep import DeepEPDispatcher, Exchange, find_deepep
from hpcrl.modeling.layers.dispatch import LocalDispatcher
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.dispatcher import use_dispatcher
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.step.policy import TrainerPolicy

RANKS = 2
OWN = pytest.mark.skipif(not OWN_PYTHON.is_dir(), reason="no DeepEP: python3 tools/bootstrap.py --deepep")
KINDS = ["stand-in", pytest.param("own", marks=OWN)]


def exact(buffer):
    """Let the compiled part take float32, which DeepEP's own refuses: sums can be compared more closely."""
    Compiled.dtypes = (torch.bfloat16, torch.float32)
    return buffer


def find_buffer(kind):
    """Return the class of buffers: DeepEP's own Python, or the stand-in for it."""
    Compiled.made.clear()
    return load_own_python() if kind == "own" else StandIn


def check_dispatch(rank, group, buffer):
    """Choices of every kind, ranks without tokens and without rows: as with all experts here."""
    experts, width = 2 * RANKS, 8
    exchange = Exchange(buffer, group, most_tokens=9, timeout_s=899.5)
    over_ranks, here = DeepEPDispatcher(experts, RANKS, exchange), LocalDispatcher(experts)
    generator = torch.Generator().manual_seed(rank)
    scale = torch.arange(1.0, experts + 1)
    cases = ((7, (0, 1)), (1 if rank else 9, range(experts)), (0 if rank else 4, (experts - 1, 2)))
    # the one that DeepEP's compiled part takes first
    for dtype, (tokens, choices) in product((torch.bfloat16, torch.float32), cases):
        if dtype == torch.float32:
            exact(buffer)
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
    # the buffer is aligned to 2 MiB
    assert Compiled.made == [{"bytes": 2 << 20, "cpu_timeout": 900, "gpu_timeout": 900}]
    with pytest.raises(ValueError, match="10 tokens"):
        over_ranks.dispatch(torch.zeros(10, width), torch.zeros(10, 2), torch.zeros(10, 2, dtype=torch.int64))


def on_ranks(rank, model_dir, kind):
    with distributed(timeout_s=60) as start:
        mesh = ParallelDims(world_size=RANKS, ep=RANKS)
        mesh.build_mesh("cpu")
        buffer = find_buffer(kind)
        check_dispatch(rank, mesh.get_mesh("ep").get_group(), buffer)
        recipe, found = make_recipe(model_dir, steps=9), []
        Compiled.made.clear()
        for make in (None, exact(buffer)):
            policy = TrainerPolicy(recipe, load_arch(model_dir), Parallel(mesh, start.device), model_dir=model_dir)
            use_dispatcher(policy.model, mesh, recipe.trainer, make, timeout_s=recipe.collective_timeout_s)
            found.append(train(policy))
        # one buffer for all layers, and it waits as long as collectives do
        (made,) = Compiled.made
        assert made["gpu_timeout"] >= recipe.orchestrator.wait_timeout_s + 300
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_gradients_travel_as_by_collectives_of_torch(tmp_path, kind):
    model_dir = write_model_dir(tmp_path / "model", ARCHS["qwen3_moe"])
    for torch_own, deepep in run_ranks(RANKS, on_ranks, model_dir, kind, timeout_s=120.0):
        assert deepep[0] == pytest.approx(torch_own[0], rel=1e-4)
        # the norm that clips, over experts and the rest
        assert deepep[1] == pytest.approx(torch_own[1], rel=1e-4)
        for name in torch_own[2]:
            ours, theirs = torch.tensor(deepep[2][name]), torch.tensor(torch_own[2][name])
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def signatures(buffer):
    """Names and defaults of what is called, in order."""
    calls = (buffer.__init__, buffer.dispatch, buffer.combine)
    return [[(p.name, p.default) for p in inspect.signature(call).parameters.values()] for call in calls]


def own_signatures(rank):
    return signatures(load_own_python())


@OWN
def test_the_stand_in_has_deepeps_signatures():
    assert run_ranks(1, own_signatures) == [signatures(StandIn)]


def one_group_at_a_time(rank, model_dir):
    """What the communicator of each group is at the moment that DeepEP takes it: made by a collective, or not yet."""
    with distributed(timeout_s=60):
        mesh = ParallelDims(world_size=RANKS, ep=RANKS)
        mesh.build_mesh("cpu")
        group, collectives, own = mesh.get_mesh("ep").get_group(), [], dist.all_reduce

        def all_reduce(tensor, *arguments, group=None, **keywords):
            collectives.append((group, tensor.device.type))
            return own(tensor, *arguments, group=group, **keywords)

        class Lazy(StandIn):
            @property
            def communicator(self):
                return int((group, "cpu") in collectives)

        dist.all_reduce = all_reduce
        buffer = Exchange(Lazy, group, most_tokens=9, timeout_s=60).buffer(8, 2, torch.device("cpu"))
        return buffer.ranks


def test_the_communicator_is_there_before_deepep_takes_it(tmp_path):
    assert run_ranks(RANKS, one_group_at_a_time, tmp_path) == [RANKS] * RANKS


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


FAILURES = {
    "assert False, 'Duplicate NCCL runtime found in the current system'": "AssertionError: Duplicate NCCL runtime",
    "assert None is not None": "AssertionError: no reason given",
    "raise RuntimeError('cannot compile')": "RuntimeError: cannot compile",
    "raise OSError('libnccl.so.2: undefined symbol')": "OSError: libnccl",
    "raise TypeError('expected str, bytes or os.PathLike object, not NoneType')": "TypeError: expected str",
    "import no_such_module_of_deepep": "not installed here.*no_such_module_of_deepep",
}


@pytest.mark.parametrize(("line", "said"), FAILURES.items())
def test_a_deepep_that_cannot_be_imported_is_named(monkeypatch, tmp_path, line, said):
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text(line + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    with pytest.raises(UsageError, match=said) as raised:
        find_deepep(torch.device("cuda"))
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("trainer.parallelism.dispatcher: deepep")
    assert lines[1].startswith("    hint: ")
    if "not installed" not in said:
        assert "2.30.4" in lines[1]
        assert "CUDA_HOME" in lines[1]


@OWN
def test_what_deepeps_own_import_asserts_is_named(monkeypatch):
    """Its own ``__init__`` on a machine without its NCCL."""
    monkeypatch.syspath_prepend(OWN_PYTHON.parent)
    for name in [name for name in sys.modules if name.split(".")[0] == "deep_ep"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match="deep_ep"):
        find_deepep(torch.device("cuda"))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (AssertionError("NCCL GIN is unavailable"), UsageError),
        (RuntimeError("Prior to NCCL 2.31, NCCL compile-time and runtime versions must be the same"), UsageError),
        (dist.DistBackendError("remote process exited"), dist.DistBackendError),
        (torch.OutOfMemoryError("tried to allocate 6 GiB"), torch.OutOfMemoryError),
    ],
)
def test_a_buffer_that_cannot_be_made_is_named(error, raised):
    def make(group, **settings):
        raise error

    with distributed(timeout_s=60), pytest.raises(raised, match=str(error)[:20]) as found:
        Exchange(make, dist.group.WORLD, most_tokens=9, timeout_s=60).buffer(8, 2, torch.device("cpu"))
    if raised is UsageError:
        assert "    hint: " in str(found.value)
        assert "2.30.4" in str(found.value)
