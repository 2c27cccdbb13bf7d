"""Addresses of this machine's network interfaces, and properties of an address."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil


def interface_addresses() -> dict[str, list[str]]:
    """Return IPv4 and IPv6 addresses of each interface that is up, in the kernel's order."""
    # not `isup`, which asks for a carrier, too
    up = {name for name, stats in psutil.net_if_stats().items() if "up" in stats.flags.split(",")}
    return {
        name: [a.address.partition("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def machine_id() -> str:
    """Return an identifier that is equal exactly for processes that share a loopback interface."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


def only_local(address: str) -> str:
    """Return why other machines cannot use an address; empty if they can.

    Reasons are ``loopback``, ``link-local`` and ``unspecified``.
    """
    parsed = ipaddress.ip_address(address)
    for name in ("loopback", "link-local", "unspecified"):
        if getattr(parsed, f"is_{name.replace('-', '_')}"):
            return name
    return ""


def preferred(addresses: Iterable[str]) -> str | None:
    """Return the first IPv4 address, else the first IPv6 address, else None.

    IPv4 comes first because many libraries support IPv6 poorly.
    """
    return min(addresses, key=lambda address: ":" in address, default=None)


def resolve(host: str) -> str:
    """Return the address of a name as this machine resolves it; an address is returned unchanged (OSError if none)."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    address = preferred(str(entry[4][0]) for entry in found)
    assert address is not None, "getaddrinfo raises where there is nothing"
    return address


def address_towards(host: str) -> str:
    """Return the address of this machine that ``host`` would see; no packet is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
        return address


def http_url(host: str, port: int) -> str:
    """Return the URL of a server, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
