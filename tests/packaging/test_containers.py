"""Recipes of images: what they copy, install and call is there, and both make the same. Nothing is built here."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from hpcrl.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE, APPTAINER = ROOT / "containers/Dockerfile", ROOT / "containers/hpcrl.def"
INSTRUCTIONS = {"ARG", "FROM", "RUN", "COPY", "ENV"}
SECTIONS = {"files", "post", "environment", "test"}


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their arguments, continuations joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1].strip()) for line in lines]


def sections() -> tuple[dict[str, str], dict[str, str]]:
    """Header and sections of the definition of Apptainer."""
    text = re.sub(r"^\s*#.*\n", "", APPTAINER.read_text(encoding="utf-8"), flags=re.MULTILINE)
    head, *rest = re.split(r"^%", text, flags=re.MULTILINE)
    header = dict(line.split(": ", 1) for line in head.splitlines() if line.strip())
    return header, {each.split("\n", 1)[0].strip(): each.split("\n", 1)[1] for each in rest}


def copied() -> dict[str, dict[str, str]]:
    """What each recipe copies, by source."""
    docker = {}
    for name, rest in instructions():
        if name == "COPY":
            *sources, target = shlex.split(rest)
            docker |= {source: f"{target}{source}" if target.endswith("/") else target for source in sources}
    files = [shlex.split(line) for line in sections()[1]["files"].splitlines() if line.strip()]
    return {"Dockerfile": docker, "hpcrl.def": dict(files)}  # type: ignore[dict-item]


def scripts() -> dict[str, str]:
    """The shell scripts of each recipe."""
    docker = "set -eu\n" + "\n".join(rest for name, rest in instructions() if name == "RUN")
    return {"Dockerfile": docker, "hpcrl.def": sections()[1]["post"]}


def commands(script: str) -> list[list[str]]:
    """Commands of a script, in words."""
    lines = re.split(r"&&|\n", re.sub(r"\\\n", " ", script))
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def test_the_dockerfile_is_of_instructions_that_docker_knows() -> None:
    found = instructions()
    assert {name for name, _ in found} == INSTRUCTIONS
    assert [name for name, _ in found][:2] == ["ARG", "FROM"]
    # what is used is declared, or of the shell
    declared = {rest.partition("=")[0] for name, rest in found if name == "ARG"} | {"PATH"}
    assert {name for _, rest in found for name in re.findall(r"\$\{?(\w+)", rest)} == declared
    # an ARG before FROM is for FROM alone
    assert dict(found)["FROM"] == "${BASE}"


def test_the_definition_is_of_sections_that_apptainer_knows() -> None:
    header, found = sections()
    assert set(header) == {"Bootstrap", "From"}
    assert header["Bootstrap"] == "docker"
    assert set(found) == SECTIONS


def test_both_begin_with_the_same_system() -> None:
    base = next(rest for name, rest in instructions() if name == "ARG")
    assert base == f"BASE=docker.io/{sections()[0]['From']}"
    assert re.search(r":\d+\.\d+\.\d+-", base), "the base has no exact version"


@pytest.mark.parametrize("recipe", ["Dockerfile", "hpcrl.def"])
def test_what_is_copied_is_there(recipe: str) -> None:
    found = copied()[recipe]
    for source in found:
        assert (ROOT / source).exists(), source
    assert found == copied()["Dockerfile"]
    # all that hpcrl's own wheel is made of: it is made in the image
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    included = re.findall(r'^(\w+) = "hpcrl/_data/', project, re.MULTILINE)
    assert len(included) >= 4
    assert {"pyproject.toml", "hpcrl", *included} <= set(found)
    assert {target for source, target in found.items() if (ROOT / source).is_dir()} == {
        f"/src/hpcrl/{source}" for source in found if (ROOT / source).is_dir()
    }


@pytest.mark.parametrize("recipe", ["Dockerfile", "hpcrl.def"])
def test_scripts_are_good_shell(recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "script.sh"
    path.write_text(f"#!/bin/sh\n{scripts()[recipe]}\n")
    subprocess.run(["sh", "-n", path], check=True)


@pytest.mark.parametrize("recipe", ["Dockerfile", "hpcrl.def"])
def test_commands_of_hpcrl_exist_with_their_options(recipe: str) -> None:
    found = [words[words.index("hpcrl") + 1 :] for words in commands(scripts()[recipe]) if "hpcrl" in words]
    assert [words[words.index("--role") + 1] for words in found] == ["trainer", "vllm"]
    for words in found:
        command: Any = typer.main.get_command(app)
        rest = ["cuda" if word == "${ACCELERATOR}" else word for word in words]
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(command.name, rest)


@pytest.mark.parametrize("recipe", ["Dockerfile", "hpcrl.def"])
def test_options_of_pip_exist(recipe: str) -> None:
    (words,) = [words for words in commands(scripts()[recipe]) if words[0].endswith("/pip")]
    known = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"(?<!\S){option}\b", known), option
    lock = words[words.index("-r") + 1]
    assert (ROOT / lock.removeprefix("/src/hpcrl/")).is_file()


@pytest.mark.parametrize("recipe", ["Dockerfile", "hpcrl.def"])
def test_packages_have_the_libraries_of_the_store(recipe: str) -> None:
    spec = importlib.util.spec_from_file_location("bootstrap_of_images", ROOT / "tools/bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    (words,) = [words for words in commands(scripts()[recipe]) if words[1:3] == ["apt-get", "install"]]
    assert set(bootstrap.STORE_LIBRARIES.values()) <= set(words)
    assert {"python3-venv", "python3-dev", "gcc"} <= set(words)


def test_both_install_the_same() -> None:
    docker, apptainer = (commands(scripts()[recipe]) for recipe in ("Dockerfile", "hpcrl.def"))
    docker = [["cuda" if word == "${ACCELERATOR}" else word for word in words] for words in docker]
    assert docker == apptainer
    assert ("ARG", "ACCELERATOR=cuda") in instructions()


def test_the_docs_name_them() -> None:
    text = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    assert "docker build -f containers/Dockerfile -t hpcrl ." in text
    assert "apptainer build hpcrl.sif containers/hpcrl.def" in text
    assert "/opt/hpcrl/trainer/bin/python" in text
