"""Adapters are merged into the version that they were trained on: the arithmetic, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_helpers import ALPHA, EXPERTS, OUTPUT, QUERY, RANK, Factors, changes, factors, publish_factors
from adapter_lab import ExpertAdapter, publish_adapter
from engine_helpers import publish, random_model, shard_of, tensors_of, tiny_arch

from hpcrl.errors import HandoffError
from hpcrl.inference.adapters import Adapter
from hpcrl.trainer.publish.publisher import tensor_bytes
from hpcrl.weights import Handoff, HandoffStore, VersionCommitter, write_shard
from hpcrl.weights.read.adapters import ADAPTER_CONFIG, Contents, adapter_blocks, plan_merge
from hpcrl.weights.read.reconstruct import read_tensors
from hpcrl.weights.write.handoff_writer import ShardResult

ARCH = tiny_arch()
TENSORS = tensors_of(random_model(ARCH, 1))


def stacked(tensors: dict[str, torch.Tensor], module: str = EXPERTS) -> dict[str, torch.Tensor]:
    """The same model with the experts of a layer in two tensors ``[experts, out, in]``."""
    result = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{module}.")}
    each = [[tensors[f"{module}.{e}.{leaf}.weight"] for e in range(ARCH.num_experts)] for leaf in LEAVES]
    result[f"{module}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(*each[:2], strict=True)])
    result[f"{module}.down_proj"] = torch.stack(each[2])
    return result


LEAVES = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture
def store(tmp_path: Path) -> HandoffStore:
    return HandoffStore(tmp_path / "weights")


@pytest.fixture
def base(store: HandoffStore, tmp_path: Path) -> Handoff:
    return publish(store, 0, tmp_path, TENSORS)


def merge(store: HandoffStore, adapter: Handoff, base: Handoff) -> dict[str, torch.Tensor]:
    merging = Adapter([base, adapter], read_tensors(store, adapter.version))
    return dict(merging.merged(read_tensors(store, base.version)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", [dict, stacked])
@pytest.mark.parametrize("layout", ["per_expert", "fused"])
def test_merged_weights_are_those_of_plain_arithmetic(
    store: HandoffStore, tmp_path: Path, layout: Any, form: Callable[..., dict[str, torch.Tensor]], dtype: str
) -> None:
    """Both layouts of an adapter, into experts that are stored one by one or together; other tensors stay."""
    stored = {name: tensor.to(getattr(torch, dtype)) for name, tensor in TENSORS.items()}
    writer = VersionCommitter.claim(store.root, 1)
    path = writer.stage(0) / "model.safetensors"
    bytes_of = [tensor_bytes(name, tensor, tensor.dtype) for name, tensor in form(stored).items()]
    shard = ShardResult(path.name, *write_shard(path, bytes_of))
    base = writer.publish(version=0, shards=[shard], model_dir=tmp_path, producer="test")
    given = factors(TENSORS, 7, QUERY, OUTPUT, EXPERTS)
    adapter = publish_factors(store, 3, base, given, layout)
    delta = changes(given)
    expected = {
        name: tensor if name not in delta else (tensor.double() + torch.from_numpy(delta[name]).double())
        for name, tensor in stored.items()
    }
    expected = form({name: tensor.float().to(getattr(torch, dtype)) for name, tensor in expected.items()})
    found = merge(store, adapter, base)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        # one rounding: B @ A is exact here, its sum with the base need not be
        assert torch.equal(tensor, expected[name]), name
    assert sum(not torch.equal(found[name], form(stored)[name]) for name in found) == (
        2 + 3 * ARCH.num_experts if form is dict else 4
    )


def test_the_adapter_may_be_bfloat16(store: HandoffStore, base: Handoff) -> None:
    given = factors(TENSORS, 7, QUERY)
    a, b = (torch.from_numpy(array).to(torch.bfloat16).view(torch.uint16).numpy() for array in given.linear[QUERY])
    adapter = publish_adapter(
        VersionCommitter.claim(store.root, 1),
        version=1,
        base=base,
        tensors={f"base_model.model.{QUERY}.lora_A.weight": a, f"base_model.model.{QUERY}.lora_B.weight": b},
        dtype="bfloat16",
        config={"r": RANK, "lora_alpha": ALPHA},
        producer="test",
    )
    expected = TENSORS[f"{QUERY}.weight"] + torch.from_numpy(changes(given)[f"{QUERY}.weight"])
    assert torch.equal(merge(store, adapter, base)[f"{QUERY}.weight"], expected)


def test_only_tensors_that_may_differ_are_loaded() -> None:
    first, second = Contents("b", frozenset({"x", "y"})), Contents("b", frozenset({"y", "z"}))
    assert second.different_from(first) == {"x", "y", "z"}
    assert second.different_from(Contents("b", frozenset())) == {"y", "z"}
    assert second.different_from(Contents("other", frozenset({"y"}))) is None
    assert second.different_from(None) is None


def test_what_engines_fuse_is_in_one_block() -> None:
    changed = [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.3.up_proj.weight",
        "lm_head.weight",
    ]
    found = adapter_blocks(changed, TENSORS)
    assert found == {
        name
        for name in TENSORS
        if name.startswith(("model.layers.1.self_attn.", "model.layers.0.mlp.")) or name == "lm_head.weight"
    }
    assert {"model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.gate.weight"} <= found


# -- what is refused ---------------------------------------------------------------------------------------------


#: what PEFT knows beside adding B · A times alpha over rank, each with a value that asks for it
MORE_THAN_ADDING: dict[str, Any] = {
    "peft_type": "LOHA",
    "bias": "lora_only",
    "use_dora": True,
    "use_rslora": True,
    "fan_in_fan_out": True,
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 16},
}


def wrong_rank(given: Factors) -> Factors:
    a, b = given.linear[QUERY]
    return Factors({QUERY: (a[:2], b[:, :2])}, {})


def wrong_columns(given: Factors) -> Factors:
    a, b = given.linear[QUERY]
    return given._replace(linear={QUERY: (a[:, :-1], b)})


def unknown_module(given: Factors) -> Factors:
    return given._replace(linear={"model.layers.9.self_attn.q_proj": given.linear[QUERY]})


def fewer_experts(given: Factors) -> Factors:
    return given._replace(experts={EXPERTS: ExpertAdapter(*(array[:-1] for array in given.experts[EXPERTS]))})


def unchanged(given: Factors) -> Factors:
    return given


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ((wrong_rank, "per_expert", {}), r"q_proj: A has 2 rows and B 2 columns, the rank makes 4"),
        ((wrong_columns, "per_expert", {}), r"q_proj: B · A is 128x63, but .*q_proj.weight of the base 128x64"),
        ((unknown_module, "per_expert", {}), r"layers\.9\.self_attn\.q_proj: the base has no such module"),
        ((fewer_experts, "fused", {}), r"experts.*: A has 28 rows and B 28 columns, the rank of 8 experts makes 32"),
        ((unchanged, "fused", {"r": 3}), r"the rank makes 3.*; and 1 more"),
        *(
            ((unchanged, "fused", {name: value}), rf"adapter_config.json asks for more than adding .*{name}: ")
            for name, value in MORE_THAN_ADDING.items()
        ),
        ((unchanged, "fused", {"lora_alpha": None}), r"r 4 and lora_alpha None are not a valid rank and scale"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    store: HandoffStore, base: Handoff, wrong: tuple[Callable[[Factors], Factors], Any, dict[str, Any]], reason: str
) -> None:
    change, layout, config = wrong
    adapter = publish_factors(store, 1, base, change(factors(TENSORS, 7, QUERY, OUTPUT, EXPERTS)), layout, **config)
    with pytest.raises(HandoffError, match=reason):
        plan_merge(adapter, base)


def test_an_adapter_of_another_base_is_refused(store: HandoffStore, base: Handoff, tmp_path: Path) -> None:
    """The number of its base names other weights now: a trainer was restored, and wrote that version anew."""
    adapter = publish_factors(store, 1, base, factors(TENSORS, 7, QUERY))
    VersionCommitter.claim(store.root, 1).remove(0)
    other = publish(store, 0, tmp_path, tensors_of(random_model(ARCH, 2)))
    with pytest.raises(HandoffError, match=r"v000001 is an adapter of other weights than those of version 0"):
        plan_merge(adapter, other)
    plan_merge(adapter, base)


def test_torn_configuration_and_missing_factors_are_refused(store: HandoffStore, base: Handoff) -> None:
    adapter = publish_factors(store, 1, base, factors(TENSORS, 7, QUERY))
    path = adapter.path / ADAPTER_CONFIG
    text = path.read_text()
    path.write_text(text.replace('"lora_alpha": 8', '"lora_alpha": 9'))
    with pytest.raises(HandoffError, match=r"adapter_config.json does not have the content that the manifest says"):
        plan_merge(adapter, base)
    a, _ = factors(TENSORS, 7, QUERY).linear[QUERY]
    writer = VersionCommitter.claim(store.root, 1)
    named = {"base": base, "dtype": "float32", "config": {"r": RANK, "lora_alpha": ALPHA}, "producer": "test"}
    half = publish_adapter(writer, version=2, tensors={f"base_model.model.{QUERY}.lora_A.weight": a}, **named)
    with pytest.raises(HandoffError, match=r"q_proj has no B"):
        plan_merge(half, base)
    other = publish_adapter(writer, version=3, tensors={f"{QUERY}.lora_magnitude_vector": a}, **named)
    with pytest.raises(HandoffError, match=r"lora_magnitude_vector \(float32 \(4, 64\)\) is not an A or B"):
        plan_merge(other, base)


def test_an_adapter_that_overflows_is_refused(store: HandoffStore, base: Handoff) -> None:
    given = factors(TENSORS, 7, QUERY, size=1e19)
    adapter = publish_factors(store, 1, base, given, lora_alpha=1e9)
    with pytest.raises(HandoffError, match=r"makes model.layers.0.self_attn.q_proj.weight infinite"):
        merge(store, adapter, base)


def test_weights_whose_sum_overflows_are_merged(store: HandoffStore, tmp_path: Path) -> None:
    """Each of them is finite, and the sum of the base is; that of what the adapter makes of it is not."""
    name = f"{QUERY}.weight"
    rows, columns = TENSORS[name].shape
    large = publish(store, 0, tmp_path, {**TENSORS, name: torch.full((rows, columns), 3e38 / (rows * columns))})
    side = (ALPHA * 1e-38 * rows * columns) ** -0.5
    given = {QUERY: (np.full((RANK, columns), side, np.float32), np.full((rows, RANK), side, np.float32))}
    found = merge(store, publish_factors(store, 1, large, Factors(given, {})), large)
    assert torch.isfinite(found[name]).all()
    assert torch.isinf(found[name].sum())


def test_nothing_is_merged_into_fp8_or_into_an_adapter(store: HandoffStore, base: Handoff, tmp_path: Path) -> None:
    adapter = publish_factors(store, 1, base, factors(TENSORS, 7, QUERY))
    with pytest.raises(HandoffError, match=r"does not fit version 1: .*the base has no such module"):
        plan_merge(publish_factors(store, 2, adapter, factors(TENSORS, 7, QUERY)), adapter)
    writer = VersionCommitter.claim(store.root, 1)
    shard = shard_of(writer.stage(3) / "model.safetensors", TENSORS)
    fp8 = writer.publish(version=3, shards=[shard], model_dir=tmp_path, producer="test", kind="fp8")
    with pytest.raises(HandoffError, match="of kind 'fp8': merged into FP8 it would lose most of its bits"):
        plan_merge(publish_factors(store, 4, fp8, factors(TENSORS, 7, QUERY)), fp8)
