"""Memory of the optimizer of a trainer rank on the device."""

from __future__ import annotations

from hpcrl.models.facts import ModelFacts
from hpcrl.planning.ledger import Term
from hpcrl.planning.memory.settings import TrainerMemory
from hpcrl.planning.muon import BATCH_BYTES, ITERATION_COPIES, moments_formula, muon_matrices, spared_bytes


def moments_term(facts: ModelFacts, memory: TrainerMemory, trained: int) -> Term:
    """Return the moments of ``trained`` parameters on a rank."""
    spared = spared_bytes(facts, muon=memory.muon)
    inputs: dict[str, float | str] = {"P": trained, "N": memory.shards}
    formula = moments_formula("8 P", spared, inputs)
    return Term("optimizer state", (8 * trained - spared) // memory.shards, formula, inputs)


def staging_term(facts: ModelFacts, memory: TrainerMemory, trained: int, buckets: int) -> Term:
    """Return the buckets in which AdamW's moments come from the host; Muon's momentum comes a matrix at a time."""
    of_adamw = 8 * trained - 2 * spared_bytes(facts, muon=memory.muon)
    value = min(buckets * memory.optimizer_bucket_bytes, of_adamw // memory.shards)
    inputs = {"buckets": buckets, "bucket": memory.optimizer_bucket_bytes}
    return Term("optimizer staging", value, "buckets · bucket", inputs)


def muon_batch_term(facts: ModelFacts, memory: TrainerMemory) -> Term | None:
    """Return the matrices that a rank makes orthogonal at once; None without Muon."""
    if not memory.muon:
        return None
    found = muon_matrices(facts)
    largest = 2 * found.largest
    batch = min(max(BATCH_BYTES, largest), max(largest, 2 * found.parameters // memory.shards))
    inputs: dict[str, float | str] = {"batch": batch, "largest matrix": largest}
    return Term("matrices of Muon", ITERATION_COPIES * batch, f"{ITERATION_COPIES} · batch", inputs)
