"""Kinds of text in a stored rollout: control tokens, thinking, tool calls, outputs of tools.

``python -m hpcrl.rollouts.rendering.spoken < request.json`` prints one JSON document. `hpcrl rollouts show` calls it
with the interpreter of the orchestrator, which has the parsers of chat formats.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hpcrl.config.chat import ChatConfig
from hpcrl.models.token_pieces import TokenPiece, pieces_of
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.rendering.renderer import Renderer

_TYPED_BY_TOOLS = ("glm-4.5", "glm-5", "minimax-m2", "nemotron-3", "qwen3.5")
"""Formats whose arguments are text or JSON depending on the tools, which are not stored with a rollout."""


class SpokenTurn(msgspec.Struct, frozen=True):
    """Messages before a turn, and the turn, in pieces of a kind and a text each.

    Kinds are ``control``, ``said`` and ``tool result`` for messages, ``thinking``, ``text``, ``tool call`` and
    ``bad call`` for sampled tokens, and ``problem``, which describes what is wrong with the calls before it.
    """

    said: list[TokenPiece]
    sampled: list[TokenPiece]


def spoken_turns(
    renderer: Renderer, tokenizer: ChatTokenizer, turns: Sequence[tuple[list[int], list[int]]]
) -> list[SpokenTurn]:
    """Return the turns of a rollout in pieces.

    Parameters
    ----------
    turns:
        Token ids of the messages before each turn, and of the sampled tokens.
    """
    found, called = [], False
    for number, (said, sampled) in enumerate(turns):
        parsed = renderer.parse(sampled, said=said, turn=number)
        typed = renderer.format in _TYPED_BY_TOOLS
        bad = [call for call in parsed.calls if call.status != "ok" and not (typed and call.status == "invalid_json")]
        kinds = ["text"] * len(sampled)
        for call in parsed.calls:
            begin, end = call.span or (0, 0)
            for at in range(begin, min(end, len(sampled))):
                kinds[at] = "bad call" if call in bad else "tool call"
        pieces = [
            part for piece in pieces_of(tokenizer, sampled, kinds) for part in _with_thinking(piece, parsed.thinking)
        ]
        problems = [f"{call.name or 'a call'}: {call.error or call.status}" for call in bad]
        pieces += [TokenPiece("problem", problem) for problem in problems]
        found.append(SpokenTurn(pieces_of(tokenizer, said, "tool result" if called else "said"), pieces))
        called = bool(parsed.calls)
    return found


def _with_thinking(piece: TokenPiece, thinking: str) -> Iterator[TokenPiece]:
    """Yield the parts of a text: thinking and other text."""
    thought, own = thinking.strip(), piece.text.strip()
    if piece.kind != "text" or not thought or not own:
        yield piece
    elif own in thought:
        yield TokenPiece("thinking", piece.text)
    elif thought in piece.text:
        before, _, after = piece.text.partition(thought)
        for kind, text in (("text", before), ("thinking", thought), ("text", after)):
            if text:
                yield TokenPiece(kind, text)
    else:
        yield piece


def main() -> None:
    """Read a request from the standard input and print the answer."""
    request = msgspec.json.decode(sys.stdin.buffer.read())
    chat, path = ChatConfig.model_validate(request["chat"]), Path(request["model_dir"])
    renderer = Renderer.of_model(path, chat_format=chat.format, variables=chat.variables)
    turns = spoken_turns(renderer, ChatTokenizer(path), [tuple(turn) for turn in request["turns"]])
    sys.stdout.buffer.write(msgspec.json.encode({"turns": turns}) + b"\n")


if __name__ == "__main__":
    main()
