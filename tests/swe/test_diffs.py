"""Unified diffs: read, applied, undone and made."""

from __future__ import annotations

import pytest

from hpcrl.swe.diffs import DiffError, apply_diff, make_diff, parse_diff

BEFORE = {"a.py": "one\ntwo\nthree\n" + "x\n" * 20 + "last", "gone.py": "old\n", "same.py": "same\n"}
AFTER = {"a.py": "one\n2\nthree\nfour\n" + "x\n" * 20 + "end\n", "new.py": "new\x0cpage\n", "same.py": "same\n"}


def test_a_diff_makes_the_other_side_of_both() -> None:
    diff = parse_diff(make_diff(BEFORE, AFTER))
    assert apply_diff(diff, BEFORE) == {"a.py": AFTER["a.py"], "gone.py": None, "new.py": AFTER["new.py"]}
    assert apply_diff(diff, AFTER, reverse=True) == {"a.py": BEFORE["a.py"], "gone.py": "old\n", "new.py": None}


def test_lines_that_git_adds_are_read() -> None:
    text = "diff --git a/a.py b/a.py\nindex 1..2 100644\n--- a/a.py\n+++ b/a.py\n"
    text += "@@ -1,2 +1,2 @@ def f():\n one\n-two\n+2\n"
    assert apply_diff(parse_diff(text), BEFORE)["a.py"] == BEFORE["a.py"].replace("two", "2")


def test_a_place_that_has_moved_is_found_where_it_is_the_only_one() -> None:
    text = "--- a/a.py\n+++ b/a.py\n@@ -1,1 +1,1 @@\n-three\n+3\n"
    assert apply_diff(parse_diff(text), BEFORE)["a.py"] == BEFORE["a.py"].replace("three", "3")
    with pytest.raises(DiffError, match=r"does not fit a\.py"):
        apply_diff(parse_diff("--- a/a.py\n+++ b/a.py\n@@ -1,1 +1,1 @@\n-x\n+y\n"), BEFORE)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("hello", "not a unified diff"),
        ("--- a/a\n+++ b/a\n@@ nonsense\n", "no line numbers"),
        ("--- a/a\n+++ b/a\n@@ -1,2 +1,2 @@\n one\n", "another number of lines"),
        ("--- a/a\n+++ b/a\n@@ -1,1 +1,1 @@\n*one\n", "begins with"),
        ("--- a/../../etc/passwd\n+++ b/../../etc/passwd\n@@ -1 +1 @@\n-a\n+b\n", "outside of the repository"),
        ("Binary files a/x and b/x differ\n", "binary"),
        ("rename from a\nrename to b\n", "renamed"),
    ],
)
def test_what_is_no_diff_is_named(text: str, what: str) -> None:
    with pytest.raises(DiffError, match=what):
        parse_diff(text)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(DiffError, match=r"missing\.py"):
        apply_diff(parse_diff("--- a/missing.py\n+++ b/missing.py\n@@ -1 +1 @@\n-a\n+b\n"), BEFORE)
