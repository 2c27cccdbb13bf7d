"""Types of tensors that versions may have."""

from __future__ import annotations

#: torch's dtype names (without ``torch.``) and the names safetensors gives them, with bytes per element
SAFETENSORS_DTYPES: dict[str, tuple[str, int]] = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "uint8": ("U8", 1),
}
