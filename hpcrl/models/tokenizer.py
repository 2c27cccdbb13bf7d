"""Tokenizer and chat template of a model directory, without transformers.

Also makes the character tokenizer of the small start models. Token ids are the truth in hpcrl: text is
turned into ids once, when an environment says it, and what a model sampled is never tokenized again.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2.sandbox
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from hpcrl.fs import atomic_write, write_json

__all__ = ["ChatTokenizer", "Message", "write_character_tokenizer"]

Message = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant" | "tool", "content": text}``."""

_SPECIAL = ("<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class ChatTokenizer:
    """Text and messages to token ids and back."""

    def __init__(self, model_dir: Path) -> None:
        """Load ``tokenizer.json`` and the chat template beside it.

        Raises
        ------
        FileNotFoundError
            The directory has no tokenizer.
        ValueError
            It has no chat template.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises no other kind
            raise ValueError(f"{path}: {error}") from error
        config = json.loads((model_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
        template_file = model_dir / "chat_template.jinja"
        template = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
        if not isinstance(template, str):
            raise ValueError(f"{model_dir} has no chat template (chat_template.jinja or tokenizer_config.json)")
        # templates of models come from strangers: a sandbox, as transformers does
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(template)
        end = self._tokenizer.token_to_id(config["eos_token"])
        if end is None:
            raise ValueError(f"{model_dir}: eos_token {config['eos_token']!r} is not in tokenizer.json")
        self.eos_token_id: int = end

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens written in ``text`` are recognised."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The chat template's text of ``messages``."""
        return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt)

    def render_ids(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        """Token ids of `render`."""
        return self.encode(self.render(messages, add_generation_prompt=add_generation_prompt))


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
