"""Values that are secrets have no place in recipes and profiles: these are copied into run directories and shown.

Names decide, because a value says nothing about itself. Environment variables are refused where a word of their name
says that they open something; arguments of environments, parameters of sinks and notifiers, and flags of vLLM where
that is beyond doubt, because there ``stop_token`` is a harmless word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.config.yamltree import KeyPath, Origins
from hpcrl.errors import Finding

#: whole words of a name, joined by ``_``
_BEYOND_DOUBT = re.compile(
    r"(^|_)(SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEYS?|(ACCESS|PRIVATE|SECRET|AUTH|ENCRYPTION)_KEYS?"
    r"|(HF|HUB|API|AUTH|ACCESS|BEARER|REFRESH|GITHUB|GITLAB)_TOKENS?)(_|$)"
)
_LIKELY = re.compile(r"(^|_)(TOKENS?|AUTH|COOKIES?)(_|$)")
#: what a name tells where a secret is, not what it is
_WHERE = re.compile(r"_(PATH|FILE|FILENAME|DIR|DIRECTORY|NAME|TYPE|METHOD|MODE)$")
_WITH_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s:/@'\"]*:[^\s:/@'\"]+@")
_SEEN = "in the run directory, in plans and on screens"
_HINT = (
    "put it into a file of mode 0600 and name that in the profile (secrets: {NAME: FILE}), or export it in your shell: "
    "a local run inherits it, jobs where the profile names it in launch.inherit"
)


def is_secret_name(name: str, *, likely: bool = True) -> bool:
    """Return whether a variable or argument of this name holds a secret.

    Parameters
    ----------
    likely:
        Also match names with a word that may be harmless, like ``TOKEN``.
    """
    # apiKey and api-key are API_KEY
    words = re.sub(r"[^A-Z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper())
    if _WHERE.search(words):
        return False
    return bool(_BEYOND_DOUBT.search(words) or (likely and _LIKELY.search(words)))


def find_secrets(tree: Any, origins: Origins) -> Iterator[Finding]:
    """Yield a finding for each secret in a recipe or a profile, as it was written, without its value."""
    for path, value in _named(tree, ()):
        if value in (None, "", False):
            continue
        if _is_secret(path):
            what = "by its name this is a secret"
        elif _is_argument(path) and has_password(str(value)):
            what = "this address has a password"
        else:
            continue
        where = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), "")
        yield Finding(where, ".".join(map(str, path)), f"{what}: it would stand {_SEEN}", _HINT)


def has_password(text: str) -> bool:
    """Return whether an address in a text has a user's password: ``https://user:word@host``."""
    return _WITH_PASSWORD.search(text) is not None


def hide_value(path: KeyPath, shown: str) -> str:
    """Return ``shown``, the text of a value in an error, or a placeholder where the value may be a secret."""
    hidden = path[:1] == ("secrets",) or any(_is_secret(path[:n]) for n in range(1, len(path) + 1))
    hidden = hidden or has_password(shown)
    return "a value that is not shown" if hidden else shown


def hide_setting(override: str) -> str:
    """Return an argument of ``--set`` for display, without its value where that may be a secret."""
    key, equals, _ = override.partition("=")
    hidden = is_secret_name(key.rpartition(".")[2]) or has_password(override)
    return f"{key}{equals}..." if equals and hidden else override


def _is_secret(path: KeyPath) -> bool:
    variable = path[0] in ("env", "env_by_role")
    return (variable or _is_argument(path)) and is_secret_name(str(path[-1]), likely=variable)


def _is_argument(path: KeyPath) -> bool:
    """Return whether a value is an argument of programs of others."""
    return not {"args", "vllm_args", "parameters"}.isdisjoint(path[:-1])


def _named(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value that has a name, mappings included."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        inner = (*path, key)
        if isinstance(value, Mapping) and not isinstance(item, Mapping):
            yield inner, item
        yield from _named(item, inner)
