"""The tables of families in docs/training.md and docs/models.md say what tests try, no less and no more."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import family_tables
import pytest
import test_context_parallel
import test_eight_ranks
import test_families
import test_memory_tools
import test_meshes
from family_tables import NOT_ON_CPUS, SERVED_BY_VLLM, agreeing, model_table, parameters_of, with_table

from hpcrl.modeling.spec import SPECS
from hpcrl.models.arch import ModelArch, arch_from_config

TESTS = Path(__file__).parents[1]
DOCS = (TESTS.parent / "docs/training.md").read_text(encoding="utf-8")
HEAD = (
    "| family | logits and gradients of transformers | `ep` | `cp` | memory tools "
    "| checkpoint, hand-off, embedded engine | vLLM |"
)
#: on which meshes each family is trained as on one rank: family, degrees, scheme
TRAINED = [
    *((family, degrees, "ulysses") for cases in test_meshes.MESHES.values() for family, degrees in cases),
    *((family, degrees, scheme) for family, degrees, scheme, _ in test_context_parallel.CASES),
    *test_eight_ranks.CASES,
]


def degrees_of(family: str, dimension: str) -> str:
    """Which sizes of a dimension are tried, and with which schemes those of context parallelism."""
    found: dict[str, set[int]] = {}
    for kind, degrees, scheme in TRAINED:
        if kind == family and degrees.get(dimension, 1) > 1:
            found.setdefault(scheme if dimension == "cp" else "ulysses", set()).add(degrees[dimension])
    return "; ".join(
        f"{'' if scheme == 'ulysses' else scheme + ' '}{', '.join(map(str, sorted(sizes)))}"
        for scheme, sizes in sorted(found.items(), reverse=True)
    )


def said(family: str, tried: Iterable[str]) -> str:
    return "yes" if family in tried else "not tried"


def row(arch: type[ModelArch]) -> str:
    family = arch.MODEL_TYPES[0]
    small = arch_from_config(
        {"model_type": family, "vocab_size": 8, **test_families.FAMILIES[family], "pad_token_id": None}
    )
    experts = degrees_of(family, "ep") or ("not tried" if small.routed_experts else "no experts")
    context = degrees_of(family, "cp") or ("not tried" if small.state is None else "refused")
    columns = (
        ", ".join(f"`{kind}`" for kind in arch.MODEL_TYPES),
        said(family, agreeing()),
        experts,
        context,
        said(family, test_memory_tools.FAMILIES),
        said(family, test_families.FAMILIES),
        "not on CPUs" if family in NOT_ON_CPUS else said(family, SERVED_BY_VLLM),
    )
    return f"| {' | '.join(columns)} |"


def test_the_table_is_what_tests_try() -> None:
    rule = "| " + " | ".join(["---"] * (HEAD.count("|") - 1)) + " |"
    wanted = "\n".join([HEAD, rule, *(row(spec.arch) for spec in SPECS)])
    assert f"\n\n{wanted}\n\n" in DOCS, f"docs/training.md must say:\n{wanted}"


def test_the_table_of_models_is_what_tests_try() -> None:
    page = (TESTS.parent / "docs/models.md").read_text(encoding="utf-8")
    assert with_table(page) == page, "docs/models.md is out of date: python tools/draw_families.py"


def test_a_family_without_its_case_has_no_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def cells(family: str) -> list[str]:
        (line,) = (line for line in model_table().splitlines() if line.startswith(f"| `{family}`"))
        return line.split(" | ")

    assert cells("mistral")[3:8] == ["yes"] * 5
    way = test_families.test_a_family_goes_all_the_way
    (mark,) = way.pytestmark
    left = [family for family in test_families.FAMILIES if family != "mistral"]
    monkeypatch.setattr(way, "pytestmark", [pytest.mark.parametrize("family", left).mark])
    assert (cells("mistral")[7], cells("llama")[7]) == ("no", "yes")
    monkeypatch.setattr(way, "pytestmark", [mark])
    monkeypatch.setattr(family_tables, "agreeing", lambda: {"llama"})
    assert (cells("mistral")[3], cells("llama")[3]) == ("no", "yes")


def test_a_test_that_is_not_parametrised_has_no_cases() -> None:
    with pytest.raises(AssertionError, match="is not parametrised by family"):
        parameters_of(test_the_table_is_what_tests_try)
