"""Tokenizers that are published as ranks of tiktoken with Python code, like Kimi's.

A fast tokenizer is made of the ranks in ``tiktoken.model``. The code (``tokenization_kimi.py``) is read, and never run:
its pattern and the numbers of its special tokens are constants there. A missing constant is an error.
"""

from __future__ import annotations

import ast
import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from hpcrl.errors import HpcrlError

RANKS_FILE = "tiktoken.model"

_MOST_BYTES = 64 << 20
_LONGEST_TOKEN = 1024
"""Bytes; published ones have up to 128."""
_NUMBERS = "range(num_base_tokens, num_base_tokens + self.num_reserved_special_tokens + 2)"
"""The loop over special tokens in Kimi's code."""
_UNNAMED = "<|reserved_token_{}|>"
_TOOL_TEXT = "encode_tools_to_typescript_style"
"""Function that writes tools as text for the template in the code of Kimi K2.5."""
_SAME_IN_BOTH = re.compile(
    r"""
    \\ (?: [sSrnt] | [pP]\{ \w+ \} | [^\w] )       # escapes; no others, as they differ between engines
    | \[ \^? | \] | && | - | \(\?i: | \(\?: | \(\?! | \( (?! \? ) | \) | \|
    | (?: [*+?] | \{ \d+ (?: ,\d* )? \} ) (?! [+*?] )  # no possessive and lazy ones: `{1,3}+` has another meaning
    | [\w\s'"<>/=,;:!@#%~`_]
    """,
    re.VERBOSE,
)
"""Syntax with equal meaning in the regular expressions of tiktoken (fancy-regex) and of tokenizers (Oniguruma)."""


class TokenizerError(HpcrlError, ValueError):
    """A model directory has no tokenizer or chat template, or one that cannot be used."""


@dataclass(frozen=True, slots=True)
class TokenizerCode:
    """Facts from the Python code of a tokenizer.

    Attributes
    ----------
    path:
        The file.
    pattern:
        Pattern of the pieces that are encoded separately; None where the code has no constant of this kind.
    special_tokens:
        Number of special tokens after the ranks; None where the code numbers them in an unknown way.
    sorts_tools:
        Whether it gives tools to the chat template with the keys of all objects in order.
    writes_tools:
        Whether it gives the chat template a text of the tools, which hpcrl cannot make.
    """

    path: Path
    pattern: str | None
    special_tokens: int | None
    sorts_tools: bool
    writes_tools: bool


