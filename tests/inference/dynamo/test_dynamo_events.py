"""KV events of vLLM, with salts where Dynamo looks for them."""

from __future__ import annotations

from typing import Any

from hpcrl.inference.dynamo.events import Salts


def stored(hashes: list[Any], parent: Any = None, keys: Any = None) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "extra_keys": keys}


def test_a_chain_has_the_salt_of_its_first_block() -> None:
    salts = Salts()
    assert salts.name(stored([1, 2], None, [("3-a",), None]))["cache_salt"] == "3-a"
    assert salts.name(stored([b"x"], 2, [None]))["cache_salt"] == "3-a"
    assert salts.name(stored([5], b"x"))["cache_salt"] == "3-a"
    assert salts.name(stored([9], None, [["adapter", ["image", 0], "4", b"digest"]]))["cache_salt"] == "4"


def test_what_has_no_salt_is_left_as_it_is() -> None:
    salts = Salts()
    for event in (stored([1]), stored([2], None, [None]), stored([3], 77), {"type": "Other"}, ["BlockStored", [1]], 5):
        assert salts.name(event) is event
    assert len(salts) == 0


def test_removed_blocks_are_forgotten() -> None:
    salts = Salts()
    salts.name(stored([1, 2, 3], None, [("1",)]))
    salts.name({"type": "BlockRemoved", "block_hashes": [2, 99]})
    assert len(salts) == 2
    assert "cache_salt" not in salts.name(stored([4], 2))
    salts.name({"type": "AllBlocksCleared"})
    assert len(salts) == 0
