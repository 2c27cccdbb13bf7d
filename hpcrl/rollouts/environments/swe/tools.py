"""The tools of software-engineering tasks: a shell and an editor, in the schema of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.rollouts.environments.base import Tool
from hpcrl.sandboxes import ExecResult, Sandbox, SandboxLimitError

BASH = "bash"
"""Name of the shell."""
_EDITOR = "editor"
_MAX_FILE_BYTES = 4 << 20
_CONTEXT_LINES = 4


def _function(name: str, description: str, properties: Mapping[str, Any], required: list[str]) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SWE_TOOLS: tuple[Tool, ...] = (
    _function(
        BASH,
        "Run a command with bash in the root of the repository. Each call is a new shell. There is no network.",
        {"command": {"type": "string", "description": "The command."}},
        ["command"],
    ),
    _function(
        _EDITOR,
        "View or change a text file. `view` shows it with line numbers; `create` writes `text` to it; `replace` puts "
        "`new` in the place of `old`, which must occur exactly once; `insert` adds `text` behind line `line`.",
        {
            "action": {"type": "string", "enum": ["view", "create", "replace", "insert"]},
            "path": {"type": "string", "description": "Path of the file, relative to the repository or absolute."},
            "text": {"type": "string", "description": "For create and insert."},
            "old": {"type": "string", "description": "For replace: the text that is replaced."},
            "new": {"type": "string", "description": "For replace: what stands there instead."},
            "line": {"type": "integer", "description": "For insert: 0 is the beginning. For view: the first line."},
            "end_line": {"type": "integer", "description": "For view: the last line."},
        },
        ["action", "path"],
    ),
)
"""Tools that the policy may call."""


class _RefusedError(Exception):
    """The policy asked for what cannot be done; the text is the answer."""


class ToolBox:
    """Runs calls of one rollout in its sandbox.

    Attributes
    ----------
    timeouts:
        Commands that were ended by their limit of time.
    """

    def __init__(self, sandbox: Sandbox, *, directory: str, max_characters: int) -> None:
        """Remember the sandbox.

        Parameters
        ----------
        directory:
            Directory of the repository in the sandbox.
        max_characters:
            Longest answer to a call.
        """
        self._sandbox, self._directory, self._limit = sandbox, directory, max_characters
        self.timeouts = 0

    async def call(self, name: str, arguments: Mapping[str, Any], *, timeout_s: float) -> str:
        """Run one call and return its result for the policy. A mistake of the policy is a result, not an exception.

        Raises
        ------
        SandboxError
            The sandbox failed.
        """
        try:
            if name == BASH:
                return await self._bash(_text(arguments, "command"), timeout_s)
            if name == _EDITOR:
                return _cut(await self._edit(arguments), self._limit)
        except _RefusedError as error:
            return f"error: {error}"
        except SandboxLimitError as error:
            return f"error: {str(error).partition(chr(10))[0]}"
        return f"error: there is no tool {name!r}"

    async def _bash(self, command: str, timeout_s: float) -> str:
        # an argument of a program has a length that the kernel limits; a script on the input has not
        result = await self._sandbox.exec(
            ["/bin/bash", "-c", 'eval "$(cat)" </dev/null'],
            stdin=command.encode("utf-8", "replace"),
            timeout_s=timeout_s,
            # a character takes up to four bytes
            max_output=4 * self._limit,
            cwd=self._directory,
        )
        self.timeouts += result.killed_by == "timeout"
        return self._answer(result, timeout_s)

    def _answer(self, result: ExecResult, timeout_s: float) -> str:
        text = _cut(result.text, self._limit)
        if result.truncated and len(result.text) <= self._limit:
            text += f"\n[output was cut in the middle: it had {result.out_bytes} bytes]"
        if result.killed_by == "timeout":
            return f"{text}\n[killed after {timeout_s:g} s]"
        if result.killed_by is not None:
            return f"{text}\n[killed: limit of {result.killed_by}]"
        if result.rc:
            return f"{text}\n[exit code {result.rc}]"
        return text or "[no output]"

    async def _edit(self, arguments: Mapping[str, Any]) -> str:
        action, path = _text(arguments, "action"), _text(arguments, "path")
        if action == "create":
            await self._sandbox.put({path: _text(arguments, "text").encode("utf-8", "replace")})
            return f"wrote {path}"
        lines = (await self._read(path)).split("\n")
        if action == "view":
            first = max(1, _number(arguments, "line", 1))
            last = _number(arguments, "end_line", len(lines))
            return _numbered(lines, first, last)
        if action == "replace":
            text, old = "\n".join(lines), _text(arguments, "old")
            if (count := text.count(old)) != 1:
                raise _RefusedError(f"the text to replace occurs {count} times in {path}; it must occur once")
            before = text.partition(old)[0].count("\n") + 1
            text = text.replace(old, _text(arguments, "new"))
        elif action == "insert":
            before = _number(arguments, "line", 0)
            if not 0 <= before <= len(lines):
                raise _RefusedError(f"{path} has {len(lines)} lines")
            added = _text(arguments, "text").removesuffix("\n").split("\n")
            text = "\n".join([*lines[:before], *added, *lines[before:]])
        else:
            raise _RefusedError(f"there is no action {action!r}: view, create, replace, insert")
        await self._sandbox.put({path: text.encode("utf-8", "replace")})
        return f"changed {path}:\n{_numbered(text.split(chr(10)), before - _CONTEXT_LINES, before + _CONTEXT_LINES)}"

    async def _read(self, path: str) -> str:
        found = await self._sandbox.get([path], max_bytes=_MAX_FILE_BYTES)
        if path not in found:
            raise _RefusedError(f"there is no file {path}")
        try:
            return found[path].decode()
        except UnicodeDecodeError:
            raise _RefusedError(f"{path} is not UTF-8 text") from None


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise _RefusedError(f"the argument {name!r} is missing, or is not text")
    if "\0" in value:
        raise _RefusedError(f"the argument {name!r} has a null character")
    return value


def _number(arguments: Mapping[str, Any], name: str, default: int) -> int:
    value = arguments.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise _RefusedError(f"the argument {name!r} is not a whole number")
    return value


def _numbered(lines: list[str], first: int, last: int) -> str:
    first = max(1, first)
    return "\n".join(f"{number:6}  {line}" for number, line in enumerate(lines[first - 1 : last], first))


def _cut(text: str, limit: int) -> str:
    """Return a text of a limited length: the first and the last half, with a notice between."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out here]\n{text[-half:]}"
