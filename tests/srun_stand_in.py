"""An ``srun`` whose nodes are made up: each has one address, and a clock that may be wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

_SCRIPT = """#!{python}
import json, sys, time
ADDRESSES, AHEAD = json.loads({addresses!r}), json.loads({ahead!r})
(names,) = [word.partition("=")[2].split(",") for word in sys.argv if word.startswith("--nodelist=")]
def say(**words):
    print("@hpcrl-line " + json.dumps(words), flush=True)
for name in names:
    say(node=name, machine="of " + name, interfaces={{"lo": ["127.0.0.1"], "net0": [ADDRESSES[name]]}})
for line in iter(sys.stdin.readline, ""):
    question = json.loads(line)
    for name in names:
        say(node=name, number=question["number"], time_s=time.time() + AHEAD.get(name, 0.0))
"""


def write_srun(directory: Path, addresses: Mapping[str, str], *, ahead_s: Mapping[str, float] | None = None) -> str:
    """Write it; returns the ``PATH`` under which it is found.

    Parameters
    ----------
    addresses:
        By node, on the interface ``net0``.
    ahead_s:
        How far clocks of nodes are ahead of ours.
    """
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "srun"
    program.write_text(
        _SCRIPT.format(python=sys.executable, addresses=json.dumps(addresses), ahead=json.dumps(ahead_s or {}))
    )
    program.chmod(0o755)
    return str(directory)
