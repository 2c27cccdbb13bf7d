"""Format of help texts: usage lines as people write them, no types of switches, paragraphs without line breaks."""

from __future__ import annotations

import inspect
import re
import shutil
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from hpcrl.cli.output import say
from hpcrl.cli.overview import overview


class PlainCommand(TyperCommand):
    """Command whose usage has ``RUN`` where Typer writes ``{RUN}``, and no ``<bool>`` at options without a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options, those of help included."""
        return _switches_without_type(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of a command; a value that pydantic refuses is refused in plain words."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            details: list[Any] = getattr(error.__cause__, "errors", list)()
            if details:
                from hpcrl.config.explain import plain_message

                # Typer has escaped control characters of the message
                refused: Any = {**details[0], "msg": error.message}
                error.message = plain_message(refused)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line."""
        return [_plain(piece) for piece in super().collect_usage_pieces(ctx)]


_ALIASES = {"list": "ls", "gc": "prune"}
"""Second names of commands, which no help shows."""
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("launch", "run", "start", "train", "create", "apply", "sbatch", "srun"), ("submit", "up")),
    **dict.fromkeys(("stop", "kill", "end", "abort", "down", "scancel", "terminate"), ("cancel", "down")),
    **dict.fromkeys(("queue", "runs", "ps", "jobs", "squeue", "sacct"), ("ls",)),
    **dict.fromkeys(("describe", "get", "info", "inspect"), ("status", "show", "check")),
    **dict.fromkeys(("show", "cat", "view"), ("status", "show", "ls")),
    **dict.fromkeys(("top", "watch", "attach", "follow", "progress"), ("status --watch",)),
    **dict.fromkeys(("delete", "remove", "destroy", "purge", "clean", "rm", "del"), ("rm", "prune", "down")),
    **dict.fromkeys(("log", "tail", "output"), ("logs",)),
    **dict.fromkeys(("restart", "continue", "retry"), ("resume",)),
    **dict.fromkeys(("explain", "diagnose", "events", "debug"), ("why",)),
    **dict.fromkeys(("ssh", "connect", "login", "exec"), ("shell",)),
    **dict.fromkeys(("validate", "lint", "check", "verify", "test"), ("recipe check", "check", "verify", "try")),
    **dict.fromkeys(("init", "new", "configure"), ("cluster init", "init", "up")),
    **dict.fromkeys(("diff", "comparison", "versus", "vs", "leaderboard"), ("compare", "plan diff")),
    **dict.fromkeys(("perfetto", "timeline", "chrome-trace"), ("trace",)),
    **dict.fromkeys(("bottleneck", "bound", "slow", "speed"), ("why --slow",)),
    **dict.fromkeys(("plot", "metrics", "curves", "graph"), ("report",)),
    **dict.fromkeys(("estimate", "forecast", "dry-run"), ("plan",)),
    **dict.fromkeys(("sites", "clusters"), ("cluster ls",)),
    **dict.fromkeys(("download", "pull", "fetch"), ("model get", "get")),
    **dict.fromkeys(("evaluate", "benchmark"), ("eval",)),
    **dict.fromkeys(("version",), ("--version",)),
}
"""Names of commands in other tools; the first command that the group has is meant."""


class PlainGroup(TyperGroup):
    """A group of commands whose own help looks like that of `PlainCommand`, and that knows words of other tools."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name or of its second name; None where there is none."""
        other = _ALIASES.get(cmd_name, cmd_name)
        return super().get_command(ctx, cmd_name if cmd_name in self.commands else other)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that ``args`` begin with; ``help`` shows the help of what follows it."""
        word = args[0]
        if word == "help":
            return super().resolve_command(ctx, [*args[1:], "--help"]) if args[1:] else self._own_help(ctx)
        if self.get_command(ctx, word) is None:
            for meant in _ELSEWHERE.get(word, ()):
                if meant.split()[0] in self.commands or (meant.startswith("-") and ctx.parent is None):
                    ctx.fail(f"No such command {word!r}. Did you mean {meant!r}?")
        return super().resolve_command(ctx, args)

    def _own_help(self, ctx: Any) -> NoReturn:
        """Print the help of the group."""
        say(ctx.get_help())
        raise typer.Exit

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, those of help included."""
        return _switches_without_type(super().get_params(ctx))


class RootGroup(PlainGroup):
    """All commands: their help is `hpcrl.cli.overview`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        commands = {
            name: (command.help or "").partition("\n\n")[0]
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None and not command.hidden
        }
        formatter.write(overview(commands, shutil.get_terminal_size().columns) + "\n")


def _switches_without_type(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def _plain(piece: str) -> str:
    """Return ``RUN`` of ``{RUN}``, ``[RUN]`` of ``[[RUN]]``: metavars already mark optional and repeated words."""
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
        if command.cls in (None, TyperCommand):  # Typer sets TyperCommand where no class was given
            command.cls = PlainCommand
    group.info.cls = group.info.cls or PlainGroup
    for below in group.registered_groups:
        if below.typer_instance is not None:
            make_plain(below.typer_instance)
