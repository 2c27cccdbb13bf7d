"""How help texts look: usage lines as people write them, no types of switches, paragraphs that flow."""

from __future__ import annotations

import inspect
import re
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from hpcrl.cli.output import say

__all__ = ["PlainCommand", "PlainGroup", "make_plain"]


class PlainCommand(TyperCommand):
    """``RUN`` in the usage where Typer writes ``{RUN}``, and no ``<bool>`` beside options that take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Arguments and options, those of help included."""
        return _switches_without_type(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Words of the usage line."""
        return [_plain(piece) for piece in super().collect_usage_pieces(ctx)]


_ELSEWHERE = {
    **dict.fromkeys(("launch", "run", "start", "train", "exec", "create", "apply"), "submit"),
    **dict.fromkeys(("stop", "kill", "end", "abort", "down", "scancel"), "cancel"),
    **dict.fromkeys(("queue", "list", "runs", "ps", "jobs", "squeue"), "ls"),
    **dict.fromkeys(("describe", "get", "info", "show", "top", "watch", "attach", "follow", "progress"), "status"),
    **dict.fromkeys(("delete", "remove", "destroy", "purge", "clean"), "rm"),
    **dict.fromkeys(("log", "tail", "output"), "logs"),
    **dict.fromkeys(("restart", "continue", "retry"), "resume"),
    **dict.fromkeys(("explain", "diagnose", "events", "debug"), "why"),
    **dict.fromkeys(("ssh", "connect", "login"), "shell"),
    **dict.fromkeys(("validate", "lint", "check"), "recipe check"),
    **dict.fromkeys(("init", "new"), "cluster init"),
    **dict.fromkeys(("plot", "metrics", "curves"), "report"),
    **dict.fromkeys(("estimate", "forecast", "dry-run"), "plan"),
    **dict.fromkeys(("version",), "--version"),
}
"""What other tools call a command."""


class PlainGroup(TyperGroup):
    """A group of commands whose own help looks like that of `PlainCommand`, and that knows words of other tools."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that ``args`` begin with; ``help`` shows the help of what follows it."""
        word = args[0]
        if word not in self.commands:
            if word == "help" and ctx.parent is None:
                return super().resolve_command(ctx, [*args[1:], "--help"]) if args[1:] else self._own_help(ctx)
            wanted = _ELSEWHERE.get(word)
            if wanted is not None and (wanted.startswith("-") or wanted.split()[0] in self.commands):
                ctx.fail(f"No such command {word!r}. Did you mean {wanted!r}?")
        return super().resolve_command(ctx, args)

    def _own_help(self, ctx: Any) -> NoReturn:
        """Print the help of all commands."""
        say(ctx.get_help())
        raise typer.Exit

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
