"""Functions of replies, called in real sandboxes with the arguments of a row, in the forms of published data sets."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from code_testing import SHARE, made, score_of, skip_without_sandboxes
from dataset_testing import OneReply, make_dataset, write_jsonl

from hpcrl.errors import ConfigError
from hpcrl.rollouts.environments.rewards import packed_tests
from hpcrl.rollouts.environments.rewards.code_cases import CodeTestsError
from hpcrl.rollouts.environments.rewards.code_check import CodeCheck
from hpcrl.rollouts.environments.rewards.code_compare import same_value
from hpcrl.rollouts.environments.rewards.code_tests import read_code_tests
from hpcrl.rollouts.environments.rewards.packed_tests import UnpackError, is_packed, unpacked_text

ROWS = Path(__file__).parent / "code_rows"
FORMS: dict[str, dict[str, Any]] = {
    "apps": {"tests": "input_output"},
    "livecodebench": {"tests": ["public_test_cases", "private_test_cases"], "entry_point": "metadata"},
}


def calls(*outputs: Any, given: Any = ()) -> dict[str, Any]:
    """A row whose function ``f`` is called once for each output, with 1, 2, 3 or the given arguments."""
    inputs = [[number] for number in range(1, len(outputs) + 1)]
    return {"tests": {"fn_name": "f", "inputs": list(given) or inputs, "outputs": list(outputs)}}


def packed(value: Any, protocol: int = 4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


@pytest.fixture(scope="module")
def share() -> Iterator[CodeCheck]:
    """A checker whose sandboxes all tests use."""
    skip_without_sandboxes()
    with closing(CodeCheck(made(**SHARE))) as check:
        yield check


def example_rows(form: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROWS / f"{form}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_published_forms(form: str) -> None:
    skip_without_sandboxes()
    with closing(CodeCheck(made(**{**SHARE, "score": "all"}, **FORMS[form]))) as check:
        rows = example_rows(form)
        assert [score_of(check, row["right"], row) for row in rows] == [1] * 5
        assert [score_of(check, row["wrong"], row) for row in rows] == [0] * 5


async def test_environment_with_functions_and_streams() -> None:
    skip_without_sandboxes()
    settings = {"columns": {"answer": "right"}, "template": "{question_content}\n\n{starter_code:optional}"}
    reward = {"kind": "code", **FORMS["livecodebench"]}
    environment = make_dataset(ROWS / "livecodebench.jsonl", reward, demonstration="```\n{right}\n```", **settings)
    for index in range(5):
        prompt = environment.prompt("train", index)
        assert (await environment.rollout(prompt, OneReply(prompt.data.demonstration))).reward == 1
        assert (await environment.rollout(prompt, OneReply("```\nprint(1, 2, 3)\n```"))).reward == 0
    environment.close()


@pytest.mark.parametrize(
    ("program", "share_of_tests"),
    [
        ("def f(x): return x * 2", 1),
        ("class Solution:\n  def f(self, x): return x * 2", 1),
        ("class Solution:\n  @staticmethod\n  def f(x): return x * 2", 1),
        ("class Solution:\n  def __init__(self, x): self.x = x\ndef f(x): return x * 2", 1),
        ("class Solution:\n  def f(self, x): return 0\ndef f(x): return x * 2", 0),
        ("class Solution:\n  n = 0\n  def f(self, x):\n    self.n += x\n    return self.n * 2", 1),
        ("class Solution:\n  def __init__(self, x): pass\n  def f(self, x): return x * 2", 0),
        ("def f(x): return 4", 0.333),
        ("def f(x): return str(x * 2)", 0),
        ("def f(x): print(x * 2)", 0),
        ("def g(x): return x * 2", 0),
        ("f = 2", 0),
        ("Solution = 2\ndef f(x): return x * 2", 1),
        ("def f(x):\n  while x == 1: pass\n  return x * 2", 0.667),
        ("def f(x):\n  if x == 1: return 'x' * (1 << 30)\n  return x * 2", 0.667),
        ("def f(x):\n  if x == 1: import os; os._exit(0)\n  return x * 2", 0.667),
        ("def f(x, n=5000): return x * 2 if n == 0 else f(x, n - 1)", 1),
        ("def f(x): return x * 2\nif __name__ == '__main__':\n  input()", 1),
        ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", 0),
    ],
)
def test_functions(share: CodeCheck, program: str, share_of_tests: float) -> None:
    assert score_of(share, program, calls(2, 4, 6)) == share_of_tests


EQUAL = "__eq__ = __le__ = __ge__ = __bool__ = __contains__ = lambda *a: True"
SENTENCE = "0 ready  \\n1 test 0 P\\n2 test 1 P\\n3 end 0 2 0 0\\n"
BRIBES = {
    "ends with success": "import os\nos._exit(0)",
    "ends inside with success": "def f(x):\n  import os\n  os._exit(0)",
    "equal to everything": f"class E:\n  {EQUAL}\ndef f(x): return E()",
    "number equal to everything": f"class E(int):\n  {EQUAL}\ndef f(x): return E(7)",
    "list equal to everything": f"class E(list):\n  {EQUAL}\n  __len__ = lambda s: 2\ndef f(x): return E()",
    "mapping that has everything": f"class E(dict):\n  {EQUAL}\n  __missing__ = lambda s, k: s\ndef f(x): return E()",
    "text equal to everything": f"class E(str):\n  {EQUAL}\ndef f(x): return E('?')",
    "class with a lie": f"class E:\n  {EQUAL}\n  __class__ = list\ndef f(x): return E()",
    "patched json": "import json\njson.dumps = lambda *a, **b: '[\"v\", [true, []]]'\ndef f(x): return 0",
    "patched json with a reference": 'import json\njson.dumps = lambda *a, **b: \'["v", [["h", 0], []]]\'\ndef f(x): 0',
    "patched encoder": (
        "import sys\nname = next(each for each in sys.modules if each.endswith('code_values'))\n"
        "sys.modules[name].encode_value = lambda *a: True\ndef f(x): return 0"
    ),
    "patched comparison": "import builtins\nbuiltins.isinstance = builtins.all = lambda *a: True\ndef f(x): return 0",
    "prints results": f"def f(x): print('{SENTENCE}')\nprint('{SENTENCE}')",
    "verdict on every descriptor": (
        f"import os\ndef f(x):\n  for fd in range(256):\n    try: os.write(fd, b'{SENTENCE}')\n    except OSError: pass"
    ),
    "answers of the channel": 'import os, sys\nos.write(int(sys.orig_argv[-1]), b\'["v", [["f", true]]]\\n\' * 99)',
    "descriptors of the judge": (
        "import os\ndef f(x):\n  for fd in range(32):\n"
        f"    try: os.write(os.open(f'/proc/{{os.getppid()}}/fd/{{fd}}', os.O_WRONLY), b'{SENTENCE}')\n"
        "    except OSError: pass\n"
    ),
    "memory of the judge": "import os\ndef f(x): return open(f'/proc/{os.getppid()}/mem', 'rb').read()",
    "end of the judge": "import os\nos.kill(os.getppid(), 9)\ndef f(x): return [2, 4]",
    "expected values among its objects": (
        "import gc\ndef f(x): return next(each for each in gc.get_objects() if each == [2, 4] and each is not x)"
    ),
    "expected values among its frames": (
        "import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n"
        "    if 'wanted' in frame.f_locals: return frame.f_locals['wanted']\n    frame = frame.f_back"
    ),
    "raises what tests raise": "def f(x): raise AssertionError",
    "raises the end": "def f(x): raise StopIteration",
    "exits": "def f(x): raise SystemExit(0)",
    "changes its argument": "def f(x): x[:] = [2, 4]",
}


@pytest.mark.parametrize("bribe", BRIBES)
def test_bribes_of_functions(share: CodeCheck, bribe: str) -> None:
    row = calls([2, 4], [3, 5], given=([[4, 2]], [[5, 3]]))
    assert score_of(share, "def f(x): return sorted(x)", row) == 1
    assert score_of(share, BRIBES[bribe], row) == 0


@pytest.mark.parametrize(
    ("name", "arguments", "output"),
    [("gcd", [6, 4], 2), ("sum", [[6, 4]], 10), ("comb", [6, 4], 15), ("Counter", ["aab"], {"a": 2, "b": 1})],
)
def test_function_of_python_is_not_that_of_the_program(
    share: CodeCheck, name: str, arguments: list[Any], output: Any
) -> None:
    """Modules whose names a program may use without an import have functions with the names of questions."""
    row = {"tests": {"fn_name": name, "inputs": [arguments], "outputs": [output]}}
    assert score_of(share, "x = accumulate([1]), deque(), heappop, inf, List[int]", row) == 0
    assert score_of(share, f"def {name}(*x): return {output}", row) == 1


@pytest.mark.parametrize(
    ("program", "outputs", "share_of_tests"),
    [
        ("def f(x): return x", ([1], [2]), 1),
        ("def f(x): return [x]", ([1], [2]), 1),
        ("def f(x): return [[x]]", ([1], [2]), 0),
        ("def f(x): return x", ([1], [2, 2]), 0),
        ("def f(x): return [x] * x", ([1], [2, 2]), 1),
        ("def f(x): return 1", ([1, 5],), 0),
        ("def f(x): return [x]", (1, 2), 0),
        ("def f(x): return (x, (x,))", ([1, [1]], [2, [2]]), 1),
    ],
)
def test_layers_of_lists(share: CodeCheck, program: str, outputs: tuple[Any, ...], share_of_tests: float) -> None:
    """An output in a list of one element is right without that list, where the whole row is written so."""
    assert score_of(share, program, calls(*outputs)) == share_of_tests


def test_json_outputs_have_no_layer_around_them() -> None:
    skip_without_sandboxes()
    row = {"tests": [{"input": "3", "output": "[3]", "testtype": "functional"}], "meta": {"func_name": "f"}}
    with closing(CodeCheck(made(**SHARE, entry_point="meta"))) as check:
        assert score_of(check, "def f(x): return x", row) == 0
        assert score_of(check, "def f(x): return [x]", row) == 1


def test_code_around_a_function() -> None:
    skip_without_sandboxes()
    row = {**calls(6, 12), "before": "FACTOR = 3", "setup": "f = doubled"}
    program = "def doubled(x): return x * 2 * FACTOR"
    with closing(CodeCheck(made(**SHARE, before="before", setup="setup"))) as check:
        assert score_of(check, program, row) == 1
    with closing(CodeCheck(made(**SHARE))) as check:
        assert score_of(check, program, row) == 0


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (0.6666666, 0.66667, True),
        (0.6665, 0.66667, False),
        (2, 2.0, True),
        (2.0, 2, True),
        (1.9999999, 2, False),
        (50000000000000001, 50000000000000000, False),
        ([50000000000000001], [50000000000000000], False),
        (1e-5, 0.0, False),
        (-1e-17, 0.0, True),
        (float("inf"), float("inf"), True),
        (1e300, float("inf"), False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        ("1.0", 1.0, False),
        (b"a", "a", False),
        ((1, (2,)), [1, [2]], True),
        ({1, 2}, [1, 2], False),
        ([1], [1, 1], False),
        ({1: (2,)}, {"1": [2]}, True),
        ({"1": 2, 1: 2}, {"1": 2, "2": 2}, False),
        ({"a": 1}, {"a": 1, "b": 1}, False),
        (None, None, True),
        (0, None, False),
        (None, False, False),
        ("", [], False),
        ([], {}, False),
    ],
)
def test_equal_values(found: Any, expected: Any, same: bool) -> None:
    assert same_value(found, expected) is same


def functional(given: Any, wanted: Any, kind: str = "functional") -> dict[str, Any]:
    return {"input": given, "output": wanted, "testtype": kind}


DEEP = "[" * 200 + "]" * 200


@pytest.mark.parametrize(
    ("tests", "what"),
    [
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f("}, "fn_name of column 'tests' is not a name of Python"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": 7}, "fn_name of column 'tests' is not a name"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "lambda"}, "fn_name of column 'tests' is not a name"),
        ({"inputs": [[1], 2], "outputs": [1, 2], "fn_name": "f"}, "test 2 of column 'tests' has an input that is"),
        ({"inputs": ["a"], "outputs": ["1"], "fn_name": "f"}, "test 1 of column 'tests' has an input of a function"),
        ({"inputs": ["1"], "outputs": [1], "fn_name": "f"}, "that is not text with JSON"),
        ({"inputs": [[1]], "outputs": [], "fn_name": "f"}, "not as many inputs as outputs"),
        ({"inputs": [], "outputs": [], "fn_name": "f"}, "has no tests"),
        (f'{{"inputs": [[{DEEP}]], "outputs": [1], "fn_name": "f"}}', "deeper than 100"),
        ([functional("1", "1"), functional("1\n[", "1")], "test 2 of column 'tests' has an input of a function"),
        ([functional("1, 2", "1")], "test 1 of column 'tests' has an input of a function that is not JSON"),
        ([functional("1", "yes")], "test 1 of column 'tests' has an output of a function that is not JSON"),
        ([functional(DEEP, "1")], "deeper than 100"),
        ([functional(1, 1)], "not text with JSON"),
        ([functional("1", "1", "interactive")], "a testtype other than stdin and functional"),
        ({"inputs": [[{1}]], "outputs": [object()], "fn_name": "f"}, "a value of type object"),
        (packed({"a": 1}), "column 'tests' is a pickle of something else than text"),
        (packed("[1"), "column 'tests' is not JSON when it is unpacked"),
        (packed("[]"), "has no tests"),
    ],
)
def test_wrong_functional_tests(tests: Any, what: str) -> None:
    with pytest.raises(CodeTestsError, match=what):
        read_code_tests(made(entry_point="name"), {"tests": tests, "name": "f"})


@pytest.mark.parametrize(
    ("settings", "row", "what"),
    [
        ({}, {"tests": [functional("1", "1")]}, "without a name: entry_point names the column"),
        ({"entry_point": "meta"}, {"tests": [functional("1", "1")], "meta": "{}"}, "without a name"),
        ({"entry_point": "meta"}, {"tests": ["assert f"], "meta": {"func_name": 1}}, "func_name of column 'meta'"),
        ({"tests": ["a", "b"]}, {"a": [functional("1", "1", "stdin")]}, "column 'b' does not exist"),
        ({"tests": ["a", "b"]}, {"a": None, "b": "[]"}, "columns 'a' and 'b' have no tests"),
        ({"tests": ["a", "b"]}, {"a": ["assert f()"], "b": [functional("1", "1", "stdin")]}, "assert lines, and"),
        ({"tests": ["tests", "b"]}, {**calls(1), "b": {**calls(1)["tests"], "fn_name": "g"}}, "two functions, f and g"),
        ({"setup": "s"}, {"tests": [functional("1", "1", "stdin")], "s": "x = 1"}, "before and setup cannot be used"),
    ],
)
def test_wrong_columns_of_tests(settings: dict[str, Any], row: dict[str, Any], what: str) -> None:
    with pytest.raises(CodeTestsError, match=what):
        read_code_tests(made(**settings), row)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", ["", "[]", "ä\n\U0001f600" * 99, "x" * 70000])
def test_pickles_of_text(text: str, protocol: int) -> None:
    assert is_packed(packed(text, protocol))
    assert unpacked_text(packed(text, protocol)) == text


class _Planted:
    """Calls a function where it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("planted"),))


