"""Free ports."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from hpcrl.errors import HpcrlError
from hpcrl.network.ports import HeldPorts, choose_blocks, choose_ports, is_free

HOST = "127.0.0.1"


@pytest.fixture
def listener() -> socket.socket:
    server = socket.socket()
    server.bind((HOST, 0))
    server.listen()
    yield server
    server.close()


def test_a_port_in_use_is_not_free(listener: socket.socket) -> None:
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
    assert "hint" in str(caught.value)


def test_blocks_are_neighbouring_free_and_do_not_meet(listener: socket.socket) -> None:
    taken = listener.getsockname()[1]
    sizes = [1, 10, 2, 10, 1]
    reserved = range(taken + 5, taken + 8)
    # begins right before what is taken, so that the first blocks have to step over it
    blocks = choose_blocks(sizes, first=taken - 100, last=taken + 100, host=HOST, start=taken - 3, taken=reserved)
    used = [port + i for port, size in zip(blocks, sizes, strict=True) for i in range(size)]
    assert len(set(used)) == sum(sizes)
    assert not {taken, *reserved} & set(used)
    assert taken - 100 <= min(used) <= max(used) <= taken + 100


def test_no_block_wraps_at_the_end_of_the_range() -> None:
    (port,) = choose_blocks([8], first=23000, last=23020, host=HOST, start=23016)
    assert port + 7 <= 23016


def test_a_range_without_neighbours_is_a_clear_error() -> None:
    with pytest.raises(HpcrlError, match="no 3 neighbouring free ports") as caught:
        choose_blocks([3], first=23000, last=23006, host=HOST, taken=[23002, 23005])
    assert "hint" in str(caught.value)


HOLDER = """
from hpcrl.network.ports import HeldPorts, choose_blocks
held = HeldPorts()
print(*choose_blocks([20, 3], first=24000, last=24999, host="127.0.0.1", start=24500, held=held), flush=True)
input()
"""


def test_what_a_run_chose_is_not_chosen_by_another_until_its_process_ends() -> None:
    """Nobody listens yet, and both begin at the same port."""
    held = HeldPorts()

    def choose() -> list[int]:
        return choose_blocks([20, 3], first=24000, last=24999, host=HOST, start=24500, held=held)

    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = [int(word) for word in other.stdout.readline().split()]
        ours = choose()
        other.kill()
    spans = [
        {port + i for port, size in zip(blocks, [20, 3], strict=True) for i in range(size)} for blocks in (ours, theirs)
    ]
    assert not spans[0] & spans[1]
    # our own attempt before does not stand in the way, nor does a process that is gone
    assert choose() == theirs
    held.release()


def test_released_ports_can_be_chosen() -> None:
    first, second = HeldPorts(), HeldPorts()
    assert first.hold(24100)
    assert not second.hold(24100)
    first.release()
    assert second.hold(24100)
    second.release()
