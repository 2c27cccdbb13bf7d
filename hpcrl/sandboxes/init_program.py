"""The first process of a sandbox: an executable of about 200 bytes that waits until it is killed.

It keeps the namespaces alive. The kernel delivers no signal from inside to a pid 1 that handles none, so programs in
the sandbox cannot end it. It ignores SIGCHLD, and therefore the kernel reaps the orphans that it inherits. Programs of
the same user may not look into it: through ``/proc/1/mem`` they could else write programs that have no resource limits.
It ends where no process reads that it is ready: bubblewrap, the spawner and the daemon can have been killed while it
started. A thousand sandboxes have a thousand of these: each takes 12 KiB, where an interpreter would take 5 MiB. It
needs no library, and so runs in every image.
"""

from __future__ import annotations

import struct

READY = b"R"
"""Written to standard output when the sandbox is set up, before standard streams are closed."""

_BASE = 0x400000
_HEADERS = 64 + 56
_MACHINES = {"x86_64": 62, "aarch64": 183}
_IGNORE_SIGCHLD = struct.pack("<QQQQ", 1, 0, 0, 0)
"""A ``struct kernel_sigaction`` whose handler is ``SIG_IGN``."""


def init_program(machine: str) -> bytes:
    """Return the static ELF executable for an architecture as `os.uname` names it.

    Raises
    ------
    ValueError
        The architecture is not known.
    """
    if machine not in _MACHINES:
        raise ValueError(f"no init program for the architecture {machine!r}; known are {', '.join(_MACHINES)}")
    code = _x86_64() if machine == "x86_64" else _aarch64()
    total = _HEADERS + len(code)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, _MACHINES[machine], 1, _BASE + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    # one segment, readable and executable, with the whole file
    header += struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, total, total, 0x1000)
    return header + code


def _x86_64() -> bytes:
    def load(register: int, value: int) -> bytes:  # mov r32, imm32
        return bytes([0xB8 + register]) + struct.pack("<I", value)

    eax, edx, edi = 0, 2, 7
    syscall = b"\x0f\x05"

    def address_to_rsi(place: int, of: int) -> bytes:  # lea rsi, [rip + distance]
        return b"\x48\x8d\x35" + struct.pack("<i", of - (place + 7))

    def assemble(data: int) -> bytes:
        code = load(eax, 13) + load(edi, 17)  # rt_sigaction(SIGCHLD, &ignore, NULL, 8)
        code += address_to_rsi(len(code), data) + load(edx, 0) + b"\x41\xba\x08\x00\x00\x00" + syscall
        code += load(eax, 157) + load(edi, 4) + load(6, 0) + syscall  # prctl(PR_SET_DUMPABLE, 0)
        code += load(eax, 1) + load(edi, 1)  # write(1, READY, 1)
        code += address_to_rsi(len(code), data + len(_IGNORE_SIGCHLD)) + load(edx, 1) + syscall
        give_up = load(edi, 1) + load(eax, 231) + syscall  # exit_group(1)
        code += b"\x83\xf8\x01" + bytes([0x74, len(give_up)]) + give_up  # cmp eax, 1; je over it
        for stream in range(3):  # close
            code += load(eax, 3) + load(edi, stream) + syscall
        code += load(eax, 34) + syscall + b"\xeb\xf7"  # pause() again and again
        return code + b"\x90" * (-len(code) % 8)

    code = assemble(len(assemble(0)))
    return code + _IGNORE_SIGCHLD + READY


def _aarch64() -> bytes:
    def load(register: int, value: int) -> int:  # movz xN, imm16
        return 0xD2800000 | value << 5 | register

    def address_to_x1(place: int, of: int) -> int:  # adr x1, distance
        distance = of - place
        return 0x10000001 | (distance & 3) << 29 | (distance >> 2 & 0x7FFFF) << 5

    call = 0xD4000001  # svc 0

    def assemble(data: int) -> bytes:
        code = [load(8, 134), load(0, 17)]  # rt_sigaction
        code += [address_to_x1(4 * len(code), data), load(2, 0), load(3, 8), call]
        code += [load(8, 167), load(0, 4), load(1, 0), call]  # prctl
        code += [load(8, 64), load(0, 1)]  # write
        code += [address_to_x1(4 * len(code), data + len(_IGNORE_SIGCHLD)), load(2, 1), call]
        give_up = [load(0, 1), load(8, 94), call]  # exit_group(1)
        code += [0xF100041F, 0x54000000 | (len(give_up) + 1) << 5, *give_up]  # cmp x0, #1; b.eq over it
        for stream in range(3):  # close
            code += [load(8, 57), load(0, stream), call]
        # ppoll(NULL, 0, NULL, NULL), and back: this architecture has no pause
        code += [load(8, 73), load(0, 0), load(1, 0), load(2, 0), load(3, 0), call, 0x17FFFFFA]
        code += [0xD503201F] * (len(code) % 2)  # nop: what follows is aligned to 8 bytes
        return struct.pack(f"<{len(code)}I", *code)

    code = assemble(len(assemble(0)))
    return code + _IGNORE_SIGCHLD + READY