def read_code(model_dir: Path, config: Mapping[str, Any]) -> TokenizerCode | None:
    """Read the code that ``auto_map`` of tokenizer_config.json names; None where there is none.

    Raises
    ------
    TokenizerError
        It is not Python code.
    """
    mapped = config.get("auto_map")
    names = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else None
    named = next((name for name in names if isinstance(name, str)), None) if isinstance(names, list) else names
    if not isinstance(named, str) or not re.fullmatch(r"\w+\.\w+", named):
        return None
    module, kind = named.split(".")
    path = model_dir / f"{module}.py"
    if not path.is_file():
        return None
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise TokenizerError(f"{path} cannot be read as Python code: {error}") from error
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind), None)
    body = [] if found is None else found.body
    values = _constants(tree.body) | _constants(body)
    reserved = values.get("num_reserved_special_tokens")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    numbered = any(ast.unparse(call) == _NUMBERS for call in calls) and isinstance(reserved, int)
    render = next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == "apply_chat_template"), None)
    used = set() if render is None else {ast.unparse(n.func) for n in ast.walk(render) if isinstance(n, ast.Call)}
    pattern = values.get("pat_str")
    return TokenizerCode(
        path=path,
        pattern=pattern if isinstance(pattern, str) else None,
        special_tokens=reserved + 2 if numbered and isinstance(reserved, int) else None,
        sorts_tools="deep_sort_dict" in used,
        writes_tools=_TOOL_TEXT in used,
    )


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a file of ranks: a token in base64 and its number in each line.

    Raises
    ------
    TokenizerError
        It cannot be read, has other numbers than 0, 1, 2 and so on, or lacks a byte.
    """
    ranks: dict[bytes, int] = {}
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise TokenizerError(f"{path} has {size:,} bytes, more than files of ranks have")
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if not line:
                continue
            text, _, rank = line.partition(b" ")
            token = base64.b64decode(text, validate=True)
            if not 0 < len(token) <= _LONGEST_TOKEN or int(rank) != len(ranks) or token in ranks:
                raise TokenizerError(f"{path}, line {number}: a new token and the number {len(ranks)} were expected")
            ranks[token] = len(ranks)
    except (binascii.Error, ValueError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{path}, line {number}: no token in base64 and number: {error}") from error
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(f"{path} has no token of the byte {missing[0]}: it is incomplete")
    return ranks


def tokenizer_of_ranks(model_dir: Path, code: TokenizerCode | None, added: Mapping[int, AddedToken]) -> Tokenizer:
    """Make the tokenizer of ``tiktoken.model``.

    Texts of more than 25,000 characters without white space are cut there by the published code, and not here.

    Parameters
    ----------
    code:
        Result of `read_code`.
    added:
        Tokens of tokenizer_config.json by number.

    Raises
    ------
    TokenizerError
        Something is missing, or cannot be converted.
    """
    path = model_dir / RANKS_FILE
    beside = f"{model_dir} has no tokenizer.json, and {RANKS_FILE} alone makes no tokenizer"
    if code is None:
        raise TokenizerError(
            f"{beside}: the Python file that auto_map of tokenizer_config.json names is missing\n"
            "    hint: download the model again with its Python files; they are read and not run"
        )
    if code.pattern is None:
        raise TokenizerError(f"{beside}: {code.path} has no constant pat_str in the class of the tokenizer")
    if code.special_tokens is None:
        raise TokenizerError(f"{beside}: {code.path} numbers special tokens in a way that hpcrl does not know")
    splits = _regex(code)
    ranks = read_ranks(path)
    tokenizer = Tokenizer(_bpe(ranks))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(splits, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    numbers = range(len(ranks), len(ranks) + code.special_tokens)
    if outside := sorted(added.keys() - set(numbers)):
        named = f"{added[outside[0]].content!r} the number {outside[0]}"
        raise TokenizerError(f"tokenizer_config.json gives {named}: special tokens are {numbers[0]} to {numbers[-1]}")
    tokens = [
        added.get(number, AddedToken(_UNNAMED.format(number), normalized=False, special=True)) for number in numbers
    ]
    for token, number in zip(tokens, numbers, strict=True):
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])
        if tokenizer.token_to_id(token.content) != number:
            raise TokenizerError(f"{path}: {token.content!r} is in the ranks as well, and cannot be token {number}")
    return tokenizer


def _regex(code: TokenizerCode) -> Regex:
    assert code.pattern is not None
    at = 0
    while at < len(code.pattern):
        known = _SAME_IN_BOTH.match(code.pattern, at)
        if known is None:
            part = code.pattern[at : at + 20]
            raise TokenizerError(f"{code.path}: pat_str cannot be converted exactly at {part!r}")
        at = known.end()
    try:
        return Regex(code.pattern)
    except Exception as error:  # the library raises no more specific error
        raise TokenizerError(f"{code.path}: pat_str cannot be converted: {error}") from error


def _bpe(ranks: Mapping[bytes, int]) -> models.BPE:
    """Make the model. tiktoken merges the two neighbours that make the token of lowest rank, whichever they are."""
    letters = _letters_of_bytes()
    vocabulary = {token.decode("latin-1").translate(letters): rank for token, rank in ranks.items()}
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda one: one[1]):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(ranks[one], ranks[other], one, other) for one, other in pairs if one in ranks and other in ranks]
        merges += [(_spelled(one, letters), _spelled(other, letters)) for _, _, one, other in sorted(known)]
    return models.BPE(vocabulary, merges, ignore_merges=True)


def _spelled(token: bytes, letters: Mapping[int, str]) -> str:
    return token.decode("latin-1").translate(letters)


def _letters_of_bytes() -> dict[int, str]:
    """Return the characters that byte-level tokenizers have for bytes: those that can be seen, and others in order."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in seen else next(others)) for byte in range(256)}


def _constants(body: list[ast.stmt]) -> dict[str, Any]:
    """Return constants that are assigned by name."""
    return dict(_assigned(body))


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, Any]]:
    known: dict[str, Any] = {}
    for node in body:
        target: ast.expr | None = None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = _value(node.value, known)
            if value is not None:
                known[target.id] = value
                yield target.id, value


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of a text or a number, of joined texts, or None."""
    match node:
        case ast.Constant(value=str() | int() as value):
            return value
        case ast.Name(id=name):
            return known.get(name)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as glue), attr="join"), args=[listed]):
            parts = (
                [_value(each, known) for each in listed.elts] if isinstance(listed, ast.List | ast.Tuple) else [None]
            )
            texts = [part for part in parts if isinstance(part, str)]
            return glue.join(texts) if len(texts) == len(parts) else None
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            one, other = _value(left, known), _value(right, known)
            return one + other if isinstance(one, str) and isinstance(other, str) else None
    return None
