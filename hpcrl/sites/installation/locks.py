"""Lock files: exact versions and digests of an environment, made by ``tools/lock_sites.py``."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from hpcrl.config.resources import package_data
from hpcrl.errors import UsageError

_HEADER = re.compile(r"# ([a-z-]+): ([\w., -]+)")
_PACKAGE = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[\w.+!]+)(?: ; (?P<marker>.+?))?")
_DIGEST = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_CLAUSE = re.compile(r'(?:python_version == "(?P<python>[\d.]+)" and )?platform_machine == "(?P<machine>\w+)"')


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """One package of a lock.

    Attributes
    ----------
    name:
        Canonical: small letters and hyphens.
    version:
        Without a local version such as ``+cpu``.
    digests:
        SHA-256 of all wheels that may be installed, hexadecimal. Empty for a build that is on no public index, such as
        torch for processors: its digest is the user's affair.
    places:
        Pairs of Python version (None: all) and machine that it is for; empty for all.
    """

    name: str
    version: str
    digests: tuple[str, ...]
    places: tuple[tuple[str | None, str], ...] = ()

    def is_for(self, python: str, machine: str) -> bool:
        """Return whether a Python (``3.11``) on a machine (``x86_64``) needs it."""
        return not self.places or any(p in (None, python) and m == machine for p, m in self.places)

    def requirement(self) -> str:
        """Return the line that pip and uv read."""
        return " ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{each}" for each in self.digests)])


@dataclass(frozen=True, slots=True)
class Lock:
    """Packages of an environment.

    Attributes
    ----------
    name:
        Name of the file, without ``.txt``.
    packages:
        All packages: only hpcrl is installed in addition.
    pythons, machines:
        Platforms of the lock, for example ``3.11`` and ``x86_64``.
    wheel_bytes:
        Sum of the wheels of the platform that needs most.
    digest:
        SHA-256 of the file, hexadecimal.
    """

    name: str
    packages: tuple[LockedPackage, ...]
    pythons: tuple[str, ...]
    machines: tuple[str, ...]
    wheel_bytes: int
    digest: str

    def packages_for(self, python: str, machine: str) -> tuple[LockedPackage, ...]:
        """Return the packages of one platform.

        Raises
        ------
        UsageError
            The lock is not for it.
        """
        for found, known, what in ((python, self.pythons, "Python"), (machine, self.machines, "machines of the type")):
            if found not in known:
                hint = (
                    "name another interpreter with --python" if what == "Python" else "no environment can be made here"
                )
                raise UsageError(
                    f"the shipped versions of {self.name!r} are for {what} {', '.join(known)}, and this is {found}\n"
                    f"    hint: {hint}"
                )
        return tuple(package for package in self.packages if package.is_for(python, machine))


def read_lock(name: str) -> Lock:
    """Read a lock file that hpcrl ships, from a checkout or from an installed wheel.

    Raises
    ------
    UsageError
        It is not there, or damaged.
    """
    path = package_data("locks") / f"{name}.txt"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}\n    hint: install hpcrl again") from error
    return parse_lock(name, text, str(path))


def parse_lock(name: str, text: str, where: str) -> Lock:
    """Read the text of a lock file (UsageError where it is none; ``where`` names it)."""
    headers = {match[1]: match[2] for line in text.splitlines() if (match := _HEADER.fullmatch(line))}
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    try:
        return Lock(
            name,
            tuple(map(_package, lines)),
            tuple(headers["pythons"].split(", ")),
            tuple(headers["machines"].split(", ")),
            int(headers["wheel-bytes"]),
            hashlib.sha256(text.encode()).hexdigest(),
        )
    except (KeyError, ValueError) as error:
        raise UsageError(f"{where} is not a lock file of hpcrl: {error}\n    hint: install hpcrl again") from error


def canonical_name(name: str) -> str:
    """Return the name of a distribution as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _package(line: str) -> LockedPackage:
    requirement, *options = re.split(r"\s+(?=--hash)", line.strip())
    digests = [_DIGEST.fullmatch(option.strip()) for option in options]
    match = _PACKAGE.fullmatch(requirement.strip())
    if match is None or None in digests:
        raise ValueError(f"the line {line[:80]!r} does not pin a package with digests")
    places = []
    for clause in (match["marker"] or "").split(" or ") if match["marker"] else ():
        place = _CLAUSE.fullmatch(clause.strip())
        if place is None:
            raise ValueError(f"the marker {clause!r} does not have the form of this file")
        places.append((place["python"], place["machine"]))
    found = tuple(digest[1] for digest in digests if digest is not None)
    return LockedPackage(canonical_name(match["name"]), match["version"], found, tuple(places))
