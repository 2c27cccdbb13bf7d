"""Common parts of the modules of layers: linear layers as weights, and elements of the KV cache."""

from __future__ import annotations

from hpcrl.models.tensors import DTYPE_BYTES, Part, Weight

KV_DTYPES = ("float32", "bfloat16", "float16", "fp8")


def kv_element_bytes(dtype: str) -> int:
    """Return the bytes of an element of the KV cache (ValueError where the dtype is none of `KV_DTYPES`)."""
    if dtype not in KV_DTYPES:
        raise ValueError(f"KV cache dtype is {dtype!r}; it must be one of {', '.join(KV_DTYPES)}")
    return 1 if dtype == "fp8" else DTYPE_BYTES[dtype]


def linear(name: str, out: int, inp: int, part: Part, *, tp: int | None, bias: bool = False) -> tuple[Weight, ...]:
    """Return a linear layer ``[out, in]`` with its bias, which is sharded like the rows."""
    weight = Weight(f"{name}.weight", (out, inp), part, tp_dim=tp, quantised=True)
    if not bias:
        return (weight,)
    return weight, Weight(f"{name}.bias", (out,), part, tp_dim=0 if tp == 0 else None)
