"""Bugs: made at the positions of nodes, and nothing else of a file changes."""

from __future__ import annotations

import ast
import random

import pytest

from hpcrl.swe.making.mutations import SourceFile, mutate

TEXT = '''class Box:
    """A box."""

    def size(self, a, b = 2):  # ü
        """Return it."""
        if a  <  b and (a or b):
            return self.other( a, b )
        for each in range(3): break
        self.kept = f"{a + 1}" + "x"
        a += 1
        return a not in (1, True)


def plain():
    pass
'''


def test_each_kind_of_bug_changes_its_place_alone() -> None:
    file = SourceFile("box.py", TEXT)
    function = file.functions[0]
    assert (function.name, function.line) == ("Box.size", 4)
    bugs = file.bugs(function)
    assert {bug.kind for bug in bugs} == {
        *("compare", "boolean", "condition", "return", "arguments", "constant", "loop", "arithmetic", "assignment"),
    }
    for bug in bugs:
        text = file.changed([bug])
        assert text is not None, bug
        content = TEXT.encode()
        assert text.encode() == content[: bug.begin] + bug.text.encode() + content[bug.end :]
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(TEXT)), bug
        assert "# ü" in text


def test_operators_keep_their_blanks() -> None:
    file = SourceFile("box.py", TEXT)
    texts = [file.changed([bug]) or "" for bug in file.bugs(file.functions[0])]
    assert any("if a  <=  b and" in text for text in texts)
    assert any("self.other( b, a )" in text for text in texts)
    assert any("return a in (1" in text for text in texts)


def test_places_inside_formatted_strings_are_left_alone() -> None:
    file = SourceFile("box.py", 'def f(a):\n    return f"{a + 1:>{2}}"\n')
    assert {bug.kind for bug in file.bugs(file.functions[0])} == {"return"}


def test_a_function_is_removed_behind_its_docstring() -> None:
    file = SourceFile("box.py", TEXT)
    bug = file.removal(file.functions[0])
    assert bug is not None
    assert '"""Return it."""\n        raise NotImplementedError\n\n\ndef plain' in (file.changed([bug]) or "")
    assert file.removal(file.functions[1]) is None


def test_bugs_that_overlap_are_refused() -> None:
    file = SourceFile("box.py", TEXT)
    removal = file.removal(file.functions[0])
    assert removal is not None
    assert file.changed([removal, file.bugs(file.functions[0])[3]]) is None


@pytest.mark.parametrize("text", ["def f(:\n", "x = 1\n", "def f():\n    '''only this'''\n"])
def test_a_file_without_places_has_no_bugs(text: str) -> None:
    file = SourceFile("x.py", text)
    assert all(mutate(file, each, random.Random(0), remove=False) is None for each in file.functions)


def test_draws_depend_on_the_seed_alone() -> None:
    file = SourceFile("box.py", TEXT)
    drawn = [mutate(file, file.functions[0], random.Random(seed), remove=False) for seed in range(30)]
    assert drawn == [mutate(file, file.functions[0], random.Random(seed), remove=False) for seed in range(30)]
    assert len({bug for bug in drawn if bug}) > 6
