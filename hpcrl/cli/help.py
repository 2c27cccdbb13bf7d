"""How help texts look: usage lines as people write them, no types of switches, paragraphs that flow."""

from __future__ import annotations

import inspect
import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["PlainCommand", "PlainGroup", "make_plain"]


class PlainCommand(TyperCommand):
    """``RUN`` in the usage where Typer writes ``{RUN}``, and no ``<bool>`` beside options that take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Arguments and options, those of help included."""
        return _switches_without_type(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Words of the usage line."""
        return [_plain(piece) for piece in super().collect_usage_pieces(ctx)]


class PlainGroup(TyperGroup):
    """A group of commands whose own help looks like that of `PlainCommand`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Options, those of help included."""
        return _switches_without_type(super().get_params(ctx))


def _switches_without_type(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def _plain(piece: str) -> str:
    """``RUN`` of ``{RUN}``, ``[RUN]`` of ``[[RUN]]``: metavars say themselves what may be left out or repeated."""
    piece = re.sub(r"^\{(.+)\}", r"\1", piece)
    piece = re.sub(r"^\[\[(.+)\]\]", r"[\1]", piece)
    return re.sub(r"\.\.\.(\]?)\.\.\.$", r"...\1", piece)


def make_plain(group: typer.Typer) -> None:
    """Give all commands and groups below a plain help.

    Line breaks within paragraphs of help texts go: a terminal breaks lines at its own width.
    """
    for command in group.registered_commands:
        text = inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        if command.cls in (None, TyperCommand):  # which Typer itself says where nothing else was said
            command.cls = PlainCommand
    group.info.cls = group.info.cls or PlainGroup
    for below in group.registered_groups:
        if below.typer_instance is not None:
            make_plain(below.typer_instance)
