"""Tokenizer and chat template of a model directory, read like transformers.

Special tokens stand in ``tokenizer_config.json`` and, of older models, in ``special_tokens_map.json`` and
``added_tokens.json``, as strings or objects. A chat template stands in ``chat_template.jinja`` (further ones by name in
``additional_chat_templates/``), or in ``tokenizer_config.json`` as a string, a list of named ones, or an object.
Without ``tokenizer.json`` a tokenizer is made of ``tiktoken.model`` (`hpcrl.models.tiktoken_files`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from hpcrl.models.tiktoken_files import RANKS_FILE, TokenizerCode, TokenizerError, read_code, tokenizer_of_ranks

__all__ = ["TokenizerError", "TokenizerFiles", "read_tokenizer_files"]

_CONFIG = "tokenizer_config.json"
_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_DEFAULTS: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
}
"""Special tokens of transformers' classes where ``tokenizer_config.json`` does not have the key."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Tokenizer and chat templates of a model directory.

    Attributes
    ----------
    tokenizer:
        Knows all added tokens; neither cuts nor pads.
    special_tokens:
        By the name that templates use: ``bos_token``, ``eos_token`` and further ones of the model.
    missing:
        Special tokens that ``tokenizer.json`` lacks, and that were added to it as new ones.
    templates:
        Text of chat templates by name; the only one is ``default``.
    template_sources:
        The file of each of them.
    code:
        Treatment of tools by the model's own Python code, where it has such a tokenizer.
    """

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    missing: frozenset[str]
    templates: dict[str, str]
    template_sources: dict[str, Path]
    code: TokenizerCode | None = None


def read_tokenizer_files(model_dir: Path) -> TokenizerFiles:
    """Read the tokenizer, its special tokens and chat templates.

    Raises
    ------
    TokenizerError
        A file is missing, cannot be read, or is not of a tokenizer.
    """
    config = _read_object(model_dir / _CONFIG)
    code = read_code(model_dir, config)
    added: dict[int, AddedToken] = {}
    if isinstance(listed := config.get("added_tokens_decoder"), dict):
        for key, value in listed.items():
            added[_token_id(key, model_dir / _CONFIG)] = _token(value, "added_tokens_decoder", model_dir / _CONFIG)
    else:
        config |= _older_names(model_dir / "special_tokens_map.json", config)
    if config.get("extra_special_tokens") in (None, [], {}) and "additional_special_tokens" in config:
        config["extra_special_tokens"] = config.pop("additional_special_tokens")
    tokenizer, own = _read_tokenizer(model_dir, code, added)
    names = _names(config, model_dir / _CONFIG)
    if own.get("padding") and "pad_token" not in config:
        names.setdefault("pad_token", _token(own["padding"].get("pad_token"), "padding", model_dir / "tokenizer.json"))
    if not isinstance(listed, dict):
        added |= _older_tokens(model_dir / "added_tokens.json", names)
    _add(tokenizer, [added[key] for key in sorted(added)], names)
    missing = _add(tokenizer, [*names.values(), *_extra(config, model_dir / _CONFIG)], names)
    templates, sources = _templates(model_dir, config)
    special = {name: token.content for name, token in names.items()}
    return TokenizerFiles(tokenizer, special, missing, templates, sources, code)


def _read_tokenizer(
    model_dir: Path, code: TokenizerCode | None, added: Mapping[int, AddedToken]
) -> tuple[Tokenizer, dict[str, Any]]:
    path = model_dir / "tokenizer.json"
    if not path.is_file() and (model_dir / RANKS_FILE).is_file():
        return tokenizer_of_ranks(model_dir, code, added), {}
    if not path.is_file():
        hint = "hpcrl reads this form and tiktoken.model alone: save it by transformers' AutoTokenizer"
        raise TokenizerError(f"{path.parent} has no tokenizer.json\n    hint: {hint}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no more specific error
        raise TokenizerError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    own = {"padding": tokenizer.padding}
    # saved truncation for fixed batches would cut prompts silently
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, own


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one without a file."""
    try:
        found = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} must be a JSON object, not {type(found).__name__}")
    return found


