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

from hpcrl.config.environments import (
    CalculatorEnv,
    CustomEnv,
    EnvironmentConfig,
    HarnessEnv,
    ReasoningGymEnv,
    SweEnv,
    TaskFileEnv,
    VerifiersEnv,
)
from hpcrl.config.recipe import Recipe
from hpcrl.errors import UsageError
from hpcrl.models import load_arch
from hpcrl.models.tokenizer import ChatTokenizer, Message
from hpcrl.rollouts.environments.base import Tool, ToolCall, tool_message
from hpcrl.rollouts.rendering.parsing import Parsed
from hpcrl.rollouts.rendering.renderer import Renderer

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
    """Make the renderer of a model, and render the kinds of messages that the environments of a recipe use.

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
    """Collects problems."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.findings: list[dict[str, str]] = []
        self.notes: list[str] = []

    def find(self, key: str, what: str, hint: str) -> None:
        self.findings.append({"key": key, "what": what, "hint": hint})

    def render(self, renderer: Renderer) -> list[int]:
        """Render an opening, and an extension after a turn; return all token ids."""
        environments = self._recipe.environments
        # the recipe's template settings are checked first
        key = "model.chat.variables" if self._recipe.model.chat.variables else "model.path"
        system = next((each.system for each in environments if isinstance(each, TaskFileEnv | ReasoningGymEnv)), None)
        opening: list[Message] = [*([{"role": "system", "content": system}] if system else ()), _QUESTION]
        try:
            ids = renderer.opening(opening)
        except ValueError as error:
            self.find(key, f"no conversation can begin: {error}", _OTHER_TEMPLATE)
            return []
        calling = [each.name for each in environments if _calls_tools(each)]
        if calling and renderer.format is None:
            what = f"no format of tool calls is known of this model, and environment {calling[0]!r} needs calls"
            self.find(_FORMAT, what, "choose a model of a known format, or name its format")
            return ids
        for what, uses, needed, attempt in _ATTEMPTS:
            names = [each.name for each in environments if uses(each)]
            if not names:
                continue
            try:
                ids += attempt(renderer)
            except ValueError as error:
                if needed:
                    self.find(key, f"{what}, as environment {names[0]!r} needs it: {error}", _OTHER_TEMPLATE)
                elif renderer.format is not None:
                    # custom environments may use calls; a model without calls cannot
                    self.notes.append(f"{what}; rollouts of environment {names[0]!r} fail where they need it: {error}")
        self._say_where_it_branches(renderer)
        return ids

    def _say_where_it_branches(self, renderer: Renderer) -> None:
        names = [
            each.name for each in self._recipe.environments if isinstance(each, CustomEnv | HarnessEnv | VerifiersEnv)
        ]
        if not names or renderer.format is None or not renderer.cuts_thinking:
            return
        try:
            followed = renderer.extension([_QUESTION], ended_by=renderer.stop_token_ids[0], thought=True)
        except ValueError:
            return  # this problem is reported already
        if followed is None:
            self.notes.append(
                "the chat template leaves earlier thinking out at a message of the user, and model.chat.thinking is "
                f"cut: rollouts of environment {names[0]!r} branch at each, and may have "
                f"{self._recipe.rollouts.max_branches} sequences (rollouts.max_branches)"
            )

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
                self.find(f"{section}.sampling.stop_token_ids", f"{found[0]} is not a token: {model}", "name others")
        if above and not wrong:
            first = next(iter(above))
            self.notes.append(
                f"the tokenizer has {len(above)} tokens more than the model, the first is {above[first]!r} ({first}): "
                "engines refuse prompts that have one"
            )


def _after(
    renderer: Renderer, message: Message, tools: Sequence[Tool] = (), calls: Sequence[ToolCall] = ()
) -> list[int]:
    """Render what follows a turn with thinking: behind it, or the whole conversation where it branches there."""
    ended_by = renderer.stop_token_ids[0]
    followed = renderer.extension([message], ended_by=ended_by, calls=calls, tools=tools, thought=True)
    if followed is not None:
        return followed.token_ids
    turn = renderer.message_of(Parsed("" if calls else "4", "2 + 2", tuple(calls)))
    return renderer.whole([_QUESTION, turn, message], tools=tools).token_ids


def _use_tool(renderer: Renderer) -> list[int]:
    return renderer.opening([_QUESTION], tools=[_TOOL]) + _after(renderer, tool_message(_CALL, "4"), [_TOOL], [_CALL])


def _calls_tools(config: EnvironmentConfig) -> bool:
    return isinstance(config, SweEnv) or (isinstance(config, TaskFileEnv) and config.columns.tools is not None)


_ATTEMPTS: tuple[tuple[str, Callable[[EnvironmentConfig], bool], bool, Callable[[Renderer], list[int]]], ...] = (
    (
        "a tool's result cannot follow a reply without a call",
        lambda config: isinstance(config, CalculatorEnv),
        True,
        lambda renderer: _after(renderer, {"role": "tool", "content": "4"}),
    ),
    (
        "a user's message cannot follow a reply",
        lambda config: isinstance(config, CustomEnv),
        False,
        lambda renderer: _after(renderer, _QUESTION),
    ),
    ("tools cannot be used", lambda config: isinstance(config, CustomEnv), False, _use_tool),
    ("tools cannot be used", _calls_tools, True, _use_tool),
)
"""Unsupported feature, the environments that use it, whether they do or may, and the attempt to use it."""


def main() -> None:
    """Read a request from the standard input and print the answer."""
    request = msgspec.json.decode(sys.stdin.buffer.read())
    recipe = Recipe.model_validate_json(msgspec.json.encode(request["recipe"]))
    answer = check_chat(recipe, Path(request["model_dir"]))
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
