"""An interpreter as `pip install .` leaves it on a login node: what only extras bring cannot be imported.

``python core_install.py FILE`` calls each command line of a JSON file in this process and prints how each ended.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import traceback
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any


def core_distributions() -> set[str]:
    """Everything that hpcrl needs without an extra, and what that needs."""
    found, waiting = set[str](), ["hpcrl"]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        with contextlib.suppress(PackageNotFoundError):
            for line in requires(name) or ():
                requirement, _, marker = line.partition(";")
                if "extra ==" not in marker:
                    waiting.append(re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0])
    return found


class WithoutExtras:
    """A finder of modules that does not find what only extras bring."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self.finder, self.hidden = finder, hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self.hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def hide() -> None:
    """In this interpreter, and by ``sitecustomize`` in those that it starts."""
    core = core_distributions()
    hidden = {
        module
        for module, distributions in packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", each).lower() in core for each in distributions)
    }
    sys.meta_path[:] = [WithoutExtras(finder, hidden) for finder in sys.meta_path]


def call(words: list[str]) -> dict[str, Any]:
    from hpcrl.cli.main import main

    sys.argv = ["hpcrl", *words]
    out, err = io.StringIO(), io.StringIO()
    code, failed = 0, ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
        except Exception:  # noqa: BLE001 - a traceback is what is looked for
            failed = traceback.format_exc()
    return {"words": words, "code": code, "traceback": failed, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    hide()
    print(json.dumps([call(words) for words in json.loads(Path(sys.argv[1]).read_text())]))
