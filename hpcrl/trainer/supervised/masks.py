"""Token ids of conversations for supervised training, and which of them are the assistant's. No torch in here.

Each turn of the assistant is rendered by the chat template as the end of a conversation, after what the template
writes before a reply. So its context has the tokens that the model gets when it replies, and its tokens are those
that it has to produce. If the rendering of one turn continues that of the turn before, both are one sequence. A
template that rewrites earlier turns, for example one that leaves out earlier thinking, makes more sequences of a
conversation; each turn is trained in one of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpcrl.config.chat import ChatConfig
from hpcrl.models.chat_template import ChatTemplateError
from hpcrl.models.generation_config import GenerationConfig
from hpcrl.models.tokenizer import ChatTokenizer, Message, Rendered
from hpcrl.rollouts.rendering.formats import find_format, same_ends

TrainOn = Literal["assistant", "last", "all"]
"""See ``sft.train_on``."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_LEADING_THINKING = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
_PROOFS = 16
"""Renderings that must have equal ids in parts and as a whole before renderings are only encoded in parts."""
_NO_END = -1
"""An id that no token has."""


class SaidTokens(NamedTuple):
    """One sequence.

    Attributes
    ----------
    ids:
        Token ids.
    said:
        Whether each token is trained; the first one never is.
    """

    ids: list[int]
    said: list[bool]


