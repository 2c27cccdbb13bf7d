"""The seccomp filter of sandboxes: a classic BPF program that refuses system calls by their number.

The namespaces already keep most of these calls harmless. The filter makes the kernel's attack surface smaller, and
refuses what no namespace covers: ``AF_VSOCK`` reaches the host of a virtual machine from every network namespace.
"""

from __future__ import annotations

import errno
import struct

#: audit numbers of architectures, by the name that `os.uname` gives
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

#: refused system calls: numbers on x86_64 and on aarch64 (None: it does not exist there)
SYSTEM_CALLS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
#: memory that belongs to no mapping and to no mounted filesystem: only cgroups count it
_UNMAPPED_MEMORY: dict[str, tuple[int, int]] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "msgget": (68, 186),
    "shmget": (29, 194),
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_IOCTL = (16, 29)
_SOCKET = (41, 198)
_NEW_NAMESPACES = 0x7E020080
"""Flags of ``clone`` that make namespaces of any kind."""
_TERMINAL_INJECTION = (0x5412, 0x541C)
"""Requests of ``ioctl`` that type into a terminal: ``TIOCSTI`` and ``TIOCLINUX``."""
_SOCKET_FAMILIES = (1, 2, 10, 16)
"""Families of sockets that are allowed: unix, IPv4, IPv6, netlink."""

# offsets in the kernel's struct seccomp_data; arguments are 64-bit, and both architectures are little-endian
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def seccomp_filter(machine: str, *, unmapped_memory: bool = True) -> bytes:
    """Return the program for ``bwrap --seccomp`` and ``prctl(PR_SET_SECCOMP)``: 8 bytes an instruction.

    Parameters
    ----------
    machine:
        Architecture as `os.uname` names it.
    unmapped_memory:
        Allow calls that take memory which a sum over processes does not show (memfd, System V shared memory and
        message queues). A node without memory cgroups must not.

    Raises
    ------
    ValueError
        The architecture is not known.
    """
    if machine not in ARCHITECTURES:
        raise ValueError(f"no seccomp filter for the architecture {machine!r}; known are {', '.join(ARCHITECTURES)}")
    index = list(ARCHITECTURES).index(machine)
    refuse = _refusal(errno.EPERM)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        # a system call of another architecture (int 0x80) has other numbers
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_BIT if machine == "x86_64" else 0xFFFFFFFF),
        _refusal(errno.ENOSYS),
        # its flags lie in memory, which a filter cannot read; libraries fall back to clone
        (_EQUAL, 0, 1, _CLONE3[index]),
        _refusal(errno.ENOSYS),
    ]
    denied = [numbers[index] for numbers in SYSTEM_CALLS.values()]
    if not unmapped_memory:
        denied += [numbers[index] for numbers in _UNMAPPED_MEMORY.values()]
    for number in sorted(number for number in denied if number is not None):
        program += [(_EQUAL, 0, 1, number), refuse]
    program += _with_argument(_CLONE[index], 0, [(_BITS, 0, 1, _NEW_NAMESPACES), refuse])
    program += _with_argument(
        _IOCTL[index], 1, [step for request in _TERMINAL_INJECTION for step in ((_EQUAL, 0, 1, request), refuse)]
    )
    allowed = [(_EQUAL, len(_SOCKET_FAMILIES) - n, 0, family) for n, family in enumerate(_SOCKET_FAMILIES)]
    program += _with_argument(_SOCKET[index], 0, [*allowed, refuse])
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _refusal(number: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERRNO | number)


def _with_argument(call: int, argument: int, steps: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Return the steps that look at the low half of one argument of one call; the loaded value is the number after."""
    body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *steps, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), call), *body]
