"""Filter of the system calls that a program may not make.

Namespaces leave some gaps. Sockets of other families reach the virtual machine's host (vsock) or kernel services.
io_uring makes calls that no filter sees. Keyrings outlive the program. Special kinds of memory (System V, memfd, huge
pages, pages pinned by a pipe) are not limited. Nothing that a solution needs is refused: files, processes, threads,
pipes and socket pairs work as usual.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
"""Instructions of classic BPF: load a word of the call's description, mask it, compare it, return a verdict."""

NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets of the words in that description (seccomp_data). Arguments have 8 bytes, the lower half first."""

OTHER_ABI = 0x40000000
"""First number of x32, a second set of numbers for the same calls."""

NEW_NAMESPACES = 0x7E020080
AF_UNIX, SOCK_STREAM, SOCK_SEQPACKET, SOCK_TYPE_MASK = 1, 1, 5, 0xF
MAP_HUGETLB, RLIMIT_CORE, SOL_SOCKET = 0x40000, 4, 1
SO_SNDBUF, SO_RCVBUF = 7, 8
F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETPIPE_SZ = 8, 10, 15, 1031
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
CLONE3, FIRST_UNKNOWN = 435, 470
"""Numbers above 423 are the same on both processors. From the second number on they are unknown here."""

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers by processor. The first half of the list is refused, and the arguments of the second half are checked.
REFUSED = {
    # Other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "ioprio_set": (251, 30),
    # Namespaces, mounts, the machine
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89),
    "sethostname": (170, 161), "setdomainname": (171, 162), "init_module": (175, 105), "delete_module": (176, 106),
    "finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "quotactl": (179, 60),
    "syslog": (103, 116), "vhangup": (153, 58), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "personality": (135, 92), "lookup_dcookie": (212, 18),
    # Special descriptors and kernel services
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "perf_event_open": (298, 241),
    "bpf": (321, 280), "userfaultfd": (323, 282), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27), "socket_accept": (43, 202), "connect": (42, 203), "bind": (49, 200),
    "listen": (50, 201), "accept4": (288, 242),
    # Memory outside all limits
    "memfd_create": (319, 279), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "semctl": (66, 191), "semop": (65, 193), "semtimedop": (220, 192), "msgget": (68, 186), "msgctl": (71, 187),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "mq_open": (240, 180), "mq_unlink": (241, 181), "vmsplice": (278, 75),
    "splice": (275, 76), "tee": (276, 77), "mlockall": (151, 230), "io_setup": (206, 0),
}  # fmt: skip
REFUSED_ON_X86 = (134, 136, 139, 154, 156, 172, 173, 174, 177, 178, 180, 253)
"""uselib, ustat, sysfs, modify_ldt, _sysctl, iopl, ioperm, create_module and its like, nfsservctl, inotify_init."""

REFUSED_ON_BOTH = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 440, 442, 443, 444, 445, 446, 447, 448, 450, 453,
                   457, 458, 459, 460, 461, 467)  # fmt: skip
"""io_uring, the mount API, pidfd_getfd, process_madvise, mount_setattr, quotactl_fd, Landlock, memfd_secret,
process_mrelease, set_mempolicy_home_node, map_shadow_stack, statmount, listmount, LSM calls, open_tree_attr."""

EXAMINED = {
    "socket": (41, 198), "socketpair": (53, 199), "clone": (56, 220), "prlimit64": (302, 261), "setrlimit": (160, 164),
    "fcntl": (72, 25), "setsockopt": (54, 208), "mmap": (9, 222), "ioctl": (16, 29), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
}  # fmt: skip
SIGNALS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip

Instruction = tuple[int, int, int, int]


def call_filter(*, limit_signals: bool = False, processor: str = platform.machine()) -> bytes:
    """Return the filter as an array of sock_filter, for prctl(PR_SET_SECCOMP).

    The only sockets allowed are socket pairs, which no other process can reach. `limit_signals` refuses descriptors
    that send signals to other processes. `signal_filter` does the rest. A program of the processor's other word size is
    killed. Raises ValueError for an unknown processor.
    """
    if processor not in AUDIT_ARCH:
        raise ValueError(f"no filter of system calls for the processor {processor}")
    column = list(AUDIT_ARCH).index(processor)
    refused = [numbers[column] for numbers in REFUSED.values()] + list(REFUSED_ON_BOTH)
    refused += REFUSED_ON_X86 if processor == "x86_64" else ()
    examined = {name: numbers[column] for name, numbers in EXAMINED.items()}
    denied = _fail(errno.EPERM)
    fcntl_refused = (F_SETPIPE_SZ, F_SETOWN, F_SETSIG, F_SETOWN_EX) if limit_signals else (F_SETPIPE_SZ,)
    program = _head(processor)
    program += [(AT_LEAST, 0, 1, FIRST_UNKNOWN), _fail(errno.ENOSYS)]
    for number in sorted(refused):
        program += [(EQUAL, 0, 1, number), denied]
    # The arguments of clone3 are in memory, which a filter cannot read. The C library then uses clone.
    program += [(EQUAL, 0, 1, CLONE3), _fail(errno.ENOSYS)]
    program += [(EQUAL, 0, 1, examined["socket"]), _fail(errno.EAFNOSUPPORT)]
    program += _call(examined["clone"], [*_load(0), (ANY_BIT, 0, 1, NEW_NAMESPACES), denied])
    # A datagram with an address can leave its pair, so allow only types that stay connected.
    program += _call(examined["socketpair"], [
        *_load(0), (EQUAL, 1, 0, AF_UNIX), _fail(errno.EAFNOSUPPORT),
        *_load(1), (AND, 0, 0, SOCK_TYPE_MASK), (EQUAL, 2, 0, SOCK_STREAM), (EQUAL, 1, 0, SOCK_SEQPACKET),
        _fail(errno.EPROTONOSUPPORT),
    ])  # fmt: skip
    program += _call(examined["prlimit64"], [
        *_load(0), (EQUAL, 1, 0, 0), denied,
        *_load(1), (EQUAL, 0, 5, RLIMIT_CORE),
        *_load(2), (EQUAL, 0, 2, 0), (LOAD, 0, 0, ARGUMENTS + 20), (EQUAL, 1, 0, 0), denied,
    ])  # fmt: skip
    program += _call(examined["setrlimit"], _deny_values(0, [RLIMIT_CORE]))
    program += _call(examined["fcntl"], _deny_values(1, fcntl_refused))
    program += _call(examined["ioctl"], _deny_values(1, (TIOCSTI, TIOCLINUX, 0x8901, 0x8902, 0x5452)))
    program += _call(examined["setsockopt"], _deny_values(2, (SO_SNDBUF, SO_RCVBUF, 32, 33)))
    program += _call(examined["mmap"], [*_load(3), (ANY_BIT, 0, 1, MAP_HUGETLB), denied])
    program += _call(
        examined["setpriority"], [*_load(0), (EQUAL, 1, 0, 0), denied, *_load(1), (EQUAL, 1, 0, 0), denied]
    )
    program += _call(examined["sched_setaffinity"], [*_load(0), (EQUAL, 1, 0, 0), denied])
    return _assembled([*program, (RETURN, 0, 0, ALLOW)])


def signal_filter(pid: int, *, processor: str = platform.machine()) -> bytes:
    """Return a filter that lets a process signal only itself, for kernels whose Landlock does not restrict signals.

    Its children inherit the filter, so they cannot send any signals.
    """
    column = list(AUDIT_ARCH).index(processor)
    program = _head(processor)
    for numbers in SIGNALS.values():
        program += _call(numbers[column], [*_load(0), (EQUAL, 1, 0, pid), _fail(errno.EPERM)])
    return _assembled([*program, (RETURN, 0, 0, ALLOW)])


def _head(processor: str) -> list[Instruction]:
    """Kill programs of another processor, refuse x32, and load the call's number."""
    return [
        (LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, AUDIT_ARCH[processor]), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, OTHER_ABI), _fail(errno.EPERM),
    ]  # fmt: skip


def _load(argument: int) -> list[Instruction]:
    return [(LOAD, 0, 0, ARGUMENTS + 8 * argument)]


def _fail(number: int) -> Instruction:
    return (RETURN, 0, 0, ERRNO | number)


def _deny_values(argument: int, values: Sequence[int]) -> list[Instruction]:
    tests = [(EQUAL, 0, 1, value) for value in values]
    return _load(argument) + [step for test in tests for step in (test, _fail(errno.EPERM))]


def _call(number: int, steps: list[Instruction]) -> list[Instruction]:
    """Check one call, which is allowed unless one of the steps returns another verdict."""
    return [(EQUAL, 0, len(steps) + 1, number), *steps, (RETURN, 0, 0, ALLOW)]


def _assembled(program: list[Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
