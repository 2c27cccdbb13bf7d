"""An installed wheel works outside the checkout, with the core dependencies alone."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hpcrl.sites.installation.own_wheel import code_digest, own_wheel
from hpcrl.sites.installation.roles import Accelerator, SiteRole, lock_name

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``hpcrl`` command of a wheel in an environment of its own.

    The dependencies come from this environment by a path file, torch and the like hidden.
    """
    directory = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = directory.glob("*.whl")
    environment = directory / "env"
    venv.create(environment)
    # by this environment's pip, and without compiling what is hardly imported: both were most of the time
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python"]
    subprocess.run([*pip, "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt", wheel], check=True)
    return environment / "bin/hpcrl"


@pytest.mark.slow
def test_wheel_lists_and_plans(installed: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        words = [installed, *arguments]
        return subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)

    assert "quickstart" in run("recipe", "ls").stdout
    assert "local" in run("cluster", "ls").stdout
    plan = run("plan", "recipes/quickstart.yaml", "--commands")
    assert plan.returncode == 0, plan.stderr
    assert "hpcrl.trainer" in plan.stdout
    # the trainer's part is not installed: an error with the install command, no traceback
    warmup = run("warmup", "quickstart")
    assert warmup.returncode == 2
    # hpcrl is on no package index: the command names the wheel, and the interpreter that lacks the part
    assert f"{installed.parent / 'python'} -m pip install '" in warmup.stderr
    assert ".whl[trainer]'" in warmup.stderr
    assert "Traceback" not in warmup.stderr
    # the skill file for coding agents, without the library of the server
    skill = run("mcp", "--skill")
    assert (skill.returncode, skill.stdout) == (0, (ROOT / "hpcrl/mcp_server/SKILL.md").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_wheel_that_hpcrl_makes_of_itself_is_the_one_that_is_built(installed: Path, tmp_path: Path) -> None:
    """From a checkout and from an installed wheel: sites install it without a build backend."""
    (built,) = installed.parents[2].glob("*.whl")
    made = own_wheel(tmp_path)
    assert code_digest(made) == code_digest(built)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (tmp_path / "again").mkdir()
    module = "from hpcrl.sites.installation import own_wheel as module"
    code = f"import sys, pathlib; {module}; module.own_wheel(pathlib.Path(sys.argv[1]))"
    subprocess.run([installed.parent / "python", "-I", "-c", code, tmp_path / "again"], env=environ, check=True)
    (again,) = (tmp_path / "again").iterdir()
    assert code_digest(again) == code_digest(built)
    with zipfile.ZipFile(built) as one, zipfile.ZipFile(made) as two, zipfile.ZipFile(again) as three:
        names = {name for name in two.namelist() if "_data/locks/" in name}
        roles = {lock_name(role, accelerator) for role in SiteRole for accelerator in Accelerator}
        assert names == {f"hpcrl/_data/locks/{name}.txt" for name in roles}
        info = next(name.partition("/")[0] for name in one.namelist() if ".dist-info/" in name)
        for archive in (two, three):
            assert archive.testzip() is None
            for file in ("METADATA", "entry_points.txt"):
                theirs, ours = (each.read(f"{info}/{file}").decode() for each in (one, archive))
                if file == "METADATA":
                    assert _metadata(ours) == _metadata(theirs)
                else:
                    assert [line for line in ours.splitlines() if line] == [
                        line for line in theirs.splitlines() if line
                    ]


def _metadata(text: str) -> tuple[dict[str, str], dict[str, set[str]]]:
    """What pip reads of metadata: fields, and what each extra brings (extras of hpcrl in extras resolved)."""
    message = email.message_from_string(text)
    fields = {name: message[name] for name in ("Name", "Version", "Requires-Python", "License-Expression", "Summary")}
    wanted = [Requirement(line) for line in message.get_all("Requires-Dist", [])]

    def brings(extra: str) -> set[str]:
        found = set()
        for each in wanted:
            if each.marker is not None and not each.marker.evaluate({"extra": extra}):
                continue
            if each.name == "hpcrl":
                found |= set().union(*map(brings, each.extras))
            else:
                found.add(f"{each.name.lower()}{each.specifier}")
        return found

    return fields, {extra: brings(extra) for extra in ("", *message.get_all("Provides-Extra", []))}


@pytest.mark.slow
def test_an_installed_wheel_finds_the_lists_of_sites(installed: Path, tmp_path: Path) -> None:
    uv = tmp_path / "bin/uv"  # in place of pip, which this environment has not
    uv.parent.mkdir()
    uv.touch(mode=0o755)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PATH"] = os.pathsep.join([str(uv.parent), environ.get("PATH", os.defpath)])
    words = [installed, "site", "install", "--role", "vllm", "--prefix", tmp_path / "envs", "--dry-run"]
    run = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "packages of vllm-cuda, by uv, from the package index" in run.stderr
    assert run.stdout == f'vllm_python: "{tmp_path}/envs/vllm/bin/python"\n'
