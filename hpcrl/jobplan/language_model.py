"""The language model of a published model that also sees, as a directory of its own family: no weights are computed.

Trainer and engines read the names and the configuration of a family, and not those of wrappers around it. Tensors are
copied by the byte under their own names; towers, projectors and processors are left out.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.errors import UsageError
from hpcrl.fs import StagedDirectory, atomic_write
from hpcrl.jobplan.start_model import look_at_directory
from hpcrl.models.arch import SAME_TEXT, Qwen35Arch, Qwen35MoeArch, arch_from_config
from hpcrl.models.configfile import read_config
from hpcrl.models.written import small_files
from hpcrl.weights.read.model_directory import INDEX
from hpcrl.weights.read.model_files import ModelFiles, StoredBlock
from hpcrl.weights.read.stored_weights import EMBEDDING, HEAD, rows_differ
from hpcrl.weights.write.copied_tensors import write_copied_tensors

__all__ = ["Extracted", "extract_language_model", "language_model_name"]

_NAMES = (
    (re.compile(r"^language_model\.(model\.|lm_head\.)"), r"\1"),
    (re.compile(r"^model\.language_model\.(?!model\.|lm_head\.)"), "model."),
    (re.compile(r"^lm_head\."), "lm_head."),
)
"""Names of the language model's tensors in wrappers, older and newer ones of transformers, and their own."""
_MTP = "mtp."
"""Before the names of tensors of multi-token prediction, which lie beside the language model of Qwen3.5."""
_STACKED = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
"""Experts of a layer of Qwen3.5 that are published as one tensor, laid out as one expert's matrices are."""
_QWEN35 = (*Qwen35Arch.MODEL_TYPES, *Qwen35MoeArch.MODEL_TYPES)
"""Families that are published inside of models that also see, and not by themselves."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that wrappers may have in place of the language model."""
_OF_WRAPPERS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


class Extracted(NamedTuple):
    """A language model that was written.

    Attributes
    ----------
    path, tensors:
        Its directory, and how many tensors are in it.
    left_out:
        How many tensors were left out, by the first part of their names.
    """

    path: Path
    tensors: int
    left_out: Mapping[str, int]


def language_model_name(name: str) -> str | None:
    """Return the own name of a wrapper's tensor; None where it is not part of the language model."""
    for pattern, own in _NAMES:
        found, count = pattern.subn(own, name)
        if count:
            return found
    return None


def extract_language_model(model_dir: Path, target: Path) -> Extracted:
    """Write the language model of ``model_dir`` to ``target``, which must not be there.

    Raises
    ------
    UsageError
        ``model_dir`` wraps no language model of a known family, cannot be read, or what would be written is not whole;
        ``target`` is there.
    OSError
        The filesystem refused.
    """
    if target.exists():
        raise UsageError(f"{target} exists already\n    hint: use it as it is, or give another --output")
    config = _own_config(model_dir)
    with ModelFiles(model_dir) as files:
        # a weight in MXFP4 is stored as its blocks and scales
        stored = {name: block for name, block in files.tensors.items() if block.width}
    qwen35 = config["model_type"] in _QWEN35
    names = {name: own for name in stored if (own := language_model_name(name)) is not None}
    if qwen35:
        names |= {name: name for name in stored if name.startswith(_MTP)}
    left_out = Counter(_beginning(name) for name in stored.keys() - names.keys())
    parts = {
        name: dict(_by_expert(own, stored[name])) if qwen35 and not name.startswith(_MTP) else {own: stored[name]}
        for name, own in names.items()
    }
    stage = StagedDirectory(target, token=f"extract-{os.getpid()}")
    stage.create()
    try:
        _write_tensors(stage.path, parts, stored)
        _write_small_files(model_dir, stage.path, {**config, "tie_word_embeddings": _is_tied(stage.path, config)})
        if problems := look_at_directory(stage.path).problems:
            what = problems[0][0].replace(str(stage.path), str(target))
            raise UsageError(f"the language model of {model_dir} would not be whole: {what}")
        stage.commit()
    except BaseException:
        stage.discard()
        raise
    return Extracted(target, sum(map(len, parts.values())), dict(left_out))


def _own_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        config = read_config(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    inner = config.get("text_config") if isinstance(config, dict) else None
    if not isinstance(inner, dict):
        raise UsageError(f"{model_dir} wraps no language model: its config.json has no text_config")
    own = {**{key: config[key] for key in _TOKENS if key in config}, **inner}
    for key in ("dtype", "torch_dtype", "quantization_config"):
        if own.get(key) is None and config.get(key) is not None:
            own[key] = config[key]
    kind = str(own.get("model_type"))
    if kind in SAME_TEXT or kind in _QWEN35:
        own["model_type"] = SAME_TEXT.get(kind, kind)
        for key in ("rope_scaling", "rope_parameters"):
            if isinstance(own.get(key), dict):
                own[key] = {name: value for name, value in own[key].items() if not name.startswith("mrope")}
    try:
        arch = arch_from_config(own)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: text_config: {error}") from error
    return {**own, "architectures": [arch.ARCHITECTURE]}


def _is_tied(written: Path, config: Mapping[str, Any]) -> bool:
    """Return whether head and embedding are one. Wrappers decide on it by a key of their own, which few files have."""
    with ModelFiles(written) as files:
        if HEAD not in files.tensors or EMBEDDING not in files.tensors:
            return True
        return bool(config.get("tie_word_embeddings")) and not rows_differ(files)


def _beginning(name: str) -> str:
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "model" else first


def _by_expert(name: str, block: StoredBlock) -> Iterator[tuple[str, StoredBlock]]:
    """Name the matrices of each expert in a tensor of all, ``[experts, out, in]``; any other tensor is one itself."""
    found = _STACKED.match(name)
    if found is None or len(block.shape) != 3:
        yield name, block
        return
    experts, rows, width = block.shape
    matrices = ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else ("down_proj",)
    own = StoredBlock(block.file, block.offset, block.dtype, block.width, (rows // len(matrices), width))
    for expert in range(experts):
        for number, matrix in enumerate(matrices):
            place = block.offset + (expert * len(matrices) + number) * own.nbytes
            yield f"{found[1]}.{expert}.{matrix}.weight", own._replace(offset=place)


def _write_tensors(
    target: Path, parts: Mapping[str, Mapping[str, StoredBlock]], stored: Mapping[str, StoredBlock]
) -> None:
    """Write a file for each of the model's that has tensors of the language model, and an index."""
    by_file: dict[Path, dict[str, StoredBlock]] = {}
    for name, own in parts.items():
        by_file.setdefault(stored[name].file, {}).update(own)
    placed: dict[str, str] = {}
    # not the name of the only file of a model: an index beside it would not be read
    for number, (_, own) in enumerate(sorted(by_file.items()), start=1):
        file = f"model-{number:05d}-of-{len(by_file):05d}.safetensors"
        write_copied_tensors(target / file, own)
        placed |= dict.fromkeys(own, file)
    size = sum(stored[name].nbytes for name in parts)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
    _write_json(target / INDEX, index)


def _write_small_files(model_dir: Path, target: Path, config: Mapping[str, Any]) -> None:
    _write_json(target / "config.json", config)
    for path in small_files(model_dir):
        if path.name not in _OF_WRAPPERS:
            atomic_write(target / path.name, path.read_bytes())


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    atomic_write(path, (json.dumps(document, indent=2) + "\n").encode())
