"""Weights that are not finite are not served, whatever kind of hand-off brings them; an older version is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_helpers import QUERY, factors, publish_factors
from delta_helpers import model, nudged, publish_bf16, publish_delta, shard_of_any
from engine_helpers import tensors_of

from hpcrl.errors import HandoffError
from hpcrl.inference.embedded.weights.updates import ReaderConfig, UpdateSession
from hpcrl.inference.finite import all_finite
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.fp8.quantiser import block_amax, quantise, scales_of
from hpcrl.weights import HandoffStore, VersionCommitter
from hpcrl.weights.format.quantise import QuantisedModules
from hpcrl.weights.read.subscriber import ReaderSettings

VALUES = [float("nan"), float("inf"), float("-inf")]


def broken(source: Decoder, value: float) -> Decoder:
    result = nudged(source, 9)
    with torch.no_grad():
        list(result.parameters())[3].view(-1)[-1] = value
    return result


def publish_fp8(store: HandoffStore, source: Decoder, path: Path, *, scale: float | None, code: int | None) -> None:
    """Version 2; ``scale`` takes the place of one of its scales, ``code`` that of one of its numbers of eight bits."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in tensors_of(source).items():
        if QuantisedModules().has(name, tuple(tensor.shape)):
            scales = scales_of(block_amax(tensor, (0, 0)))
            tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensor, (0, 0), scales), scales
        else:
            tensors[name] = tensor
    quantised = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn)
    if scale is not None:
        tensors[f"{quantised}_scale_inv"].view(-1)[0] = scale
    if code is not None:
        tensors[quantised].view(torch.uint8).view(-1)[0] = code
    writer = VersionCommitter.claim(store.root, 1)
    shard = shard_of_any(writer.stage(2) / "model-00001-of-00001.safetensors", tensors)
    writer.publish(version=2, shards=[shard], model_dir=path, producer="test", kind="fp8")


@pytest.mark.parametrize("kind", ["full", "delta", "fp8 scale", "fp8 code", "adapter"])
@pytest.mark.parametrize("value", VALUES)
def test_a_version_that_is_not_finite_is_not_served(tmp_path: Path, kind: str, value: float) -> None:
    store, source = HandoffStore(tmp_path / "weights"), model(2)
    base = publish_bf16(store, 1, source, tmp_path)
    if kind == "full":
        publish_bf16(store, 2, broken(source, value), tmp_path)
    elif kind == "delta":
        publish_delta(store, 2, (1,), source, broken(source, value))
    elif kind == "adapter":
        given = factors(tensors_of(source), 3, QUERY)
        a, _ = next(iter(given.linear.values()))
        a.reshape(-1)[0] = value
        publish_factors(store, 2, base, given)
    else:
        publish_fp8(
            store, source, tmp_path, scale=value if "scale" in kind else None, code=0x7F if "code" in kind else None
        )
    updater = UpdateSession(model(1), ReaderConfig(store.root, "engine-0", ReaderSettings()))
    updater.init()
    try:
        updater.start()
        with pytest.raises(HandoffError, match="not a number"):
            updater.update({"path": str(store.path_of(2))})
        updater.start()
        found = updater.update({"path": str(store.path_of(2)), "fallback": True})
        assert (found.version, [version for version, _ in found.skipped]) == (1, [2])
        exchanged = []

        def exchange(other, label):
            exchanged.append(other)
            return model(1)

        updater.finish(exchange)
        (served,) = exchanged
        assert all(torch.equal(a, b) for a, b in zip(served.parameters(), source.parameters(), strict=True))
    finally:
        updater.shutdown()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_each_code_of_a_type_is_judged_as_torch_does(dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    if size == 1:
        codes = torch.arange(256, dtype=torch.uint8)
    else:
        codes = torch.randint(0, 256, (4096 * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for number in codes.view(dtype):
        assert all_finite(number.view(1)) == bool(torch.isfinite(number.float())), number
    large = torch.full((8,), torch.finfo(torch.float32).max)
    assert all_finite(large)
    assert all_finite(torch.arange(3))
    assert all_finite(torch.empty(0))
