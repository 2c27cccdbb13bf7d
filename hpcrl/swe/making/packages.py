"""Packages that get bugs: where they are pinned, and how their files are fetched and unpacked."""

from __future__ import annotations

import hashlib
import html
import json
import re
import tarfile
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hpcrl.errors import UsageError
from hpcrl.sandboxes import SandboxFile
from hpcrl.storage.files import atomic_write
from hpcrl.swe.trees import Tree, read_tree

_PINS = Path(__file__).parent / "packages.toml"
DEFAULT_INDEX = "https://pypi.org/simple/"
_TIMEOUT_S = 120.0
_MAX_BYTES = 64 << 20
_JSON = "application/vnd.pypi.simple.v1+json"
_LEFT_OUT = ("docs", "doc", "benchmarks", "examples", "fuzz", ".github")
"""Directories that no test reads."""


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file of a package index.

    Attributes
    ----------
    name, version:
        Name and version of the package.
    file:
        Name of the file.
    sha256:
        Hash of its content.
    """

    name: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class SourcePackage:
    """A package that gets bugs.

    Attributes
    ----------
    pinned:
        Its source distribution.
    source:
        Files and directories that get bugs.
    tests:
        Files and directories that pytest is given.
    imports:
        Directories that modules are imported from.
    """

    pinned: PinnedFile
    source: tuple[str, ...]
    tests: tuple[str, ...]
    imports: tuple[str, ...]


def _pins() -> dict[str, Any]:
    return tomllib.loads(_PINS.read_text(encoding="utf-8"))


def _pinned(given: dict[str, Any]) -> PinnedFile:
    return PinnedFile(given["name"], given["version"], given["file"], given["sha256"])


def pinned_packages() -> dict[str, SourcePackage]:
    """Return the packages that are pinned, by name."""
    return {
        each["name"]: SourcePackage(_pinned(each), tuple(each["source"]), tuple(each["tests"]), tuple(each["imports"]))
        for each in _pins()["package"]
    }


def pinned_tools() -> list[PinnedFile]:
    """Return the wheels of pytest and of what tests need."""
    return [_pinned(each) for each in _pins()["tool"]]


def fetch_package(pinned: PinnedFile, cache: Path, *, index: str = DEFAULT_INDEX, offline: bool = False) -> Path:
    """Return a pinned file in a cache directory; it is fetched where it is not there.

    Parameters
    ----------
    index:
        Address of a package index (PEP 503 or 691).
    offline:
        Fetch nothing.

    Raises
    ------
    UsageError
        It cannot be fetched, or is not the pinned file.
    """
    path = cache / pinned.file
    if path.is_file():
        if hashlib.sha256(path.read_bytes()).hexdigest() == pinned.sha256:
            return path
        raise UsageError(f"{path} is not the pinned file: its hash differs\n    hint: remove it")
    if offline:
        raise UsageError(f"{pinned.file} is not in {cache}\n    hint: fetch it once without --offline")
    content = _download(pinned, index)
    if hashlib.sha256(content).hexdigest() != pinned.sha256:
        raise UsageError(
            f"{index} has another {pinned.file} than the pinned one\n    hint: try --index with another one"
        )
    cache.mkdir(parents=True, exist_ok=True)
    atomic_write(path, content)
    return path


def _download(pinned: PinnedFile, index: str) -> bytes:
    if not index.startswith(("https://", "http://", "file://")):
        raise UsageError(f"{index!r} is not an address of a package index\n    hint: {DEFAULT_INDEX}")
    page = urllib.parse.urljoin(index if index.endswith("/") else f"{index}/", f"{pinned.name}/")
    body, kind, page = _get(page)
    links: dict[str, str] = {}
    if "json" in kind:
        try:
            links = {str(each["filename"]): str(each["url"]) for each in json.loads(body)["files"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{page} is not a page of a package index") from None
    else:
        for link, text in re.findall(r'<a[^>]*href="([^"]+)"[^>]*>([^<]+)</a>', body.decode("utf-8", "replace")):
            links[text.strip()] = html.unescape(link)
    if pinned.file not in links:
        raise UsageError(f"{page} has no {pinned.file}\n    hint: try --index with another one")
    return _get(urllib.parse.urljoin(page, links[pinned.file]))[0]


def _get(address: str) -> tuple[bytes, str, str]:
    """Return the content of an address, its type, and the address that it came from."""
    request = urllib.request.Request(address, headers={"Accept": f"{_JSON}, text/html;q=0.1, */*;q=0.01"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            content: bytes = answer.read(_MAX_BYTES + 1)
            kind, final = str(answer.headers.get("Content-Type", "")), str(answer.url)
    except (OSError, urllib.error.URLError, ValueError) as error:
        hint = "see the network, --index, or put the files into the cache directory and say --offline"
        raise UsageError(f"{address} cannot be fetched: {error}\n    hint: {hint}") from error
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{address} has more than {_MAX_BYTES >> 20} MiB")
    return content, kind, final


def source_tree(path: Path) -> Tree:
    """Return the files of a source distribution, without the directory that all of them are in.

    Raises
    ------
    TreeError
        It cannot be read.
    UsageError
        Its files are not in one directory.
    """
    try:
        found = read_tree(path)
    except tarfile.TarError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    tops = {PurePosixPath(name).parts[0] for name in found}
    if len(tops) != 1:
        raise UsageError(f"{path} is not a source distribution: its files are in {len(tops)} directories")
    tree: dict[str, SandboxFile] = {}
    for name, file in found.items():
        parts = PurePosixPath(name).parts[1:]
        if not parts or parts[0] in _LEFT_OUT or any(part.endswith(".egg-info") for part in parts):
            continue
        tree[PurePosixPath(*parts).as_posix()] = file
    return tree
