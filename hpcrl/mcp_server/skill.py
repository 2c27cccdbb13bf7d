"""The skill file for coding agents, which comes with the package."""

from __future__ import annotations

from importlib import resources


def skill_text() -> str:
    """Return the text of the skill file: how to work with hpcrl by its commands and tools."""
    return (resources.files("hpcrl.mcp_server") / "SKILL.md").read_text(encoding="utf-8")
