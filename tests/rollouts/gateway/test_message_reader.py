"""Messages of a request are read once, and those of a history that was changed are read again."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from hpcrl.rollouts.gateway import messages
from hpcrl.rollouts.gateway.errors import GatewayError
from hpcrl.rollouts.gateway.messages import MessageReader, ReadHistory
from hpcrl.storage.msgspec_types import decode_json

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


def made() -> MessageReader:
    return MessageReader(knows_developer=lambda: False)


def read(reader: MessageReader, given: Any, tools: Any = (), **layout: Any) -> ReadHistory:
    offered = reader.tools(msgspec.Raw(json.dumps(tools).encode()))
    return reader.read(msgspec.Raw(json.dumps(given, **layout).encode()), offered)


def history(turns: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "system", "content": "Be terse."}]
    for number in range(turns):
        call = {"id": f"call_{number}", "function": {"name": "bash", "arguments": json.dumps({"n": number})}}
        found += [
            {"role": "user", "content": f'Next, "{number}", [1], {{}}: ü'},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": f"result {number}"},
        ]
    return found


@pytest.mark.parametrize("layout", [{}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}])
def test_a_history_that_grows_reads_as_one_that_is_new(layout: Any) -> None:
    whole, reader = history(12), made()
    for length in range(1, len(whole) + 1):
        assert read(reader, whole[:length], [TOOL], **layout) == read(made(), whole[:length], [TOOL], **layout)


def test_a_history_that_is_changed_anywhere_reads_as_one_that_is_new() -> None:
    rng, reader, now = random.Random(3), made(), history(4)
    for number in range(200):
        match rng.randrange(6):
            case 0:
                now = now[: rng.randrange(1, len(now) + 1)]
            case 1:
                now = [*now, *history(1)]
            case 2:
                place = rng.randrange(len(now))
                now = [*now[:place], {**now[place], "content": f"changed {number}"}, *now[place + 1 :]]
            case 3:
                del now[rng.randrange(len(now))]
                now = now or history(1)
            case _:
                now = [*now, {"role": "user", "content": f"more {number}"}]
        tools = [] if rng.random() < 0.3 else [TOOL]
        layout = {"indent": 1} if rng.random() < 0.2 else {}
        fresh = made()
        # names of calls that a program has dropped are still known, which a fresh reader cannot know
        fresh._names.update(reader._names)
        assert read(reader, now, tools, **layout) == read(fresh, now, tools, **layout)


def test_only_the_new_messages_of_a_request_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def decode(data: Any, *kind: Any) -> Any:
        sizes.append(len(data))
        return decode_json(data, *kind)

    monkeypatch.setattr(messages, "decode_json", decode)
    whole, reader = history(200), made()
    read(reader, whole[:-1], [TOOL])
    sizes.clear()
    assert len(read(reader, whole, [TOOL]).messages) == len(whole)
    assert sum(sizes) < 500
    # nor are any for a request that is sent again
    sizes.clear()
    assert len(read(reader, whole, [TOOL]).messages) == len(whole)
    assert sum(sizes) < 10


def test_conversations_that_alternate_are_both_known(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = made()
    one, two = history(50), [{"role": "user", "content": "Another task."}, *history(50)]
    for conversation in (one[:-1], two[:-1]):
        read(reader, conversation)
    sizes: list[int] = []
    pieces = messages._pieces

    def noted(rest: Any) -> list[msgspec.Raw]:
        sizes.append(len(rest))
        return pieces(rest)

    monkeypatch.setattr(messages, "_pieces", noted)
    for conversation in (one, two):
        assert len(read(reader, conversation).messages) == len(conversation)
    assert max(sizes) < 500


def test_other_tools_are_another_conversation() -> None:
    reader = made()
    with_tools, without = read(reader, history(2), [TOOL]), read(reader, history(2))
    assert with_tools.messages == without.messages
    assert not set(with_tools.digests) & set(without.digests)


def test_a_bad_message_is_named_by_its_place() -> None:
    reader = made()
    read(reader, history(1))
    with pytest.raises(GatewayError, match=r"messages\[4\]"):
        read(reader, [*history(1), {"role": "user", "content": 5}])
    # and what was read before is not lost by it
    assert len(read(reader, [*history(1), {"role": "user", "content": "x"}]).messages) == 5


@pytest.mark.parametrize("given", ['"x"', "{}", "null", "[1]"])
def test_messages_that_are_no_list_of_objects_are_refused(given: str) -> None:
    with pytest.raises(GatewayError) as refused:
        made().read(msgspec.Raw(given.encode()), made().tools(msgspec.Raw()))
    assert refused.value.status == 400


@pytest.mark.parametrize("given", ['"x"', "{}", "[1]", "[{}]"])
def test_tools_that_are_no_list_of_tools_are_refused(given: str) -> None:
    with pytest.raises(GatewayError) as refused:
        made().tools(msgspec.Raw(given.encode()))
    assert refused.value.status == 400
    assert made().tools(msgspec.Raw(b"null")).tools == []
