"""Memory of the head: logits of all trained tokens, or of a piece of them (`hpcrl.trainer.step.head`)."""

from __future__ import annotations

from hpcrl.models.facts import ModelFacts
from hpcrl.planning.ledger import Term
from hpcrl.planning.memory.settings import HEAD_PIECE_BYTES, LOGIT_PIECE_BYTES, TrainerMemory


def logits_term(facts: ModelFacts, m: TrainerMemory) -> Term:
    """Return the term of logits, their working memory, and the gradients of head and hidden states, in bytes."""
    d, v = facts.hidden_size, facts.vocab_size
    n, b, rows = m.logit_tokens, m.element_bytes, m.head_rows
    rounded = 0 if b == 4 else b
    columns = min(v, HEAD_PIECE_BYTES // (4 * rows))
    inputs: dict[str, float | str] = {"n": n, "V": v, "D": d, "b": b, "rows": rows, "columns": columns}
    if m.lm_head_chunk_tokens is not None and m.loss_of_rollouts:
        # of a piece the gradient of its logits, rounded too, and what it adds to those of head and hidden states;
        # in addition these two
        value = (4 + rounded) * rows * columns + 4 * (2 * columns + n + rows) * d + b * v * d
        return Term("logits", value, "(4 + b) rows · columns + 4 (2 columns + n + rows) D + b V D", inputs)
    # a piece of them, and in bfloat16 a copy of it in float32
    piece = min(4 * rows * v, LOGIT_PIECE_BYTES[m.device]) * (1 if b == 4 else 2)
    inputs["piece"] = piece
    if m.lm_head_chunk_tokens is not None:
        # sums over pieces are in float32, and rounded when no logits are left
        added = rounded * columns * d
        logits = b * rows * v + max(piece, added)
        value = b * n * d + 4 * v * d + max(logits, rounded * v * d)
        formula = "b n D + 4 V D + max(b rows V + max(piece, b columns · D), b V D)"
        return Term("logits", value, formula, inputs)
    # whose memory their gradient takes (`hpcrl.trainer.batch.tensors.token_logprobs`)
    value = b * n * v + max(piece, b * (v + n) * d)
    return Term("logits", value, "b n V + max(piece, b (V + n) D)", inputs)
