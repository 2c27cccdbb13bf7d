"""Places of control tokens, and marks, are those of the plain ways: the whole tokenizer, and one character at a time.

`ControlTokens` finds the template's control tokens without the model of the tokenizer, and marks a text by a few
replacements. The plain ways give the same token ids for all texts and tokenizers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chat_lab import byte_tokenizer, piece_tokenizer, write_model
from family_lab import FAMILIES, TOOLS, needs_templates, write_family
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.chat_template import ChatTemplateError
from hpcrl.models.control_tokens import ControlTokens, Rendered
from hpcrl.models.foreign_text import ForeignText, Substitutes
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.environments import ToolCall, tool_message
from hpcrl.rollouts.rendering import Renderer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{{ m.more }}<|im_end|>\n{% endfor %}"
    "<|im_start|>a <|z|>"
)
FULL_WIDTH = str.maketrans("<>|", "＜＞｜")


def mark_plainly(self: Substitutes, text: str, characters: Callable[[str], bool]) -> str:
    """Mark each character for itself."""
    data = "".join(self.substitute(char) if characters(char) else char for char in text)
    return text if data == text else ForeignText(text, data, self)


@contextmanager
def plain_ways() -> Iterator[None]:
    """Have control tokens found by the whole tokenizer, and texts marked by character."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlTokens, "_find_added", ControlTokens._find)
        patch.setattr(Substitutes, "mark", mark_plainly)
        yield


def outcome(work: Callable[[], list[int]]) -> list[int] | str:
    """Return token ids, or the refusal."""
    try:
        return work()
    except ChatTemplateError as error:
        return str(error)


def awkward(token: str) -> list[str]:
    """Return texts that spell a token whole, in part, or in a way that is read as one."""
    half = len(token) // 2
    begin, end = token[:half], token[half:]
    return [
        *(token, token * 3, f" {token} ", f"\n{token}\t", f"x{token}", f"{token}x"),
        *(begin, end, token[:-1], token[1:], token[:1], token[-1:], f"{end}{begin}"),
        *(f"{begin}{token}{end}", f"{token}{end}", f"{begin}{token}", f"<{token}>", f"{begin}{begin}{end}{end}"),
        *(f"é{token}東", f"\u0301{token}\u0301", f"\u200d{token}\ufe0f", f"👩\u200d{begin}\u200d{end}", f"ﬁ{token}ß"),
        *(token.upper(), token.title(), token.translate(FULL_WIDTH), f"{begin.upper()}{end}", token[::-1]),
        *(f"\U000f0000{token}\U000f0001", f"{begin}\U00100000{end}", f"\U00100001{token}\U0010ffff"),
        *(f"{token}!", f"'\"\\{token}\\\"'", f"{begin}\0{end}", f"\ufffd{token}"),
    ]


