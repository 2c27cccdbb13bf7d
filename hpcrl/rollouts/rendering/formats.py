"""Formats in which published families write thinking and tool calls, and which of them a model has.

The parsers of a format are those of the package ``renderers`` (Prime Intellect, Apache-2.0). They work on token ids, so
that a call which is spelled in text, and not made of the family's control tokens, is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, get_args

from hpcrl.config.chat import ChatFormat
from hpcrl.errors import UsageError
from hpcrl.models.arch import SAME_TEXT
from hpcrl.models.configfile import read_config
from hpcrl.models.tokenizer import ChatTokenizer

_BY_MODEL_TYPE: Mapping[str, tuple[ChatFormat, ...]] = MappingProxyType(
    {
        "deepseek_v3": ("kimi-k2", "deepseek-v3"),
        "glm4_moe": ("glm-4.5",),
        "glm4_moe_lite": ("glm-5",),
        "glm_moe_dsa": ("glm-5",),
        "gpt_oss": ("gpt-oss",),
        "kimi_k2": ("kimi-k2",),
        "llama": ("llama-3",),
        "minimax_m2": ("minimax-m2",),
        "nemotron_h": ("nemotron-3",),
        "qwen2": ("qwen2.5",),
        "qwen2_moe": ("qwen2.5",),
        "qwen3": ("qwen3", "qwen2.5"),
        "qwen3_5": ("qwen3.5",),
        "qwen3_5_moe": ("qwen3.5",),
        "qwen3_5_text": ("qwen3.5",),
        "qwen3_5_moe_text": ("qwen3.5",),
        "qwen3_moe": ("qwen3", "qwen2.5"),
        "qwen3_next": ("qwen3", "qwen2.5"),
    }
)
"""Formats by ``model_type`` of config.json; a model has the first whose control tokens are all in its vocabulary."""
_MAX_KNOWN = 64
"""Maximum number of texts whose token ids are kept for parsers."""


class ParseTurn(Protocol):
    """Parser of a format: ``ids`` are those of a turn, with or without the token that ended it."""

    def __call__(self, ids: list[int], *, tools: list[Any] | None, prompt_ids: list[int]) -> Any: ...


def formats_of(model_dir: Path) -> tuple[ChatFormat, ...]:
    """Return the formats that models of this ``model_type`` may have; none where it is not known."""
    path = model_dir / "config.json"
    config = read_config(path) if path.is_file() else None
    inner = config.get("text_config") if isinstance(config, dict) else None
    # a vision-language model has the type of its wrapper or of its language model
    types = [part.get("model_type") for part in (config, inner) if isinstance(part, dict)]
    return next((found for kind in types if (found := formats_of_type(str(kind)))), ())


def formats_of_type(model_type: str) -> tuple[ChatFormat, ...]:
    """Return the formats that models of a ``model_type`` may have; none where it is not known."""
    return _BY_MODEL_TYPE.get(SAME_TEXT.get(model_type, model_type), ())


def find_format(model_dir: Path, tokenizer: ChatTokenizer) -> ChatFormat | None:
    """Return the format of a model's thinking and calls; None where it is not known, so that replies are text alone."""
    for name in formats_of(model_dir):
        try:
            make_parser(name, tokenizer, {})
        except UsageError:
            continue
        return name
    return None


