"""The import arrows of the design, and the rule that the control plane runs without torch."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from start_models import TINY_CONFIG

import hpcrl

_SPEC = importlib.util.spec_from_file_location("count_house", Path(__file__).parents[1] / "tools/count_house.py")
assert _SPEC is not None
assert _SPEC.loader is not None
house = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(house)

PACKAGE = Path(hpcrl.__file__).parent
#: modules beside the rooms; they import nothing but each other
LEAVES = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "api"}
#: rooms that every room above may import
GROUND = {"storage", "reporting", "network", "processes"}
#: which rooms each room may import, beside itself, `LEAVES`, `GROUND` and `hpcrl` itself
ARROWS: dict[str, set[str]] = {
    "storage": set(),
    "processes": set(),
    "reporting": {"storage"},
    "network": {"storage", "reporting"},
    "config": set(),
    "models": set(),
    "weights": set(),
    "checkpoints": set(),
    "dock": set(),
    "evaluation": set(),
    "sandboxes": set(),
    "runs": {"config", "checkpoints", "weights", "dock"},
    "jobplan": {"config", "models", "weights"},
    "planning": {"config", "models", "runs", "jobplan"},
    "simulation": {"config", "models", "runs", "jobplan", "planning"},
    "analysis": {
        *("config", "models", "checkpoints", "dock", "runs", "jobplan", "evaluation", "planning", "simulation"),
    },
    "slurm": {"config", "runs"},
    "supervisor": {"config", "runs", "slurm", "checkpoints"},
    "submit": {"config", "runs", "slurm", "supervisor", "jobplan"},
    "sweeps": {"config", "runs", "slurm", "supervisor", "jobplan", "submit", "analysis"},
    "sites": {"config", "slurm", "supervisor"},
    "bringup": {"config", "jobplan", "planning", "runs", "slurm", "submit", "sites"},
    "devcluster": {"config", "slurm"},
    "cli": {
        *("config", "jobplan", "planning", "simulation", "runs", "slurm", "submit", "sites", "bringup"),
        *("checkpoints", "weights", "devcluster", "store", "dock", "models", "evaluation", "sandboxes", "swe"),
        *("mcp_server", "board", "analysis", "sweeps"),
    },
    "mcp_server": {"analysis", "config", "planning", "runs", "slurm"},
    "board": {"dock", "runs", "analysis"},
    "modeling": {"models", "weights"},
    "trainer": {"config", "models", "modeling", "weights", "checkpoints", "dock", "runs"},
    "inference": {"config", "models", "modeling", "weights", "runs"},
    "store": {"config", "runs"},
    "swe": {"sandboxes"},
    "rollouts": {"swe", "sandboxes", "config", "models", "weights", "checkpoints", "dock", "runs", "evaluation"},
}
#: single modules that a room may import from another, with the reason
EXCEPTIONS = {
    # whether head and embedding of a wrapped language model are one is seen by the heads of its files
    "models": {"hpcrl.weights.read.model_files", "hpcrl.weights.read.stored_weights"},
    # `python -m hpcrl` is the command line
    "__main__": {"hpcrl.cli.main"},
    # the functions for scripts stand beside the command line, above all that they call
    "api": {f"hpcrl.{room}" for room in ("config", "planning", "runs", "simulation", "slurm", "submit", "sweeps")},
    # a submit warns of sandboxes that may need more memory than the plan leaves them
    "submit": {"hpcrl.planning.memory.sandbox_notes"},
    # tools of agents call the functions for scripts
    "mcp_server": {"hpcrl.api"},
    # the simulator decides by the scheduler's own policy and account, which import nothing else
    "simulation": {"hpcrl.rollouts.sampling.policy", "hpcrl.rollouts.core.staleness"},
    # the warm-up takes demonstrations from the environments of the recipe; supervised training reads rows of data as
    # environments do, knows end markers of turns as the renderer does, and packs as the orchestrator does
    "trainer": {
        "hpcrl.rollouts.environments",
        "hpcrl.rollouts.rendering.formats",
        "hpcrl.rollouts.batches.packing",
    },
}
#: public classes of one name in two modules, with the reason; a reader of any other knows which one is meant
TWINS = {
    # the embedded engine's own, as in vLLM, and what the orchestrator knows of engines
    *("Engine", "SamplingParams", "Scheduler"),
    # the simulator has its own of what a run has
    *("Fleet", "Group", "Outcome", "Replica", "Rollout"),
    # facts of a layer without torch, and its module in torch
    *("Indexer", "Mamba2"),
    # messages of processes of environments, which are always named with their module: `wire.Begin`
    *("Answer", "Begin"),
}
#: public functions of one name in several modules (tools/count_house.py says which count); the set may only shrink
FUNCTION_TWINS = {
    *("bad_request", "digest_of", "fetch", "find_problems", "frame", "frames_of"),
    *("make", "pack", "read_rows", "run_command", "try_environment"),
}
MODULE_TWINS = 129
"""Maximum number of file names that modules in several folders have; it may only shrink."""
MAX_LINES = 400
"""Maximum number of lines of a module."""
MAX_TEST_LINES = 500
"""Maximum number of lines of a module of tests."""
#: modules over `MAX_LINES`; the list may only shrink
LONG_MODULES = {"hpcrl.rollouts.ledger.ledger", "hpcrl.rollouts.sampling.scheduler"}
TORCH_FREE = sorted(set(ARROWS) - {"trainer", "inference", "modeling"})
HEAVY = ("torch", "transformers", "vllm", "safetensors", "numpy", "matplotlib")


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE).with_suffix("")
        yield ".".join(("hpcrl", *relative.parts)).removesuffix(".__init__"), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


class WithoutTypeChecking(ast.NodeTransformer):
    """Takes out what is for type checkers alone."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def needed_modules(path: Path, known: Collection[str]) -> set[str]:
    """Those of ``known`` that a module imports when it is loaded or when its functions are called."""
    found = set()
    for node in ast.walk(WithoutTypeChecking().visit(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module or "" for name in names}
    return found & set(known)


def test_no_two_modules_need_each_other() -> None:
    """Neither at once nor by way of others, nor in functions that import when they are called."""
    paths = dict(modules())
    graph = {name: needed_modules(path, paths) - {name} for name, path in paths.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules need each other: {' -> '.join(error.args[1])}")


def part_of(room: str, module: str) -> str:
    """Return the folder or the single module of ``room`` that a module lies in; empty outside of the room."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == [room] and len(parts) > 2 else ""


@pytest.mark.parametrize("room", sorted(ARROWS))
def test_no_two_folders_of_a_room_need_each_other(room: str) -> None:
    """Single modules of a room count as folders of one module."""
    paths = dict(modules())
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        if part := part_of(room, name):
            needed = {part_of(room, other) for other in needed_modules(path, paths)}
            graph.setdefault(part, set()).update(needed - {part, ""})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"folders of {room} need each other: {' -> '.join(error.args[1])}")


def test_arrows() -> None:
    wrong = []
    for name, path in modules():
        parts = name.split(".")
        room = parts[1] if len(parts) > 1 else ""
        ground = set() if room in GROUND else GROUND
        allowed = ARROWS.get(room, set()) | LEAVES | ground | {room, "__version__"}
        exceptions = EXCEPTIONS.get(room, set())
        for target in imports(path):
            if not target.startswith("hpcrl.") or target.split(".")[1] in allowed:
                continue
            if not any(target == e or target.startswith(f"{e}.") for e in exceptions):
                wrong.append(f"{name} imports {target}")
    assert not wrong


def test_every_room_has_arrows() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name not in ("__pycache__", "_data")}
    assert rooms == set(ARROWS)


@pytest.mark.parametrize("room", TORCH_FREE)
def test_torch_free_rooms_never_name_torch(room: str) -> None:
    for name, path in modules():
        if name.split(".")[1:2] == [room]:
            assert not [t for t in imports(path) if t.split(".")[0] in ("torch", "vllm", "transformers")], name


def test_command_line_is_light() -> None:
    """Importing the command line loads none of the heavy packages, nor what only single commands need; a guard, of
    which there is one a task, loads still less; and who hands a run over loads no supervisor."""
    modules = ("hpcrl.supervisor.process.guard", "hpcrl.cli.main", "hpcrl.submit.submission")
    code = "import sys, importlib\nfor name in sys.argv[1:]:\n    importlib.import_module(name); print(*sys.modules)"
    command = [sys.executable, "-c", code, *modules]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    guard, cli, submission = (set(line.split()) for line in lines)
    assert not guard & {"msgspec", "logging", "subprocess", "socket", "random"}
    assert not cli & {*HEAVY, "pydantic", "submitit", "aiohttp", "yaml"}
    assert not submission & {*HEAVY, "aiohttp", "hpcrl.supervisor.supervisor"}


def test_a_submit_hands_the_supervisor_over_without_importing_it() -> None:
    """It is half of what a submit would import. Who is handed it has it before submitit takes signals."""
    code = """
import pickle, sys
import hpcrl.submit.new_run
from hpcrl.supervisor.job import Supervise
handed_over = pickle.dumps(Supervise("run"))
print(*sys.modules)
pickle.loads(handed_over)
print(*sys.modules)
"""
    command = [sys.executable, "-c", code]
    before, after = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert not {*before.split()} & {*HEAVY, "aiohttp", "hpcrl.supervisor.supervise"}
    assert "hpcrl.supervisor.supervise" in after.split()


def test_an_embedded_engine_starts_without_what_shards_or_compiles_a_model() -> None:
    """FSDP2, DTensor, `torch.compile` and sympy would be half of its start. A model is made as well: some ways to make
    tensors on ``meta``, and from such, import them."""
    code = """
import json, sys
import hpcrl.inference.embedded.serving.process
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import arch_from_config
build_model(arch_from_config(json.loads(sys.argv[1])), device="cpu")
print(*sys.modules)
"""
    command = [sys.executable, "-c", code, json.dumps(TINY_CONFIG)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in out
    assert not set(out) & {"torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "sympy"}


def test_no_two_public_classes_have_one_name() -> None:
    classes = [
        node.name
        for _, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name, count in Counter(classes).items() if count > 1} == TWINS


def test_no_more_functions_have_one_name() -> None:
    """A new name says what its module's does; one that is gone is taken off the list."""
    assert set(house.functions_in_several(PACKAGE)) == FUNCTION_TWINS


def test_no_more_modules_have_one_name() -> None:
    """A traceback, a search and a tab of an editor show the name alone."""
    names = house.modules_in_several(PACKAGE)
    assert len(names) == MODULE_TWINS, sorted(names)


def test_counts_tell_names_in_several_modules_and_circles_of_rooms(tmp_path: Path) -> None:
    package = tmp_path / "hpcrl"
    texts = {
        "one/__init__.py": "",
        "two/__init__.py": "",
        "one/same.py": "from hpcrl.two import same\ndef shared(): ...\ndef _own(): ...\n",
        "two/same.py": "import hpcrl.one.same\ndef shared(): ...\ndef _own(): ...\n",
        "cli/shared.py": "def shared(): ...\ndef status(): ...\n",
        "cli/other.py": "def status(): ...\n",
    }
    for name, text in texts.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert house.functions_in_several(package) == {"shared": 2}
    assert house.modules_in_several(package) == {"same": 2}
    assert house.arrows(package) == {("one", "two"), ("two", "one")}
    assert house.circular(house.arrows(package)) == 1
    assert house.circular({("one", "two"), ("two", "three")}) == 0


def test_modules_are_short() -> None:
    """A longer module is split by what its parts do; one that was split is taken off the list."""
    assert {name for name, path in modules() if len(path.read_text().splitlines()) > MAX_LINES} == LONG_MODULES
    tests = Path(__file__).parent.rglob("*.py")
    assert {path.name for path in tests if len(path.read_text().splitlines()) > MAX_TEST_LINES} == set()


def test_what_docstrings_name_is_there() -> None:
    sources = {name: path.read_text() for name, path in modules()}
    missing = []
    for name, source in sources.items():
        for named in re.findall(r"`(hpcrl(?:\.\w+)+)`", source):
            module = named
            while module not in sources:
                module = module.rpartition(".")[0]
            member = named.removeprefix(module).strip(".").partition(".")[0]
            if member and not re.search(rf"\b{member}\b", sources[module]):
                missing.append(f"{name} names {named}")
    assert not missing


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by their names alone: of two, one run cannot collect the second."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
