"""Free ports."""

from __future__ import annotations

import socket

import pytest

from hpcrl.errors import HpcrlError
from hpcrl.supervisor.ports import choose_ports, is_free

HOST = "127.0.0.1"


@pytest.fixture
def listener() -> socket.socket:
    server = socket.socket()
    server.bind((HOST, 0))
    server.listen()
    yield server
    server.close()


def test_a_port_somebody_listens_on_is_not_free(listener: socket.socket) -> None:
    assert not is_free(HOST, listener.getsockname()[1])


def test_ports_differ_and_stay_in_range() -> None:
    ports = choose_ports(50, first=23000, last=23200, host=HOST)
    assert len(set(ports)) == 50
    assert all(23000 <= port <= 23200 for port in ports)


def test_the_search_wraps_and_skips_what_is_taken(listener: socket.socket) -> None:
    taken = listener.getsockname()[1]
    # others on this machine use ports, too: ask for some of many
    ports = choose_ports(10, first=taken - 50, last=taken + 3, host=HOST, start=taken)
    assert taken not in ports
    assert len(set(ports)) == 10
    assert min(ports) < taken


def test_two_searches_rarely_begin_at_the_same_port() -> None:
    assert len({choose_ports(1, first=23000, last=29000, host=HOST)[0] for _ in range(20)}) > 10


def test_a_full_range_is_a_clear_error(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(HpcrlError, match="0 of 1 ports are free") as caught:
        choose_ports(1, first=port, last=port, host=HOST)
    assert "way out" in str(caught.value)
