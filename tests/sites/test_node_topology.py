"""Sockets, GPUs and adapters from trees as ``/sys`` has them on a node with PCIe switches."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.sites.node_topology import AdapterPort, nearest_adapters, parse_cpu_list, parse_rate, read_topology

#: a switch on each of two roots, with a GPU and an adapter below; a third adapter is alone on the second socket
TREE = {
    "0000:1b:00.0": ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:1b:00.0", "gpu", 0),
    "0000:1a:00.0": ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:01.0/0000:1a:00.0", "mlx5_0", 0),
    "0000:9a:00.0": ("pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:00.0/0000:9a:00.0", "gpu", 1),
    "0000:9c:00.0": ("pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:01.0/0000:9c:00.0", "mlx5_1", 1),
    "0000:d0:00.0": ("pci0000:cf/0000:cf:01.0/0000:d0:00.0", "mlx5_2", 1),
    # management: a display of the server, which is not a GPU of ours
    "0000:03:00.0": ("pci0000:00/0000:00:1c.0/0000:03:00.0", "display", -1),
}


def tree(root: Path) -> Path:
    sys = root / "sys"
    (sys / "bus/pci/devices").mkdir(parents=True)
    (sys / "class/infiniband").mkdir(parents=True)
    for address, (path, kind, numa) in TREE.items():
        device = sys / "devices" / path
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")
        (device / "vendor").write_text("0x10de\n" if kind == "gpu" else "0x1a03\n" if kind == "display" else "0x15b3\n")
        (device / "class").write_text("0x020700\n" if kind.startswith("mlx") else "0x030200\n")
        (sys / "bus/pci/devices" / address).symlink_to(device)
        if kind.startswith("mlx"):
            port = device / "infiniband" / kind / "ports/1"
            port.mkdir(parents=True)
            (port / "state").write_text("1: DOWN\n" if kind == "mlx5_2" else "4: ACTIVE\n")
            (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
            (port / "link_layer").write_text("InfiniBand\n")
            (device / "infiniband" / kind / "device").symlink_to(device)
            (sys / "class/infiniband" / kind).symlink_to(device / "infiniband" / kind)
    for node, cpus in ((0, "0-47,96-143"), (1, "48-95,144-191")):
        (sys / f"devices/system/node/node{node}").mkdir(parents=True)
        (sys / f"devices/system/node/node{node}/cpulist").write_text(f"{cpus}\n")
    (sys / "devices/system/node/possible").write_text("0-1\n")
    return sys


def test_where_gpus_and_adapters_are(tmp_path: Path) -> None:
    found = read_topology(tree(tmp_path))
    assert found.cpus == {0: "0-47,96-143", 1: "48-95,144-191"}
    assert found.gpu_numa == {"0000:1b:00.0": 0, "0000:9a:00.0": 1}
    assert found.gpu_paths["0000:1b:00.0"] == tuple(TREE["0000:1b:00.0"][0].split("/"))
    assert [(port.name, port.port, port.numa, port.active) for port in found.ports] == [
        ("mlx5_0", 1, 0, True),
        ("mlx5_1", 1, 1, True),
        ("mlx5_2", 1, 1, False),
    ]
    assert {(port.gb_s, port.link) for port in found.ports} == {(50.0, "InfiniBand")}


def test_the_nearest_adapter_shares_the_switch(tmp_path: Path) -> None:
    found = read_topology(tree(tmp_path))
    near = {bus: [port.name for port in nearest_adapters(path, found.ports)] for bus, path in found.gpu_paths.items()}
    assert near == {"0000:1b:00.0": ["mlx5_0"], "0000:9a:00.0": ["mlx5_1"]}


def test_adapters_on_other_roots_are_not_near() -> None:
    far = AdapterPort(name="mlx5_0", port=1, path=("pci0000:00", "0000:00:01.0"))
    assert nearest_adapters(("pci0000:16", "0000:16:01.0"), [far]) == []
    virtual = AdapterPort(name="mlx5_0", port=1)
    assert nearest_adapters(("pci0000:16", "0000:16:01.0"), [virtual]) == []
    twins = [AdapterPort(name=f"mlx5_{i}", port=1, path=("pci0000:16", f"0000:16:0{i}.0")) for i in (2, 3)]
    assert nearest_adapters(("pci0000:16", "0000:16:01.0"), twins) == twins


def test_nothing_there_is_nothing_known(tmp_path: Path) -> None:
    found = read_topology(tmp_path)
    assert (found.cpus, found.gpu_paths, found.ports) == ({}, {}, [])
    sys = tree(tmp_path)
    for name in ("numa_node", "infiniband/mlx5_0/ports/1/state", "infiniband/mlx5_0/ports/1/rate"):
        (sys / "devices" / TREE["0000:1a:00.0"][0] / name).unlink()
    port = read_topology(sys).ports[0]
    assert (port.name, port.numa, port.active, port.gb_s) == ("mlx5_0", None, None, None)


@pytest.mark.parametrize(
    ("text", "gb_s"),
    [
        ("400 Gb/sec (4X NDR)", 50.0),
        ("100 Gb/sec (4X EDR)", 12.5),
        ("2.5 Gb/sec (1X SDR)", 0.3125),
        ("0 Gb/sec", None),
        ("", None),
        ("unknown", None),
    ],
)
def test_rates_of_ports(text: str, gb_s: float | None) -> None:
    assert parse_rate(text) == gb_s


@pytest.mark.parametrize(("text", "cpus"), [("0-2,8\n", [0, 1, 2, 8]), ("5", [5]), ("", []), ("0-", []), ("all", [])])
def test_lists_of_cpus(text: str, cpus: list[int]) -> None:
    assert parse_cpu_list(text) == cpus
