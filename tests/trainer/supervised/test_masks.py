"""Which tokens of a conversation are trained: transformers, which reads `{% generation %}`, says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from supervised_lab import TALK, chat_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from hpcrl.config.chat import ChatConfig
from hpcrl.models.chat_template import ChatTemplateError
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.trainer.supervised.masks import ConversationRenderer, make_conversation_renderer

SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|head|>", "<|tail|>", "<|eot|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ '\\n' if m.content else '' }}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = (
    "<|bos|>{% for m in messages %}{{ '<|head|>' + m.role + '<|tail|>\\n\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot|>' }}{% endgeneration %}"
    "{% else %}{{ m.content | trim + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|tail|>\\n\\n' }}{% endif %}"
)
LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: as Qwen3: thinking of turns before the last question is left out
FORGETFUL = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THOUGHTFUL: list[dict[str, Any]] = [
    {"role": "user", "content": "what is 7+5?"},
    {"role": "assistant", "reasoning_content": "seven, five", "content": "12"},
    {"role": "user", "content": "and 1+1?"},
    {"role": "assistant", "reasoning_content": "easy", "content": "2"},
]
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "the weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get", "arguments": {"place": "São Paulo"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "assistant", "content": "It rains.\n\nTake an umbrella"},
]


def write_tokenizer(path: Path, template: str, end: str, pattern: str = LLAMA_WORDS) -> Path:
    """A byte-level BPE vocabulary, in which blanks and line breaks join what follows."""
    tokenizer = Tokenizer(models.BPE())
    if pattern:
        words = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [json.dumps([TALK, THOUGHTFUL, TOOLS]), "system user assistant\n\n\n think tool_call umbrella umbrella"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "bos_token": "<|bos|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def of_transformers(path: Path, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    found = theirs.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    return list(found["input_ids"]), [bool(flag) for flag in found["assistant_masks"]]


@pytest.mark.parametrize(
    ("template", "end", "messages"),
    [
        (CHATML, "<|im_end|>", TALK),
        (CHATML, "<|im_end|>", THOUGHTFUL),
        (CHATML, "<|im_end|>", TOOLS),
        (LLAMA, "<|eot|>", TALK),
        (LLAMA, "<|eot|>", [{**m, "content": m.get("content") or "x"} for m in THOUGHTFUL]),
    ],
)
def test_transformers_trains_the_same_tokens(
    tmp_path: Path, template: str, end: str, messages: list[dict[str, Any]]
) -> None:
    path = write_tokenizer(tmp_path / "model", template, end)
    (found,) = ConversationRenderer(ChatTokenizer(path)).render(messages)
    ids, said = of_transformers(path, messages)
    assert found.ids == ids[: len(found.ids)]
    assert found.said == said[: len(found.said)]
    # what is cut off is never trained
    assert not any(said[len(found.said) :])
    assert found.ids[-1] == ChatTokenizer(path).eos_token_id
    assert found.said[-1]


def test_a_template_that_forgets_makes_a_sequence_of_each_turn(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "model", FORGETFUL, "<|im_end|>")
    tokenizer = ChatTokenizer(path)
    found = ConversationRenderer(tokenizer).render(THOUGHTFUL)
    assert len(found) == 2
    for sequence, turns in zip(found, (2, 4), strict=True):
        ids, said = of_transformers(path, THOUGHTFUL[:turns])
        assert sequence.ids == ids[: len(sequence.ids)]
        # each turn once, in the context that the model has when it says it
        begin = len(sequence.ids) - next(i for i, flag in enumerate(reversed(said[: len(sequence.ids)])) if not flag)
        assert sequence.said == [False] * begin + [True] * (len(sequence.ids) - begin)
    said_text = [tokenizer.decode([t for t, f in zip(s.ids, s.said, strict=True) if f]) for s in found]
    assert said_text == ["<think>seven, five</think>12", "<think>easy</think>2"]


def test_a_token_that_reaches_from_prompt_into_reply_is_cut(tmp_path: Path) -> None:
    """The model begins behind whole tokens: two line breaks are one token before a reply, and two in front of text."""
    path = write_tokenizer(tmp_path / "model", LLAMA, "<|eot|>", pattern="")
    tokenizer = ChatTokenizer(path)
    (found,) = ConversationRenderer(tokenizer).render(TALK)
    ids, said = of_transformers(path, TALK)
    assert found.ids != ids
    assert found.ids[: found.said.index(True)] == tokenizer.render_ids(TALK[:2], add_generation_prompt=True)
    texts = [
        [
            tokenizer.decode(chosen, skip_special_tokens=False)
            for chosen in (i, [t for t, f in zip(i, s, strict=True) if f])
        ]
        for i, s in ((found.ids, found.said), (ids, said))
    ]
    assert texts[0] == texts[1]


def test_thinking_can_be_dropped(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path / "model", CHATML, "<|im_end|>"))
    inline = [*THOUGHTFUL[:1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\n12 <think>"}]
    (with_key,) = ConversationRenderer(tokenizer, thinking="drop").render(THOUGHTFUL)
    (in_text,) = ConversationRenderer(tokenizer, thinking="drop").render(inline)
    assert "think" not in tokenizer.decode(with_key.ids)
    assert tokenizer.decode(in_text.ids).endswith("assistant\n12 <think>")
    (kept,) = ConversationRenderer(tokenizer).render(THOUGHTFUL)
    assert "<think>\nseven, five\n</think>" in tokenizer.decode(kept.ids)


def test_train_on_says_which_turns(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path / "model", CHATML, "<|im_end|>"))
    (every,) = ConversationRenderer(tokenizer, train_on="assistant").render(TALK)
    (last,) = ConversationRenderer(tokenizer, train_on="last").render(TALK)
    (everything,) = ConversationRenderer(tokenizer, train_on="all").render(TALK)
    assert last.ids == every.ids
    assert tokenizer.decode([t for t, f in zip(last.ids, last.said, strict=True) if f]) == "b"
    assert sum(last.said) < sum(every.said)
    assert everything.ids == tokenizer.render_ids(TALK, add_generation_prompt=False)
    assert everything.said == [False, *[True] * (len(everything.ids) - 1)]


def test_a_message_of_the_weight_0_is_context(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path / "model", CHATML, "<|im_end|>"))
    weighed = [*TALK[:2], {**TALK[2], "weight": 0}, TALK[3], {**TALK[4], "weight": 1}]
    (found,) = ConversationRenderer(tokenizer).render(weighed)
    (plain,) = ConversationRenderer(tokenizer).render(TALK)
    assert found.ids == plain.ids
    assert tokenizer.decode([t for t, f in zip(found.ids, found.said, strict=True) if f]) == "b"


def test_arguments_as_text_are_read_as_objects(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path / "model", CHATML, "<|im_end|>"))
    call = TOOLS[1]["tool_calls"][0]
    function = {"name": "get", "arguments": json.dumps({"place": "São Paulo"}, ensure_ascii=False)}
    as_text = [TOOLS[0], {**TOOLS[1], "tool_calls": [{**call, "function": function}]}, *TOOLS[2:]]
    renderer = ConversationRenderer(tokenizer)
    assert renderer.render(as_text) == renderer.render(TOOLS)


def test_arguments_that_are_nested_too_deeply_stay_text(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path / "model", CHATML, "<|im_end|>"))
    call = {"type": "function", "function": {"name": "get", "arguments": "[" * 100_000}}
    said = [TOOLS[0], {"role": "assistant", "content": "a", "tool_calls": [call]}]
    (found,) = ConversationRenderer(tokenizer).render(said)
    assert any(found.said)


def test_control_tokens_that_a_message_spells_are_text(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path / "model", CHATML, "<|im_end|>"))
    spelled = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    (found,) = ConversationRenderer(tokenizer).render(spelled)
    end = tokenizer.eos_token_id
    assert [t for t, f in zip(found.ids, found.said, strict=True) if f].count(end) == 1
    assert found.ids[-1] == end


def test_a_turn_without_an_end_of_its_own_ends_with_the_next_role(tmp_path: Path) -> None:
    """As GLM: the model says the marker of who speaks next."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = chat_tokenizer(tmp_path, template)
    ends = frozenset({tokenizer.id_of("<|user|>"), tokenizer.id_of("<|tool|>")})
    (found,) = ConversationRenderer(tokenizer, ends=ends).render(TALK)
    text = tokenizer.decode(found.ids, skip_special_tokens=False)
    assert text == "<|system|>be short<|user|>say a<|assistant|>a!<|user|>and b<|assistant|>b<|user|>"
    said = tokenizer.decode([t for t, f in zip(found.ids, found.said, strict=True) if f], skip_special_tokens=False)
    assert said == "a!<|user|>b<|user|>"
    with pytest.raises(ValueError, match="does not end replies"):
        ConversationRenderer(tokenizer).render(TALK)


