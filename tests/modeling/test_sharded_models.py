"""Sharding where there is one rank: it computes as without; what is summed when, and which groups come early."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcrl.errors import UsageError
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.compile.opaque import opaque, opaque_methods
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.kernels.attend import use_flash_attention_3
from hpcrl.modeling.layers.dispatch import AllToAllDispatcher
from hpcrl.modeling.layers.moe import SparseMLP
from hpcrl.modeling.memory.shared import view_of
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.modeling.parallelize import _ReduceNothing, parallelize_decoder, sum_over_copies
from hpcrl.modeling.spec import build_model, spec_of
from hpcrl.models.arch import Qwen3MoeArch
from hpcrl.weights.handover import SharedMemory, SharedTensor


def arch_of(*, tied: bool = False) -> Qwen3MoeArch:
    return Qwen3MoeArch(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=tied,
    )


def model_of(*, tied: bool = False) -> Decoder:
    model = build_model(arch_of(tied=tied), device="cpu")
    model.init_weights(torch.Generator().manual_seed(0), std=0.2)
    return model


@contextlib.contextmanager
def mesh_of(*, size: int = 1, fake: bool = False, **degrees: int) -> Iterator[ParallelDims]:
    store: Any = FakeStore() if fake else HashStore()
    dist.init_process_group("fake" if fake else "gloo", store=store, rank=0, world_size=size)
    try:
        mesh = ParallelDims(world_size=size, **degrees)
        mesh.build_mesh("cpu")
        yield mesh
    finally:
        dist.destroy_process_group()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    tokens, context = torch.arange(12), PackedAttention(torch.tensor([0, 7, 12])).context()
    for _ in range(2):  # they are added up
        model(tokens, context).log_softmax(-1)[:, 3].sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad: Any = parameter.grad
        found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    return found


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_one_rank_computes_what_a_whole_model_does(tied: bool, on_host: bool) -> None:
    wanted = gradients(model_of(tied=tied))
    with mesh_of() as mesh:
        model = model_of(tied=tied)
        parallelize_decoder(model, mesh, dtype=torch.float32, on_host=on_host)
        found = gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_family_is_sharded_as_asked(monkeypatch: pytest.MonkeyPatch, on_host: bool) -> None:
    asked = list[dict[str, Any]]()
    monkeypatch.setattr("hpcrl.modeling.parallelize.parallelize_decoder", lambda *_, **how: asked.append(how))
    with mesh_of() as mesh:
        spec_of(arch_of()).parallelize(model_of(), mesh, dtype=torch.bfloat16, on_host=on_host)
    assert asked == [{"dtype": torch.bfloat16, "on_host": on_host}]


def test_masters_are_float32_where_a_pass_is_not() -> None:
    with mesh_of() as mesh:
        model = model_of()
        parallelize_decoder(model, mesh, dtype=torch.bfloat16)
        seen = list[torch.dtype]()
        layer: Any = model.layers[0]
        layer.self_attn.q_proj.register_forward_hook(lambda module, given, y: seen.append(y.dtype))
        assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert set(seen) == {torch.bfloat16}


def test_what_has_nothing_to_reduce_stays_where_it_is() -> None:
    reduce = _ReduceNothing()
    device = torch.device("cpu")
    given = reduce.allocate((4,), dtype=torch.float32, device=device)
    assert (given.shape, given.dtype) == ((4,), torch.float32)
    assert reduce.allocate((4,), dtype=torch.float32, device=device) is given
    other = reduce.allocate((4,), dtype=torch.float64, device=device)
    assert other is not given
    assert other.dtype == torch.float64
    # one that failed in between leaves nothing
    del other
    assert reduce.allocate((6,), dtype=torch.float32, device=device).shape == (6,)
    # on the device of the gradients, which need not be the default
    assert reduce.allocate((5,), dtype=torch.float32, device=torch.device("meta")).device.type == "meta"
    with pytest.raises(AssertionError, match="nothing to reduce"):
        reduce()


# -- over ranks that are not there: which groups there are


def test_experts_are_dealt_out_and_the_next_layer_comes_early(monkeypatch: pytest.MonkeyPatch) -> None:
    early: list[tuple[str, nn.Module, list[nn.Module]]] = []
    for way in ("forward", "backward"):
        monkeypatch.setattr(
            FSDPModule,
            f"set_modules_to_{way}_prefetch",
            lambda self, modules, way=way: early.append((way, self, list(modules))),
        )
    with mesh_of(size=4, fake=True, ep=2) as mesh:
        model = model_of()
        parallelize_decoder(model, mesh, dtype=torch.float32)
        layers = list(model.layers)
        groups = [[layer, layer.mlp.experts] for layer in layers]
        assert early == [
            ("forward", layers[0], groups[1]),
            ("backward", layers[1], groups[0]),
            ("forward", layers[1], groups[2]),
            ("backward", layers[2], groups[1]),
        ]
        for module in model.modules():
            if isinstance(module, SparseMLP):
                assert isinstance(module.dispatcher, AllToAllDispatcher)
                for parameter in module.experts.parameters():
                    assert parameter.shape[0] == 4
                    local: Any = parameter
                    assert local.to_local().shape[0] == 1  # of two here, one of two ranks


def test_copies_are_summed_when_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[nn.Module, bool, bool]]()
    monkeypatch.setattr(
        FSDPModule, "set_requires_all_reduce", lambda self, now, *, recurse: asked.append((self, now, recurse))
    )
    with mesh_of(size=2, fake=True, dp_replicate=2) as mesh:
        model = model_of()
        parallelize_decoder(model, mesh, dtype=torch.float32)
        for now in (False, True):
            asked.clear()
            sum_over_copies(model, now=now)
            grouped = [module for module in model.modules() if isinstance(module, FSDPModule)]
            assert [module for module, _, _ in asked] == grouped
            assert {each[1:] for each in asked} == {(now, False)}
            assert {model, model.embed_tokens, *model.layers} <= set(grouped)


def test_degrees_have_names() -> None:
    mesh = ParallelDims(world_size=24, dp_replicate=2, cp=3, ep=6)
    assert mesh.degrees == {"dp_replicate": 2, "dp_shard": 4, "cp": 3, "ep": 6}
    assert repr(mesh) == "ParallelDims(dp_replicate=2, dp_shard=4, cp=3, ep=6, world_size=24)"


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"cp": 0}, "cp is 0; the least is 1"),
        ({"dp_replicate": -1}, "dp_replicate is -1; the least is 1"),
        ({"ep": 0}, "ep is 0; the least is 1"),
        ({"cp": 5}, "dp_replicate 1 times cp 5 does not divide 24 ranks"),
        ({"cp": 3, "dp_replicate": 5}, "dp_replicate 5 times cp 3 does not divide 24 ranks"),
        ({"ep": 16}, "ep 16 does not divide the 24 ranks that parameters are sharded over"),
        ({"ep": 8, "dp_replicate": 2}, "ep 8 does not divide the 12 ranks"),
    ],
)
def test_degrees_that_do_not_divide_the_ranks_are_refused(degrees: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelDims(world_size=24, **degrees)


# -- other doors


class Marked(nn.Module):
    @opaque
    def first(self) -> int:
        return 1

    def second(self) -> int:
        return 2

    @opaque
    def third(self) -> int:
        return 3


class Inherits(Marked):
    def third(self) -> int:
        return 4


def test_methods_that_are_no_part_of_a_graph_are_found() -> None:
    assert opaque_methods(Marked()) == ["first", "third"]
    assert opaque_methods(Inherits()) == ["first"]
    assert (Marked().first(), Marked().third()) == (1, 3)


def test_a_tensor_may_lie_in_memory_that_is_shared() -> None:
    memory = SharedMemory.create(100)
    try:
        x = view_of(memory, SharedTensor("x", "int16", (2, 3), 8))
        x.copy_(torch.arange(6).view(2, 3))
        assert bytes(memory.data[:20]) == bytes(8) + b"".join(n.to_bytes(2, "little") for n in range(6))
        assert view_of(memory, SharedTensor("y", "int16", (2,), 12)).tolist() == [2, 3]
        assert view_of(memory, SharedTensor("one", "float32", (), 96)).shape == ()
        nothing = view_of(memory, SharedTensor("none", "bfloat16", (0, 4), 100))
        assert (nothing.shape, nothing.dtype) == ((0, 4), torch.bfloat16)
        del x
    finally:
        memory.close()


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "message"),
    [
        ("cpu", (9, 0), torch.bfloat16, r"is for GPUs of NVIDIA's Hopper, .* on another device \(cpu\)"),
        ("cuda", (8, 0), torch.bfloat16, r"is for GPUs of NVIDIA's Hopper, .* on another device \(cuda\)"),
        ("cuda", (10, 0), torch.bfloat16, r"is for GPUs of NVIDIA's Hopper"),
        ("cuda", (9, 0), torch.float32, r"computes in half precision, and trainer\.dtype is float32"),
        ("cuda", (9, 0), torch.bfloat16, r"needs the package flash_attn_3 .* does not load: RuntimeError: no driver"),
        ("cuda", (9, 0), torch.float16, r"needs the package flash_attn_3 .* does not load: RuntimeError: no driver"),
    ],
)
def test_a_kernel_that_cannot_be_used_is_named_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, *, kind: str, capability: tuple[int, int], dtype: torch.dtype, message: str
) -> None:
    def fails(name: str) -> None:
        assert name == "FA3"
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", fails, raising=False)
    with pytest.raises(UsageError, match=rf"kernels\.attention: flash_attention_3 {message}.*\n    hint: leave"):
        use_flash_attention_3(torch.device(kind), dtype)


def test_a_kernel_that_loads_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = list[str]()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", loaded.append, raising=False)
    use_flash_attention_3(torch.device("cuda"), torch.bfloat16)
    assert loaded == ["FA3"]
