"""Reads the data of a supervised run before anything is submitted. No torch in here.

``python -m hpcrl.trainer.supervised.trial check < request.json`` prints one JSON document: all rows are read, and the
first ones and some of the others rendered. `hpcrl.jobplan.conversation_trial` calls it with the trainer's interpreter.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding, HpcrlError, UsageError
from hpcrl.trainer.supervised.masks import make_conversation_renderer
from hpcrl.trainer.supervised.order import ConversationOrder, run_steps, steps_of_epoch
from hpcrl.trainer.supervised.rendered import RenderCounts, fit_length, render_row
from hpcrl.trainer.supervised.rows import SECTION, ConversationReader

_FIRST, _EVERY = 2000, 50
"""Number of first rows that are rendered, and stride among the others."""


def check_examples(recipe: Recipe) -> dict[str, Any]:
    """Read all conversations of a recipe and render some.

    Returns
    -------
    dict
        ``findings``: ``key``, ``what`` and ``hint`` of what is wrong. ``notes``: what the user should know. ``steps``:
        of the run.
    """
    try:
        return {"findings": [], **_look(recipe)}
    except ConfigError as error:
        found = list(error.findings)
    except UsageError as error:
        what, _, hint = str(error).partition("\n    hint: ")
        found = [Finding("recipe", SECTION, what, hint)]
    except (HpcrlError, ValueError, OSError) as error:
        found = [Finding("recipe", "model.path", str(error), "the chat template and the tokenizer are read from it")]
    return {"findings": [{"key": each.key, "what": each.what, "hint": each.hint} for each in found]}


def _look(recipe: Recipe) -> dict[str, Any]:
    config = recipe.sft
    assert config is not None
    renderer = make_conversation_renderer(
        Path(recipe.model.path), recipe.model.chat, train_on=config.train_on, thinking=config.thinking
    )
    reader, counts, rendered, kept_rows = ConversationReader(config), RenderCounts(), 0, 0
    for number, row in enumerate(reader.read()):
        if number >= _FIRST and number % _EVERY:
            continue
        rendered += 1
        sequences = render_row(renderer, row)
        kept = fit_length(sequences, config)
        kept_rows += bool(kept) and not row.held_out
        counts.add(sequences, kept)
    total = reader.train + reader.held_out
    if not counts.trained:
        what = f"none of {rendered} conversations has at most {config.max_len} tokens; the longest has {counts.longest}"
        raise ConfigError([Finding("recipe", f"{SECTION}.max_len", what, "raise it, or set over_long: truncate")])
    if rendered == total:
        # refuses an epoch with more steps than conversations are left
        ConversationOrder(kept_rows, reader.train, config, seed=recipe.seed)
    steps = run_steps(recipe.trainer.steps, reader.train, config)
    epoch = steps_of_epoch(reader.train, config)
    if recipe.trainer.optimizer.warmup_steps >= steps:
        what = f"{recipe.trainer.optimizer.warmup_steps} warm-up steps in a run of {steps} (sft.epochs)"
        hint = "lower it, or raise sft.epochs or trainer.steps"
        raise ConfigError([Finding("recipe", "trainer.optimizer.warmup_steps", what, hint)])
    seen = "" if rendered == total else f" (of {rendered:,} that were rendered)"
    notes = [
        f"{reader.train:,} conversations for training, {reader.held_out:,} held out; {steps:,} steps, "
        f"{epoch:,} an epoch ({steps / epoch:.3g} epochs)",
        f"{counts.tokens:,} tokens{seen}, {counts.trained:,} of them trained; the longest sequence has "
        f"{counts.longest:,}",
        *reader.notes(),
    ]
    if counts.dropped or counts.truncated:
        what = f"{counts.dropped:,} are dropped and {counts.truncated:,} truncated"
        notes.append(f"conversations longer than sft.max_len ({config.max_len}){seen}: {what}")
    return {"notes": notes, "steps": steps}


def main() -> None:
    """Read a request from the standard input and print the answer."""
    request = msgspec.json.decode(sys.stdin.buffer.read())
    recipe = Recipe.model_validate_json(msgspec.json.encode(request["recipe"]))
    sys.stdout.buffer.write(msgspec.json.encode(check_examples(recipe)) + b"\n")


if __name__ == "__main__":
    # the waiting parent command reports a Ctrl-C
    with suppress(KeyboardInterrupt):
        main()
