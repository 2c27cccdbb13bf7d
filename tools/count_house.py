"""Count the structure of the package: ``python tools/count_house.py [--json] [DIRECTORY]``.

It prints modules at the root, arrows between rooms, openings of docstrings, names that several modules define, and
sizes. DIRECTORY is the root of a checkout, this one by default, so that two versions can be compared.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: first words of docstrings that are no imperative
FRAGMENTS = ("What", "Whether", "Where", "Who", "How", "Of", "When", "Which", "Why", "The", "A")
#: names that a module has by its role in the package, as `register` of each module of commands
BY_ROLE = {"register", "main"}
#: a function of a command, and one for scripts, are called like the command and what it calls
NAMED_BY_COMMANDS = ("hpcrl.cli.", "hpcrl.api")
#: programs that run alone on a node, without hpcrl: they cannot share a function
ALONE = re.compile(r"_script$")


def sources(folder: Path) -> dict[str, str]:
    """Texts of the modules below a folder by dotted name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        if "__pycache__" not in path.parts:
            relative = path.relative_to(folder.parent).with_suffix("")
            found[".".join(relative.parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


def public(tree: ast.Module, kind: type[ast.stmt] | tuple[type[ast.stmt], ...]) -> Iterator[str]:
    """Names of the public functions or classes that a module defines itself."""
    for node in tree.body:
        if isinstance(node, kind) and not node.name.startswith("_"):  # type: ignore[attr-defined]
            yield node.name  # type: ignore[attr-defined]


def in_several(names: dict[str, list[str]]) -> dict[str, int]:
    """How often each name occurs that more than one module defines."""
    counts = Counter(name for found in names.values() for name in set(found))
    return {name: count for name, count in sorted(counts.items()) if count > 1}


def functions_in_several(package: Path) -> dict[str, int]:
    """Names of public functions that several modules define, with the number of modules."""
    names = {
        module: list(public(ast.parse(text), (ast.FunctionDef, ast.AsyncFunctionDef)))
        for module, text in sources(package).items()
        if not module.startswith(NAMED_BY_COMMANDS) and not ALONE.search(module)
    }
    return {name: count for name, count in in_several(names).items() if name not in BY_ROLE}


def modules_in_several(package: Path) -> dict[str, int]:
    """File names of modules that lie in several folders, with the number of folders."""
    names = Counter(module.rpartition(".")[2] for module in sources(package) if _is_file(package, module))
    return {name: count for name, count in sorted(names.items()) if count > 1}


def arrows(package: Path) -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second; a module at the root is a room of its own."""
    known = {path.parent.name for path in package.glob("*/__init__.py")} | {path.stem for path in package.glob("*.py")}
    found = set()
    for module, text in sources(package).items():
        room = module.split(".")[1] if "." in module else "__init__"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                parts = target.split(".")
                if parts[0] == package.name and len(parts) > 1 and parts[1] in known - {room}:
                    found.add((room, parts[1]))
    return found


def circular(pairs: set[tuple[str, str]]) -> int:
    """Return the number of arrows that must be left out until no circle remains: those that run up."""
    left, removed = set(pairs), 0
    while True:
        graph = defaultdict(set)
        for room, other in left:
            graph[room].add(other)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            # `graphlib` lists a circle against the direction of its arrows
            circle = error.args[1]
            left -= {(circle[1], circle[0]), (circle[0], circle[1])}
            removed += 1
        else:
            return removed


def openings(package: Path) -> Counter[str]:
    """First words of the docstrings of functions, as far as they are no imperative."""
    counts = Counter[str]()
    for text in sources(package).values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                words = (ast.get_docstring(node) or "").split()
                counts["functions with a docstring"] += bool(words)
                if words and words[0].strip(",.:") in FRAGMENTS:
                    counts[words[0].strip(",.:")] += 1
    return counts


def count(root: Path) -> dict[str, object]:
    """All counts of a checkout."""
    package = root / "hpcrl"
    texts = sources(package)
    pairs = arrows(package)
    classes = Counter(
        node.name
        for text in texts.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return {
        "modules at the root": len([path for path in package.glob("*.py") if path.stem != "__init__"]),
        "rooms": len(list(package.glob("*/__init__.py"))),
        "arrows between rooms": len(pairs),
        "arrows up": circular(pairs),
        "openings of docstrings": dict(openings(package).most_common()),
        "classes of one name": len([name for name, number in classes.items() if number > 1]),
        "functions of one name": len(functions_in_several(package)),
        "modules of one name": len(modules_in_several(package)),
        "isinstance(…, SlurmCluster)": sum(
            len(re.findall(r"isinstance\([^()]*(?:\([^()]*\))?[^()]*SlurmCluster\b", text)) for text in texts.values()
        ),
        "modules with __all__": sum("\n__all__ = " in text for text in texts.values()),
        "files": {folder: len(sources(root / folder)) for folder in ("hpcrl", "bench", "tests")},
        "lines": {
            folder: sum(len(text.splitlines()) for text in sources(root / folder).values())
            for folder in ("hpcrl", "bench", "tests")
        },
    }


def _is_file(package: Path, module: str) -> bool:
    return package.parent.joinpath(*module.split(".")).with_suffix(".py").is_file()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("directory", nargs="?", type=Path, default=ROOT, help="root of a checkout")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--names", action="store_true", help="also print the names that several modules define")
    arguments = parser.parse_args()
    counts = count(arguments.directory.resolve())
    if arguments.names:
        counts["names of functions"] = functions_in_several(arguments.directory.resolve() / "hpcrl")
        counts["names of modules"] = modules_in_several(arguments.directory.resolve() / "hpcrl")
    if arguments.json:
        print(json.dumps(counts, indent=2, ensure_ascii=False))
    else:
        for name, value in counts.items():
            shown = ", ".join(f"{k} {v:,}" for k, v in value.items()) if isinstance(value, dict) else f"{value:,}"
            print(f"{name:<30} {shown}")
