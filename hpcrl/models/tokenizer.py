"""Tokenizer and chat template of a model directory, without transformers.

Token ids are the truth in hpcrl: text is
turned into ids once, when an environment says it, and what a model sampled is never tokenized again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hpcrl.models.chat_template import ChatTemplate, ChatTemplateError, plain_data
from hpcrl.models.control_tokens import ControlTokens, Rendered
from hpcrl.models.foreign_text import Substitutes
from hpcrl.models.tokenizer_files import TokenizerError, read_tokenizer_files
from hpcrl.models.tool_schemas import ToolSchemas

__all__ = ["ChatTokenizer", "Message", "Rendered"]

Message = Mapping[str, Any]
"""``{"role": "system" | "user" | "assistant" | "tool", "content": text}``, and what else the chat template reads."""


class ChatTokenizer:
    """Text and messages to token ids and back."""

    def __init__(self, model_dir: Path) -> None:
        """Load ``tokenizer.json`` or ``tiktoken.model``, with the special tokens and the chat template.

        Raises
        ------
        TokenizerError
            The directory has no tokenizer, no chat template or no end-of-sequence token, or one that cannot be read.
        ChatTemplateError
            The chat template is none.
        """
        files = read_tokenizer_files(model_dir)
        self._tokenizer, self._special_tokens, self._code = files.tokenizer, files.special_tokens, files.code
        if "default" not in files.templates:
            places = "chat_template.jinja or tokenizer_config.json"
            named = f"; there are: {', '.join(sorted(files.templates))}" if files.templates else f" ({places})"
            raise TokenizerError(f"{model_dir} has no{' default' * bool(files.templates)} chat template{named}")
        wanted = [name for name in ("default", "tool_use") if name in files.templates]
        sources = files.template_sources
        self._templates = {name: ChatTemplate(files.templates[name], str(sources[name])) for name in wanted}
        written = "\0".join(template.literals() for template in self._templates.values())
        self._control = ControlTokens(files.tokenizer, written)
        self._tools = ToolSchemas(lambda tools, text: plain_data(self._as_code_gives(tools), text), self._control)
        self.eos_token = files.special_tokens.get("eos_token", "")
        if not self.eos_token:
            raise TokenizerError(f"{model_dir / 'tokenizer_config.json'} names no eos_token, which ends a reply")
        if self.eos_token in files.missing:
            raise TokenizerError(f"{model_dir}: eos_token {self.eos_token!r} is not in the vocabulary")
        end = self._tokenizer.token_to_id(self.eos_token)
        assert end is not None  # it was added where it was missing
        self.eos_token_id: int = end

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def control_ids(self) -> frozenset[int]:
        """Return the ids of control tokens, which mark speakers, beginnings and ends; text never has one."""
        return self._control.ids

    def id_of(self, token: str) -> int | None:
        """Return the id of a token as it stands in the vocabulary; None where it does not."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def tokens_from(self, first: int) -> dict[int, str]:
        """Return the tokens whose ids are ``first`` or more, by id."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        return {
            number: token for token, number in sorted(vocabulary.items(), key=lambda one: one[1]) if number >= first
        }

    def template_reads(self, name: str) -> bool:
        """Return whether the chat template mentions a field of messages or a role; others have no effect."""
        return any(template.reads(name) for template in self._templates.values())

    def encode(self, text: str) -> list[int]:
        """Return token ids; special tokens written in ``text`` are recognised."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, **variables: Any) -> str:
        """Return the chat template's text of ``messages``; ``variables`` as `render_marked` has them."""
        return self.render_marked(messages, add_generation_prompt=add_generation_prompt, **variables).text

    def render_ids(self, messages: Sequence[Message], *, add_generation_prompt: bool, **variables: Any) -> list[int]:
        """Return token ids of a conversation; control tokens that a message spells are encoded as text."""
        rendered = self.render_marked(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode_rendered(rendered)

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """Return token ids of a rendered conversation, or of a part of one."""
        return self._control.encode(rendered)

    def render_marked(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
        **variables: Any,
    ) -> Rendered:
        """Render a conversation, and mark text of others in it where that spells control tokens.

        Parameters
        ----------
        messages:
            With everything that the template may read: ``tool_calls``, ``reasoning_content``, ``name``.
        add_generation_prompt:
            Whether the text ends with the beginning of a reply.
        tools, documents:
            As JSON schemas, and as objects with a title and a text; None where there are none.
        now:
            Time of ``strftime_now``; the current time by default.
        variables:
            Further ones of the template, for example ``enable_thinking``.

        Raises
        ------
        ChatTemplateError
            The template refuses the conversation or fails on it, or changes spelled control tokens in a way that
            cannot be followed.
        """
        template = self._templates.get("default" if tools is None else "tool_use", self._templates["default"])
        own = {**self._special_tokens, "add_generation_prompt": add_generation_prompt}
        moment = now or datetime.now()
        prepared = None if tools is None else self._tools.prepare(tools)

        def render(text: _Change, role: _Change, schemas: Any) -> str:
            chat = [_plain_message(message, text, role) for message in messages]
            given = {"documents": documents, **variables}
            plain = {name: plain_data(value, text) for name, value in given.items()}
            return template.render(chat, moment, own | {"tools": schemas} | plain)

        texts: set[str] = set()
        roles: set[str] = set()
        rendered = render(_collect(texts), _collect(roles), None if prepared is None else prepared.data)
        spelled = set(filter(self._control.spells, texts)) | set(filter(self._control.has_control, roles))
        of_tools = None if prepared is None else prepared.substitutes
        if not spelled and of_tools is None:
            return Rendered(rendered, rendered)
        if not spelled and prepared is not None and of_tools is not None and of_tools.absent(rendered):
            substitutes, marked = of_tools, render(str, str, prepared.marked)
        else:
            texts |= prepared.texts if prepared is not None else frozenset()
            spelled |= set(filter(self._control.spells, texts))
            substitutes = Substitutes([rendered, *texts, *roles])

            def mark(text: str) -> str:
                return self._control.mark(text, substitutes) if text in spelled else text

            marked = render(mark, mark, plain_data(self._as_code_gives(tools), mark))
        if substitutes.restore(marked) == rendered:
            return Rendered(rendered, str.__str__(marked), substitutes)
        if self._control.same(rendered, marked):
            return Rendered(rendered, rendered)  # the spelled text is not a control token any more
        raise ChatTemplateError(
            f"{template.name}: a message spells control tokens, and the chat template changes it in an unknown "
            "way, so that they cannot be distinguished from its own"
        )

    def _as_code_gives(self, tools: Sequence[Mapping[str, Any]] | None) -> Any:
        """Return tools as Python code of the model's own gives them to the template."""
        if not tools or self._code is None:
            return tools
        if self._code.writes_tools:
            raise ChatTemplateError(
                f"{self._code.path} writes tools as TypeScript for the chat template, which hpcrl cannot do"
            )
        return _in_order(plain_data(tools)) if self._code.sorts_tools else tools


_Change = Callable[[str], str]


def _collect(texts: set[str]) -> _Change:
    """Return a function that remembers the texts it is called with, and returns them."""

    def collect(text: str) -> str:
        texts.add(text)
        return text

    return collect


def _in_order(value: Any) -> Any:
    """Return plain data with the keys of all objects in order."""
    if isinstance(value, dict):
        return {key: _in_order(item) for key, item in sorted(value.items())}
    return [_in_order(item) for item in value] if isinstance(value, list) else value


def _plain_message(message: Message, text: _Change, role: _Change) -> dict[str, Any]:
    """Return a message as plain data without keys that are None, as transformers gives it to templates."""
    given = {key: value for key, value in message.items() if value is not None}
    return {plain_data(key): plain_data(value, role if key == "role" else text) for key, value in given.items()}