@pytest.mark.parametrize(
    "value", [_Planted(), ["a", _Planted()], b"text", bytearray(b"text"), 7, None, ["text"], ("a", "b"), {"a": "b"}]
)
def test_other_pickles_are_refused(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnpackError, match="a pickle of something else than text"):
        unpacked_text(packed(value))
    assert not list(tmp_path.iterdir())


def raw(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (raw(b""), "not a pickle"),
        (raw(b"[]"), "not a pickle"),
        (raw(pickle.dumps("a")[:-1]), "not a pickle"),
        (raw(pickle.dumps("a") + b"."), "a pickle of something else than text"),
        (raw(b"Va\nVb\n."), "a pickle of something else than text"),
        (raw(b"Va\n" + b"p0\n" * 9 + b"."), "a pickle of something else than text"),
        (raw(b"cos\nsystem\n(Vtouch planted\ntR."), "a pickle of something else than text"),
        (raw(b"X\xff\xff\xff\xffa."), "not a pickle"),
        (packed("text")[:-8], "cannot be unpacked"),
        (raw(pickle.dumps("a" * 99))[:24], "cannot be unpacked"),
        (base64.b64encode(zlib.compress(pickle.dumps("a")) + b"b").decode(), "something behind its end"),
    ],
)
def test_damaged_pickles_are_refused(text: str, what: str) -> None:
    with pytest.raises(UnpackError, match=what):
        unpacked_text(text)


def test_unpacked_text_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    text = packed("a" * (1 << 20))
    assert len(text) < 10000
    monkeypatch.setattr(packed_tests, "_MAX_BYTES", 1 << 20)
    with pytest.raises(UnpackError, match="has more than 1 MiB"):
        unpacked_text(text)


def test_wrong_functional_rows_are_named(tmp_path: Path) -> None:
    rows = example_rows("livecodebench")
    rows[1]["private_test_cases"] = packed(["text"])
    rows[3]["private_test_cases"] = json.dumps([functional("[1", "1")])
    file = write_jsonl(tmp_path / "wrong.jsonl", rows)
    reward = {"kind": "code", **FORMS["livecodebench"]}
    with pytest.raises(ConfigError) as caught:
        make_dataset(file, reward, columns={"prompt": "question_content", "answer": "right"})
    text = str(caught.value)
    assert "line 2: column 'private_test_cases' is a pickle of something else than text" in text
    assert "line 4: test 1 of column 'private_test_cases' has an input of a function that is not JSON" in text
