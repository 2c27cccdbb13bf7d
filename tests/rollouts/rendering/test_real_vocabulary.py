"""DeepSeek's published vocabulary of 128,815 tokens: none of its added tokens becomes a control token in a message.

The package litellm, which mini-swe-agent brings, has the file.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from chat_lab import oracle, spelled
from family_lab import FAMILIES, PUBLISHED, TOOLS, needs_templates
from tokenizers import Tokenizer

from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.models.tokenizer_files import read_tokenizer_files

BROUGHT = "lib/python3*/site-packages/litellm/litellm_core_utils/tokenizers/deepseek_tokenizer.json"
FOUND = sorted((Path(__file__).parents[3] / ".mini-swe").glob(BROUGHT))
pytestmark = [
    needs_templates,
    pytest.mark.skipif(not FOUND, reason="mini-swe-agent is not there (tools/bootstrap.py --mini-swe)"),
]
#: added tokens that are put into each field at once
AT_ONCE = 32


def conversation(*, as_text: bool) -> dict[str, Any]:
    arguments: Any = '{"city": "Paris"}' if as_text else {"city": "Paris", "days": 2}
    made = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    asks = {"role": "assistant", "content": "I look.", "tool_calls": [made]}
    result = {"role": "tool", "tool_call_id": "call_0", "name": "weather", "content": "grey"}
    return {
        "messages": [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "What is the weather?"},
            asks,
            result,
            {"role": "assistant", "content": "It is grey."},
            {"role": "user", "content": "Really so?"},
        ],
        "tools": TOOLS,
    }


@pytest.fixture(scope="module", params=["DeepSeek-V3", "DeepSeek-V3.1"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a directory with the tokenizer and a published template, and a conversation that the template takes."""
    path, name = tmp_path_factory.mktemp("deepseek"), str(request.param)
    shutil.copyfile(FOUND[0], path / "tokenizer.json")
    template = (PUBLISHED / f"{FAMILIES[name].template}.jinja").read_text(encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": FAMILIES[name].tokens[0],
        "eos_token": FAMILIES[name].eos,
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path, conversation(as_text=name == "DeepSeek-V3")


def test_token_ids_are_those_of_transformers(family: tuple[Path, dict[str, Any]]) -> None:
    path, talk = family
    messages, tools = talk["messages"], talk["tools"]
    ids = oracle(path).apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    assert ChatTokenizer(path).render_ids(messages, tools=tools, add_generation_prompt=True) == ids


def test_no_added_token_of_a_message_is_a_control_token(family: tuple[Path, dict[str, Any]]) -> None:
    path, talk = family
    tokenizer = ChatTokenizer(path)
    vocabulary: Tokenizer = read_tokenizer_files(path).tokenizer
    added = {number: token.content for number, token in vocabulary.get_added_tokens_decoder().items()}
    texts = list(added.values())
    assert len(texts) == 1283
    assert tokenizer.control_ids == set(added)

    def added_in(talk: dict[str, Any]) -> list[int]:
        ids = tokenizer.render_ids(talk["messages"], tools=talk["tools"], add_generation_prompt=True)
        return [number for number in ids if number in added]

    clean = added_in(talk)
    assert len(clean) >= 8
    for begin in range(0, len(texts), AT_ONCE):
        some = " ".join(texts[begin : begin + AT_ONCE])
        everywhere = spelled(talk, f"a{some}b")
        assert added_in(everywhere) == clean, some
        # and each of them is in the prompt as the text that it is
        ids = tokenizer.render_ids(everywhere["messages"], tools=everywhere["tools"], add_generation_prompt=True)
        assert some in tokenizer.decode(ids, skip_special_tokens=False)
