"""Findings from the imports of roles on a node: versions out of their range, libraries that do not load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcrl import __version__
from hpcrl.installing import install_command
from hpcrl.sites.library_probe import CudaAnswer, LibraryAnswer, library_named
from hpcrl.sites.profile_check import Severity
from hpcrl.versions import NCCL, OLDEST_PYTHON, is_at_least, is_below, release_of

_PRINTED = 120
"""Characters of a printed line that are shown."""


class FindingRow(NamedTuple):
    """A finding about one node: what it is about has no name of the node yet. ``key`` empty: the node's shape."""

    code: str
    severity: Severity
    key: str
    what: str
    hint: str


def library_findings(answers: Sequence[LibraryAnswer], *, has_driver: bool) -> list[FindingRow]:
    """Judge all answers of a node.

    Parameters
    ----------
    has_driver:
        Whether the node has a driver of NVIDIA. Without one there are no findings about requirements of GPUs: the
        missing driver is a separate finding.
    """
    found: list[FindingRow] = []
    for answer in answers:
        if library_named(answer.question.library).on_gpus and not has_driver:
            continue
        found += _loads(answer) if answer.kind != "good" else _fits(answer)
        if answer.cuda is not None and has_driver:
            found += _cuda(answer, answer.cuda, answers)
    found += _prints(answers)
    # a missing interpreter is one finding, which all roles have
    return list(dict.fromkeys(found))


def library_summary(answers: Iterable[LibraryAnswer]) -> list[str]:
    """Return a line for each interpreter: the installed libraries, and optional ones that a role could use."""
    by_python: dict[str, list[LibraryAnswer]] = {}
    for answer in answers:
        by_python.setdefault(answer.question.python, []).append(answer)
    lines = []
    for python, its in by_python.items():
        there = [f"{a.question.library} {a.version}".rstrip() for a in its if a.kind == "good"]
        absent = [a.question.library for a in its if a.kind == "absent" and not a.question.needed]
        text = f"{python} ({', '.join(its[0].question.roles)}): {', '.join(there) or 'nothing that loads'}"
        lines.append(text + (f"; not installed: {', '.join(absent)}" if absent else ""))
    return lines


def _severity(answer: LibraryAnswer) -> Severity:
    return Severity.ERROR if answer.question.needed else Severity.WARNING


def _key(answer: LibraryAnswer) -> str:
    role = answer.question.roles[0]
    if role == "vllm":
        return "vllm_python"
    return f"python_by_role.{'orchestrator' if role == 'env' else role}"


def _who(answer: LibraryAnswer) -> str:
    return f"{answer.question.python} ({', '.join(answer.question.roles)})"


def _install(answer: LibraryAnswer) -> str:
    extra = "vllm" if answer.question.roles == ("vllm",) else "all"
    return f"{install_command(extra, python=answer.question.python)}, or name another interpreter in {_key(answer)}"


def _loads(answer: LibraryAnswer) -> Iterator[FindingRow]:
    name, needed, key = answer.question.library, answer.question.needed, _key(answer)
    if answer.kind == "missing":
        what = f"{_who(answer)} cannot be started: {answer.problem}"
        way = f"correct {key}: all nodes must see the interpreter under this name"
        yield FindingRow("imports", Severity.ERROR, key, what, way)
    elif answer.kind == "absent":
        if needed:
            what = f"{_who(answer)} has no {name}, which it needs"
            way = "install torch for CUDA, which brings it" if name == "Triton" else _install(answer)
            yield FindingRow("imports", Severity.ERROR, key, what, way)
    elif answer.kind == "skipped":
        what = f"{_who(answer)} was not checked for {name}: {answer.problem}"
        way = "try again when the shared filesystem is less busy; start-up of roles is as slow"
        yield FindingRow("imports-slow", Severity.WARNING, key, what, way)
    else:
        what = f"{_who(answer)} cannot import {name}{_version(answer)}: {answer.problem}"
        code, way = {
            "crash": (
                "import-crash",
                f"install {name} built for this processor, driver and torch, or name another interpreter in {key}",
            ),
            "hang": (
                "import-hang",
                "check the named place and the filesystem of the environment: nodes must read it fast",
            ),
        }.get(answer.kind, ("imports", _install(answer) if needed else f"install it again, or remove {name}"))
        yield FindingRow(code, _severity(answer), key, what, way)


def _version(answer: LibraryAnswer) -> str:
    return f" {answer.version}" if answer.version else ""


