"""Tokenizer and chat template of a model directory, without transformers.

Also makes the character tokenizer of the small start models. Token ids are the truth in hpcrl: text is
turned into ids once, when an environment says it, and what a model sampled is never tokenized again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from hpcrl.fs import atomic_write, write_json
from hpcrl.models.chat_template import ChatTemplate, ChatTemplateError, plain_data
from hpcrl.models.control_tokens import ControlTokens, Rendered
from hpcrl.models.foreign_text import Substitutes
from hpcrl.models.tokenizer_files import TokenizerError, read_tokenizer_files

__all__ = ["ChatTokenizer", "Message", "Rendered", "write_character_tokenizer"]

Message = Mapping[str, Any]
"""``{"role": "system" | "user" | "assistant" | "tool", "content": text}``, and what else the chat template reads."""

_SPECIAL = ("<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class ChatTokenizer:
    """Text and messages to token ids and back."""

    def __init__(self, model_dir: Path) -> None:
        """Load ``tokenizer.json`` or ``tiktoken.model``, the special tokens and the chat template beside it.

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
        """Number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of tokens that say who speaks and where something begins or ends; text never has one."""
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
            What ``strftime_now`` tells; now, where it is left out.
        variables:
            Further ones of the template, for example ``enable_thinking``.

        Raises
        ------
        ChatTemplateError
            The template refuses the conversation or fails on it, or changes spelled control tokens in a way that
            cannot be followed.
        """
        template = self._templates.get("default" if tools is None else "tool_use", self._templates["default"])
        given = {"tools": self._as_code_gives(tools), "documents": documents, **variables}
        own = {**self._special_tokens, "add_generation_prompt": add_generation_prompt}
        moment = now or datetime.now()

        def render(text: _Change, role: _Change) -> str:
            chat = [_plain_message(message, text, role) for message in messages]
            return template.render(chat, moment, own | {name: plain_data(value, text) for name, value in given.items()})

        texts: set[str] = set()
        roles: set[str] = set()
        rendered = render(_collect(texts), _collect(roles))
        spelled = set(filter(self._control.spells, texts)) | set(filter(self._control.has_control, roles))
        if not spelled:
            return Rendered(rendered, rendered)
        substitutes = Substitutes([rendered, *texts, *roles])

        def mark(text: str) -> str:
            return self._control.mark(text, substitutes) if text in spelled else text

        marked = render(mark, mark)
        if substitutes.restore(marked) == rendered:
            return Rendered(rendered, str.__str__(marked), substitutes)
        if self._control.same(rendered, marked):
            return Rendered(rendered, rendered)  # what was spelled is no control token any more
        raise ChatTemplateError(
            f"{template.name}: a message spells control tokens, and the chat template changes it in a way that cannot "
            "be followed, so that they cannot be told from its own"
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


def write_character_tokenizer(model_dir: Path) -> tuple[int, int]:
    """Write a tokenizer of printable ASCII characters that hpcrl, transformers and vLLM load.

    Returns
    -------
    tuple
        ``(vocab_size, eos_token_id)``.
    """
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    model_dir.mkdir(parents=True, exist_ok=True)
    atomic_write(model_dir / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_json(
        model_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            "unk_token": "<|unk|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    )
    return len(vocabulary), vocabulary["<|end|>"]
