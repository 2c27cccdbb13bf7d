"""What nvidia-smi and the kernel's log print, read: outputs as drivers of data centers write them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpcrl.sites.gpu_state import GpuXid, ask_driver, gpu_states, parse_cells, parse_xids, throttle_reasons

BASE = """\
0, NVIDIA H200, 00000000:1B:00.0, 570.158.01, 143771, 33, 345, 1980
1, NVIDIA H200, 00000000:43:00.0, 570.158.01, 143771, 71, 1305, 1980
"""
ECC = "0, Enabled, 0, 2\n1, Disabled, [N/A], [N/A]\n"
REMAPPED = "00000000:1B:00.0, No, No\n00000000:43:00.0, Yes, No\n"
REFUSED = 'Field "clocks_event_reasons.active" is not a valid field to query.\n'
DMESG = """\
[    4.111111] nvidia-nvlink: Nvlink Core is being initialized, major device number 511
[ 1843.100000] NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained: SM (0x1). RST: No, D-RST: No
[ 1850.100000] NVRM: Xid (PCI:0000:9b:00): 94, pid=1299, name=python3, Contained: SM (0x1). RST: No, D-RST: No
[ 2000.000000] NVRM: Xid (PCI:0000:1b:00): 31, pid=77, name=python3, Ch 00000008, intr 10000000. MMU Fault
[ 2100.000000] NVRM: Xid (PCI:0019:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000)
[74889.644138] NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.
"""
GONE = """\
[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0
               NVRM: (PCI ID: 10de:26b5) installed in this system has
               NVRM: fallen off the bus and is not responding to commands.
[ 1843.439662] NVRM: The NVIDIA probe routine failed for 1 device(s).
"""


class Driver:
    """Answers as nvidia-smi does; asked for a field in ``refuses``, it prints a message and fails."""

    def __init__(self, refuses: Sequence[str] = (), width: str = "16") -> None:
        self.refuses, self.width = refuses, width
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str]) -> str | None:
        assert command[0] == "nvidia-smi"
        if command[1] == "--list-gpus":
            return "GPU 0: NVIDIA H200 (UUID: GPU-42be0b4d-4cfd-d4b1-51db-1900b18bf14d)\n"
        assert command[2] == "--format=csv,noheader,nounits"
        query = command[1]
        self.asked.append(query)
        if any(field in query for field in self.refuses):
            return None
        if query.startswith("--query-remapped-rows="):
            return REMAPPED
        for field, text in (
            ("memory.total", BASE),
            ("pcie.link", f"0, {self.width}, 16\n1, 16, 16\n"),
            ("reasons.active", "0, 0x0000000000000001\n1, 0x0000000000000048\n"),
            ("ecc.mode", ECC),
        ):
            if field in query:
                return text
        raise AssertionError(query)


def test_all_queries_are_put_together() -> None:
    first, second = ask_driver(Driver(width="8"))
    assert (first.index, first.name, first.bus, first.driver) == (0, "NVIDIA H200", "0000:1b:00.0", "570.158.01")
    assert (first.memory_mib, first.temperature_c, first.sm_mhz, first.max_sm_mhz) == (143771, 33, 345, 1980)
    assert (first.link_width, first.max_link_width, first.throttle) == (8, 16, 1)
    assert (first.ecc, first.uncorrected, first.corrected) == (True, 0, 2)
    assert (first.remap_pending, first.remap_failed) == (False, False)
    assert (second.bus, second.throttle, second.remap_pending) == ("0000:43:00.0", 0x48, True)
    # what the driver does not know is unknown, and no zero
    assert (second.ecc, second.uncorrected, second.corrected) == (False, None, None)


def test_an_older_driver_has_another_name_for_the_reasons() -> None:
    driver = Driver(refuses=["clocks_event_reasons"])
    assert [gpu.throttle for gpu in ask_driver(driver)] == [1, 0x48]
    assert any("clocks_throttle_reasons.active" in query for query in driver.asked)


def test_a_query_that_is_refused_leaves_the_others() -> None:
    first, _ = ask_driver(Driver(refuses=["reasons", "ecc", "remapped"]))
    assert (first.throttle, first.uncorrected, first.remap_failed) == (None, None, None)
    assert first.memory_mib == 143771
    assert ask_driver(lambda command: None) == []


def test_messages_are_no_rows() -> None:
    fields = ("index", "clocks_event_reasons.active")
    assert parse_cells(fields, REFUSED) == []
    assert parse_cells(fields, "") == []
    text = "Unable to determine the device handle for GPU0000:43:00.0: Unknown Error\n0, 0x0\n"
    assert parse_cells(fields, text) == [{"index": "0", "clocks_event_reasons.active": "0x0"}]


@pytest.mark.parametrize("cell", ["[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "ERR!", "-1", "\u0663"])
def test_no_value_is_unknown(cell: str) -> None:
    (gpu,) = gpu_states([[{"index": "0", "memory.total": cell, "clocks_event_reasons.active": cell}]])
    assert (gpu.memory_mib, gpu.throttle, gpu.needs_reset) == (None, None, False)


def test_a_gpu_that_wants_a_reset() -> None:
    (gpu,) = gpu_states([[{"index": "0", "memory.total": "[GPU requires reset]"}]])
    assert (gpu.memory_mib, gpu.needs_reset) == (None, True)


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x0, []),
        (0x1, []),
        (0x2, []),
        (0x100, []),
        (0x4, ["power cap of the software"]),
        (0x48, ["slowdown by the hardware", "temperature (hardware)"]),
        (0x80, ["power brake of the server"]),
    ],
)
def test_reasons_that_hold_a_gpu_back(bits: int, reasons: list[str]) -> None:
    assert throttle_reasons(bits) == reasons


def test_errors_in_the_log_of_the_kernel() -> None:
    found = parse_xids(DMESG)
    assert [(xid.bus, xid.number) for xid in found] == [
        ("0000:9b:00", 94),
        ("0000:1b:00", 31),
        ("0019:01:00", 149),
        ("0000:02:00", 79),
    ]
    assert found[0].text.startswith("pid=1234, name=python3, Contained")
    assert [xid.of_programs for xid in found] == [False, True, False, False]
    assert parse_xids("") == []


def test_a_gpu_that_is_gone_without_a_number() -> None:
    assert parse_xids(GONE) == [GpuXid(bus="0000:b3:00", number=79, text="GPU has fallen off the bus")]
    assert parse_xids(GONE.splitlines()[0]) == []
