"""Find and import extensions: losses, advantages, environments and more that other packages bring (docs/extending.md).

A recipe names an extension by ``package.module:Name``, or by the name under which an installed package registers it in
the entry-point group `GROUP`:

    [project.entry-points."hpcrl.extensions"]
    "loss.token_mean" = "my_package.losses:TokenMean"

The part before the dot is the kind of the extension (`KINDS`), the rest its name. Looking a name up reads the metadata
of installed packages; only `load_extension` and `import_object` import foreign code.
"""

from __future__ import annotations

import importlib
import os
import re
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Literal, get_args

from hpcrl.errors import UsageError
from hpcrl.reporting.screen_text import visible

__all__ = [
    "GROUP",
    "KINDS",
    "ExtensionError",
    "ExtensionKind",
    "call_extension",
    "describe_error",
    "extension_path",
    "frames_of",
    "import_object",
    "installed_extensions",
    "load_extension",
]

GROUP = "hpcrl.extensions"
"""The group of entry points."""
ExtensionKind = Literal["loss", "advantage", "environment", "sink", "notifier", "transport", "family", "command"]
KINDS: tuple[str, ...] = get_args(ExtensionKind)
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MAX_MESSAGE = 4000
"""Maximum number of characters of the message of an exception, and of its frames."""
_MAX_FRAMES = 20
"""Maximum number of frames of an exception that are shown: the innermost ones."""
_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
"""Ends with a separator: another package's directory may have a name that begins with the same letters."""
_OURS = (os.path.abspath(__file__), "<frozen", importlib.__file__ or "?")


class ExtensionError(UsageError):
    """An extension cannot be used.

    Attributes
    ----------
    what:
        The problem, in one sentence; frames of the extension's own code follow in lines of their own.
    hint:
        The way to solve it.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"{what}\n    hint: {hint}" if hint else what)
        self.what, self.hint = what, hint


def installed_extensions(kind: ExtensionKind) -> dict[str, str]:
    """Return the extensions of a kind that installed packages register: ``package.module:Name`` by their names.

    If two have one name, the first on ``sys.path`` counts, as it does for modules. Nothing is imported.
    """
    # reading the metadata of all packages takes time: commands that need none do not pay for it
    from importlib.metadata import entry_points  # noqa: PLC0415

    found: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        of, _, name = point.name.partition(".")
        if of == kind and name:
            found.setdefault(name, point.value.partition("[")[0].replace(" ", ""))
    return dict(sorted(found.items()))


def extension_path(kind: ExtensionKind, name: str) -> str:
    """Return ``package.module:Name`` of an extension that a recipe names by that, or by its installed name.

    Raises
    ------
    ExtensionError
        No installed package registers the name.
    """
    if _PATH.fullmatch(name):
        return name
    known = installed_extensions(kind)
    if name in known:
        return known[name]
    close = get_close_matches(name, known, n=1)
    if close:
        hint = f"did you mean {close[0]!r}?"
    else:
        hint = f"installed are {', '.join(known)}" if known else "install its package, or name package.module:Name"
    raise ExtensionError(f"no installed package registers {kind}.{name} in {GROUP}", hint)


def load_extension(kind: ExtensionKind, name: str) -> Any:
    """Import the object that a recipe names by ``package.module:Name`` or by its installed name.

    Raises
    ------
    ExtensionError
        It is not installed, cannot be imported, or is not there.
    """
    return import_object(extension_path(kind, name))


def import_object(path: str, *, called: str = "object") -> Any:
    """Import ``package.module:Name``.

    Parameters
    ----------
    called:
        Expected type of the object, for the message: ``object``, ``callable``, ``function``. All but ``object`` must
        be callable.

    Raises
    ------
    ExtensionError
        The module cannot be imported, or has nothing of this name.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        hint = "install it, or add its directory to PYTHONPATH"
        raise ExtensionError(f"module {module_name!r} cannot be imported: {error}", hint) from error
    except (Exception, SystemExit) as error:
        what = f"module {module_name!r} cannot be imported: {describe_error(error)}"
        raise ExtensionError(f"{what}{_indented(frames_of(error, (_PACKAGE,)))}", "correct the module") from error
    missing = object()
    found = getattr(module, attribute, missing)
    if found is missing or (called != "object" and not callable(found)):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        hint = f"it has {', '.join(own)}" if own else f"name the {called}: package.module:Name"
        raise ExtensionError(f"{module_name!r} has no {called} {attribute!r}", hint)
    return found


def call_extension(path: str, call: Callable[[], Any], hint: str) -> Any:
    """Call foreign code, and say what it raised with its own frames.

    Parameters
    ----------
    path:
        The called object, for the message.
    call:
        Calls it with its arguments.
    hint:
        The way to solve it where it raises.

    Raises
    ------
    ExtensionError
        It raised.
    """
    try:
        return call()
    except ExtensionError:
        raise
    except (Exception, SystemExit) as error:
        raise ExtensionError(
            f"{path} raised {describe_error(error)}{_indented(frames_of(error, (_PACKAGE,)))}", hint
        ) from error


def describe_error(error: BaseException) -> str:
    """Return the type and the message of a foreign exception, of limited length and safe to show."""
    try:
        message = str(error)
    except BaseException as other:  # noqa: BLE001 - foreign code: __str__ may raise anything
        message = f"(its message cannot be shown: {type(other).__name__})"
    return _cut(f"{type(error).__name__}: {message}")


def frames_of(error: BaseException, ours: tuple[str, ...] = ()) -> str:
    """Return where an exception was raised, one frame a line, without the frames of what imports and calls it.

    Parameters
    ----------
    ours:
        Beginnings of file names that are left out as well.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith((*_OURS, *ours))]
    lines = [f"{each.filename}:{each.lineno} in {each.name}: {each.line or ''}".rstrip(": ") for each in own]
    return _cut("\n".join(lines[-_MAX_FRAMES:]))


def _indented(frames: str) -> str:
    return "".join(f"\n      {line}" for line in frames.splitlines())


def _cut(text: str) -> str:
    return visible(text[:_MAX_MESSAGE] + ("…" if len(text) > _MAX_MESSAGE else ""))