def drawn(tokens: list[str], count: int) -> list[str]:
    """Return texts of pieces of tokens and others, drawn at random."""
    draw = random.Random(f"{count} of {tokens}")
    pieces = [*tokens, *"<>|[]/!? \n", "im_", "end", "a", "ä", "東", "   ", "e\u0301", "\U000f0002"]
    pieces += [part for token in tokens for part in (token[: len(token) // 2], token[len(token) // 2 :])]
    return ["".join(draw.choices(pieces, k=draw.randrange(1, 12))) for _ in range(count)]


def with_tokens(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    for token in tokens:
        tokenizer.add_tokens([token])
    return tokenizer


def competing_tokenizer() -> Tokenizer:
    """Make a tokenizer in which text and other control tokens overlap with control tokens."""
    return with_tokens(
        byte_tokenizer(),
        *(AddedToken(text, special=False, normalized=False) for text in ("!<|im", "><|im_st", "|im_end|>?", "?<")),
        AddedToken("<|im_end|><|im_start|>", special=True, normalized=False),
        AddedToken("<|im", special=True, normalized=False),
    )


def folding_tokenizer() -> Tokenizer:
    """Make a tokenizer that finds tokens in normalized text."""
    made = byte_tokenizer()
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return with_tokens(
        made,
        AddedToken("<|im_end|>", special=True, normalized=True),
        AddedToken("<|im_start|>", special=True, normalized=False),
        AddedToken("<|Fi|>", special=False, normalized=True),
    )


def greedy_tokenizer() -> Tokenizer:
    """Make a tokenizer whose tokens take white space with them, and must stand alone."""
    made = byte_tokenizer()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return with_tokens(
        made,
        AddedToken("<|im_end|>", special=True, normalized=False, lstrip=True, rstrip=True),
        AddedToken("<|im_start|>", special=True, normalized=False, rstrip=True),
        AddedToken("[X]", special=True, normalized=False, single_word=True),
        AddedToken(" <|z|>", special=True, normalized=False),
    )


def word_tokenizer() -> Tokenizer:
    """Make a tokenizer whose model has control tokens as words."""
    words = ["[UNK]", "<|im_start|>", "<|im_end|>", "<", "<|im", "|>", "user", "a", "x", "[X]", "|im_end|>"]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\[X\]|<\|im_\w+\|>|\s+|<"), "isolated")
    return with_tokens(
        made,
        *(AddedToken(word, special=True, normalized=False) for word in words[:3]),
        AddedToken("[X]", special=True, normalized=False, single_word=True),
    )


TOKENIZERS = {
    "bytes": byte_tokenizer,
    "pieces": piece_tokenizer,
    "competing": competing_tokenizer,
    "folding": folding_tokenizer,
    "greedy": greedy_tokenizer,
    "words": word_tokenizer,
}


@pytest.fixture(scope="module", params=[*TOKENIZERS, "characters"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    path = tmp_path_factory.mktemp(str(request.param))
    if request.param == "characters":
        write_character_tokenizer(path, chat="qwen2.5")
    else:
        write_model(path, TEMPLATE, TOKENIZERS[request.param](), eos_token="<|im_end|>")
    return ChatTokenizer(path)


def conversations(tokens: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations with awkward texts: in one message, cut between two fields, and in two messages."""
    for number, text in enumerate([*(text for token in tokens for text in awkward(token)), *drawn(tokens, 60)]):
        half = len(text) // 2
        if number % 3 == 0:
            yield [{"role": "user", "content": text, "more": ""}]
        elif number % 3 == 1:
            yield [{"role": "user", "content": text[:half], "more": text[half:]}]
        else:
            yield [{"role": "user", "content": text, "more": ""}, {"role": "user", "content": "a b", "more": text[::2]}]


def test_token_ids_are_those_of_the_plain_ways(tokenizer: ChatTokenizer) -> None:
    """Also, a message adds no control token, whatever it spells."""
    names = {number: token for number, token in tokenizer.tokens_from(0).items() if number in tokenizer.control_ids}
    tokens = list(dict.fromkeys(("<|im_end|>", "<|im_start|>", *names.values())))
    # the unknown token is a control token of some vocabularies, and stands for any text
    harmless = {number for number, token in names.items() if token in ("[UNK]", "<unk>", "<|unk|>")}
    clean = {
        turns: Counter(tokenizer.render_ids([{"role": "user", "content": ""}] * turns, add_generation_prompt=True))
        for turns in (1, 2)
    }
    spelled = 0
    for messages in conversations(tokens[:5]):

        def render(messages: list[dict[str, Any]] = messages) -> list[int]:
            return tokenizer.render_ids(messages, add_generation_prompt=True)

        ids = outcome(render)
        with plain_ways():
            assert outcome(render) == ids, messages
        if isinstance(ids, str):
            continue
        spelled += any(token in str(messages) for token in tokens)
        more = Counter(filter(tokenizer.control_ids.__contains__, ids)) - clean[len(messages)]
        assert more.keys() <= harmless, messages
    assert spelled > 60


@pytest.mark.parametrize("begin", [0, 3])
def test_long_texts(begin: int, tmp_path: Path) -> None:
    """Tokens are whole or cut at both ends of a long text."""
    tokenizer, size = ChatTokenizer(write_model(tmp_path, TEMPLATE, eos_token="<|im_end|>")), 20_000
    clean = tokenizer.render_ids([{"role": "user", "content": ""}], add_generation_prompt=True)
    right = list(filter(tokenizer.control_ids.__contains__, clean))
    for repeated in ("<|im_end|>x < 3 and y | 4\n", "<|im_end|>", "<|<|im_<|im_end|>end|>|>", "|>"):
        text = (repeated * size)[begin : begin + size]

        def render(text: str = text) -> list[int]:
            return tokenizer.render_ids([{"role": "user", "content": text}], add_generation_prompt=True)

        ids = render()
        with plain_ways():
            assert render() == ids
        assert list(filter(tokenizer.control_ids.__contains__, ids)) == right
        assert text in tokenizer.decode(ids, skip_special_tokens=False)


def test_control_tokens_that_the_model_makes_of_the_templates_text(tmp_path: Path) -> None:
    """``[X]`` is an added token where it stands alone, and a word of the model everywhere."""
    template = TEMPLATE.replace("<|im_end|>", "x[X]y<|im_end|>")
    tokenizer = ChatTokenizer(write_model(tmp_path, template, word_tokenizer(), eos_token="<|im_end|>"))
    number = tokenizer.id_of("[X]")
    assert number in tokenizer.control_ids

    def render() -> list[int]:
        return tokenizer.render_ids([{"role": "user", "content": "a<|im_end|>b[X]c"}], add_generation_prompt=True)

    ids = render()
    assert ids.count(number) == 1
    with plain_ways():
        assert render() == ids


def test_control_tokens_that_a_template_writes_in_other_letters() -> None:
    """They are found in normalized text, as the tokenizer does."""
    made, table, content = folding_tokenizer(), Substitutes([]), "a<|im_END|>b＜|Im_End|＞"
    control = ControlTokens(made, "")
    marked = str.__str__(control.mark(content, table))
    rendered = Rendered(f"<|IM_END|>{content}<|im_End|>", f"<|IM_END|>{marked}<|im_End|>", table)
    ids = control.encode(rendered)
    assert list(filter(control.ids.__contains__, ids)) == [made.token_to_id("<|im_end|>")] * 2
    with plain_ways():
        assert control.encode(rendered) == ids


@needs_templates
@pytest.mark.parametrize("name", FAMILIES)
def test_extensions_of_families(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    renderer = Renderer.of_model(write_family(tmp_path, family))
    call, end = ToolCall("weather", {"city": "Paris"}, "functions.weather:0"), renderer.stop_token_ids[0]
    tokens = list(dict.fromkeys((family.eos, *family.tokens[-1:], "</tool_response>")))
    texts = [*(text for token in tokens for text in awkward(token)[::3]), *drawn(tokens, 10)]
    for number, text in enumerate(texts):
        described = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "description": text}}]
        offered = described if number % 2 else TOOLS

        def extend(text: str = text, offered: Any = offered) -> list[int]:
            found = renderer.extension([tool_message(call, text)], ended_by=end, calls=[call], tools=offered)
            assert found is not None
            return found.token_ids

        ids = outcome(extend)
        with plain_ways():
            assert outcome(extend) == ids, text


def test_marks_are_those_of_each_character() -> None:
    draw = random.Random("marks")
    alphabet = [chr(code) for code in (*range(32, 127), *range(0x400, 0x430))] + list("東é👩\n")
    for count in (0, 1, 5, 32, 33, 90):
        chosen = frozenset(draw.sample(alphabet, count))
        for _ in range(50):
            text = "".join(draw.choices(alphabet, k=draw.randrange(300)))
            table = Substitutes([text])
            marked = table.mark(text, chosen.__contains__)
            assert marked == text
            assert str.__str__(marked) == str.__str__(mark_plainly(table, text, chosen.__contains__))
            assert table.restore(marked) == text
            assert sum(a != b for a, b in zip(str.__str__(marked), text, strict=True)) == sum(map(text.count, chosen))


def test_added_tokens_of_the_unknown_word() -> None:
    """The word that stands for text between added tokens is none of them."""
    made = with_tokens(
        byte_tokenizer(), *(AddedToken("?" * count, special=True, normalized=False) for count in range(2, 9))
    )
    control, table = ControlTokens(made, ""), Substitutes([])
    marked = control.mark("a??b", table)
    ids = control.encode(Rendered("???a??b???", f"???{str.__str__(marked)}???", table))
    assert [made.id_to_token(number) for number in ids if number in control.ids] == ["???", "???"]
