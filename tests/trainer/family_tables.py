"""Tables of families for docs/, of registries of the code and of what tests are parametrised by.

A family whose case is taken out of a test has "no" in the table, and the table in docs/ is out of date then
(`test_family_table`). ``python tools/draw_families.py`` writes it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "rollouts" / "rendering")]

import family_lab  # noqa: E402 - it lies in another room
import test_adapters_trained  # noqa: E402
import test_families  # noqa: E402
import test_fp8_training  # noqa: E402

from hpcrl.models.arch import ARCHS, ModelArch  # noqa: E402
from hpcrl.models.families import FAMILIES  # noqa: E402
from hpcrl.models.known import known_models, load_facts  # noqa: E402
from hpcrl.rollouts.rendering.formats import formats_of_type  # noqa: E402

BEGIN, END = "<!-- families: python tools/draw_families.py -->", "<!-- end of families -->"
HEAD = (
    *("family", "models", "chat formats", "gradients of transformers", "FP8", "LoRA", "PEFT reads it"),
    *("export", "embedded engine", "vLLM"),
)
#: which versions a real vLLM has loaded and computed (tests/inference/vllm, which few machines run)
SERVED_BY_VLLM = {"deepseek_v3", "glm4_moe", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next"}
#: which vLLM for processors refuses or cannot compute; docs/training.md has its words
NOT_ON_CPUS = {"glm_moe_dsa", "minimax_m2", "nemotron_h", "qwen3_5_text", "qwen3_5_moe_text"}
#: what all other tests of vLLM start
_IN_ALL_OTHERS = {"qwen3_moe"}


def agreeing() -> set[str]:
    """Families of which a config is held to transformers by `model_agreement.assert_agreement`."""
    found = set()
    for path in (TESTS / "modeling" / "families").glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "assert_agreement(" in text:
            found |= set(_strings_at(ast.parse(text), "model_type"))
    return found


def _strings_at(tree: ast.AST, key: str) -> Iterator[str]:
    """Texts that stand at a key of any dict that is written out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for name, value in zip(node.keys, node.values, strict=True):
                if isinstance(name, ast.Constant) and name.value == key and isinstance(value, ast.Constant):
                    yield str(value.value)


def cases_of_vllm() -> set[str]:
    """Families that tests of vLLM have a case of; their module needs what only its own room has."""
    path = TESTS / "inference" / "vllm" / "test_vllm_families.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "FAMILIES":
            assert isinstance(node.value, ast.Dict)
            return {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)} | _IN_ALL_OTHERS
    raise AssertionError(f"{path} has no FAMILIES")


def parameters_of(test: object, name: str = "family") -> set[str]:
    """Values of a parameter that a test is called with."""
    for mark in getattr(test, "pytestmark", ()):
        names = mark.args[0] if mark.name == "parametrize" else ()
        names = names.split(",") if isinstance(names, str) else names
        if name in names:
            at = list(names).index(name)
            return {each if len(names) == 1 else each[at] for each in mark.args[1]}
    raise AssertionError(f"{test} is not parametrised by {name}")


def _said(family: str, tried: Iterable[str]) -> str:
    return "yes" if family in tried else "no"


def _models(kinds: Iterable[str]) -> str:
    """Models whose ``config.json`` is shipped, that of each size left to `hpcrl model check`."""
    facts = {name: load_facts(name).model_type for name in known_models()}
    return ", ".join(name for name in known_models() if facts[name] in kinds) or "none shipped"


def _formats(kinds: Iterable[str]) -> str:
    """Chat formats of a family; those that are held to no published template say so."""
    proved = {family.chat_format for family in family_lab.FAMILIES.values()}
    names = dict.fromkeys(name for kind in kinds for name in formats_of_type(kind))
    return ", ".join(f"`{name}`" + ("" if name in proved else " (no template)") for name in names) or "text alone"


def _vllm(family: str) -> str:
    if family in NOT_ON_CPUS:
        return "not on CPUs"
    if family not in cases_of_vllm():
        return "no"
    return "on CPUs" if family in SERVED_BY_VLLM else "not run yet"


def trained_row(arch: type[ModelArch]) -> tuple[str, ...]:
    """Return the cells of a family that trainer and embedded engine have."""
    family = arch.MODEL_TYPES[0]
    all_the_way = parameters_of(test_families.test_a_family_goes_all_the_way)
    return (
        ", ".join(f"`{kind}`" for kind in arch.MODEL_TYPES),
        _models(arch.MODEL_TYPES),
        _formats(arch.MODEL_TYPES),
        _said(family, agreeing()),
        _said(family, parameters_of(test_fp8_training.test_near_what_float32_computes)),
        _said(family, parameters_of(test_adapters_trained.test_each_family_is_the_model_with_the_products_added)),
        _said(family, parameters_of(test_adapters_trained.test_peft_reads_a_version_as_it_is)),
        _said(family, all_the_way),
        _said(family, all_the_way),
        _vllm(family),
    )


def model_table() -> str:
    """Return the table of docs/models.md."""
    trained = {kind for arch in ARCHS for kind in arch.MODEL_TYPES}
    rows = [trained_row(arch) for arch in sorted(ARCHS, key=lambda arch: arch.MODEL_TYPES[0])]
    for kind in sorted(FAMILIES.keys() - trained):
        rows.append((f"`{kind}`", _models([kind]), _formats([kind]), "planned alone", *["no"] * (len(HEAD) - 4)))
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def with_table(page: str) -> str:
    """Return a page of docs/ with the table between its marks."""
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert mark, f"the page has no {BEGIN}"
    assert end, f"the page has no {END}"
    return f"{before}{BEGIN}\n\n{model_table()}\n\n{END}{after}"
