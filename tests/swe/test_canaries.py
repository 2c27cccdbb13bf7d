"""Canaries fail whatever the tested code does, and names in a judged run are random."""

from __future__ import annotations

import ast
import random

import pytest

from hpcrl.swe.judging.canaries import lay_tests

FILE = '''import unittest
import pytest

# ü
@pytest.mark.parametrize("a", [1, 2])
def test_equal(a):
    """It is equal."""
    assert a == value()
    assert flag() is True


def test_flag():
    assert not wrong()


def test_skipped():
    pytest.skip("later")
    assert 1 == 1


def test_early(a=1):
    if a:
        return
    assert a == 1


def test_named():
    assert 1 == 1


test_other = test_named


class TestMore(unittest.TestCase):
    def test_b(self):
        self.assertFalse(wrong())

    def test_a(self):
        self.assertEqual(value(), 1, "message")
'''
NAMES = ["test_equal[1]", "test_equal[2]", "test_flag", "test_skipped", "test_early", "test_named"]
TESTS = [f"tests/test_x.py::{name}" for name in [*NAMES, "TestMore::test_a", "TestMore::test_b"]]


def _lay(seed: int, **more: bool):  # type: ignore[no-untyped-def]
    return lay_tests({"tests/test_x.py": FILE}, TESTS, first=TESTS[:1], rng=random.Random(seed), **more)


def test_all_tests_are_there_under_other_names() -> None:
    laid = _lay(1)
    assert sorted(laid.real.values()) == sorted(TESTS)
    kept = [name for name, test in laid.real.items() if name == test]
    # it is named elsewhere in the file
    assert kept == ["tests/test_x.py::test_named"]
    text = laid.files["tests/test_x.py"]
    names = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    for name in [*laid.real, *laid.canaries]:
        assert name.partition("[")[0].rpartition("::")[2] in names
    # unittest runs by name: the order stays
    in_class = sorted(name for name in laid.real if "TestMore" in name)
    assert [laid.real[name].rpartition("::")[2] for name in in_class] == ["test_a", "test_b"]


def test_names_can_be_kept() -> None:
    laid = _lay(1, rename=False)
    assert all(name == test for name, test in laid.real.items())
    assert laid.canaries


def test_a_renamed_test_has_canaries_under_both_names() -> None:
    """Code under test that lies to callers with a known name, or to those with another one, lies to a canary."""
    for seed in range(8):
        laid = _lay(seed)
        assert not set(laid.real) & laid.canaries
        for test in set(laid.copied.values()):
            names = {name.partition("[")[0] for name, copied in laid.copied.items() if copied == test}
            # one that is named elsewhere in the file keeps its name, and has no other canary of that name
            kept = test.endswith("::test_named")
            assert (test in names, len(names)) == ((False, 1) if kept else (True, 2))


def test_tests_whose_assertion_may_not_be_reached_are_not_copied() -> None:
    copied = {test.rpartition("::")[2] for test in _lay(1, every=True).copied.values()}
    assert copied == {"test_equal", "test_flag", "test_named", "test_a", "test_b"}


@pytest.mark.parametrize("value", [0, 1, 2, True, False, None, "1", b"1", 1.0, float("inf"), [1], (1,), {1}, {1: 1}])
def test_a_canary_fails_whatever_the_tested_code_gives(value: object) -> None:
    """Right or wrong."""
    for seed in range(8):
        for wrong in (True, False):
            laid = _lay(seed, every=seed % 2 == 0)
            text = laid.files["tests/test_x.py"]
            space = {"value": lambda: value, "flag": lambda wrong=wrong: not wrong, "wrong": lambda wrong=wrong: wrong}
            exec(text, space)
            for name in laid.canaries:
                function = name.partition("::")[2].partition("[")[0]
                where, _, last = function.rpartition("::")
                run = getattr(space[where](last), last) if where else space[last]  # type: ignore[operator]
                parameters = (1,) if "[" in name else ()
                with pytest.raises(AssertionError):
                    run(*parameters)


def test_a_file_that_is_no_python_gets_a_canary_beside_it() -> None:
    laid = lay_tests({"tests/a.py": "def f(:"}, ["tests/a.py::test_a"], first=(), rng=random.Random(1))
    assert laid.real == {"tests/a.py::test_a": "tests/a.py::test_a"}
    [(path, text)] = laid.files.items()
    assert path.startswith("tests/test_")
    assert "assert" in text
    assert len(laid.canaries) == 1


def test_a_test_and_its_canary_use_the_same_names() -> None:
    """Code under test sees the functions that call it; the real ones still pass."""
    for seed in range(8):
        laid = _lay(seed, every=True, rename=False)
        space = {"value": lambda: 1, "flag": lambda: True, "wrong": lambda: False}
        exec(laid.files["tests/test_x.py"], space)
        for canary, real in laid.copied.items():
            found = []
            for test in (canary, real):
                where, _, last = test.partition("::")[2].partition("[")[0].rpartition("::")
                function = getattr(space[where], last) if where else space[last]
                found.append(set(function.__code__.co_names))  # type: ignore[attr-defined]
            assert found[0] == found[1]
        space["test_equal"](1)  # type: ignore[operator]
        space["test_named"]()  # type: ignore[operator]
