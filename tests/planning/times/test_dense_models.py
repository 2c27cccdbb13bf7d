"""Dense models need no tensor parallelism in the trainer: the table of docs/training.md is what the planner says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.models import load_facts
from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.planning.hardware import node_hardware
from hpcrl.planning.ledger import GIB
from hpcrl.planning.lengths import Quantiles
from hpcrl.planning.memory.fit import memory_report
from hpcrl.planning.times.rates import Rates
from hpcrl.planning.times.shapes import TrainerShape
from hpcrl.planning.times.trainer import TrainerBatch, trainer_step

DOCS = Path(__file__).parents[3] / "docs/training.md"
CLUSTER = load_cluster("h200-28").value
GPUS = 8


class Case(NamedTuple):
    """A trainer: ``nodes`` of 8 GPUs, context parallelism, and tokens that a context-parallel group has at once."""

    model: str
    nodes: int
    cp: int
    tokens: int
    offload: bool = False


CASES = (
    Case("Qwen2.5-7B", 1, 1, 32_768),
    Case("Qwen2.5-32B", 1, 4, 65_536),
    Case("Llama-3.1-70B-Instruct", 1, 8, 131_072, offload=True),
    Case("Llama-3.1-70B-Instruct", 2, 8, 131_072),
    Case("Llama-3.1-70B-Instruct", 4, 8, 131_072),
    Case("Llama-3.3-70B-Instruct", 8, 8, 131_072),
    Case("Llama-3.3-70B-Instruct", 16, 8, 131_072),
    Case("Llama-3.3-70B-Instruct", 28, 8, 131_072),
)


def gpu_gib(case: Case) -> float:
    """Peak of a trainer's GPU, which has to fit."""
    recipe: dict[str, Any] = {
        "name": "dense",
        "model": {"path": case.model},
        "environments": [{"name": "reverse", "kind": "words", "task": "reverse"}],
        "trainer": {
            "steps": 1,
            "nodes": case.nodes,
            "ranks": GPUS * case.nodes,
            "micro_batch_tokens": case.tokens,
            "dtype": "bfloat16",
            "parallelism": {"cp": case.cp},
            "memory": {
                "activation_checkpointing": "full",
                "lm_head_chunk_tokens": 1024,
                "optimizer_offload": case.offload,
            },
        },
    }
    report = memory_report(Recipe.model_validate(recipe), CLUSTER, load_facts(case.model))
    place = report.place(Role.TRAINER, "gpu")
    assert place.headroom is not None
    assert place.headroom > 0, case
    return place.needed / GIB


def traffic(case: Case) -> tuple[float, float]:
    """Seconds of FSDP's collectives over those of matrix products, and seconds of them that nothing hides."""
    assert isinstance(CLUSTER, SlurmCluster)
    shape = TrainerShape(
        nodes=case.nodes,
        gpus_per_node=GPUS,
        context_parallel=case.cp,
        recompute="full",
        micro_batch_tokens=case.tokens,
    )
    batch = TrainerBatch(256, Quantiles((float(case.tokens // 2),)))
    table = trainer_step(
        load_facts(case.model), shape, batch, Rates(node_hardware(CLUSTER, Role.TRAINER), load_calibration())
    )
    gather, reduce, products, exposed = (
        table[name].value for name in ("fsdp.gather", "fsdp.reduce_scatter", "compute.linear", "fsdp.exposed")
    )
    assert gather is not None
    assert reduce is not None
    assert products is not None
    assert exposed is not None
    return (gather + reduce) / products, exposed


def row(case: Case) -> str:
    share, _ = traffic(case)
    offload = ", `optimizer_offload`" if case.offload else ""
    cells = (
        case.model,
        f"{case.nodes}{offload}",
        str(case.cp),
        f"{case.tokens // case.cp:,}",
        f"{gpu_gib(case):.0f} of 140 GiB",
        f"{share:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def test_the_table_is_what_the_planner_computes() -> None:
    wanted = "\n".join(row(case) for case in CASES)
    assert f"\n{wanted}\n\n" in DOCS.read_text(encoding="utf-8"), f"docs/training.md must say:\n{wanted}"


@pytest.mark.parametrize("case", CASES)
def test_products_hide_what_fsdp_sends(case: Case) -> None:
    assert traffic(case)[1] == 0


def test_what_fsdp_sends_takes_as_large_a_part_of_a_larger_model() -> None:
    """Bytes and products are both in proportion to the parameters: the tokens of a rank alone count."""
    shares = [traffic(Case(name, 4, 8, 131_072))[0] for name in ("Qwen2.5-32B", "Llama-3.1-70B-Instruct")]
    assert shares[0] == pytest.approx(shares[1], rel=0.1)
    assert traffic(Case("Llama-3.1-70B-Instruct", 4, 8, 8_192))[1] > 0
