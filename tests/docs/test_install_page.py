"""docs/install.md: its commands run as they stand, and nothing names hpcrl as if it were on a package index."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import hpcrl
from hpcrl.bringup.stages import STAGES
from hpcrl.config.load import load_cluster
from hpcrl.sites.installation.installers import _FAILURES
from hpcrl.sites.installation.roles import Accelerator, SiteRole, lock_name, profile_line

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/install.md").read_text(encoding="utf-8")
HPCRL = f"{shlex.quote(sys.executable)} -m hpcrl"
#: files that tell people what to type
TEXTS = sorted(
    path
    for place in ("hpcrl", "docs", "clusters", "recipes", "templates", "containers", "tools", "bench", ".")
    for path in ((ROOT / place).glob("*") if place == "." else (ROOT / place).rglob("*"))
    if path.suffix in {".py", ".md", ".yaml", ".j2", ".toml", ".def", ".txt"} or path.name in {"Dockerfile", "Makefile"}
)
#: `pip install hpcrl`, also quoted, with extras or a version; not a path to a checkout or a wheel of it
PUBLIC_NAME = re.compile(
    r"(?:pip|uv|pipx)\d? (?:pip )?(?:install|download|tool install|run)\b[^\n`#]*?(?<![\w./{}-])hpcrl(?![\w/.-])"
)


def commands(section: str) -> list[list[str]]:
    """Blocks of commands of a section of the page."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert text, section
    blocks = re.findall(r"(?:^ {4}\S.*\n)+", text, re.MULTILINE)
    return [[line.strip() for line in block.splitlines()] for block in blocks]


def shell(lines: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    """Run lines as a person types them, in a directory."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-euc", "\n".join(lines)],
        cwd=place,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.slow
def test_the_way_without_a_network(tmp_path: Path) -> None:
    """All of it but the environments of several GB. What runs after the bundle was made reaches no index."""
    (bundle,), site, others = commands("Without a network")
    prefix = tmp_path / "shared/of all/v1"
    made = shell([bundle.replace("hpcrl site bundle", f"{HPCRL} site bundle --role login")], tmp_path)
    assert made.returncode == 0, made.stderr
    assert re.fullmatch(rf"[0-9a-f]{{64}}  {re.escape(str(tmp_path))}/hpcrl-site\.tar\n", made.stdout)

    def on_the_site(*lines: str) -> subprocess.CompletedProcess[str]:
        """Run lines of the page on a machine that has no index, no settings of pip and no checkout."""
        typed = [line.replace("/shared/hpcrl/v1", shlex.quote(str(prefix))) for line in lines]
        closed = "export PIP_CONFIG_FILE=/dev/null PIP_INDEX_URL=http://127.0.0.1:9/simple"
        return shell(["unset PYTHONPATH ${!PIP_@}", closed, *typed], tmp_path)

    run = on_the_site(*(line.replace("python3 -m venv", f"{shlex.quote(sys.executable)} -m venv") for line in site))
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith(f"{prefix}/login/bin/hpcrl\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hpcrl-site.tar", "shared"]

    # what was installed works by itself, and can make the other environments
    assert [re.findall(r"--role (\w+)", line) for line in others] == [["trainer"], ["vllm"]]
    for line in others:
        again = on_the_site(f"{line} --dry-run")
        assert again.returncode == 0, again.stderr
        assert "from hpcrl-site.tar, without a network" in again.stderr
    (login,) = (line for line in site if "--role login" in line)
    again = on_the_site(login.replace("boot/bin/hpcrl", "/shared/hpcrl/v1/login/bin/hpcrl"))
    assert again.returncode == 0, again.stderr
    assert "is there already, of the same versions" in again.stderr
    # hints name the wheel that it keeps
    warmup = on_the_site("/shared/hpcrl/v1/login/bin/hpcrl warmup quickstart")
    assert warmup.returncode == 2
    wheel = f"{prefix}/login/share/hpcrl/hpcrl-{hpcrl.__version__}-py3-none-any.whl"
    assert f"pip install '{wheel}[trainer]'" in warmup.stderr


def test_the_way_with_a_network_says_what_it_would_do(tmp_path: Path) -> None:
    ((_, pip, *lines),) = commands("With a network")
    lock = shlex.split(pip)[-1]
    assert (ROOT / lock).is_file()
    assert "--require-hashes" in pip
    assert len(lines) == 3
    for line in lines:
        words = re.sub(r"^(PYTHONPATH=\. boot/bin/python -m|/shared/hpcrl/v1/login/bin/)\s?hpcrl", HPCRL, line)
        run = shell([words.replace("/shared/hpcrl/v1", shlex.quote(str(tmp_path))) + " --dry-run"], tmp_path)
        assert run.returncode == 0, run.stderr
        assert "would be made" in run.stderr


def test_packages_of_the_page_are_those_that_roles_load() -> None:
    """Of Debian: those that the images install, but for what their tools bring."""
    text = PAGE.partition("\n## Before you begin\n")[2].partition("\n## ")[0]
    rows = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in text.splitlines() if "`" in line)}
    login, nodes = (set(cell.strip("`").split()) for cell in rows["Debian 12, Ubuntu 24.04"])
    image = (ROOT / "containers/hpcrl.def").read_text(encoding="utf-8")
    installed = re.search(r"--no-install-recommends \\\n([^\n]+)\n", image)
    assert installed is not None
    assert login | nodes == set(installed[1].split()) - {"ca-certificates", "g++"}
    # of the other distribution as many
    login, nodes = (set(cell.strip("`").split()) for cell in rows["RHEL 9, Rocky 9"])
    assert login == {"python3.11"}
    assert {"python3.11-devel", "gcc"} <= nodes
    assert len(nodes) == 6


def test_the_first_run_begins_as_it_stands(tmp_path: Path) -> None:
    """Its options are those of the command; without a Slurm the first stage says so, and the report is there."""
    ((line,),) = commands("First run")
    words = shlex.split(line)
    assert words[:4] == ["hpcrl", "site", "first-run", "mysite"]
    slurm = f"SLURM_CONF={shlex.quote(str(tmp_path))}/nowhere.conf "
    run = shell([slurm + line.replace("hpcrl site", f"{HPCRL} site", 1).replace("/shared", str(tmp_path))], tmp_path)
    assert run.returncode == 1, run.stderr
    assert run.stdout == f"{tmp_path}/first-run-mysite/report.md\n"
    assert "1/6 init: " in run.stderr
    # there is no profile yet, so the same draft is wanted again
    assert "continue: hpcrl site first-run mysite --runs-root " in run.stderr
    assert "| init | stopped |" in (tmp_path / "first-run-mysite/report.md").read_text(encoding="utf-8")


def test_stages_of_the_page_are_those_of_the_code() -> None:
    text = PAGE.partition("\n## First run\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE) == [stage.name for stage in STAGES]


def test_the_walk_has_lines_that_the_command_line_knows() -> None:
    """All of it runs by tools/walk_install.py; here each line is looked at."""
    (lines,) = commands("On a virtual cluster")
    typed = "\n".join(lines)
    assert "git clone" in lines[1]
    packages = set(lines[0].partition("--no-install-recommends ")[2].split())
    assert {"slurm-wlm", "munge"} <= packages
    assert [re.findall(r"--role (\w+)", line) for line in lines if "site install" in line] == [
        ["login"],
        ["trainer"],
        ["vllm"],
    ]
    spec = importlib.util.spec_from_file_location("walk_install", ROOT / "tools/walk_install.py")
    assert spec is not None
    assert spec.loader is not None
    walk = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(walk)
    assert walk.commands(without_vllm=False) == lines
    script = walk.traced(lines)
    assert all(f"\n{line}\n" in script for line in lines)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    without = walk.commands(without_vllm=True)
    assert "vllm" not in "\n".join(without)
    assert len(without) == len(lines) - 1
    # the page's two ways to the first run are one
    ((real,),) = commands("First run")
    assert real.replace("infiniband", "ethernet") in typed


def test_the_table_has_all_roles_and_sizes() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+) (MB|GB) \|$", PAGE, re.MULTILINE)
    assert [name for name, _, _ in rows] == [str(role) for role in SiteRole]
    for name, size, unit in rows:
        lock = (ROOT / f"locks/{lock_name(SiteRole(name), Accelerator.CUDA)}.txt").read_text(encoding="utf-8")
        found = int(re.search(r"^# wheel-bytes: (\d+)$", lock, re.MULTILINE)[1])  # type: ignore[index]
        assert abs(float(size) * {"MB": 1e6, "GB": 1e9}[unit] / found - 1) < 0.1, name


def test_messages_of_the_table_are_those_of_the_code() -> None:
    """Each begins as in the table."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hpcrl/sites/installation").glob("*.py"))
    table = PAGE.partition("## What can go wrong")[2]
    quoted = [
        text
        for row in table.splitlines()
        if row.startswith("| `")
        for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    ]
    assert len(quoted) > 8
    for text in quoted:
        for part in re.split(r" … ", text.removesuffix(" …")):
            assert part in sources, part
    assert {what for _, what, _ in _FAILURES} & set(quoted)


