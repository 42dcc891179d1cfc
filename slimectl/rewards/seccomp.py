"""Which system calls a program that a model wrote may not make: a filter for the kernel.

Namespaces leave some ways out: sockets of other families reach the virtual machine's host (vsock) or the kernel's own
services, io_uring makes calls that no filter sees, keyrings outlive the program. Nothing that a solution needs is
refused: files, processes, threads and pipes work as ever.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""Instructions of classic BPF: load a word of the call's description, compare it, end with a verdict."""

NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Where in that description (seccomp_data) the words stand; of an argument the lower half, on both processors below."""

OTHER_ABI = 0x40000000
"""From here on the numbers of x32 begin, a second set for the same calls."""

NEW_NAMESPACES = 0x7E020000
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10


@dataclass(frozen=True)
class Calls:
    """The numbers of one processor: its AUDIT_ARCH, three calls that are looked into, and those that are refused."""

    architecture: int
    socket: int
    clone: int
    clone3: int
    refused: tuple[int, ...]
    """ptrace, unshare, setns, mount, add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd, io_uring_setup,
    process_vm_readv and _writev."""


PROCESSORS = {
    "x86_64": Calls(
        0xC000003E, 41, 56, 435, (101, 272, 308, 165, 248, 249, 250, 298, 321, 323, 425, 310, 311)
    ),
    "aarch64": Calls(
        0xC00000B7, 198, 220, 435, (117, 97, 268, 40, 217, 218, 219, 241, 280, 282, 425, 270, 271)
    ),
}  # fmt: skip


def call_filter(families: tuple[int, ...], processor: str = platform.machine()) -> bytes:
    """The filter as an array of sock_filter, for prctl(PR_SET_SECCOMP); only sockets of `families` can be opened.

    Empty on a processor whose numbers are not known here. A program of the processor's other word size is killed.
    """
    calls = PROCESSORS.get(processor)
    if calls is None:
        return b""
    denied = ERRNO | errno.EPERM
    words = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, calls.architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, OTHER_ABI),
        (RETURN, 0, 0, denied),
    ]
    for number in calls.refused:
        words += [(EQUAL, 0, 1, number), (RETURN, 0, 0, denied)]
    # What clone3 is asked for stands in memory, where no filter looks: the C library then takes clone.
    words += [(EQUAL, 0, 1, calls.clone3), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    words += [
        (EQUAL, 0, 4, calls.clone),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 0, 1, NEW_NAMESPACES),
        (RETURN, 0, 0, denied),
        (RETURN, 0, 0, ALLOW),
        (EQUAL, 1, 0, calls.socket),
        (RETURN, 0, 0, ALLOW),
        (LOAD, 0, 0, FIRST_ARGUMENT),
    ]
    for family in families:
        words += [(EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    words.append((RETURN, 0, 0, ERRNO | errno.EAFNOSUPPORT))
    return b"".join(struct.pack("=HBBI", *word) for word in words)
