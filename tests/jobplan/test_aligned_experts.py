"""Rows of experts that products of grouped matrices do not take are refused before a run is queued."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.errors import ConfigError
from hpcrl.jobplan.model_rules import check_model_rules
from hpcrl.models import ModelFacts, load_facts
from hpcrl.models.layers import Moe


def narrow(width: int) -> ModelFacts:
    facts = load_facts("Qwen3-30B-A3B")
    layers = []
    for layer in facts.layers:
        assert isinstance(layer.mlp, Moe)
        layers.append(replace(layer, mlp=replace(layer.mlp, moe_intermediate_size=width)))
    return replace(facts, layers=tuple(layers))


@pytest.mark.parametrize(("width", "dtype"), [(764, "bfloat16"), (766, "float32"), (4, "bfloat16")])
def test_rows_of_experts_are_whole_multiples_of_16_bytes(width: int, dtype: str) -> None:
    recipe = load_recipe("qwen3_30b_a3b", (f"trainer.dtype={dtype}",))
    with pytest.raises(ConfigError) as caught:
        check_model_rules(recipe, load_cluster("h200-28"), narrow(width))
    found = [each for each in caught.value.findings if each.key == "trainer.dtype"]
    assert len(found) == 1
    assert f"is {width}, and {dtype} needs a multiple of {16 // {'bfloat16': 2, 'float32': 4}[dtype]}" in found[0].what


@pytest.mark.parametrize(("width", "dtype"), [(768, "bfloat16"), (8, "bfloat16"), (764, "float32")])
def test_rows_that_fit_are_no_finding(width: int, dtype: str) -> None:
    recipe = load_recipe("qwen3_30b_a3b", (f"trainer.dtype={dtype}",))
    try:
        check_model_rules(recipe, load_cluster("h200-28"), narrow(width))
    except ConfigError as error:
        assert not [each for each in error.findings if "rows of experts" in each.what]  # noqa: PT017
