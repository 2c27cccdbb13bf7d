"""mini-swe-agent as it was installed from PyPI, copied to where programs of other users may read it."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

_MINI = Path(__file__).parents[2] / ".mini-swe"
_PYTHON = _MINI / "bin/python"
#: what `mini` imports when its model is not one of LiteLLM
_IMPORTED = """
import json, sys, sysconfig
import minisweagent.run.mini, minisweagent.agents.default, minisweagent.environments.local
import minisweagent.models.requesty_model

site = sysconfig.get_path("purelib")
files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
tops = {file[len(site) + 1 :].split("/")[0] for file in files if file.startswith(site + "/")}
print(json.dumps({"site": site, "tops": sorted(tops), "version": list(sys.version_info[:2])}))
"""


def copy_mini_swe_agent(directory: Path, *, python: Path) -> None:
    """Copy mini-swe-agent and what it imports into a new directory; the test is skipped where that cannot run.

    Parameters
    ----------
    python:
        The interpreter that will run it.
    """
    if not (_MINI / "hpcrl-bootstrap").is_file():
        pytest.skip("mini-swe-agent is not there (tools/bootstrap.py --mini-swe)")
    environ = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": str(directory.parent / "mini-swe-settings")}
    shown = "import sys; print(*sys.version_info[:2], sep='.')"
    found = json.loads(_output_of([str(_PYTHON), "-c", _IMPORTED], environ).splitlines()[-1])
    if (version := _output_of([str(python), "-I", "-c", shown], {}).strip()) != ".".join(map(str, found["version"])):
        pytest.skip(f"the sandbox has Python {version}, and mini-swe-agent is installed for another one")
    site = Path(found["site"])
    directory.mkdir()
    # some of them read the version that their metadata has
    for path in [*(site / top for top in found["tops"]), *site.glob("*.dist-info")]:
        if path.is_dir():
            shutil.copytree(path, directory / path.name)
        else:
            shutil.copy2(path, directory)
    let_others_read(directory)


def let_others_read(directory: Path) -> None:
    """Give all users the right to read a directory: sandboxes have users of their own, and the umask may be 077."""
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def changed_files(directory: Path) -> list[str]:
    """Return the modules of mini-swe-agent in a copy that are not as its wheel on PyPI had them."""
    (record,) = directory.glob("mini_swe_agent-*.dist-info/RECORD")
    rows = [row for row in csv.reader(record.read_text().splitlines()) if row[0].startswith("minisweagent/") and row[1]]
    assert len(rows) > 50
    return [name for name, digest, _ in rows if digest != f"sha256={_digest(directory / name)}"]


def _digest(path: Path) -> str:
    made = hashlib.sha256(path.read_bytes()).digest()
    return base64.urlsafe_b64encode(made).decode().rstrip("=")


def _output_of(command: list[str], environ: dict[str, str]) -> str:
    ran = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout
