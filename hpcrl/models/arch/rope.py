"""Rotary embeddings of a ``config.json``, in the keys of transformers 5 and of earlier versions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_KINDS = ("linear", "llama3", "yarn")
_PLAIN = ("default", None)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of frequencies to longer contexts; names and meaning are those of transformers.

    Attributes
    ----------
    rope_type:
        ``linear``, ``llama3`` or ``yarn``.
    factor:
        Factor of the context length.
    original_max_position_embeddings:
        Context that the model was trained with before (``llama3`` and ``yarn``).
    attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, truncate:
        Parameters of ``yarn``.
    low_freq_factor, high_freq_factor:
        Parameters of ``llama3``.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in _KINDS:
            raise ValueError(f"rope_type is {self.rope_type!r}; known are default, {', '.join(_KINDS)}")
        needed = {
            "linear": (),
            "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
            "yarn": ("original_max_position_embeddings",),
        }
        missing = [name for name in needed[self.rope_type] if getattr(self, name) is None]
        if missing:
            raise ValueError(f"rope scaling of type {self.rope_type} lacks {', '.join(missing)}")

    def to_hf(self) -> dict[str, Any]:
        """Return the keys of ``config.json``, without those that have no value."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor``, as far as a config has them.

    Raises
    ------
    ValueError
        The scaling of frequencies is not supported, or one of its parameters is missing.
    """
    # like transformers: one group is read, rope_scaling where it is set, and the other one is ignored
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(name) or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} is {given!r}, not an object")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError("rope_parameters differ between kinds of layers, which no known family does")
    found: dict[str, Any] = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        value = given.get(key)
        value = config.get(key) if value is None else value
        if value is not None:
            found[key] = _number(key, value)
    kind = given.get("rope_type", given.get("type"))
    if kind not in _PLAIN:
        if given.get("factor") is None:
            raise ValueError(f"rope scaling of type {kind} lacks factor")
        known = {key: given[key] for key in RopeScaling.__dataclass_fields__ if given.get(key) is not None}
        known["rope_type"] = str(kind)
        if kind in ("llama3", "yarn"):
            known["original_max_position_embeddings"] = _original(config, given)
        if "truncate" in given:
            # null counts as false in transformers
            known["truncate"] = bool(given["truncate"])
        for key, value in known.items():
            if key not in ("rope_type", "truncate"):
                _number(f"{key} of {name}", value)
        found["rope_scaling"] = RopeScaling(**known)
    return found


def _original(config: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    """Return the context that frequencies were trained with: the group's, or the whole context where it has none."""
    value, outside = given.get("original_max_position_embeddings"), config.get("original_max_position_embeddings")
    value = config.get("max_position_embeddings") if value is None else value
    if outside is not None and outside != value:
        raise ValueError(
            f"original_max_position_embeddings is {outside!r} outside the rope group, where transformers does not read "
            f"it, and takes {value!r}; write it into the group"
        )
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"original_max_position_embeddings is {value!r}, not a whole number above 0")
    return value


def _number(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{key} is {value!r}; it must be a number from 0")
    return float(value)
