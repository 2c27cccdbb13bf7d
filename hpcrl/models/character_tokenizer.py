"""Character tokenizer of the small start models, with the chat format of a published family where one is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from hpcrl.storage.files import atomic_write, write_json

_ChatName = Literal["text", "qwen2.5", "glm-5"]


class _Chat(NamedTuple):
    """A chat format.

    Attributes
    ----------
    control:
        Tokens that mark speakers and ends.
    marks:
        Tokens of thinking and calls, which are text for a decoder that leaves control tokens out.
    ends:
        Tokens that end a turn; the first one is the ``eos_token``.
    """

    control: tuple[str, ...]
    marks: tuple[str, ...]
    ends: tuple[str, ...]
    template: str


_COMMON = ("<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_TEXT = _Chat(
    control=_COMMON,
    marks=(),
    ends=("<|end|>",),
    template=(
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
)
_QWEN = _Chat(
    control=(*_COMMON, "<|im_end|>", "<|endoftext|>"),
    marks=("<tool_call>", "</tool_call>"),
    ends=("<|im_end|>",),
    template=(
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
        "{% for call in message.tool_calls or [] %}"
        '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
        "</tool_call>{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
)
_GLM = _Chat(
    # a turn has no end of its own: the mark of the next speaker ends it
    control=(*_COMMON, "<|endoftext|>", "<|observation|>", "[gMASK]", "<sop>"),
    marks=(
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
        *("<arg_value>", "</arg_value>", "<tool_response>", "</tool_response>"),
    ),
    ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
    template=(
        "[gMASK]<sop>{% for message in messages %}"
        "{% if message.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
        "<tool_response>{{ message.content }}</tool_response>"
        "{% elif message.role == 'assistant' %}"
        "<|assistant|>{% if message.reasoning_content %}<think>{{ message.reasoning_content }}{% endif %}</think>"
        "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
        "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>"
        "<arg_value>{{ value if value is string else value | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}"
        "{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>"
        "{{ '</think>' if enable_thinking is false else '<think>' }}{% endif %}"
    ),
)
_CHATS: Mapping[_ChatName, _Chat] = MappingProxyType({"text": _TEXT, "qwen2.5": _QWEN, "glm-5": _GLM})
"""Chat formats by name. Their templates write no schemas of tools: small models learn calls from demonstrations."""


def write_character_tokenizer(
    model_dir: Path, *, chat: _ChatName = "text", words: Sequence[str] = ()
) -> tuple[int, int]:
    """Write a tokenizer of printable ASCII characters that hpcrl, transformers and vLLM load.

    Parameters
    ----------
    chat:
        Format of conversations: control tokens and the chat template.
    words:
        Further texts that are one token each.

    Returns
    -------
    tuple
        ``(vocab_size, eos_token_id)``.
    """
    form = _CHATS[chat]
    plain = (*form.marks, *words)
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys((*form.control, *characters, *plain)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in form.control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    model_dir.mkdir(parents=True, exist_ok=True)
    atomic_write(model_dir / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_json(
        model_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": form.ends[0],
            "pad_token": "<|pad|>",
            "unk_token": "<|unk|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": form.template,
        },
    )
    if len(form.ends) > 1:
        write_json(model_dir / "generation_config.json", {"eos_token_id": [vocabulary[end] for end in form.ends]})
    return len(vocabulary), vocabulary[form.ends[0]]