def make_parser(
    name: ChatFormat, tokenizer: ChatTokenizer, variables: Mapping[str, Any]
) -> tuple[ParseTurn, tuple[int, ...]]:
    """Make the parser of a format.

    Parameters
    ----------
    name:
        Name of the format.
    variables:
        Variables of the chat template. Those that decide how the model begins a turn, such as ``enable_thinking``, are
        the parser's as well.

    Returns
    -------
    tuple
        The parser, and tokens that end a turn.

    Raises
    ------
    UsageError
        The vocabulary lacks control tokens of the format, or the package ``renderers`` is not installed.
    """
    assert name in get_args(ChatFormat), name
    try:
        # imported late: this takes a second, and only models with a known format need it
        from renderers.base import create_renderer, template_field_names  # noqa: PLC0415
        from renderers.configs import config_from_name  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(
            f"model.chat.format {name}: the package renderers is not installed here ({error})\n"
            "    hint: install hpcrl with its extra 'rollouts', or set model.chat.format: text"
        ) from error
    vocabulary = _Vocabulary(tokenizer)
    try:
        if name == "qwen2.5":
            return _hermes(vocabulary, tokenizer), vocabulary.needed("<|im_end|>", "<|endoftext|>")
        if name == "gpt-oss":
            return _harmony(vocabulary), vocabulary.needed("<|return|>", "<|call|>")
        config = config_from_name(name)
        known = template_field_names(config)
        made = create_renderer(
            vocabulary, config, chat_template_kwargs={key: variables[key] for key in variables if key in known}
        )
        parse = _deepseek(vocabulary, made.parse_response) if name == "deepseek-v3" else made.parse_response
        return parse, tuple(made.get_stop_token_ids())
    except Exception as error:
        raise UsageError(
            f"model.chat.format {name}: this model does not have it: {error}\n"
            "    hint: leave model.chat.format out to have it found from the model, or set it to text"
        ) from error


def thinking_splitter(tokenizer: ChatTokenizer) -> Callable[[list[int], list[int]], tuple[str, int]]:
    """Return a function that finds thinking in ``<think>`` and ``</think>``, where these are tokens of the model.

    It gets the tokens of a turn and those before it, which may have begun the thinking, and returns the thinking, and
    the number of tokens before the text that follows it: all where it is not closed.
    """
    begin, end = (tokenizer.id_of(mark) for mark in ("<think>", "</think>"))

    def split(ids: list[int], before: list[int]) -> tuple[str, int]:
        if begin is None or end is None:
            return "", 0
        opened = next((token == begin for token in reversed(before) if token in (begin, end)), False)
        first = 0 if opened else -1
        if begin in ids and not tokenizer.decode(ids[: ids.index(begin)]).strip():
            first = ids.index(begin) + 1
        if first < 0:
            return "", 0
        close = ids.index(end, first) if end in ids[first:] else len(ids)
        return tokenizer.decode(ids[first:close]).strip(), min(close + 1, len(ids))

    return split


@dataclass(frozen=True, slots=True)
class _ThoughtAndText:
    reasoning_content: str
    content: str
    tool_calls: tuple[Any, ...] = ()


def thinking_parser(tokenizer: ChatTokenizer) -> ParseTurn:
    """Return the parser of a model whose calls have no known format: thinking, and text."""
    split = thinking_splitter(tokenizer)

    def parse(ids: list[int], *, tools: list[Any] | None, prompt_ids: list[int]) -> Any:
        thought, at = split(ids, prompt_ids)
        text = tokenizer.decode(ids[at:])
        return _ThoughtAndText(thought, text.strip() if at else text)

    return parse


def same_ends(name: ChatFormat | None, tokenizer: ChatTokenizer) -> dict[int, int]:
    """Return tokens that end sampled turns, and what the format's chat template writes in their place.

    A turn of gpt-oss is sampled up to ``<|return|>``, and ``<|end|>`` stands there in conversations.
    """
    pairs = {"gpt-oss": {"<|return|>": "<|end|>"}}.get(name or "", {})
    ids = {tokenizer.id_of(one): tokenizer.id_of(other) for one, other in pairs.items()}
    return {one: other for one, other in ids.items() if one is not None and other is not None}


