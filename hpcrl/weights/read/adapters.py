"""Changes of an adapter to the version that it was trained on: names, shapes and ranks, before any weight is read.

An engine merges: ``W = W_base + (alpha / r) · B · A``. `plan_merge` returns for each tensor of the base the parts of
the adapter and their places, for both layouts of experts and for bases that store experts one by one or as one tensor
``[experts, out, in]``. Arithmetic is in `hpcrl.inference.adapters`. No numpy, no torch.

Each expert by itself:
    ``...mlp.experts.7.gate_proj.lora_A.weight [r, in]`` and so on: the format of hpcrl's trainer, and in vLLM that of
    Qwen3-MoE, DeepSeek-V3 and GLM (``is_3d_moe_weight = False``).
All experts of a layer together:
    ``...mlp.experts.base_layer.lora_A.weight [E·r, hidden]`` and ``lora_B [2·intermediate, r·E]`` for gate and up,
    ``...mlp.experts.lora_A.weight [E·r, intermediate]`` and ``lora_B [hidden, r·E]`` for down: PEFT's wrapper of
    parameters, and vLLM's models with ``is_3d_moe_weight = True``. Rows of A are grouped by expert, columns of B by
    rank: column ``i·E + e`` belongs to expert ``e``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hpcrl.errors import HandoffError
from hpcrl.weights.format.manifest import OpenedVersion, TensorRecord, chunk_digests, content_digest
from hpcrl.weights.read.announced import read_companion

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MODEL = "adapter_model.safetensors"
"""Only file in which PEFT and vLLM search tensors. Merging accepts any file: manifests locate tensors."""
CANARY = "canary.json"
"""Optional file of a version with reference values for its engines (`hpcrl.weights.format.canary`)."""
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
_FLOATS = ("float32", "bfloat16", "float16")
#: settings with which PEFT does more than adding B · A to a matrix, and their values that disable it
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": None,
    "alpha_pattern": None,
}


class Product(NamedTuple):
    """Product ``B[b_rows, b_columns] @ A[a_rows]`` that is added to a range of a tensor of the base.

    Attributes
    ----------
    a, b:
        Tensors of the adapter.
    a_rows, b_rows, b_columns:
        Rows and columns of them.
    expert:
        Index into a base tensor ``[experts, out, in]``; None for a matrix.
    rows:
        Rows of the matrix that are changed.
    """

    a: str
    b: str
    a_rows: slice = slice(None)
    b_rows: slice = slice(None)
    b_columns: slice = slice(None)
    expert: int | None = None
    rows: slice = slice(None)


class Merge(NamedTuple):
    """Changes of an adapter to its base.

    Attributes
    ----------
    scale:
        ``alpha / r``.
    parts:
        Changes by tensor of the base; other tensors are unchanged.
    """

    scale: float
    parts: dict[str, list[Product]]


class Contents(NamedTuple):
    """Identity of an engine's weights: a whole version, and the tensors of it that an adapter has changed.

    Attributes
    ----------
    base:
        `hpcrl.weights.format.manifest.content_digest` of the whole version.
    changed:
        Names; empty where no adapter is merged.
    """

    base: str
    changed: frozenset[str]

    def different_from(self, served: Contents | None) -> frozenset[str] | None:
        """Return tensors that may differ from those of ``served``; None (all) where the two have different bases."""
        return self.changed | served.changed if served is not None and served.base == self.base else None


def contents_of(handoff: OpenedVersion, changed: Collection[str] = ()) -> Contents:
    """Return the contents of an engine with ``handoff`` loaded: a version, or an adapter that changes ``changed``."""
    base = handoff.manifest.parent_xxh3_128 or content_digest(handoff.manifest)
    return Contents(base, frozenset(changed))


def adapter_blocks(names: Collection[str], all_names: Collection[str]) -> frozenset[str]:
    """Return ``names`` and all others of the same layer blocks, for engines that load fused tensors together.

    Engines fuse within a block (``model.layers.7.mlp``: gate with up, expert with expert; ``model.layers.7.self_attn``:
    queries, keys and values), and never across blocks.
    """
    wanted = {_block(name) for name in names}
    return frozenset(name for name in all_names if _block(name) in wanted)


def _block(name: str) -> str:
    parts = name.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[:-1] if layer is None else parts[: layer + 2])


def plan_merge(adapter: OpenedVersion, base: OpenedVersion) -> Merge:
    """Check that an adapter belongs to ``base`` and fits it; return the merge. Reads the configuration alone.

    Raises
    ------
    HandoffError
        It was trained on other weights, is more than a plain adapter, or has modules, shapes or ranks that do not fit.
    """
    if content_digest(base.manifest) != adapter.manifest.parent_xxh3_128:
        raise HandoffError(
            f"{adapter.path} is an adapter of other weights than those of version {base.version}: that version was "
            "published anew\n    hint: publish the adapter again, with the base that it was trained on"
        )
    if base.manifest.kind == "fp8":
        raise HandoffError(
            f"{adapter.path} is an adapter of version {base.version}, which is of kind 'fp8': merged into FP8 it would "
            "lose most of its bits\n    hint: publish a base of kind 'full'"
        )
    rank, scale = _scaling(adapter)
    merge = Merge(scale, {})
    problems: list[str] = []
    for module, pair in _modules(adapter.manifest.tensors, problems).items():
        try:
            for name, part in _parts(module, pair, rank, adapter.manifest.tensors, base.manifest.tensors):
                merge.parts.setdefault(name, []).append(part)
        except ValueError as error:
            problems.append(f"{module}: {error}")
    if not merge.parts and not problems:
        problems.append("it changes nothing")
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise HandoffError(f"{adapter.path} does not fit version {base.version}: {shown}")
    return merge


def _scaling(adapter: OpenedVersion) -> tuple[int, float]:
    """Rank and scale from ``adapter_config.json``, whose bytes are compared with the manifest."""
    path, record = adapter.path / ADAPTER_CONFIG, adapter.manifest.files.get(ADAPTER_CONFIG)
    if record is None:
        raise HandoffError(f"{adapter.path} is an adapter without {ADAPTER_CONFIG}: its rank and scale are unknown")
    text = read_companion(adapter, ADAPTER_CONFIG)
    if len(text) != record.bytes or chunk_digests(text, adapter.manifest.chunk_bytes) != record.xxh3_128:
        raise HandoffError(f"{path} does not have the content that the manifest says")
    try:
        config = json.loads(text)
        rank, alpha = config["r"], config["lora_alpha"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HandoffError(f"{path} does not say r and lora_alpha: {error!r}") from error
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise HandoffError(f"{path}: r {rank!r} and lora_alpha {alpha!r} are not a valid rank and scale")
    other = [f"{key}: {config[key]!r}" for key, plain in _PLAIN.items() if (config.get(key) or plain) != plain]
    if other:
        raise HandoffError(f"{path} asks for more than adding B · A, which is all that engines merge: {other[0]}")
    return rank, alpha / rank


def _modules(tensors: Mapping[str, TensorRecord], problems: list[str]) -> dict[str, tuple[str, str]]:
    """Return the names of A and B by module."""
    found: dict[str, dict[str, str]] = {}
    for name, record in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or len(record.shape) != 2 or record.dtype not in _FLOATS:
            problems.append(f"{name} ({record.dtype} {tuple(record.shape)}) is not an A or B of an adapter")
        else:
            found.setdefault(match[1], {})[match[2]] = name
    problems += [f"{module} has no {'B' if 'A' in pair else 'A'}" for module, pair in found.items() if len(pair) < 2]
    return {module: (pair["A"], pair["B"]) for module, pair in found.items() if len(pair) == 2}


def _parts(
    module: str, pair: tuple[str, str], rank: int, own: Mapping[str, TensorRecord], base: Mapping[str, TensorRecord]
) -> Iterator[tuple[str, Product]]:
    """Yield the changes of one module.

    Raises
    ------
    ValueError
        The module does not fit the base.
    """
    a, b = pair
    (a_rows, columns), (rows, b_columns) = own[a].shape, own[b].shape
    if f"{module}.weight" in base:
        _check_rank((a_rows, b_columns), rank)
        yield _fitting(base, f"{module}.weight", (rows, columns)), Product(a, b)
    elif (match := _EXPERT.fullmatch(module)) and (stacked := _stacked(match[1], match[3])) in base:
        _check_rank((a_rows, b_columns), rank)
        halves = 1 if match[3] == "down_proj" else 2
        _fitting(base, stacked, (None, halves * rows, columns))
        if int(match[2]) >= base[stacked].shape[0]:
            raise ValueError(f"{stacked} has {base[stacked].shape[0]} experts")
        begin = rows if match[3] == "up_proj" else 0
        yield stacked, Product(a, b, expert=int(match[2]), rows=slice(begin, begin + rows))
    else:
        yield from _fused_parts(module, pair, rank, own, base)


def _fused_parts(
    module: str, pair: tuple[str, str], rank: int, own: Mapping[str, TensorRecord], base: Mapping[str, TensorRecord]
) -> Iterator[tuple[str, Product]]:
    """Yield the changes of all experts of a layer: rows of A are grouped by expert, columns of B by rank.

    Raises
    ------
    ValueError
        The module does not fit the base.
    """
    a, b = pair
    (a_rows, columns), (rows, b_columns) = own[a].shape, own[b].shape
    experts = module.removesuffix(".base_layer")
    leaves = ("down_proj",) if experts == module else ("gate_proj", "up_proj")
    stacked = _stacked(experts, leaves[0])
    count = base[stacked].shape[0] if stacked in base else _count(experts, leaves[0], base)
    if not experts.endswith(".experts") or not count:
        raise ValueError("the base has no such module")
    _check_rank((a_rows, b_columns), count * rank, f" of {count} experts")
    if stacked in base:
        _fitting(base, stacked, (count, rows, columns))
    for e in range(count):
        part = Product(a, b, slice(e * rank, (e + 1) * rank), slice(None), slice(e, None, count))
        if stacked in base:
            yield stacked, part._replace(expert=e)
            continue
        half, rest = divmod(rows, len(leaves))
        if rest:
            raise ValueError(f"B has {rows} rows, which gate and up cannot share")
        for i, leaf in enumerate(leaves):
            name = _fitting(base, f"{experts}.{e}.{leaf}.weight", (half, columns))
            yield name, part._replace(b_rows=slice(i * half, (i + 1) * half))


def _stacked(experts: str, leaf: str) -> str:
    """Name of one tensor with all experts, gate and up behind each other."""
    return f"{experts}.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"


def _count(experts: str, leaf: str, base: Mapping[str, TensorRecord]) -> int:
    count = 0
    while f"{experts}.{count}.{leaf}.weight" in base:
        count += 1
    return count


def _check_rank(found: tuple[int, int], wanted: int, of: str = "") -> None:
    if found != (wanted, wanted):
        raise ValueError(f"A has {found[0]} rows and B {found[1]} columns, the rank{of} makes {wanted}")


def _fitting(base: Mapping[str, TensorRecord], name: str, shape: tuple[int | None, ...]) -> str:
    """Return ``name``, if that tensor of the base has ``shape`` (None: any size) and can be merged into."""
    if name not in base:
        raise ValueError(f"the base has no {name}")
    record = base[name]
    if len(record.shape) != len(shape) or any(w not in (None, f) for f, w in zip(record.shape, shape, strict=True)):
        wanted = "x".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"B · A is {wanted}, but {name} of the base {'x'.join(map(str, record.shape))}")
    if record.dtype not in _FLOATS:
        raise ValueError(f"{name} of the base is {record.dtype}, into which nothing is merged")
    return name