@pytest.mark.parametrize("role", [SiteRole.ENV, SiteRole.TRAINER, SiteRole.VLLM])
def test_the_line_that_is_printed_is_of_a_profile(role: SiteRole, tmp_path: Path) -> None:
    python = "/shared/with blanks: ü/bin/python"
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: h200-28\nname: mine\n{profile_line(role, python)}\n", encoding="utf-8")
    found = load_cluster(str(path)).value
    named = {str(key): value for key, value in found.python_by_role.items()}
    roles = {SiteRole.ENV: ["orchestrator"], SiteRole.TRAINER: ["trainer", "orchestrator"], SiteRole.VLLM: []}[role]
    assert named == dict.fromkeys(roles, python)
    assert found.vllm_python == (python if role is SiteRole.VLLM else None)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        name, _, anchor = target.partition("#")
        text = (ROOT / "docs" / name).read_text(encoding="utf-8") if name else PAGE
        titles = [
            re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in text.splitlines()
            if line.startswith("#")
        ]
        assert not anchor or anchor in titles, target


@pytest.mark.parametrize(
    "text",
    ["pip install hpcrl", "pip install 'hpcrl[all]'", "uv pip install -U hpcrl==1.0", 'pip3 install "hpcrl[vllm]"'],
)
def test_the_search_finds_the_public_name(text: str) -> None:
    assert PUBLIC_NAME.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install '/path/to/hpcrl[all]'",
        "pip install .",
        "python -m pip install '/s/hpcrl-0.1.0-py3-none-any.whl[trainer]'",
    ],
)
def test_the_search_passes_paths(text: str) -> None:
    assert not PUBLIC_NAME.search(text)


def test_nothing_names_hpcrl_as_if_it_were_on_an_index() -> None:
    """A package of that name there would be somebody else's."""
    assert len(TEXTS) > 700
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in TEXTS
        for match in PUBLIC_NAME.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
