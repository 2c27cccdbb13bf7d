"""Tries the chat format of a model before anything is submitted.

``python -m hpcrl.rollouts.rendering.trial < request.json`` prints one JSON document. The renderer of the model is made
as the orchestrator makes it, and a short conversation is rendered: an opening, and what follows a turn.
`hpcrl.jobplan.chat_trial` calls it with the interpreter of the orchestrator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.environments import CalculatorEnv, CustomEnv, DatasetEnv, ReasoningGymEnv
from hpcrl.config.recipe import Recipe
from hpcrl.errors import UsageError
from hpcrl.models import load_arch
from hpcrl.models.tokenizer import ChatTokenizer, Message
from hpcrl.rollouts.environments.base import Tool, ToolCall, tool_message
from hpcrl.rollouts.rendering.renderer import CUT_THINKING, Extension, Renderer

__all__ = ["check_chat"]

_FORMAT = "model.chat.format"
_QUESTION: Message = {"role": "user", "content": "What is 2 + 2?"}
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
_CALL = ToolCall("add", {"a": 2, "b": 2}, "call_0_0")
_OTHER_TEMPLATE = (
    "choose a model with a template for chat, or put one that can into chat_template.jinja of the model directory"
)


def check_chat(recipe: Recipe, model_dir: Path) -> dict[str, Any]:
    """Make the renderer of a model, and render what the environments of a recipe may say.

    Returns
    -------
    dict
        ``findings``: ``key``, ``what`` and ``hint`` of what no rollout could do. ``notes``: what some rollouts could
        not do, a sentence each.
    """
    trial = _Trial(recipe)
    chat = recipe.model.chat
    try:
        renderer = Renderer.of_model(
            model_dir, chat_format=chat.format, variables=chat.variables, thinking=chat.thinking
        )
        tokenizer = ChatTokenizer(model_dir)
    except UsageError as error:
        what, _, hint = str(error).partition("\n    hint: ")
        trial.find(_FORMAT, what.removeprefix(f"{_FORMAT} "), hint)
    except ValueError as error:
        trial.find("model.path", f"the tokenizer cannot be used: {error}", "copy or download it again, whole")
    else:
        rendered = trial.render(renderer)
        trial.compare(rendered, renderer.stop_token_ids, tokenizer, size=load_arch(model_dir).vocab_size)
    return {"findings": trial.findings, "notes": trial.notes}


class _Trial:
    """Collects what is wrong."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.findings: list[dict[str, str]] = []
        self.notes: list[str] = []

    def find(self, key: str, what: str, hint: str) -> None:
        self.findings.append({"key": key, "what": what, "hint": hint})

    def render(self, renderer: Renderer) -> list[int]:
        """Render an opening, and what follows a turn; returns all token ids."""
        environments = self._recipe.environments
        # what the recipe tells the template is the first thing that may be wrong with it
        key = "model.chat.variables" if self._recipe.model.chat.variables else "model.path"
        system = next((each.system for each in environments if isinstance(each, DatasetEnv | ReasoningGymEnv)), None)
        opening: list[Message] = [*([{"role": "system", "content": system}] if system else ()), _QUESTION]
        try:
            ids = renderer.opening(opening)
        except ValueError as error:
            self.find(key, f"no conversation can begin: {error}", _OTHER_TEMPLATE)
            return []
        for what, kind, attempt in _ATTEMPTS:
            names = [each.name for each in environments if isinstance(each, kind)]
            if not names:
                continue
            try:
                ids += attempt(renderer)
            except ValueError as error:
                if kind is CalculatorEnv:
                    self.find(key, f"{what}, as environment {names[0]!r} needs it: {error}", _OTHER_TEMPLATE)
                elif renderer.format is not None:
                    # code of one's own may do it; of a model without calls nobody expects it
                    self.notes.append(f"{what}; rollouts of environment {names[0]!r} fail where they need it: {error}")
        return ids

    def compare(self, rendered: Sequence[int], ends: Sequence[int], tokenizer: ChatTokenizer, *, size: int) -> None:
        """Compare tokens that are used with the ``size`` rows of the embedding, which may be more than all tokens."""
        above, model = tokenizer.tokens_from(size), f"the model has tokens 0 to {size - 1}"
        wrong = False
        for verb, token_ids in (("is written by the chat template", rendered), ("ends turns", ends)):
            if found := sorted({token for token in token_ids if token >= size}):
                wrong = True
                what = f"token {found[0]} ({above.get(found[0], '')!r}) {verb}, and {model}"
                self.find("model.path", what, "take tokenizer and weights of one model: download it again, whole")
        training, held_out = self._recipe.rollouts.sampling, self._recipe.evaluation.sampling
        for section, named in (("rollouts", training.stop_token_ids), ("evaluation", held_out.stop_token_ids or ())):
            if found := [token for token in named if token >= size]:
                self.find(f"{section}.sampling.stop_token_ids", f"{found[0]} is no token: {model}", "name others")
        if above and not wrong:
            first = next(iter(above))
            self.notes.append(
                f"the tokenizer has {len(above)} tokens more than the model, the first is {above[first]!r} ({first}): "
                "engines refuse prompts that have one"
            )


def _after(renderer: Renderer, message: Message) -> list[int]:
    return _said(renderer.extension([message], ended_by=renderer.stop_token_ids[0], thought=True))


def _said(extension: Extension | None) -> list[int]:
    if extension is None:
        raise ValueError(CUT_THINKING)
    return extension.token_ids


def _use_tool(renderer: Renderer) -> list[int]:
    result = tool_message(_CALL, "4")
    ended_by = renderer.stop_token_ids[0]
    followed = renderer.extension([result], ended_by=ended_by, calls=[_CALL], tools=[_TOOL], thought=True)
    return renderer.opening([_QUESTION], tools=[_TOOL]) + _said(followed)


_ATTEMPTS: tuple[tuple[str, type, Callable[[Renderer], list[int]]], ...] = (
    (
        "a tool's result cannot follow a reply without a call",
        CalculatorEnv,
        lambda renderer: _after(renderer, {"role": "tool", "content": "4"}),
    ),
    ("a user's message cannot follow a reply", CustomEnv, lambda renderer: _after(renderer, _QUESTION)),
    ("tools cannot be used", CustomEnv, _use_tool),
)
"""What cannot be done, the environments that do it or may, and how it is tried."""


def main() -> None:
    """Read a request from the standard input and print the answer."""
    request = msgspec.json.decode(sys.stdin.buffer.read())
    recipe = Recipe.model_validate_json(msgspec.json.encode(request["recipe"]))
    answer = check_chat(recipe, Path(request["model_dir"]))
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
