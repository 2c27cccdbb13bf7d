"""Scores a model by lm-evaluation-harness, in a process that has it: ``harness_scorer.py REQUEST RESULT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Return the exact match of a task, and log-likelihoods of continuations of contexts, both as token ids."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model: Any = HFLM(pretrained=request["model"], device="cpu", dtype="float32", batch_size=4)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[request["task"]],
        task_manager=TaskManager(include_path=request["tasks"], include_defaults=False),
        apply_chat_template=True,
        system_instruction=request["system"],
        log_samples=True,
        bootstrap_iters=0,
    )
    pairs = [(("", ""), context, continuation) for context, continuation in request["pairs"]]
    scores = model._loglikelihood_tokens(pairs)
    samples = found["samples"][request["task"]]
    return {
        "matches": {sample["doc"]["question"]: sample["exact_match"] for sample in samples},
        "replies": {sample["doc"]["question"]: sample["resps"][0][0] for sample in samples},
        "mean": found["results"][request["task"]]["exact_match,hashes"],
        "loglikelihoods": [float(score) for score, _ in scores],
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