def _token(value: Any, key: str, path: Path) -> AddedToken:
    """Return a token that is given as its text or as an object with its flags."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, Mapping) and isinstance(content := value.get("content"), str):
        flags = {name: value[name] for name in _FLAGS if name in value}
        if all(isinstance(flag, bool) for flag in flags.values()):
            return AddedToken(content, **flags)
    raise TokenizerError(
        f"{path}: {key}: a token is a text, or an object with its content and flags, not {value!r:.80}"
    )


def _token_id(key: str, path: Path) -> int:
    if not (key.isascii() and key.isdigit()):
        raise TokenizerError(f"{path}: added_tokens_decoder: {key!r:.80} is not a token id")
    return int(key)


def _older_names(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``special_tokens_map.json`` says, which counts before the config where that lists no added tokens."""
    found = _read_object(path)
    extra = found.get("extra_special_tokens")
    if isinstance(extra, list) and isinstance(before := config.get("extra_special_tokens"), list):
        found["extra_special_tokens"] = [*before, *(token for token in extra if token not in before)]
    return found


def _names(config: Mapping[str, Any], path: Path) -> dict[str, AddedToken]:
    """Return special tokens by name, those with names of the model's own among them."""
    names: dict[str, AddedToken] = {}
    kind = config.get("tokenizer_class")
    defaults = _DEFAULTS.get(kind.removesuffix("Fast"), {}) if isinstance(kind, str) else {}
    for name in _STANDARD:
        value = config.get(name, defaults.get(name))
        if value is not None:
            names[name] = _token(value, name, path)
    for name, value in config.items():
        if name.endswith("_token") and name not in _STANDARD and (isinstance(value, str) or _is_token(value)):
            names[name] = _token(value, name, path)
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(group := config.get(key), dict):
            names |= {name: _token(value, f"{key}.{name}", path) for name, value in group.items()}
    return names


def _is_token(value: Any) -> bool:
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _extra(config: Mapping[str, Any], path: Path) -> list[AddedToken]:
    """Return special tokens without a name."""
    extra = config.get("extra_special_tokens")
    if extra is None or isinstance(extra, dict):
        return []
    if not isinstance(extra, list):
        raise TokenizerError(f"{path}: extra_special_tokens must be a list or an object, not {extra!r:.80}")
    return [_token(value, "extra_special_tokens", path) for value in extra]


def _older_tokens(path: Path, names: Mapping[str, AddedToken]) -> dict[int, AddedToken]:
    """Return tokens of ``added_tokens.json``: an object from text to id."""
    special = {token.content for token in names.values()}
    found: dict[int, AddedToken] = {}
    for content, token_id in _read_object(path).items():
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise TokenizerError(f"{path}: the id of {content!r:.80} is {token_id!r:.80}, which is not a number")
        found[token_id] = AddedToken(content, normalized=content not in special, special=content in special)
    return found


def _add(tokenizer: Tokenizer, tokens: Iterable[AddedToken], names: Mapping[str, AddedToken]) -> frozenset[str]:
    """Add tokens that ``tokenizer.json`` lacks, in their order; return those that the vocabulary lacked, too."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    special, missing = {token.content for token in names.values()}, set()
    for token in tokens:
        if not token.content or token.content in known:
            continue
        known.add(token.content)
        if tokenizer.token_to_id(token.content) is None:
            missing.add(token.content)
        if token.special or token.content in special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    return frozenset(missing)


def _templates(model_dir: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Path]]:
    files = {path.stem: path for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))}
    if (model_dir / "chat_template.jinja").is_file():
        files["default"] = model_dir / "chat_template.jinja"
    if files:
        return {name: _read_text(path) for name, path in files.items()}, files
    config_file, found = model_dir / _CONFIG, config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}, {"default": config_file}
    if isinstance(found, list):
        if not all(isinstance(each, dict) and "name" in each and "template" in each for each in found):
            raise TokenizerError(f"{config_file}: chat_template: each of a list has a name and a template")
        found = {each["name"]: each["template"] for each in found}
    if found is None or found in ({}, []):
        return {}, {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise TokenizerError(f"{config_file}: chat_template is neither a text nor named texts, but {found!r:.80}")
    return found, dict.fromkeys(found, config_file)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
