"""Finds values in files of a run that open something: tokens, keys and passwords that a program has printed.

Forms decide, and the values that are known: the token of the run, and files of ``secrets``. No scan finds a password
that looks like a word; what it finds is named by its kind and place, never by its value.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.config.secret_values import is_secret_name
from hpcrl.errors import HpcrlError
from hpcrl.network.credentials import TOKEN_FILE
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.sealed_files import DAMAGE

_FORMS: dict[str, re.Pattern[bytes]] = {
    # with its lines, also where JSON writes their ends as backslash and n
    "a private key": re.compile(
        rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----(?:(?:\s|\\[rn])*[A-Za-z0-9+/=]{16,})*"
        rb"(?:(?:\s|\\[rn])*[A-Za-z0-9+/=]{0,16}(?:\s|\\[rn])*-----END (?:[A-Z]+ )*PRIVATE KEY-----)?"
        # the end of a log may begin within one
        rb"|\A(?:[A-Za-z0-9+/=]+(?:\s|\\[rn])+)+-----END (?:[A-Z]+ )*PRIVATE KEY-----"
    ),
    "a token of the Hugging Face hub": re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b"),
    "a key of an AI service": re.compile(rb"\bsk-(?:proj-|ant-[a-z0-9]+-)?[A-Za-z0-9_-]{20,}"),
    "a token of GitHub": re.compile(rb"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})"),
    "a token of GitLab": re.compile(rb"\bglpat-[A-Za-z0-9_-]{20,}"),
    "a key of AWS": re.compile(rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    "a key of Google": re.compile(rb"\bAIza[A-Za-z0-9_-]{35}\b"),
    "a token of Slack": re.compile(rb"\bxox[abeoprs]-[A-Za-z0-9-]{10,}|hooks\.slack\.com/services/[A-Za-z0-9/]{20,}"),
    "a webhook of Discord": re.compile(rb"discord(?:app)?\.com/api/webhooks/\d+/[A-Za-z0-9_-]{20,}"),
    "a JSON web token": re.compile(
        rb"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"
    ),
    "a bearer token": re.compile(rb"(?i)\bauthorization['\"]?\s*[:=]\s*['\"]?bearer\s+[A-Za-z0-9._~+/-]{20,}"),
    "a password in a URL": re.compile(rb"\b[a-z][a-z0-9+.-]{0,30}://[^\s:/@'\"]+:[^\s:/@'\"]{3,}@[\w.-]+"),
    "a variable with a secret": re.compile(
        rb"\b[A-Z][A-Z0-9_]*(?:API_KEY|SECRET_KEY|SECRET|PASSWORD|ACCESS_TOKEN|AUTH_TOKEN|HF_TOKEN)['\"]?\s*[=:]\s*['\"]?"
        rb"[A-Za-z0-9._~+/-]{12,}"
    ),
}
_CHUNK = 4 << 20
_OVERLAP = 4096
"""Maximum length in bytes of a secret that lies on both sides of a chunk."""
_SHORTEST = 8
_MOST_BYTES = 64 << 10
"""Maximum size of a file that has a secret."""
_PLACES = frozenset({"url_file", "urls_file"})
"""Parameters that name a file with addresses, which are secrets; others are named as secrets are: ``token_file``."""


class SecretFinding(NamedTuple):
    """A value that opens something."""

    kind: str
    path: Path
    line: int


class SecretScan:
    """Scans texts for secrets.

    Parameters
    ----------
    known:
        Values that are secrets whatever they look like, by what they are.
    """

    def __init__(self, known: Iterable[tuple[str, str]] = ()) -> None:
        # longer values first: another may be a part of them
        values = sorted(dict.fromkeys(known), key=lambda each: -len(each[1]))
        own = [(kind, re.compile(re.escape(_bytes(value)))) for kind, value in values if len(value) >= _SHORTEST]
        self._forms = [*_FORMS.items(), *own]

    @classmethod
    def of_run(cls, run: RunDir) -> SecretScan:
        """Make the scan of a run: `of_runs`."""
        return cls.of_runs([run])

    @classmethod
    def of_runs(cls, runs: Iterable[RunDir]) -> SecretScan:
        """Make the scan of runs: the token of each, and the values of ``secrets`` and of files that parameters name.

        These are files of sinks and notifiers, such as ``url_file`` and ``password_file``. Files that we cannot read
        are left out.
        """
        files = [each for run in runs for each in _files_of(run)]
        known = list[tuple[str, str]]()
        for kind, path in dict.fromkeys(files):
            with contextlib.suppress(OSError):
                if path.is_file() and path.stat().st_size <= _MOST_BYTES:  # a pipe would never end
                    value = path.read_text(errors="replace").strip()
                    parts = value.split() if kind == "the value of urls_file" else value.splitlines()
                    known += [(kind, each.strip()) for each in [value, *parts]]
        return cls(known)

    def cleaned(self, value: Any) -> Any:
        """Return plain values with ``[secret]`` in place of each secret in their texts; keys of mappings stay.

        Texts that are already markup stay, too. Texts of one list are lines: a secret may lie in several.
        """
        texts = b"\n".join(map(_bytes, _texts(value)))
        return self._cleaned(value) if next(self.kinds(texts), None) else value

    def cleaned_parts(self, parts: Sequence[str]) -> list[str]:
        """Return the parts of one text, with ``[secret]`` at the begin of each secret, which may lie in several."""
        data = [_bytes(part) for part in parts]
        whole = b"".join(data)
        spans = sorted(match.span() for _, form in self._forms for match in form.finditer(whole))
        if not spans:
            return list(parts)
        found, begin = list[str](), 0
        for part in data:
            end, at, kept = begin + len(part), begin, list[bytes]()
            for first, last in spans:
                if last > at and first < end:
                    kept += [whole[at:first], b"[secret]"] if first >= at else []
                    at = min(last, end)
            found.append(_text(b"".join([*kept, whole[at:end]])))
            begin = end
        return found

    def _cleaned(self, value: Any) -> Any:
        if isinstance(value, str):
            return value if _is_markup(value) else _text(self.redacted(_bytes(value))[0])
        if isinstance(value, Mapping):
            return {key: self._cleaned(each) for key, each in value.items()}
        if isinstance(value, list) or type(value) is tuple:
            return type(value)(self._cleaned_items(value))
        if isinstance(value, tuple):
            items = [self._cleaned(each) for each in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value

    def _cleaned_items(self, items: Sequence[Any]) -> Sequence[Any]:
        if all(type(each) is str for each in items):
            return [each.removesuffix("\n") for each in self.cleaned_parts([f"{each}\n" for each in items])]
        return [self._cleaned(each) for each in items]

    def kinds(self, data: bytes) -> Iterator[tuple[str, int]]:
        """Yield the kind and the offset of each secret in ``data``."""
        for kind, form in self._forms:
            yield from ((kind, match.start()) for match in form.finditer(data))

    def first_behind(self, data: bytes, at: int) -> int:
        """Return the first offset from ``at`` on that lies in no secret which begins before it."""
        spans = (match.span() for _, form in self._forms for match in form.finditer(data))
        return max((end for begin, end in spans if begin < at < end), default=at)

    def redacted(self, data: bytes) -> tuple[bytes, list[str]]:
        """Return ``data`` with ``[secret]`` in place of each secret, and the kinds that there were."""
        found = []
        for kind, form in self._forms:
            data, count = form.subn(b"[secret]", data)
            found += [kind] * count
        return data, found

    def file(self, path: Path) -> Iterator[SecretFinding]:
        """Yield the secrets in a file of any size (OSError where it cannot be read), in the content of a packed one."""
        # what can be read of a damaged packed file is scanned
        with contextlib.suppress(*DAMAGE), _opened(path) as stream:
            before, lines = b"", 1
            seen: set[tuple[str, int]] = set()
            while chunk := stream.read1(_CHUNK):  # what comes before the damage of a packed file is not lost
                data = before + chunk
                for kind, at in self.kinds(data):
                    finding = kind, lines + data.count(b"\n", 0, at)
                    if finding not in seen:
                        seen.add(finding)
                        yield SecretFinding(kind, path, finding[1])
                lines += data.count(b"\n", 0, max(len(data) - _OVERLAP, 0))
                before = data[-_OVERLAP:]


def _opened(path: Path) -> io.BufferedIOBase:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _files_of(run: RunDir) -> Iterator[tuple[str, Path]]:
    """Yield files with secrets of a run, by what they are."""
    yield "the token of the run", run.path / TOKEN_FILE
    documents = list[Any]()
    # each is of its own: one may be damaged, or of another version
    for read in (run.cluster, run.plan, run.recipe):
        with contextlib.suppress(HpcrlError, ValueError, OSError):
            documents.append(read().model_dump(mode="json"))
    for document in documents:
        yield from _named_files(document)


def _named_files(value: Any) -> Iterator[tuple[str, Path]]:
    if isinstance(value, list):
        for each in value:
            yield from _named_files(each)
    if not isinstance(value, Mapping):
        return
    for key, each in value.items():
        if key == "secrets" and isinstance(each, Mapping):
            yield from ((f"the secret {name}", Path(path)) for name, path in each.items() if isinstance(path, str))
        elif isinstance(each, str) and (key in _PLACES or (key.endswith("_file") and is_secret_name(key[:-5]))):
            with contextlib.suppress(RuntimeError):  # there is no home
                yield f"the value of {key}", Path(each).expanduser()
        else:
            yield from _named_files(each)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if not _is_markup(value):
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            if not isinstance(each, int | float):
                yield from _texts(each)


def _is_markup(value: str) -> bool:
    return hasattr(value, "__html__")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
