"""Checks of the tensors of a model directory by their heads and, where there are two of one weight, by some bytes.

Trainer, engines and the check before a submit refuse the same files in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcrl.weights.format.mxfp4 import BLOCKS_SUFFIX, MXFP4_BLOCK, MXFP4_DTYPE, SCALES_SUFFIX
from hpcrl.weights.format.quantise import BLOCK, FP8_DTYPE, scale_tensor
from hpcrl.weights.read.model_files import ModelFiles, StoredBlock

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Published names of the input and output embeddings, which a model may tie."""
SCALE_SUFFIX = "_scale_inv"
_WEIGHT_DTYPES = ("float32", "bfloat16", "float16", FP8_DTYPE, MXFP4_DTYPE)
_SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
_PACKED_SCALE_DTYPES = ("uint8", "float8_e8m0fnu")
_SAMPLED_ROWS = 64


def dtype_problem(name: str, tensors: Mapping[str, StoredBlock]) -> str:
    """Return why the numbers of the weight ``name`` cannot be read, with its scales; an empty text where they can."""
    stored = tensors[name]
    if stored.dtype not in _WEIGHT_DTYPES:
        return f"tensor {name!r} has dtype {stored.dtype}, which cannot be read as a weight"
    if stored.dtype == MXFP4_DTYPE:
        return _packed_problem(name, tensors)
    return _scale_problem(name, tensors) if stored.dtype == FP8_DTYPE else ""


def quantised_weight(name: str, tensors: Mapping[str, StoredBlock]) -> str | None:
    """Return the weight that the stored tensor ``name`` has scales or blocks of; None where it is of no other one."""
    for suffix, dtype in ((SCALE_SUFFIX, FP8_DTYPE), (BLOCKS_SUFFIX, MXFP4_DTYPE), (SCALES_SUFFIX, MXFP4_DTYPE)):
        own = name.removesuffix(suffix)
        if own != name and own in tensors and tensors[own].dtype == dtype:
            return own
    return None


def _packed_problem(name: str, tensors: Mapping[str, StoredBlock]) -> str:
    blocks, scales = tensors[name + BLOCKS_SUFFIX], tensors.get(name + SCALES_SUFFIX)
    if blocks.shape[-1] != MXFP4_BLOCK // 2:
        return f"tensor {name + BLOCKS_SUFFIX!r} has blocks of {blocks.shape[-1]} bytes, not of {MXFP4_BLOCK // 2}"
    if scales is None:
        return f"tensor {name!r} is in MXFP4, but its scales, {name + SCALES_SUFFIX!r}, are missing"
    if scales.shape != blocks.shape[:-1]:
        return f"tensor {name + SCALES_SUFFIX!r} has shape {scales.shape}, not {blocks.shape[:-1]}: one a block"
    if scales.dtype not in _PACKED_SCALE_DTYPES:
        return (
            f"tensor {name + SCALES_SUFFIX!r} has dtype {scales.dtype}; scales of MXFP4 are read in "
            f"{' and '.join(_PACKED_SCALE_DTYPES)}"
        )
    return ""


def _scale_problem(name: str, tensors: Mapping[str, StoredBlock]) -> str:
    shape = tensors[name].shape
    if len(shape) != 2:
        return f"tensor {name!r} is in FP8 but is not a matrix: the layout of its scales is unknown"
    wanted = scale_tensor(name, shape)
    scale = tensors.get(wanted.name)
    if scale is None:
        return f"tensor {name!r} is in FP8, but its scales, {wanted.name!r}, are missing"
    if scale.shape != wanted.shape:
        return f"tensor {wanted.name!r} has shape {scale.shape}, not {wanted.shape}: blocks are {BLOCK} wide"
    if scale.dtype not in _SCALE_DTYPES:
        return f"tensor {wanted.name!r} has dtype {scale.dtype}; scales are read in {', '.join(_SCALE_DTYPES)}"
    return ""


def tied_name(tensors: Mapping[str, StoredBlock]) -> str:
    """Return the stored name of the one tensor of a model whose head is tied to its embedding.

    ``safetensors.save_model`` keeps either of the two names.
    """
    return HEAD if HEAD in tensors and EMBEDDING not in tensors else EMBEDDING


def heads_differ_problem() -> str:
    """Return the problem of a model that is tied by its configuration and has two different tensors."""
    return (
        f"config.json ties the head to the embedding (tie_word_embeddings), but {HEAD!r} and {EMBEDDING!r} are stored "
        "with different values: set tie_word_embeddings to false to keep both, or remove the one that is not wanted"
    )


def rows_differ(files: ModelFiles) -> bool:
    """Return whether some rows of a stored head differ from those of the stored embedding, byte by byte.

    Rows are taken at equal distances. False where bytes cannot be compared: shapes or dtypes are not the same.
    """
    head, embedding = files.tensors[HEAD], files.tensors[EMBEDDING]
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape) or len(head.shape) != 2:
        return False
    rows, columns = head.shape
    for row in range(0, rows, max(1, rows // _SAMPLED_ROWS)):
        block = (row, 0), (row + 1, columns)
        if files.read(HEAD, *block) != files.read(EMBEDDING, *block):
            return True
    return False


def config_key(arch: object, name: str) -> str:
    """Return an addition to an error about the tensor ``name``: the key of config.json that decides on it."""
    count = getattr(arch, "n_shared_experts", None)
    return f" (n_shared_experts is {count} in config.json)" if ".shared_expert" in name and count is not None else ""
