"""Draw the rooms of the package from its imports: ``python tools/draw_rooms.py`` writes the picture into the docs.

The picture is a Mermaid flowchart in docs/architecture.md. Arrows point from a room to what it imports. One that
follows from others (a room that is reached by way of another room, too) is left out, or there would be nothing but
arrows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hpcrl"
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- rooms: begin -->", "<!-- rooms: end -->"

#: where each room runs; a room that is missing here is drawn outside of all places, and the test says so
PLACES = {
    "login node": (
        "cli",
        "mcp_server",
        "board",
        "bringup",
        "sites",
        "submit",
        "sweeps",
        "jobplan",
        "planning",
        "simulation",
        "analysis",
        "devcluster",
    ),
    "batch process of the job": ("supervisor",),
    "nodes": ("trainer", "inference", "rollouts", "sandboxes", "swe", "store", "modeling"),
    "contracts, read and written on both sides": ("weights", "checkpoints", "dock", "runs"),
    "everywhere": ("config", "evaluation", "models", "slurm"),
    "ground": ("storage", "reporting", "network", "processes"),
}


def rooms() -> list[str]:
    """Names of all rooms: the folders of the package."""
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def imported(room: str) -> set[str]:
    """Rooms that the modules of one room import."""
    known = set(rooms())
    found = {target.split(".")[1] for target in _targets(PACKAGE / room) if target.count(".") >= 1}
    return (found & known) - {room}


def _targets(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name.startswith("hpcrl."))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hpcrl":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows() -> list[tuple[str, str]]:
    """Imports between rooms without those that follow from others (transitive reduction), sorted.

    Raises
    ------
    ValueError
        Two rooms import each other, directly or by way of others.
    """
    direct = {room: imported(room) for room in rooms()}
    reached: dict[str, set[str]] = {}

    def reach(room: str, way: tuple[str, ...]) -> set[str]:
        if room in way:
            raise ValueError(f"rooms import each other: {' -> '.join((*way, room))}")
        if room not in reached:
            reached[room] = direct[room].union(*(reach(other, (*way, room)) for other in direct[room]))
        return reached[room]

    for room in direct:
        reach(room, ())
    return sorted(
        (room, other)
        for room, others in direct.items()
        for other in others
        if not any(other in reached[between] for between in others - {other})
    )


def picture() -> str:
    """The flowchart, as it stands between the marks in the docs."""
    lines = ["```mermaid", "flowchart TD"]
    for number, (place, names) in enumerate(PLACES.items()):
        lines += [f'  subgraph place{number}["{place}"]', *(f"    {name}" for name in names), "  end"]
    lines += [f"  {room} --> {other}" for room, other in arrows()]
    return "\n".join([*lines, "```"])


def page(text: str) -> str:
    """The page with the picture of today between its marks."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{picture()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
