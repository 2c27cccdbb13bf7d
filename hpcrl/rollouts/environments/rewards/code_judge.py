"""Runs assert lines, and calls of a function, inside a sandbox on a program that runs in another process there.

`code_check` sends the text of this module, of `code_host`, `code_values` and `code_compare` to the interpreter of the
sandbox on the standard input, with a request. They import nothing else of hpcrl, and run with Python 3.8 and later.
This process is the *judge*: it has the tests and the secret of the run, and executes nothing of the policy. It starts
the *host*, which executes the program. Calls in tests go to the host as JSON. Only plain data comes back (numbers,
text, lists and the like, by their values). Of any other object the tests get a reference, whose methods can be called,
and which is equal to itself alone. So no method of an object of the program decides on a test.

The judge makes itself unreadable for processes of its user before it starts the host. It signs each record about a
test with the secret, as the program of `hpcrl.swe.judging` does, and in the same form: ``number kind text signature``.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import hashlib
import importlib
import json
import os
import select
import subprocess
import sys
import time
from typing import Any, Callable, NoReturn  # noqa: UP035

from hpcrl.rollouts.environments.rewards.code_compare import same_value
from hpcrl.rollouts.environments.rewards.code_values import decode_value, encode_value

LOADER = """import json, sys, types
def load(modules):
    for name, text in modules:
        sys.modules[name] = module = types.ModuleType(name)
        exec(compile(text, name, "exec"), module.__dict__)
    return module
