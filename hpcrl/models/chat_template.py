"""Chat templates of model directories, rendered as ``apply_chat_template`` of transformers does.

A template may use what transformers gives it: special tokens by name, ``tools``, ``documents``, ``strftime_now``,
``raise_exception``, ``tojson`` that does not escape for HTML, loop controls and ``{% generation %}``. It comes from
strangers, and so runs in Jinja's sandbox and sees plain data alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from hpcrl.errors import HpcrlError
from hpcrl.models.foreign_text import ForeignText, join_texts, marked_like, original_text
from hpcrl.models.kept_json import kept_json

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; the first is the one that most templates read."""


class ChatTemplateError(HpcrlError, ValueError):
    """A chat template cannot be read, refuses a conversation, or fails on it."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, name: str) -> None:
        """Compile a template.

        Parameters
        ----------
        source:
            Its text.
        name:
            Name of its place, for messages.

        Raises
        ------
        ChatTemplateError
            It is not a Jinja template.
        """
        self.name = name
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
            self._tree = self._environment.parse(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ChatTemplateError(f"{name}{line}: the chat template cannot be read: {_words(error)}") from error
        # `a ~ b` joins by this function of the compiled module; marks of foreign text must survive it
        self._template.root_render_func.__globals__["str_join"] = join_texts

    def literals(self) -> str:
        """Return all text that the template itself holds, with null characters between its pieces."""
        data = {node.data for node in self._tree.find_all(jinja2.nodes.TemplateData)}
        constants = {node.value for node in self._tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        return "\0".join(data | constants)

    def reads(self, name: str) -> bool:
        """Return whether the template mentions a field of messages or a role, such as ``developer``."""
        constants = {node.value for node in self._tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        return name in constants | {node.attr for node in self._tree.find_all(jinja2.nodes.Getattr)}

    def render(self, messages: Sequence[Any], now: datetime, variables: Mapping[str, Any]) -> str:
        """Return the text of a conversation.

        Parameters
        ----------
        messages:
            Messages as plain data (`plain_data`). Those of role and content alone are enough for most templates.
        now:
            The time that ``strftime_now`` tells.
        variables:
            Everything else that the template may use, for example ``bos_token`` and ``tools``.

        Raises
        ------
        ChatTemplateError
            The template refuses the conversation (with its own words), or fails.
        """
        chat = [_with_reasoning(message) for message in messages]
        context = {"strftime_now": now.strftime, **variables, "messages": chat}
        try:
            return self._template.render(context)
        except _RefusedError as error:
            raise ChatTemplateError(f"{self.name}: the chat template refuses the conversation: {error}") from error
        except Exception as error:  # a template is foreign code, and may fail in any way
            raise ChatTemplateError(f"{self.name}: the chat template fails: {_words(error)}") from error


def plain_data(value: Any, text: Callable[[str], str] = str) -> Any:
    """Return a copy of ``value`` of plain JSON types, all strings of it replaced by ``text``.

    Other objects have methods that a sandbox does not know; templates get their type's name instead.
    """
    if isinstance(value, str):  # most values are
        return text(str.__str__(value))
    made: Any = f"<{type(value).__name__}>"
    if value is None or isinstance(value, bool):
        made = value
    elif isinstance(value, int):
        made = int(value)
    elif isinstance(value, float):
        made = float(value)
    elif isinstance(value, (dict, Mapping)):  # most are a dict, and an abstract class takes longer
        made = {plain_data(key, text): plain_data(item, text) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = [plain_data(item, text) for item in value]
        made = parts if isinstance(value, list) else tuple(parts)
    return made


def _with_reasoning(message: Any) -> Any:
    """Return a message whose reasoning has all names that templates read it by."""
    if not isinstance(message, dict):
        return message
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _words(error: BaseException) -> str:
    said = str(error)
    return said if isinstance(error, jinja2.TemplateError) and said else f"{type(error).__name__}: {said}".strip(": ")


class _RefusedError(jinja2.TemplateError):
    """Message of a template's ``raise_exception``."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` around what an assistant says; the text stays as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """``namespace(...)`` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a name that begins with an underscore ({name!r}) is not allowed")


class _Dict:
    """``dict(...)`` without the attributes of Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    concat = staticmethod(join_texts)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.filters["join"] = _join
        self.globals |= {"raise_exception": _refuse, "dict": _Dict(), "namespace": _Namespace}


def _refuse(message: object) -> None:
    raise _RefusedError(str(message))


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    """Join as Jinja's filter does, and keep marks of foreign text."""
    items = list(value)
    if attribute is not None:
        items = list(map(jinja2.filters.make_attrgetter(environment, attribute), items))
    parts: list[Any] = []
    for item in items:
        parts += (d, item)
    return join_texts(parts[1:])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON that is not escaped for HTML; foreign text in it stays marked."""
    kept, way = kept_json(value), (ensure_ascii, indent, separators and tuple(separators), sort_keys)
    if kept is not None and way in kept:
        return kept[way]
    foreign = _first_foreign(value)
    ascii_only = ensure_ascii and foreign is None
    made = json.dumps(value, ensure_ascii=ascii_only, indent=indent, separators=separators, sort_keys=sort_keys)
    if foreign is not None:
        made = marked_like(foreign, _escape(made, foreign) if ensure_ascii else made)
    if kept is not None:
        kept[way] = made
    return made


def _escape(text: str, foreign: ForeignText) -> str:
    """Escape what is not ASCII as `json.dumps` does, but for substitutes of ASCII characters."""

    def escaped(match: re.Match[str]) -> str:
        original = original_text(foreign, match[0])
        return match[0] if original != match[0] and original.isascii() else json.dumps(original)[1:-1]

    return re.sub(r"[^\x00-\x7e]", escaped, text)


def _first_foreign(value: Any) -> ForeignText | None:
    """Return a marked string somewhere in plain data."""
    if isinstance(value, ForeignText):
        return value
    if isinstance(value, str):
        return None
    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        parts = (*value, *value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    return next((found for part in parts if (found := _first_foreign(part)) is not None), None)
