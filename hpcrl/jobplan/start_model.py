"""The start model of a recipe, as far as its directory tells: configuration, tokenizer, and the heads of its weights.

Trainer and engines refuse the same directories when they load them, which is after the queue. Here the heads of
safetensors files are read, some kilobytes each, and no weights.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.config.load import Loaded
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding, HpcrlError
from hpcrl.jobplan.towers import tower_problems
from hpcrl.models import ModelArch, load_arch
from hpcrl.models.arch import SAME_TEXT, arch_from_config, read_model_config, trainable_types
from hpcrl.models.configfile import read_config
from hpcrl.models.generation_config import GenerationConfig
from hpcrl.models.hub import download_command, published_id
from hpcrl.models.mtp import is_mtp_tensor
from hpcrl.models.unread import unread_note
from hpcrl.weights.read.model_directory import find_weight_files
from hpcrl.weights.read.model_files import ModelFiles, StoredBlock
from hpcrl.weights.read.stored_weights import (
    EMBEDDING,
    HEAD,
    config_key,
    dtype_problem,
    heads_differ_problem,
    quantised_weight,
    rows_differ,
    tied_name,
)
from hpcrl.weights.read.wrapped_names import wrapped_type

_OTHER_FAMILY = (
    "choose a model of a family that the trainer has (docs/training.md); more families can be planned than trained"
)
_WRAPPER = (
    "set model.vision: drop, or carry to keep the vision tower in exports; or extract the language model: "
    "hpcrl model extract DIR --output DIR"
)
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of a head that vLLM's attention on CPUs has."""
_FORMAT_FLAGS = ("config-format", "load-format", "tokenizer-mode")
"""Flags by which vLLM reads the Hugging Face format of a directory that also has Mistral's own."""
_NO_TOKENIZER = "convert it with transformers (AutoTokenizer.from_pretrained, save_pretrained), or download it whole"
_TIKTOKEN = (
    "download the model whole, its Python files with it, or make tokenizer.json of its tiktoken encoding: "
    "transformers.integrations.tiktoken.convert_tiktoken_to_fast"
)
_AGAIN = "copy or download it again, whole"
_MOST_BYTES = 512 << 20
"""Maximum bytes of a tokenizer's file; the largest published ones have some 40 million bytes."""


