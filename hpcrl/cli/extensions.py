"""Commands that other packages bring (docs/extending.md): ``command.NAME`` in the entry points of `hpcrl.extend`.

They are looked up where the command line names none of hpcrl, and for the list of all commands: no command of hpcrl
pays for them, and none can be replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import typer

from hpcrl.cli.help import make_plain

PANEL = "Extensions"
"""Title of their group in the list of commands."""


def with_extensions(app: typer.Typer, words: Sequence[str]) -> typer.Typer:
    """Return the application with the commands of other packages.

    Parameters
    ----------
    words:
        The command line. Where it begins with the name of such a command, that one alone is loaded; a list of commands
        also has those that cannot be loaded, with the reason.

    Raises
    ------
    ExtensionError
        The command that ``words`` begin with cannot be loaded.
    """
    from hpcrl.extend import installed_extensions

    own = {each.name for each in app.registered_commands} | {each.name for each in app.registered_groups}
    found = {name: path for name, path in installed_extensions("command").items() if name not in own}
    if not found:
        return app
    extended = copy(app)
    extended.registered_commands, extended.registered_groups = [*app.registered_commands], [*app.registered_groups]
    if words and words[0] in found:
        _add(extended, words[0], _loaded(words[0], found[words[0]]))
    else:
        for name, path in found.items():
            _add(extended, name, _loaded_or_broken(name, path))
    make_plain(extended)
    return extended


def _add(app: typer.Typer, name: str, command: Any) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, rich_help_panel=PANEL)
    else:
        app.command(name, rich_help_panel=PANEL)(command)


def _loaded(name: str, path: str) -> Any:
    """Import a command (ExtensionError where it cannot be)."""
    from hpcrl.extend import ExtensionError, import_object

    try:
        command = import_object(path)
    except ExtensionError as error:
        raise ExtensionError(f"the command {name} cannot be used: {error.what}", error.hint) from error
    if not (isinstance(command, typer.Typer) or callable(command)):
        what = f"the command {name} cannot be used: {path} is a {type(command).__name__}"
        raise ExtensionError(what, "register a function with annotated arguments, or a Typer application")
    return command


def _loaded_or_broken(name: str, path: str) -> Any:
    from hpcrl.extend import ExtensionError

    try:
        return _loaded(name, path)
    except ExtensionError as error:
        broken, reason = error, error.what.partition("\n")[0]

    def unusable() -> None:
        raise broken

    unusable.__doc__ = f"({reason.removeprefix(f'the command {name} ')})"
    return unusable