@dataclass
class ConversationRenderer:
    """Renders conversations with one model.

    Attributes
    ----------
    tokenizer:
        Tokenizer of the model, with its chat template.
    ends:
        Further tokens that end a turn, in addition to the ``eos_token``.
    variables:
        Variables of the chat template, for example ``enable_thinking``.
    train_on, thinking:
        See ``sft`` in recipes.
    now:
        The time that templates tell.
    """

    tokenizer: ChatTokenizer
    ends: frozenset[int] = frozenset()
    variables: Mapping[str, Any] = field(default_factory=dict)
    train_on: TrainOn = "assistant"
    thinking: Literal["keep", "drop"] = "keep"
    now: datetime = field(default_factory=datetime.now)

    def __post_init__(self) -> None:
        self.ends |= {self.tokenizer.eos_token_id}
        self._closing: dict[str, int] = {}
        self._agreed: float = 0

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[SaidTokens]:
        """Return the sequences of a conversation, in the order of its turns.

        Parameters
        ----------
        tools:
            Tools that the template gets.

        Raises
        ------
        ChatTemplateError
            The template refuses the conversation.
        ValueError
            No message is the assistant's, or the template does not write a reply behind what it writes before one.
        """
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("no message has the role assistant")
        if self.thinking == "drop":
            messages = [_without_thinking(message) for message in messages]
        try:
            return self._render_all(_with_argument_objects(messages), tools)
        except ChatTemplateError:
            # some templates require the arguments of calls as text
            return self._render_all(messages, tools)

    def _render_all(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[SaidTokens]:
        if self.train_on == "all":
            everything = self._ids(messages, tools, prompt=False)
            return [SaidTokens(everything, [number > 0 for number in range(len(everything))])]
        sequences: list[SaidTokens] = []
        ids: list[int] = []
        said: list[bool] = []
        turn: list[int] = []
        text = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opening = self._rendered(messages[:number], tools, prompt=True)
            before = self._continued(ids, text, opening)
            if before is None:
                sequences.append(SaidTokens(ids, said))
                ids, said, text, before = [], [], "", self.tokenizer.encode_rendered(opening)
            rendered = self._rendered(messages[: number + 1], tools, prompt=False)
            turn = self._turn(before, opening, rendered, self._continued(ids, text, rendered))
            turn, text = self._ended(turn, rendered, message, messages[number + 1 : number + 2])
            said = said + [False] * (len(before) - len(said)) + [_is_trained(message)] * len(turn)
            ids = before + turn
        sequences.append(SaidTokens(ids, said))
        if self.train_on == "last":
            end = len(ids) - len(turn)
            sequences = [SaidTokens(ids, [number >= end and said[number] for number in range(len(ids))])]
        for sequence in sequences:
            sequence.said[0] = False  # there is no earlier token whose logits could predict it
        return sequences

    def _continued(self, ids: list[int], text: str, rendered: Rendered) -> list[int] | None:
        """Return the ids of a rendering that continues ``ids``, which are those of ``text``; None where it does not.

        Encoding everything again with each turn would take a time that grows with the square of the turns. What follows
        an end marker is encoded by itself, once that has proved to be the same with this tokenizer and template.
        """
        if not rendered.text.startswith(text):
            return None
        rest = self.tokenizer.encode_rendered(rendered[len(text) :])
        if not ids or self._agreed >= _PROOFS:
            return ids + rest
        whole = self.tokenizer.encode_rendered(rendered)
        if whole == ids + rest:
            self._agreed += 1
            return whole
        self._agreed = -math.inf
        if whole[: len(ids)] == ids:
            return whole
        # a token spans a boundary of turns; flags of earlier tokens stay as they were
        return ids + rest if self._text(ids + rest) == self._text(whole) else None

    def _turn(self, before: list[int], opening: Rendered, rendered: Rendered, whole: list[int] | None) -> list[int]:
        """Return the ids that follow ``before``, those of ``opening``, in a rendering of the ids ``whole``."""
        if whole is not None and whole[: len(before)] == before:
            return whole[len(before) :]
        # a token may reach from the prompt into the reply; the model begins behind whole tokens
        turn = self.tokenizer.encode_rendered(rendered[len(opening.text) :])
        extends = rendered.text.startswith(opening.text)
        if whole is None or not extends or self._text(before + turn) != self._text(whole):
            raise ValueError(
                "the chat template does not render a reply as an extension of its generation prompt, which ends "
                f"with {opening.text[-40:]!r}; variables of the template may change that (model.chat.variables)"
            )
        return turn

    def _ended(
        self, turn: list[int], rendered: Rendered, message: Message, following: Sequence[Message]
    ) -> tuple[list[int], str]:
        """Return a turn up to and with its end marker, and the text of the conversation up to there."""
        ends = [place for place, token in enumerate(turn) if token in self.ends]
        if not ends:
            closing = self._closing_token(message, following)
            return [*turn, closing], rendered.text + self._text([closing])
        # templates may add a line break behind the end marker; the model never says it
        return turn[: ends[-1] + 1], rendered.text.removesuffix(self._text(turn[ends[-1] + 1 :]))

    def _closing_token(self, message: Message, following: Sequence[Message]) -> int:
        """Return the end marker of a turn that has none of its own: the beginning of the next message (GLM)."""
        calls = bool(message.get("tool_calls"))
        role = following[0]["role"] if following else "tool" if calls else "user"
        key = f"{role} {calls}"
        if key not in self._closing:
            turn = {"role": "assistant", "content": "x", **({"tool_calls": message["tool_calls"]} if calls else {})}
            rest = following[:1] or [{"role": role, "content": ""}]
            asked: Message = {"role": "user", "content": "x"}
            short, long = (self._ids(chat, (), prompt=False) for chat in ([asked, turn], [asked, turn, *rest]))
            found = long[len(short)] if long[: len(short)] == short and len(long) > len(short) else _NO_END
            if found not in self.ends:
                raise ValueError(
                    "the chat template does not end replies with a token that ends turns; supervised training needs one"
                )
            self._closing[key] = found
        return self._closing[key]

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, prompt: bool) -> Rendered:
        return self.tokenizer.render_marked(
            messages, add_generation_prompt=prompt, tools=list(tools) or None, now=self.now, **self.variables
        )

    def _ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, prompt: bool) -> list[int]:
        return self.tokenizer.encode_rendered(self._rendered(messages, tools, prompt=prompt))

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def make_conversation_renderer(
    model_dir: Path, chat: ChatConfig, *, train_on: TrainOn, thinking: Literal["keep", "drop"]
) -> ConversationRenderer:
    """Read the tokenizer, the chat template and the end markers of a model directory.

    Raises
    ------
    TokenizerError, ChatTemplateError, ValueError
        They cannot be read.
    """
    tokenizer = ChatTokenizer(model_dir)
    found = find_format(model_dir, tokenizer) if chat.format == "auto" else chat.format
    pairs = same_ends(None if found == "text" else found, tokenizer)
    ends = {*GenerationConfig.read(model_dir).eos_token_ids, *pairs, *pairs.values()}
    return ConversationRenderer(
        tokenizer, ends=frozenset(ends), variables=chat.variables, train_on=train_on, thinking=thinking
    )


def _is_trained(message: Message) -> bool:
    """Return whether a message of the assistant has a loss: those of the weight 0 are context alone."""
    return bool(message.get("weight", 1))


def _without_thinking(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key not in _REASONING}
    if isinstance(kept.get("content"), str):
        kept["content"] = _LEADING_THINKING.sub("", kept["content"])
    return kept


def _with_argument_objects(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have their arguments as objects, as most templates want them."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
