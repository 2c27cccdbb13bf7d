"""Plain words: how docstrings open, and words that hide what a sentence states.

The counts below are a ratchet: a count may only shrink. Lower it when you rewrite a sentence.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_QUESTION = re.compile(r"(What|Whether|Where|Who|How|Of|When|Which|Whose|Why)\b")

#: pages that tools/generate_docs.py writes: their text comes from hpcrl/, where it is counted
_GENERATED = {"cli.md", "configuration.md"}

#: patterns by the name that `LIMITS` uses
_BANNED = {
    # "there is no" is plain, and so are comparisons; "X is not a Y" hides the verb "is not"
    "is no": r"(?<!there )\bis no (?!longer\b|more\b|less\b|better\b|worse\b|later\b)",
    "said": r"\bsaid\b",
    **{
        word: rf"\b{word}\b"
        for word in (
            "nobody",
            "somebody",
            "anybody",
            "everybody",
            "whoever",
            "for ever",
            "dear",
            "so many",
            "of ours",
            "beside",
            "goes on",
            "told",
            "living",
            "looked at",
        )
    },
}

_ANY = re.compile("|".join(_BANNED.values()), re.IGNORECASE)

#: maximum occurrences of each word in each tree; a word without an entry must not occur
LIMITS: dict[str, dict[str, int]] = {
    "hpcrl": {
        "beside": 3,
        "is no": 30,
        "said": 2,
    },
    "tests": {
        "beside": 1,
        "goes on": 3,
        "is no": 3,
        "of ours": 1,
        "said": 1,
        "told": 2,
    },
}


def _python_files() -> list[Path]:
    return sorted((_ROOT / "hpcrl").rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _texts_of_code(path: Path) -> Iterator[str]:
    """Yield docstrings, messages and comments; a string without a space is a name, not prose."""
    if not _ANY.search(path.read_text()):
        return  # tokenizing the whole package takes many seconds
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def _pages() -> list[Path]:
    pages = [path for path in (_ROOT / "docs").glob("*.md") if path.name not in _GENERATED]
    return sorted([*pages, _ROOT / "README.md", _ROOT / "CONTRIBUTING.md"])


def _texts(tree: str) -> Iterator[tuple[Path, str]]:
    if tree == "hpcrl":
        for path in _python_files():
            for text in _texts_of_code(path):
                yield path, text
    elif tree == "docs":
        for path in _pages():
            text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
            # what commands print comes from hpcrl/, where it is counted
            yield path, re.sub(r"\n\n(?: {4}.*\n|\n)+", "\n\n", text)
    elif tree == "recipes":
        for folder in ("recipes", "clusters"):
            for path in sorted((_ROOT / folder).rglob("*.yaml")):
                yield path, path.read_text()
    else:
        for path in sorted((_ROOT / "tests").rglob("test_*.py")):
            for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE):
                yield path, name.replace("_", " ")


def _found(tree: str) -> dict[str, list[str]]:
    """Return the banned words of a tree, each with the place and the line of every occurrence."""
    found: dict[str, list[str]] = {}
    for path, text in _texts(tree):
        for line in re.sub(r"`+[^`\n]*`+", "``", text).splitlines():  # names of code are not prose
            if re.fullmatch(r"\s*\**[\w., ]+:", line):
                continue  # the name of a parameter or a field
            for word, pattern in _BANNED.items():
                places = re.findall(pattern, line, re.IGNORECASE)
                found.setdefault(word, []).extend([f"{path.relative_to(_ROOT)}: {line.strip()}"] * len(places))
    return {word: places for word, places in found.items() if places}


def test_docstrings_open_with_a_statement() -> None:
    """Ruff's D401 wants an imperative, but leaves properties, classes, modules and questions alone."""
    wrong = []
    for path in _python_files():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                docstring = ast.get_docstring(node) or ""
                if _QUESTION.match(docstring):
                    line = getattr(node, "lineno", 1)
                    wrong.append(f"{path.relative_to(_ROOT)}:{line}: {docstring.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("tree", ["hpcrl", "docs", "recipes", "tests"])
def test_banned_words_only_shrink(tree: str) -> None:
    found = _found(tree)
    limits = LIMITS.get(tree, {})
    more = [
        f"{word!r} occurs {len(places)} times, {limits.get(word, 0)} are allowed:\n  " + "\n  ".join(places)
        for word, places in found.items()
        if len(places) > limits.get(word, 0)
    ]
    assert not more, "\n".join(more)


def test_quantise_has_one_spelling() -> None:
    """Names of others keep theirs: keys of models' configurations, and flags and classes of vLLM."""
    theirs = re.compile(
        r"quantization_config|quantize_config|(?<![\w-])quantization(?!\w)|\w*Unquantized[A-Z]\w*"
        r"|unquantized_fused_moe_method|\"dequantize\""
    )
    found = [
        f"{path.relative_to(_ROOT)}, line {number}: {line.strip()}"
        for path in [*_python_files(), *_pages()]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "quantiz" in theirs.sub("", line).lower()
    ]
    assert found == [], "it is quantise, quantised, quantisation here:\n" + "\n".join(found)