def _fits(answer: LibraryAnswer) -> Iterator[FindingRow]:
    library, key = library_named(answer.question.library), _key(answer)
    if answer.python_version and not is_at_least(answer.python_version, OLDEST_PYTHON):
        what = f"{_who(answer)} is Python {answer.python_version}; hpcrl needs {OLDEST_PYTHON} or later"
        yield FindingRow("python-old", Severity.ERROR, key, what, "make the environment with a newer Python")
    if library.module == "hpcrl" and answer.version != __version__:
        what = (
            f"{_who(answer)} has hpcrl {answer.version or 'of an unknown version'}, and this command is {__version__}"
        )
        way = f"install the same: {install_command('all', python=answer.question.python)}"
        yield FindingRow("hpcrl-differs", Severity.WARNING, key, what, way)
    what = f"{_who(answer)} has {library.name} {answer.version}; {library.range_text} works"
    if answer.distribution in library.numbered_otherwise:
        pass
    elif library.at_least is not None and release_of(answer.version) is None:
        what = f"{_who(answer)} has {library.name} of an unknown version; {library.range_text} works"
        yield FindingRow("version-unknown", Severity.WARNING, key, what, "install it as a package, which has a version")
    elif not is_at_least(answer.version, library.at_least):
        way = f"install another one: {library.why_at_least}"
        yield FindingRow("version-old", _severity(answer), key, what, way)
    elif not is_below(answer.version, library.below):
        way = f"install another one, or try it in a short run: {library.why_below}"
        yield FindingRow("version-new", Severity.WARNING, key, what, way)
    if answer.missing:
        what = f"{_who(answer)}: {library.name}{_version(answer)} has no {', '.join(answer.missing)}"
        way = f"install a version of {library.name} that has; {library.range_text} works"
        yield FindingRow("version-lacks", _severity(answer), key, what, way)
    yield from _builds(answer)
    for text in answer.unmet:
        what = f"{_who(answer)}: {library.name}{_version(answer)} asks for {text}"
        # DeepEP needs a newer NCCL than torch requires; docs/training.md describes its installation
        if text.startswith(NCCL.distributions):
            continue
        way = f"install both together, as the constraints of hpcrl pin them; {library.name} brings what it asks for"
        yield FindingRow("versions-conflict", _severity(answer), key, what, way)


def _builds(answer: LibraryAnswer) -> Iterator[FindingRow]:
    """Say that a library loads and cannot compile: its first program on a GPU would end the role."""
    if answer.build_problem:
        what = f"{_who(answer)}: {answer.question.library}{_version(answer)} cannot compile: {answer.build_problem}"
        way = "install gcc and the headers of this Python on the nodes (Debian: python3-dev, RHEL: python3.11-devel), "
        way += "or add the directory of the compiler to launch.path; a Python that uv installs has its headers"
        yield FindingRow("no-compiler", _severity(answer), _key(answer), what, way)


def _cuda(answer: LibraryAnswer, cuda: CudaAnswer, answers: Sequence[LibraryAnswer]) -> Iterator[FindingRow]:
    key, who = _key(answer), _who(answer)
    if not cuda.built:
        what = f"{who} has torch {answer.version}, which is built without CUDA, and the node has GPUs"
        yield FindingRow("torch-without-cuda", Severity.ERROR, key, what, "install torch for CUDA")
        return
    if cuda.problem or not cuda.gpus:
        reason = cuda.problem or "torch sees no GPU"
        what = f"{who}: torch {answer.version} for CUDA {cuda.built} does not start on a driver for CUDA "
        what += f"{cuda.driver or 'of an unknown version'}: {reason}"
        way = "update the driver, or install torch for a CUDA version that the driver supports; "
        way += "`nvidia-smi` on the node shows both"
        yield FindingRow("cuda-driver", Severity.ERROR, key, what, way)
    deepep = next(
        (a for a in answers if a.question.library == "DeepEP" and a.question.python == answer.question.python), None
    )
    if deepep is not None and deepep.kind != "absent" and cuda.nccl and not is_at_least(cuda.nccl, NCCL.at_least):
        what = f"{who}: torch loads NCCL {cuda.nccl}, and DeepEP is installed; {NCCL.at_least} or later works"
        way = f"pip install --no-deps '{NCCL.distributions[0]}>={NCCL.at_least}', then build DeepEP again: "
        yield FindingRow("nccl-old", Severity.WARNING, key, what, way + NCCL.why_at_least)


def _prints(answers: Sequence[LibraryAnswer]) -> Iterator[FindingRow]:
    printing: dict[tuple[str, str], list[LibraryAnswer]] = {}
    for answer in answers:
        if answer.printed:
            printing.setdefault((answer.question.python, answer.printed), []).append(answer)
    for (_, printed), its in printing.items():
        names = ", ".join(answer.question.library for answer in its)
        what = f"{_who(its[0])} prints on stdout when {names} is imported: {printed[:_PRINTED]!r}"
        way = "no action is needed for hpcrl, which ignores it; other programs may read it as an answer"
        yield FindingRow("import-prints", Severity.NOTE, _key(its[0]), what, way)
