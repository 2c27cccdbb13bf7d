"""Published environments of verifiers with a policy that knows the answers: their rewards are what they should be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from family_lab import FAMILIES, needs_templates, write_family
from published_environments import needs_published, played
from stub_engine import StubEngine

from hpcrl.models.tokenizer import ChatTokenizer

pytestmark = [pytest.mark.slow, needs_published, needs_templates]


def moves(prompt: str) -> str:
    """Bet wherever that is legal; else call."""
    legal = prompt.rpartition("Your legal actions: ")[2].partition("\nassistant")[0]
    return "I take [bet]." if "[bet]" in legal else "I take [call]."


def golf_once() -> Callable[[str], str]:
    """Answer rightly at first, and then no more."""
    right = {"sum of the integers": "5050", "Fibonacci": "0 1 1 2 3 5 8 13 21 34", "HELLO": "OLLEH"}
    said = 0

    def golfs(prompt: str) -> str:
        nonlocal said
        said += 1
        (answer,) = [answer for what, answer in right.items() if what in prompt]
        return f"```python\nprint({answer if said == 1 else 'no'!r})\n```"

    return golfs


def writes(prompt: str) -> str:
    """Call the tool, and say its result. Control tokens are not in the text of a prompt."""
    word = re.findall(r'word="(\w+)"', prompt)[-1]
    if re.search(rf"</tool_call>\s+user\s+{word}\s+assistant", prompt):
        return word
    call = f'{{"name": "scratchpad_roundtrip", "arguments": {{"word": "{word}"}}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "says", "reward", "parts"),
    [
        # a bet that is called: one seat wins what the other loses
        ("kuhn_poker", moves, 0.0, {"player0/forfeit": 0.0, "player1/forfeit": 0.0}),
        # one of two attempts is right, and so the shortest and the fastest
        ("code_golf", golf_once(), 1.0, {"correct": 0.5, "most_concise": 0.5, "fastest": 0.5}),
        ("scratchpad", writes, 1.0, {"isolated": 1.0}),
    ],
)
async def test_a_policy_that_knows_the_answer(
    tmp_path: Path, name: str, says: Callable[[str], str], reward: float, parts: dict[str, float]
) -> None:
    model = write_family(tmp_path / "model", FAMILIES["Qwen3"])
    tokenizer = ChatTokenizer(model)
    stub = StubEngine()
    stub.answer = lambda token_ids, seed: tokenizer.encode(says(tokenizer.decode(token_ids)) + "<|im_end|>")
    stub.version = "0"
    await stub.start()
    try:
        async with played(name, stub.url, model, max_new_tokens=400) as (outcome, rollout):
            assert outcome.reward == reward
            assert {key: outcome.parts[key] for key in parts} == parts
            assert outcome.parts["truncated"] == 0.0
            recorded = [ids.tolist() for ids in rollout.sequences]
            for request in stub.requests:
                given = request["token_ids"]
                assert any(ids[: len(given)] == given for ids in recorded)
    finally:
        await stub.stop()