"""
"""Defines a function that makes modules of names and texts, and returns the last one."""
_HOST_CALL = "load(json.loads(sys.argv[1])).serve_program(int(sys.argv[2]), int(sys.argv[3]))\n"
_MAX_ANSWER = 64 << 20
"""Maximum bytes of one answer of the host."""
_PR_SET_DUMPABLE = 4
_ALIASES = {"np": "numpy", "pd": "pandas"}


class _UnsendableError(TypeError):
    """An argument in a test cannot be given to the program."""


class _ProgramGoneError(BaseException):
    """The host has ended, or takes too long. Handlers of ``Exception`` in tests do not catch it."""


class _ProgramRaisedError(Exception):
    """The program has raised an exception of its own."""


class _Link:
    """Starts hosts, and speaks with the one that lives."""

    def __init__(self, modules: list[list[str]], texts: list[str], wanted: list[str], limit_s: float) -> None:
        self._modules, self._start_host = json.dumps(modules), LOADER + _HOST_CALL
        self._texts, self._wanted, self._limit_s = texts, wanted, limit_s
        self._process: Any = None
        self._requests = self._answers = -1
        self._rest = b""
        self._deadline = 0.0
        self._names: list[Any] = []
        self._broken = False
        self.unsendable = ""

    def begin(self) -> dict[str, Any]:
        """Begin a test, and return the names of the program; they are those of a new host where it is needed."""
        self._deadline = time.monotonic() + self._limit_s
        self.unsendable = ""
        if self._broken:
            raise _ProgramGoneError  # it fails before any test of it can begin
        if self._process is None:
            self._broken = True
            self._start()
            self._names = self.ask("run", self._texts, self._wanted)
            self._broken = False
        return {name: self.decode(value) for name, value in self._names if name in self._wanted}

    def ask(self, *request: Any) -> Any:
        """Ask the host, and return its answer, or raise what the program has raised."""
        if self._process is None:
            raise _ProgramGoneError
        self._write(json.dumps(request).encode() + b"\n")
        kind, *answer = json.loads(self._line())
        if kind == "v":
            return answer[0]
        names, message = answer
        for name in names:
            found = vars(builtins).get(name)
            if found is StopIteration and request[0] != "next":
                break  # it would end a `map` in a test as if all had been compared
            if isinstance(found, type) and issubclass(found, Exception):
                raise found(message)
        raise _ProgramRaisedError(message)

    def encode(self, value: Any) -> Any:
        return encode_value(value, self._refer)

    def decode(self, value: Any) -> Any:
        return decode_value(value, lambda number: _Reference(self, int(number)))

    def _refer(self, value: Any) -> Any:
        if type(value) is _Reference:
            return ["h", object.__getattribute__(value, "_place")[1]]
        self.unsendable = type(value).__name__
        raise _UnsendableError(self.unsendable)

    def _start(self) -> None:
        their_requests, self._requests = os.pipe()
        self._answers, their_answers = os.pipe()
        os.set_blocking(self._requests, False)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", self._start_host, self._modules, str(their_requests), str(their_answers)],
                stdin=subprocess.DEVNULL,
                pass_fds=(their_requests, their_answers),
                start_new_session=True,
            )
        except OSError:
            # earlier tests have left too many processes behind
            self.end()
            raise _ProgramGoneError from None
        finally:
            os.close(their_requests)
            os.close(their_answers)

    def end(self) -> NoReturn:
        """End the host."""
        self.close()
        raise _ProgramGoneError

    def close(self) -> None:
        if self._process is not None:
            try:
                os.killpg(self._process.pid, 9)
            except OSError:
                self._process.kill()
            self._process.wait()
        for fd in (self._requests, self._answers):
            if fd >= 0:
                os.close(fd)
        self._process, self._requests, self._answers, self._rest = None, -1, -1, b""

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        return left if left > 0 else self.end()

    def _write(self, data: bytes) -> None:
        while data:
            if select.select([], [self._requests], [], self._left())[1]:
                try:
                    data = data[os.write(self._requests, data) :]
                except OSError:
                    self.end()

    def _line(self) -> bytes:
        pieces, size = [self._rest], len(self._rest)
        while b"\n" not in pieces[-1]:
            if not select.select([self._answers], [], [], self._left())[0]:
                continue
            piece = os.read(self._answers, 1 << 16)
            size += len(piece)
            if not piece or size > _MAX_ANSWER:
                self.end()
            pieces.append(piece)
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        return line


class _Reference:
    """An object of the program, which stays in the host."""

    __slots__ = ("_place",)

    def __init__(self, link: _Link, number: int) -> None:
        object.__setattr__(self, "_place", (link, number))

    def __call__(self, *args: Any, **named: Any) -> Any:
        link, number = _place_of(self)
        given = [link.encode(each) for each in args]
        result, changed = link.ask("call", number, given, {name: link.encode(each) for name, each in named.items()})
        for place, value in changed:
            _replace(args[int(place)], link.decode(value))
        return link.decode(result)

    def __getattr__(self, name: str) -> Any:
        link, number = _place_of(self)
        if name.startswith("__"):
            raise AttributeError(name)
        return link.decode(link.ask("get", number, name))

    def __setattr__(self, name: str, value: Any) -> None:
        link, number = _place_of(self)
        link.ask("set", number, name, link.encode(value))

    def __getitem__(self, key: Any) -> Any:
        link, number = _place_of(self)
        return link.decode(link.ask("item", number, link.encode(key)))

    def __len__(self) -> int:
        found: int = self._asked("len")
        return found

    def __iter__(self) -> Any:
        return self._asked("iter")

    def __next__(self) -> Any:
        return self._asked("next")

    def __str__(self) -> str:
        found: str = self._asked("str")
        return found

    def __repr__(self) -> str:
        found: str = self._asked("repr")
        return found

    def __bool__(self) -> bool:
        raise TypeError("an object of the program is neither true nor false")

    def _asked(self, operation: str) -> Any:
        link, number = _place_of(self)
        return link.decode(link.ask(operation, number))


def _place_of(reference: _Reference) -> tuple[_Link, int]:
    found: tuple[_Link, int] = object.__getattribute__(reference, "_place")
    return found


def _replace(target: Any, value: Any) -> None:
    """Give a mutable argument the content that the program has given to its copy."""
    if type(target) is not type(value):
        raise TypeError("an argument has become another one")
    if isinstance(target, (list, bytearray)):
        target[:] = value
    else:
        target.clear()
        target.update(value)


def _reporter(channel: int, key: bytes) -> Callable[[str, str], None]:
    """Return a function that writes one signed record."""
    count = 0

    def report(kind: str, text: str) -> None:
        nonlocal count
        record = b"%d %b %b" % (count, kind.encode(), text.encode("utf-8", "backslashreplace"))
        count += 1
        rest = record + b" " + hashlib.blake2b(record, key=key, digest_size=16).hexdigest().encode() + b"\n"
        while rest:
            rest = rest[os.write(channel, rest) :]

    return report


def _become_unreadable() -> None:
    """Refuse other processes of the same user the memory and the descriptors of this one."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _imported(tests: list[ast.Module]) -> dict[str, Any]:
    """Import modules whose attributes tests use without an import: none of the program may stand in their place."""
    nodes = [node for tree in tests for node in ast.walk(tree)]
    own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    known = getattr(sys, "stdlib_module_names", names)  # since Python 3.10
    found: dict[str, Any] = {}
    for name in names - own:
        module = _ALIASES.get(name, name)
        if name in known or module in _ALIASES.values():
            try:
                found[name] = importlib.import_module(module)
            except ImportError:
                continue
    return found