@dataclass(frozen=True)
class ModelReport:
    """Problems of a start model.

    Attributes
    ----------
    findings:
        Reasons why a run cannot start from it.
    unmade:
        Reason why it does not exist yet although nothing is wrong: the warm-up of the recipe makes it. Then there are
        no findings.
    notes:
        Facts about a usable model that people should know, a sentence each: unread keys of ``config.json``, files that
        are not read.
    """

    findings: tuple[Finding, ...] = ()
    unmade: Finding | None = None
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Return the reasons why a run cannot start from it now."""
        return self.findings if self.unmade is None else (self.unmade, *self.findings)


class DirectoryReport(NamedTuple):
    """Findings from a model directory alone.

    Attributes
    ----------
    arch:
        The family's architecture; None where the configuration is not of a supported family.
    problems:
        Problems that keep trainer and engines from loading it, each with a hint.
    notes:
        As in `ModelReport`.
    """

    arch: ModelArch | None
    problems: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def check_model(recipe: Loaded[Recipe], model_dir: Path, *, weights: bool = True) -> None:
    """Check the start model (ConfigError where it is missing or cannot be used); see `report_model`."""
    if problems := report_model(recipe, model_dir, weights=weights).problems:
        raise ConfigError(problems)


def report_model(
    recipe: Loaded[Recipe], model_dir: Path, *, weights: bool = True, cluster: str | None = None
) -> ModelReport:
    """Look at the start model as trainer and engines will.

    Parameters
    ----------
    recipe:
        The recipe as loaded.
    model_dir:
        ``model.path``, absolute.
    weights:
        Whether it has to have weights; not where those of another run come in their place.
    cluster:
        The profile that commands in hints have to name; None: the one that they take by default.
    """
    where = recipe.where("model.path")
    if not (model_dir / "config.json").is_file():
        return _missing(recipe, model_dir, where, cluster)
    vision = recipe.value.model.vision
    own = look_at_directory(model_dir, weights=weights, vision=vision)
    findings = [] if own.arch is None else list(_engine_findings(recipe, own.arch, model_dir, where))
    findings += [] if own.arch is None else _storage_findings(recipe, model_dir, where)
    findings += [Finding(where, "model.path", what, hint) for what, hint in own.problems]
    findings += [
        Finding(recipe.where("model.vision"), "model.vision", what, hint)
        for what, hint in tower_problems(model_dir, vision, weights=weights)
    ]
    return ModelReport(tuple(findings), notes=own.notes)


def look_at_directory(model_dir: Path, *, weights: bool = True, vision: str | None = None) -> DirectoryReport:
    """Look at a directory that has a ``config.json``, without a recipe.

    Parameters
    ----------
    weights:
        As in `report_model`.
    vision:
        ``model.vision`` of a recipe: None refuses a model that also sees.
    """
    try:
        if vision is None:
            # a wrapped config is refused with the messages of readers of the inner config
            arch_from_config(read_config(model_dir / "config.json"))
        arch = load_arch(model_dir)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as error:
        what = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError | OSError) else str(error)
        named = what if str(model_dir) in what else f"{model_dir / 'config.json'}: {what}"
        refused = vision is None and wrapped_type(model_dir) in (*trainable_types(), *SAME_TEXT)
        return DirectoryReport(None, ((named, _WRAPPER if refused else _OTHER_FAMILY),), _notes(model_dir))
    files = _weight_problems(arch, model_dir) if weights else ()
    problems = (*_tokenizer_problems(model_dir), *_generation_problems(model_dir), *files)
    ignored = () if problems or not weights else tuple(_ignored_files(model_dir))
    return DirectoryReport(arch, problems, (*_notes(model_dir), *ignored))


def _notes(model_dir: Path) -> tuple[str, ...]:
    """Return a note of the unread keys of ``config.json``; a file that cannot be read has findings instead."""
    try:
        config = read_model_config(model_dir)
    except (OSError, ValueError):
        return ()
    note = unread_note(config) if isinstance(config, dict) else None
    return () if note is None else (note,)


def _missing(recipe: Loaded[Recipe], model_dir: Path, where: str, cluster: str | None) -> ModelReport:
    """Report a directory without ``config.json``: made by a warm-up later, downloaded, or neither."""
    what = f"{model_dir} holds no model (no config.json)"
    given = recipe.value.model.path
    if (model_dir / "config.json").is_symlink():
        link = f"{model_dir / 'config.json'} is a broken link: the download was interrupted"
        return ModelReport((Finding(where, "model.path", link, _AGAIN),))
    if (found := published_id(given)) is not None:
        # an id is downloaded into the site's directory of models; a quoted ~ would not be expanded
        directory = None if found == given else str(model_dir) if given[0] in "~$" else given
        hint = f"download it: {download_command(found, directory, cluster=cluster)}"
        return ModelReport((Finding(where, "model.path", what, hint),))
    if model_dir.is_dir() and any(model_dir.iterdir()):
        hint = "give the path of a Hugging Face model directory; this one has files, and config.json is not among them"
        return ModelReport((Finding(where, "model.path", what, hint),))
    if model_dir.exists() and not model_dir.is_dir():
        hint = "give the path of a Hugging Face model directory; this is a file"
        return ModelReport((Finding(where, "model.path", what, hint),))
    if recipe.value.model.warmup is None:
        hint = "give the path of a Hugging Face model directory"
        return ModelReport((Finding(where, "model.path", what, hint),))
    output = f" --output {shlex.quote(str(model_dir))}" if where == "--set" else ""
    hint = f"make it: hpcrl warmup {shlex.quote(str(recipe.source))}{output}"
    return ModelReport(unmade=Finding(where, "model.path", what, hint))


def _engine_findings(recipe: Loaded[Recipe], arch: ModelArch, model_dir: Path, where: str) -> Iterator[Finding]:
    engine = recipe.value.engine
    latent = arch.has_latent_attention
    if engine.backend == "vllm" and engine.device == "cpu" and not latent and arch.kv.key_dim not in _CPU_HEADS:
        sizes = ", ".join(map(str, _CPU_HEADS))
        what = f"heads of {model_dir} have size {arch.kv.key_dim}; vLLM on CPUs can {sizes}"
        yield Finding(where, "model.path", what, "choose another model, or engine.backend: embedded")
    second = _names(model_dir, "consolidated*.safetensors")
    unset = [flag for flag in _FORMAT_FLAGS if engine.vllm_args.get(flag) != "hf"]
    if engine.backend == "vllm" and second and unset:
        what = f"{model_dir} has {second[0]}: vLLM prefers it and params.json to the Hugging Face files"
        flags = ", ".join(f"{flag}: hf" for flag in _FORMAT_FLAGS)
        hint = f"set engine.vllm_args: {{{flags}}}, or leave {second[0]} out of the directory"
        yield Finding(where, "model.path", what, hint)


def _storage_findings(recipe: Loaded[Recipe], model_dir: Path, where: str) -> Iterator[Finding]:
    """Yield why vLLM engines, which keep matrices as the start model's files have them, could not take versions."""
    engine, handoff = recipe.value.engine, recipe.value.handoff
    if engine.backend != "vllm" or "hf-overrides" in engine.vllm_args:
        return
    if wrapped_type(model_dir) is not None:
        what = f"{model_dir} has a vision tower, which vLLM would load; versions of a run hold only the language model"
        hint = (
            f"extract the language model: hpcrl model extract {shlex.quote(str(model_dir))} --output DIR, "
            "and leave model.vision out"
        )
        yield Finding(where, "model.path", what, f"{hint}; or set engine.backend: embedded")
        return
    method = (read_model_config(model_dir).get("quantization_config") or {}).get("quant_method")
    copy = f"give the path of a copy in bfloat16: hpcrl model dequantise {shlex.quote(str(model_dir))} --output DIR"
    if method == "mxfp4":
        what = f"experts of {model_dir} are in MXFP4: vLLM keeps them so, and versions of a run are not"
        yield Finding(where, "model.path", what, f"{copy}, or set engine.backend: embedded")
    elif method == "fp8" and handoff.kind != "fp8":
        what = (
            f"matrices of {model_dir} are in FP8: vLLM keeps them so, and versions of handoff.kind: full have no scales"
        )
        yield Finding(where, "model.path", what, f"set handoff.kind: fp8 and engine.memory.weights: fp8, or {copy}")


