"""The table of families in docs/training.md says what tests try, no less and no more."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import test_context_parallel
import test_eight_ranks
import test_families
import test_memory_tools
import test_meshes

from hpcrl.modeling.spec import SPECS
from hpcrl.models.arch import ModelArch, arch_from_config

TESTS = Path(__file__).parents[1]
DOCS = (TESTS.parent / "docs/training.md").read_text(encoding="utf-8")
HEAD = (
    "| family | logits and gradients of transformers | `ep` | `cp` | memory tools "
    "| checkpoint, hand-off, embedded engine | vLLM |"
)
#: what tests of vLLM start (tests/inference/vllm/test_vllm_families.py, and Qwen3-MoE in all others)
SERVED_BY_VLLM = {"deepseek_v3", "glm4_moe", "gpt_oss", "mistral", "qwen3", "qwen3_moe", "qwen3_next"}
#: which vLLM for processors refuses or cannot compute; docs/training.md has its words
NOT_ON_CPUS = {"glm_moe_dsa", "minimax_m2", "nemotron_h", "qwen3_5_text", "qwen3_5_moe_text"}
#: on which meshes each family is trained as on one rank: family, degrees, scheme
TRAINED = [
    *((family, degrees, "ulysses") for cases in test_meshes.MESHES.values() for family, degrees in cases),
    *((family, degrees, scheme) for family, degrees, scheme, _ in test_context_parallel.CASES),
    *test_eight_ranks.CASES,
]


def agreeing() -> set[str]:
    """Families of which a config is held to transformers by `model_agreement.assert_agreement`."""
    texts = [path.read_text(encoding="utf-8") for path in (TESTS / "modeling" / "families").glob("test_*.py")]
    held = [text for text in texts if "assert_agreement(" in text]
    return {kind for text in held for kind in re.findall(r'^    "model_type": "(\w+)"', text, re.MULTILINE)}


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
