"""What the README tells people to type exists, and its recipe is good."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.table import check_rules

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: `hpcrl` lines of indented blocks, comments and continuations taken off
COMMANDS = [line.split("#")[0].strip() for line in README.splitlines() if re.match(r" {4}(hpcrl|make) ", line)]


def test_there_are_commands() -> None:
    assert {command.split()[0] for command in COMMANDS} == {"hpcrl", "make"}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command: str) -> None:
    reference = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    for part in command.replace("\\", "").split("&&"):
        program, *words = part.split() or [""]
        if program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        elif program == "hpcrl":
            name = " ".join(words[:2]) if words[0] in ("recipe", "cluster", "devcluster") else words[0]
            section = re.search(rf"^#+ `hpcrl {name}`$(.*?)(^#|\Z)", reference, re.MULTILINE | re.DOTALL)
            assert section, f"no command {name}"
            for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", part):
                assert option in section[1], f"{name} has no {option}"


def test_recipe_of_the_readme_is_good(tmp_path: Path) -> None:
    block = re.search(r"    # mine\.yaml\n((?:    .*\n)+)", README)
    assert block is not None
    path = tmp_path / "mine.yaml"
    path.write_text(textwrap.dedent(block[1]))
    recipe = load_recipe(str(path))
    check_rules(recipe, load_cluster("local"))
    assert recipe.value.rollouts.max_off_policy_steps == 2
    assert [environment.name for environment in recipe.value.environments] == ["sort"]


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_page_is_in_the_index_and_every_link_leads_somewhere() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)\)", index)
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {target for target in targets if "/" not in target} == pages
    for target in targets:
        assert (ROOT / "docs" / target).exists(), target


def test_files_named_in_agents_md_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:hpcrl|tests|bench|recipes|clusters|templates)/[\w./]*|[A-Z]+\.md)`", text):
        assert (ROOT / name).exists(), name
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^    make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_readme_is_short_and_links_all_pages() -> None:
    assert len(README.splitlines()) < 150
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)[)#]", README))
    assert linked == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert "--install-completion" in README
