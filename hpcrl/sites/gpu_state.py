"""Parsers of ``nvidia-smi`` and of the kernel's log about GPUs. Pure functions over texts.

A value that cannot be read is None, which means unknown and never good.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence

import msgspec

QUERIES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        (
            *("index", "name", "pci.bus_id", "driver_version", "memory.total"),
            *("temperature.gpu", "clocks.sm", "clocks.max.sm"),
        ),
    ),
    (("index", "pcie.link.width.current", "pcie.link.width.max"),),
    # the second is the name of drivers before 535
    (("index", "clocks_event_reasons.active"), ("index", "clocks_throttle_reasons.active")),
    (
        (
            *("index", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total"),
            "ecc.errors.corrected.volatile.total",
        ),
    ),
)
"""Fields of ``--query-gpu``, one query each: a driver refuses a query with a field that it does not know. Of several
forms of one query the first that is answered counts."""
REMAPPED_ROWS = ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")
"""Fields of ``--query-remapped-rows``."""

_REASONS = {
    0x4: "power cap of the software",
    0x8: "slowdown by the hardware",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake of the server",
}
"""Bits of NVML's reasons of clocks that mean that a GPU is held back; idle, settings and synchronous boost do not."""
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]{1,4}),?\s*(.*)", re.ASCII)
_OFF_THE_BUS = re.compile(r"NVRM: The NVIDIA GPU ([0-9a-fA-F:.]+)\s*$", re.ASCII)
_OFF = 79
_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 69})
"""XIDs that a program of a user makes as well: no sign of a bad GPU."""


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a GPU from the driver; None is unknown.

    Attributes
    ----------
    index, bus:
        Number and PCI address (``0000:1a:00.0``, lower case).
    memory_mib, temperature_c, sm_mhz, max_sm_mhz:
        As ``nvidia-smi`` prints them.
    link_width, max_link_width:
        Lanes of PCIe.
    throttle:
        NVML's bits of the reasons that hold the clocks back.
    ecc:
        Whether ECC is on.
    uncorrected, corrected:
        Errors of memory since the driver was loaded.
    remap_pending, remap_failed:
        Whether a row of memory is replaced at the next reset; whether spare rows are used up.
    needs_reset:
        The driver says so in place of values.
    """

    index: int
    name: str = ""
    bus: str = ""
    driver: str = ""
    memory_mib: int | None = None
    temperature_c: int | None = None
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    link_width: int | None = None
    max_link_width: int | None = None
    throttle: int | None = None
    ecc: bool | None = None
    uncorrected: int | None = None
    corrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    needs_reset: bool = False


class GpuXid(msgspec.Struct, frozen=True, kw_only=True):
    """An error of a GPU in the kernel's log; of equal ones the first.

    Attributes
    ----------
    bus:
        PCI address as the log has it.
    number:
        NVIDIA's number of the kind of error.
    text:
        The rest of the line.
    """

    bus: str
    number: int
    text: str

    @property
    def of_programs(self) -> bool:
        """Return whether a program of a user causes such errors as well."""
        return self.number in _OF_PROGRAMS


def parse_cells(fields: Sequence[str], text: str) -> list[dict[str, str]]:
    """Return the rows of a query (``--format=csv,noheader,nounits``) by field.

    Lines with another number of cells are messages, and left out.
    """
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, (cell.strip() for cell in row), strict=True)) for row in rows if len(row) == len(fields)]


def gpu_states(queries: Iterable[Sequence[dict[str, str]]], remapped: Sequence[dict[str, str]] = ()) -> list[GpuState]:
    """Put the rows of all queries together, by the index of the GPU.

    Parameters
    ----------
    queries:
        Rows of `parse_cells` for each of `QUERIES`; empty where a query was not answered.
    remapped:
        Rows for `REMAPPED_ROWS`.
    """
    by_index: dict[int, dict[str, str]] = {}
    for rows in queries:
        for row in rows:
            index = _whole(row.get("index", ""))
            if index is not None:
                by_index.setdefault(index, {}).update(row)
    rows_by_bus = {_bus(row["gpu_bus_id"]): row for row in remapped}
    return [
        _state(index, cells, rows_by_bus.get(_bus(cells.get("pci.bus_id", "")), {}))
        for index, cells in sorted(by_index.items())
    ]


def _state(index: int, cells: dict[str, str], rows: dict[str, str]) -> GpuState:
    def number(name: str) -> int | None:
        return _whole(cells.get(name, ""))

    reasons = cells.get("clocks_event_reasons.active", cells.get("clocks_throttle_reasons.active", ""))
    return GpuState(
        index=index,
        name=cells.get("name", ""),
        bus=_bus(cells.get("pci.bus_id", "")),
        driver=cells.get("driver_version", ""),
        memory_mib=number("memory.total"),
        temperature_c=number("temperature.gpu"),
        sm_mhz=number("clocks.sm"),
        max_sm_mhz=number("clocks.max.sm"),
        link_width=number("pcie.link.width.current"),
        max_link_width=number("pcie.link.width.max"),
        throttle=int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", reasons, re.ASCII) else None,
        ecc=_word(cells.get("ecc.mode.current", ""), "Enabled", "Disabled"),
        uncorrected=number("ecc.errors.uncorrected.volatile.total"),
        corrected=number("ecc.errors.corrected.volatile.total"),
        remap_pending=_word(rows.get("remapped_rows.pending", ""), "Yes", "No"),
        remap_failed=_word(rows.get("remapped_rows.failure", ""), "Yes", "No"),
        needs_reset=any("requires reset" in cell.lower() for cell in cells.values()),
    )


def throttle_reasons(bits: int) -> list[str]:
    """Return why clocks are held back, as people say it; empty where nothing does."""
    return [name for bit, name in _REASONS.items() if bits & bit]


def parse_xids(log: str) -> list[GpuXid]:
    """Return the errors of GPUs in the kernel's log (``dmesg``), each kind of each GPU once, the oldest first.

    Newer drivers write of a GPU that is gone without a number; it counts as XID 79.
    """
    found: dict[tuple[str, int], GpuXid] = {}
    lines = log.splitlines()
    for position, line in enumerate(lines):
        if match := _XID.search(line):
            bus, number, text = match[1].lower(), int(match[2]), match[3].strip()
        elif (match := _OFF_THE_BUS.search(line)) and any(
            "fallen off the bus" in near for near in lines[position:][:4]
        ):
            bus, number, text = match[1].lower(), _OFF, "GPU has fallen off the bus"
        else:
            continue
        bus = ":".join(bus.partition(".")[0].split(":")[:3])
        found.setdefault((bus, number), GpuXid(bus=bus, number=number, text=text))
    return list(found.values())


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text, re.ASCII) else None


def _word(text: str, yes: str, no: str) -> bool | None:
    answers: dict[str, bool] = {yes.lower(): True, no.lower(): False, "1": True, "0": False}
    return answers.get(text.lower())


def _bus(text: str) -> str:
    """Return an address as sysfs writes it: ``00000000:1A:00.0`` is ``0000:1a:00.0``."""
    domain, separator, rest = text.lower().partition(":")
    return f"{domain[-4:]}{separator}{rest}"


Run = Callable[[Sequence[str]], str | None]
"""Runs a command; returns what it printed, or None where it failed."""


def ask_driver(run: Run) -> list[GpuState]:
    """Ask ``nvidia-smi``; empty where it does not answer."""
    if run(["nvidia-smi", "--list-gpus"]) is None:
        # each of the queries would hang for the same time
        return []
    answered = []
    for forms in QUERIES:
        rows: list[dict[str, str]] = []
        for fields in forms:
            text = run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
            if text is not None and (rows := parse_cells(fields, text)):
                break
        answered.append(rows)
    text = run(["nvidia-smi", f"--query-remapped-rows={','.join(REMAPPED_ROWS)}", "--format=csv,noheader,nounits"])
    return gpu_states(answered, parse_cells(REMAPPED_ROWS, text or ""))