# -- tokenizer --------------------------------------------------------------------------------------------------------


def _tokenizer_problems(model_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield the reason why the orchestrator could not use the tokenizer; only the first one."""
    path, ranks = model_dir / "tokenizer.json", model_dir / "tiktoken.model"
    made_of_ranks = not path.is_file() and ranks.is_file() and not path.is_symlink()
    if not path.is_file() and not made_of_ranks:
        linked = " but a broken link" if path.is_symlink() else ""
        others = ", ".join(sorted({*_names(model_dir, "*tiktoken*"), *_names(model_dir, "*.model")}))
        beside = f" (there is {others}, which hpcrl does not read)" if others else ""
        what = f"{model_dir} has no tokenizer.json{linked}{beside}"
        yield what, _TIKTOKEN if "tiktoken" in others else _NO_TOKENIZER
        return
    try:
        _load_tokenizer(model_dir, ranks if made_of_ranks else path)
    except Exception as error:  # noqa: BLE001 - the tokenizers package raises bare exceptions, templates any
        what = str(error) or type(error).__name__
        named = what if str(model_dir) in what else f"{model_dir}: {what}"
        yield f"the tokenizer cannot be used: {named}", _TIKTOKEN if made_of_ranks else _AGAIN


def _generation_problems(model_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield the reasons why engines could not use ``generation_config.json``."""
    try:
        GenerationConfig.read(model_dir)
    except (ValueError, OSError) as error:
        yield f"engines refuse generation_config.json: {error}", _AGAIN


def _names(model_dir: Path, pattern: str) -> list[str]:
    return sorted(each.name for each in model_dir.glob(pattern))


def _load_tokenizer(model_dir: Path, path: Path) -> None:
    """Load the tokenizer as the orchestrator does; without the tokenizers package, read its files as JSON."""
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise ValueError(f"{path.name} has {size:,} bytes")
    if importlib.util.find_spec("tokenizers") is not None:
        from hpcrl.models.tokenizer import ChatTokenizer  # noqa: PLC0415 - not part of a core install

        ChatTokenizer(model_dir)
        return
    if path.suffix == ".json" and not isinstance(_json(path), dict):
        raise ValueError("tokenizer.json is not a JSON object")
    _json(model_dir / "tokenizer_config.json")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


# -- weights ----------------------------------------------------------------------------------------------------------


def _weight_problems(arch: ModelArch, model_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield the reasons why trainer and engines could not load the weights; the first one of each kind."""
    try:
        with ModelFiles(model_dir) as files:
            stored = dict(files.tensors)
            differ = arch.tie_word_embeddings and HEAD in stored and EMBEDDING in stored and rows_differ(files)
    except (HpcrlError, OSError, ValueError) as error:
        what, _, hint = str(error).partition("\n")
        yield what, hint.strip().removeprefix("hint: ") or _AGAIN
        return
    if differ:
        yield f"{model_dir}: {heads_differ_problem()}", "transformers keeps both, vLLM drops the head"
    yield from _tensor_problems(arch, model_dir, stored)


def _ignored_files(model_dir: Path) -> Iterator[str]:
    if ignored := find_weight_files(model_dir).ignored:
        yield f"not read in {model_dir}, as they are not the model's by its index or name: {', '.join(ignored)}"


def _tensor_problems(arch: ModelArch, model_dir: Path, stored: dict[str, StoredBlock]) -> Iterator[tuple[str, str]]:
    """Compare tensors with those of the configuration, as ``hpcrl.modeling.checkpoint_io.load`` will."""
    try:
        expected = {spec.name: tuple(spec.shape) for spec in arch.tensors() if not spec.is_scale}
    except ValueError as error:
        yield f"{model_dir}: {error}", _OTHER_FAMILY
        return
    if arch.tie_word_embeddings and EMBEDDING in expected:
        # a tied tensor may be stored by either name, or by both
        shape = expected.pop(EMBEDDING)
        expected |= {name: shape for name in (tied_name(stored), HEAD) if name != HEAD or HEAD in stored}
    fitting = "the weights are not those of config.json: download the model again, or choose another one"
    missing = [name for name in expected if name not in stored]
    if missing:
        what = f"{len(missing)} tensors are missing, the first is {missing[0]!r}{config_key(arch, missing[0])}"
        yield f"{model_dir}: {what}", fitting
    for name, shape in expected.items():
        if name in stored and stored[name].shape != shape:
            has = f"tensor {name!r} has shape {_shape(stored[name].shape)}, by config.json it is {_shape(shape)}"
            yield f"{model_dir}: {has}{config_key(arch, name)}", fitting
            break
    for name in expected:
        if name in stored and (what := dtype_problem(name, stored)):
            yield (
                f"{model_dir}: {what}",
                "choose an upload in bfloat16, in FP8 with block scales, or of gpt-oss in MXFP4",
            )
            break
    strange = [name for name in stored if not _belongs(arch, name, expected, stored)]
    if strange:
        what = f"{model_dir}: tensor {strange[0]!r} of {stored[strange[0]].file.name} is not part of this model"
        what += config_key(arch, strange[0])
        others = f" ({len(strange)} such tensors)" if len(strange) > 1 else ""
        yield what + others, fitting


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _belongs(arch: ModelArch, name: str, expected: dict[str, Any], stored: dict[str, StoredBlock]) -> bool:
    """Return whether loading leaves ``name`` in peace: a tensor of the model, or one that says nothing of its own."""
    own = quantised_weight(name, stored)
    redundant = name.endswith("rotary_emb.inv_freq")
    mtp = is_mtp_tensor(name, layers=arch.num_hidden_layers, modules=arch.num_nextn_predict_layers)
    return name in expected or (own is not None and (own in expected or mtp)) or redundant or mtp