def _hermes(vocabulary: _Vocabulary, tokenizer: ChatTokenizer) -> ParseTurn:
    """Return the parser of calls as JSON in marks (Qwen 2.5), and of thinking where the vocabulary has it (QwQ)."""
    from renderers.base import ParsedResponse  # noqa: PLC0415
    from renderers.parsers import get_tool_parser  # noqa: PLC0415

    vocabulary.needed("<tool_call>", "</tool_call>")
    ends = vocabulary.needed("<|im_end|>", "<|endoftext|>")
    calls, split = get_tool_parser("qwen3", vocabulary), thinking_splitter(tokenizer)

    def parse(ids: list[int], *, tools: list[Any] | None, prompt_ids: list[int]) -> Any:
        end = next((at for at, token in enumerate(ids) if token in ends), len(ids))
        thought, begin = split(ids[:end], prompt_ids)
        rest, found = calls.extract(ids[begin:end])
        for call in found:
            if call.token_span is not None:
                call.token_span = (call.token_span[0] + begin, call.token_span[1] + begin)
        return ParsedResponse(
            content=vocabulary.decode(rest).strip(), reasoning_content=thought or None, tool_calls=found
        )

    return parse


def _deepseek(vocabulary: _Vocabulary, parse_v3: ParseTurn) -> ParseTurn:
    """Return the parser of V3 that also knows calls of V3.1: the name stands before the separator, and JSON behind."""
    from renderers.base import ToolCallParseStatus  # noqa: PLC0415

    begin, separator, end = vocabulary.needed("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")

    def parse(ids: list[int], *, tools: list[Any] | None, prompt_ids: list[int]) -> Any:
        found = parse_v3(ids, tools=tools, prompt_ids=prompt_ids)
        for call in found.tool_calls:
            if call.token_span is None:
                continue
            block = [token for token in ids[slice(*call.token_span)] if token not in (begin, end)]
            if separator not in block:
                continue
            at = block.index(separator)
            name, body = vocabulary.decode(block[:at]).strip(), vocabulary.decode(block[at + 1 :]).strip()
            if name == "function" and not body.startswith("{"):
                continue
            call.name = name or None
            if call.status == ToolCallParseStatus.UNCLOSED_BLOCK:
                continue
            try:
                call.arguments, problem = json.loads(body or "{}"), None
            except (ValueError, RecursionError):
                call.arguments, problem = body, ToolCallParseStatus.INVALID_JSON
            call.status = problem or (ToolCallParseStatus.OK if name else ToolCallParseStatus.MISSING_NAME)
        return found

    return parse


def _harmony(vocabulary: _Vocabulary) -> ParseTurn:
    """Return the parser of channels (gpt-oss), without its package's encoder, which loads an own vocabulary."""
    from renderers.parsing import parse_gpt_oss  # noqa: PLC0415

    names = ("return", "call", "start", "end", "channel", "message", "constrain")
    ids = vocabulary.needed(*(f"<|{name}|>" for name in names))
    tokens = {f"{name}_id": number for name, number in zip(names, ids, strict=True)}

    begin = [tokens["start_id"], *vocabulary.encode("assistant")]

    def parse(ids: list[int], *, tools: list[Any] | None, prompt_ids: list[int]) -> Any:
        # the prompt has begun the first message
        found = parse_gpt_oss(vocabulary, [*begin, *ids], **tokens)
        for call in found.tool_calls:
            if call.token_span is not None:
                first, end = call.token_span
                call.token_span = (max(0, first - len(begin)), end - len(begin))
        return found

    return parse


class _Vocabulary:
    """Tokenizer with the interface that the package ``renderers`` expects."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        self.name_or_path = ""
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = tokenizer.eos_token_id

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        # parsers encode the same few marks at each turn
        found = self._known.get(text)
        if found is None:
            found = self._tokenizer.encode(text)
            if len(self._known) < _MAX_KNOWN:
                self._known[text] = found
        return list(found)

    def decode(self, token_ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.id_of(tokens)
        return [self._tokenizer.id_of(token) for token in tokens]

    def needed(self, *tokens: str) -> tuple[int, ...]:
        ids = {token: self._tokenizer.id_of(token) for token in tokens}
        if missing := [token for token, number in ids.items() if number is None]:
            raise ValueError(f"its vocabulary has no {', '.join(missing)}")
        return tuple(number for number in ids.values() if number is not None)
