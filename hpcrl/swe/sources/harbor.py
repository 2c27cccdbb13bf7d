"""Task directories of Harbor: ``task.toml``, ``instruction.md``, ``tests/test.sh``.

Such a task brings its own verifier, which the judge runs in a fresh sandbox and believes: see
`hpcrl.swe.judging.script`. Settings that sandboxes do not have are refused by name.
"""

from __future__ import annotations

import math
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from hpcrl.swe.task import SweTask, SweTaskError, check_task

_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_MAX_FILE = 4 << 20
_TIMEOUT_S = 600.0
_REFUSED = {
    "environment": ("gpus", "gpu_types", "mcp_servers", "healthcheck", "skills_dir"),
    "verifier": ("user", "environment", "collect"),
    "agent": ("user",),
    "solution": ("env",),
}
"""Settings, by their table, without which a task would be another one."""
_MEMORY_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1 << 20}


def read_harbor(path: Path) -> list[SweTask]:
    """Read a task directory, or a directory of such directories.

    Raises
    ------
    SweTaskError
        There is none, or one is wrong.
    """
    if (path / "task.toml").is_file():
        return [_read(path, "")]
    try:
        directories = sorted(each for each in path.iterdir() if (each / "task.toml").is_file())
    except OSError as error:
        raise SweTaskError(f"{path} cannot be read: {error.strerror}\n    hint: name a directory of tasks") from error
    if not directories:
        raise SweTaskError(f"{path} has no directory with a task.toml\n    hint: name a directory of Harbor tasks")
    return [_read(directory, directory.name) for directory in directories]


def _read(directory: Path, prefix: str) -> SweTask:
    def wrong(what: str, hint: str) -> SweTaskError:
        return SweTaskError(f"{directory}: {what}\n    hint: {hint}")

    try:
        document = tomllib.loads((directory / "task.toml").read_text(encoding="utf-8"))
        instruction = (directory / "instruction.md").read_text(encoding="utf-8")
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise wrong(f"it cannot be read: {error}", "a task has task.toml and instruction.md") from error
    version = str(document.get("version") or document.get("schema_version") or "1.0")
    if version not in _VERSIONS:
        raise wrong(f"its schema is {version!r}", f"versions {', '.join(_VERSIONS)} are read")
    if document.get("steps"):
        raise wrong("it has several steps", "tasks of one step are read")
    environment, verifier = _table(document, "environment", wrong), _table(document, "verifier", wrong)
    agent = _table(document, "agent", wrong)
    for table, names in _REFUSED.items():
        for name in names:
            if _table(document, table, wrong).get(name):
                raise wrong(f"it has {table}.{name}, which sandboxes do not have", "leave the task out")
    if verifier.get("environment_mode", "shared") != "shared":
        raise wrong("verifier.environment_mode is not 'shared'", "leave the task out")
    if (directory / "environment/docker-compose.yaml").exists():
        raise wrong("it has several containers (docker-compose.yaml)", "leave the task out")
    timeout_s = _number(verifier, "verifier.timeout_sec", _TIMEOUT_S, wrong)
    script = _files(directory, "tests", wrong)
    if "tests/test.sh" not in script:
        raise wrong("it has no tests/test.sh", "see Harbor's documentation")
    tree = f"{prefix}/tree" if prefix else "tree"
    dockerfile = _dockerfile(directory, wrong)
    if dockerfile is not None and not environment.get("docker_image") and not (directory / "tree").is_dir():
        hint = "build it and name the image in environment.docker_image, or put the task's files into tree"
        raise wrong("it has environment/Dockerfile, which hpcrl does not build", hint)
    task = SweTask(
        id=str(document.get("name") or directory.name),
        instruction=instruction,
        tree=tree if (directory / "tree").is_dir() else "",
        image=str(environment.get("docker_image") or ""),
        directory=str(environment.get("workdir") or _work_directory(dockerfile or "") or "/app"),
        verifier="script",
        script=script,
        solve=_files(directory, "solution", wrong),
        env=_variables(environment, "environment", wrong),
        script_env=_variables(verifier, "verifier", wrong),
        timeout_s=timeout_s,
        agent_timeout_s=_number(agent, "agent.timeout_sec", 0.0, wrong),
        memory_mib=_memory_mib(environment, wrong),
        cpus=_number(environment, "environment.cpus", 0.0, wrong),
        source="harbor",
        package=directory.name,
    )
    check_task(task)
    return task


def _dockerfile(directory: Path, wrong: Any) -> str | None:
    """Return the text of a task's Dockerfile; None where it has none."""
    try:
        return (directory / "environment/Dockerfile").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(f"environment/Dockerfile cannot be read: {error}", "it is UTF-8 text") from error


def _work_directory(dockerfile: str) -> str:
    """Return the work directory that a Dockerfile gives its image; empty where it does not say.

    Of several ones each is relative to that before it. One with a variable is not known.
    """
    found = ""
    for line in dockerfile.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "FROM":
            found = ""
        elif word.upper() == "WORKDIR":
            found = "" if "$" in rest else posixpath.normpath(posixpath.join(found or "/", rest.strip().strip("\"'")))
    return found if found != "/" else ""


def _table(document: dict[str, Any], name: str, wrong: Any) -> dict[str, Any]:
    value = document.get(name, {})
    if not isinstance(value, dict):
        raise wrong(f"{name} is not a table", f"write [{name}]")
    return value


def _number(table: dict[str, Any], name: str, default: float, wrong: Any) -> float:
    """Return a number that is not negative; ``name`` has the table in front."""
    value = table.get(name.partition(".")[2])
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise wrong(f"{name} is {value!r}", "give a number")
    return float(value)


def _memory_mib(environment: dict[str, Any], wrong: Any) -> int:
    """Return ``memory_mb``, or ``memory`` of older versions, such as ``"2G"``; 0 without them."""
    older = environment.get("memory")
    if older is None:
        return int(_number(environment, "environment.memory_mb", 0.0, wrong))
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", str(older).strip(), re.IGNORECASE)
    if found is None:
        raise wrong(f"environment.memory is {older!r}", 'give a size, such as "2G"')
    return math.ceil(float(found[1]) * _MEMORY_UNITS[found[2].upper()])


def _variables(table: dict[str, Any], name: str, wrong: Any) -> dict[str, str]:
    found = table.get("env") or {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise wrong(f"{name}.env is not a table of texts", f"write [{name}.env]")
    for key, value in found.items():
        if "${" in value:
            raise wrong(f"{name}.env.{key} takes a variable of the machine", "write its value")
        if not key or "=" in key or "\0" in key + value:
            raise wrong(f"{name}.env has {key!r}, which cannot be a variable", "give it another name")
    return found


def _files(directory: Path, folder: str, wrong: Any) -> dict[str, str]:
    """Return the text files of a folder by path."""
    found: dict[str, str] = {}
    for path in sorted((directory / folder).rglob("*")):
        if path.is_file():
            if path.stat().st_size > _MAX_FILE:
                raise wrong(f"{path.name} has more than {_MAX_FILE >> 20} MiB", "put large files into the image")
            try:
                text = path.read_bytes().decode()
            except UnicodeDecodeError:
                raise wrong(f"{path.name} is not UTF-8 text", f"files in {folder} are text") from None
            found[path.relative_to(directory).as_posix()] = text
    return found