def _assert_test(code: Any, modules: dict[str, Any]) -> Callable[[_Link], None]:
    """Return a test that executes an assert line, and raises what that raises."""

    def test(link: _Link) -> None:
        exec(code, {"__name__": "tests", **link.begin(), **modules})

    return test


def _call_test(function: str, call: list[Any]) -> Callable[[_Link], None]:
    """Return a test that calls a function, and raises `AssertionError` where it does not return what is expected."""
    arguments, expected, encoded, wrapped = call

    def test(link: _Link) -> None:
        number = _function(link, link.begin(), function)
        given, wanted = json.loads(arguments), json.loads(expected)
        if encoded:
            given, wanted = given[1:], link.decode(wanted)
        else:
            given = [link.encode(each) for each in given]
        # what the function has changed of its arguments is not read: its result counts
        found = link.decode(link.ask("call", number, given, {})[0])
        if not (same_value(found, wanted) or (wrapped and same_value(found, wanted[0]))):
            raise AssertionError

    return test


def _function(link: _Link, names: dict[str, Any], function: str) -> int:
    """Return the host's number of a function: a method of a new ``Solution``, or one of the program itself."""
    solution = names.get("Solution")
    if type(solution) is _Reference:
        place = _place_of(solution)[1]
        try:
            link.ask("get", place, function)
        except AttributeError:
            pass
        else:
            made = link.decode(link.ask("call", place, [], {})[0])
            return _place_of(link.decode(link.ask("get", _place_of(made)[1], function)))[1]
    return _place_of(names[function])[1]


def _outcome(test: Callable[[_Link], None], link: _Link) -> str:
    """Run one test."""
    try:
        test(link)
    except BaseException:  # noqa: BLE001 - whatever a test raises, it has failed
        return "F"
    return "P"


def run_tests(request: dict[str, Any]) -> NoReturn:
    """Run the tests of a request, report each, and end the process."""
    channel = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    _become_unreadable()
    report = _reporter(channel, bytes.fromhex(request["key"]))
    trees = [ast.parse(test) for test in request["tests"]]
    codes = [compile(test, "tests.py", "exec") for test in request["tests"]]
    modules = _imported(trees)
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    # a function of the program never stands in the place of one that tests take from Python
    wanted = (used - set(vars(builtins)) - set(modules)) | {request["entry_point"]}
    tests = [_assert_test(code, modules) for code in codes]
    if request["calls"]:
        wanted.add("Solution")
        tests += [_call_test(request["entry_point"], call) for call in request["calls"]]
    wanted = {name for name in wanted if name and not name.startswith("__")}
    link = _Link(request["modules"], request["texts"], sorted(wanted), request["test_timeout_s"])
    os.dup2(null, 2)  # errors up to here are shown to people
    report("ready", "")
    counts = {"P": 0, "F": 0}
    for number, test in enumerate(tests):
        outcome = _outcome(test, link)
        if link.unsendable:
            report("message", f"{number} {link.unsendable}")
        report("test", f"{number} {outcome}")
        counts[outcome] += 1
        if outcome == "F" and not request["every"]:
            break
    link.close()
    report("end", f"0 {counts['P']} {counts['F']} 0")
    os._exit(0)