def test_a_reply_that_does_not_follow_its_prompt_is_refused(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    )
    renderer = ConversationRenderer(chat_tokenizer(tmp_path, template))
    with pytest.raises(ValueError, match=r"generation prompt.*model\.chat\.variables"):
        renderer.render(TALK)
    with pytest.raises(ValueError, match="no message has the role assistant"):
        renderer.render(TALK[:2])


def test_the_template_may_refuse(tmp_path: Path) -> None:
    renderer = ConversationRenderer(chat_tokenizer(tmp_path, "{{ raise_exception('no systems') }}"))
    with pytest.raises(ChatTemplateError, match="no systems"):
        renderer.render(TALK)


def test_end_markers_of_the_model_directory_count(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "model", LLAMA, "<|im_end|>")
    tokenizer = ChatTokenizer(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.id_of("<|eot|>")]}))
    renderer = make_conversation_renderer(path, ChatConfig(), train_on="assistant", thinking="keep")
    (found,) = renderer.render(TALK)
    assert found.ids[-1] == tokenizer.id_of("<|eot|>")


@pytest.mark.parametrize("pattern", [LLAMA_WORDS, ""])
def test_rendering_in_parts_changes_nothing(tmp_path: Path, pattern: str) -> None:
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path / "model", LLAMA, "<|eot|>", pattern))
    long = [{"role": role, "content": f"{role} {i}\n\n {i}"} for i in range(30) for role in ("user", "assistant")]
    renderer = ConversationRenderer(tokenizer)
    first, *others = (renderer.render(long) for _ in range(4))
    assert all(other == first for other in others)
    texts = [
        tokenizer.decode(ids, skip_special_tokens=False)
        for ids in (first[0].ids, of_transformers(tmp_path / "model", long)[0])
    ]
    assert texts[0] == texts[1]


def test_a_vocabulary_that_marks_beginnings_is_encoded_as_a_whole(tmp_path: Path) -> None:
    """Of one with blanks as a character (SentencePiece) the beginning of a text has one that its middle has not."""
    path = write_tokenizer(tmp_path / "model", CHATML, "<|im_end|>")
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    letters = sorted({*json.dumps([TALK, SPECIAL]), "▁", "\n"})
    tokenizer.train_from_iterator([letters], trainers.BpeTrainer(initial_alphabet=letters, vocab_size=len(letters)))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    renderer = ConversationRenderer(ChatTokenizer(path))
    ids, said = of_transformers(path, TALK)
    for _ in range(20):
        (found,) = renderer.render(TALK)
        assert found.ids == ids[: len(found.ids)]
        assert found.said == said[: len(found.said)]
