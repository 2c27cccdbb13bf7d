"""What ``promtool check metrics`` says about a Prometheus text, and what the text format itself asks for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABELS = re.compile(r'^(?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*"(?:,|$))*$')
_KINDS = ("counter", "gauge", "histogram", "summary", "untyped")
_ABBREVIATIONS = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"}
_SCALED = {"milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "kilobytes", "megabytes", "bits"}
_PARTS = ("_bucket", "_sum", "_count")
FOREIGN = "vllm:"
"""Names of vLLM's: whoever reads vLLM's engines reads ours, so they are as they are."""


def prometheus_program(name: str) -> str:
    """Path of a program of Prometheus; empty where it is not there (tools/bootstrap.py --prometheus)."""
    own = Path(__file__).parents[1] / ".prometheus" / "usr" / "bin" / name
    return str(own) if own.is_file() else shutil.which(name) or ""


def problems(text: str) -> list[str]:
    """All that is wrong; names of vLLM's are only asked for what the format itself wants."""
    helps: dict[str, str] = {}
    kinds: dict[str, str] = {}
    order: list[str] = []
    seen: set[str] = set()
    found: list[str] = [] if text.endswith("\n") else ["the last line does not end"]
    for line in text.splitlines():
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            table = helps if what == "HELP" else kinds
            found += [f"{name}: two lines of {what}"] * (name in table)
            found += [f"{name}: {what} behind its samples"] * (name in order)
            table[name] = rest
            continue
        match = _SAMPLE.match(line)
        if match is None or not _LABELS.match(match["labels"] or "") or (match["labels"] or "").endswith(","):
            found.append(f"no sample: {line}")
            continue
        float(match["value"])
        found += [f"twice: {line}"] * ((key := line.rpartition(" ")[0]) in seen)
        seen.add(key)
        family = _family(match["name"], kinds)
        if not order or order[-1] != family:
            found += [f"{family}: its samples do not stand together"] * (family in order)
            order.append(family)
    for family in order:
        found += [f"{family}: {what}" for what in _of_family(family, helps.get(family), kinds.get(family))]
    return found


def _family(name: str, kinds: dict[str, str]) -> str:
    for part in _PARTS:
        if name.endswith(part) and kinds.get(name.removesuffix(part)) in ("histogram", "summary"):
            return name.removesuffix(part)
    return name


def _of_family(name: str, help_text: str | None, kind: str | None) -> list[str]:
    words = set(re.split(r"[_:]", name))
    found = ["no help text"] * (not help_text) + [f"no type, or {kind}"] * (kind not in _KINDS)
    if name.startswith(FOREIGN):
        return found
    found += ["a colon, which is for recording rules"] * (":" in name)
    found += ["a counter without _total"] * (kind == "counter" and not name.endswith("_total"))
    found += ["_total, and no counter"] * (kind != "counter" and name.endswith("_total"))
    found += [f"ends in {part}" for part in _PARTS if name.endswith(part)]
    found += [f"abbreviated unit {word!r}" for word in sorted(words & _ABBREVIATIONS)]
    found += [f"{word!r} is not a base unit" for word in sorted(words & _SCALED)]
    found += ["capital letters"] * (name != name.lower())
    found += [f"the type in the name: {kind}"] * (kind in words)
    return found
