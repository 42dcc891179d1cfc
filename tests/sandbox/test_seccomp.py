"""The filter of system calls, run by hand: what the kernel would say to a call."""

from __future__ import annotations

import errno
import struct

import pytest

from slimectl.sandbox.seccomp import AUDIT_ARCH, REFUSED, call_filter, signal_filter

X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003
ALLOWED, KILLED = 0x7FFF0000, 0x80000000


def verdict(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """What classic BPF comes to for a call: {nr, arch, instruction pointer, arguments}."""
    described = struct.pack("=iIQ6Q", number, architecture, 0, *(arguments + (0,) * 6)[:6])
    words, at, loaded = list(struct.iter_unpack("=HBBI", program)), 0, 0
    tests = {0x15: lambda k: loaded == k, 0x35: lambda k: loaded >= k, 0x45: lambda k: bool(loaded & k)}
    while True:
        code, jump_true, jump_false, k = words[at]
        at += 1
        if code == 0x06:
            return k
        if code == 0x20:
            (loaded,) = struct.unpack_from("=I", described, k)
        elif code == 0x54:
            loaded &= k
        else:
            at += jump_true if tests[code](k) else jump_false


def refused(number: int) -> int:
    return 0x00050000 | number


EPERM, EAFNOSUPPORT = refused(errno.EPERM), refused(errno.EAFNOSUPPORT)


@pytest.mark.parametrize(
    ("processor", "architecture", "call", "expected"),
    [
        ("x86_64", X86, (0, 3), ALLOWED),  # read
        ("x86_64", X86, (41, 1), EAFNOSUPPORT),  # socket(AF_UNIX)
        ("x86_64", X86, (41, 2), EAFNOSUPPORT),
        ("x86_64", X86, (41, 40), EAFNOSUPPORT),  # vsock
        ("x86_64", X86, (53, 1, 0x80001), ALLOWED),  # socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
        ("x86_64", X86, (53, 1, 5), ALLOWED),
        ("x86_64", X86, (53, 1, 2), refused(errno.EPROTONOSUPPORT)),  # whose datagrams take an address
        ("x86_64", X86, (53, 16, 1), EAFNOSUPPORT),
        ("x86_64", X86, (42, 3), EPERM),  # connect
        ("x86_64", X86, (56, 0x01200011), ALLOWED),  # clone, as fork does it
        ("x86_64", X86, (56, 0x003D0F00), ALLOWED),  # clone, as threads do it
        ("x86_64", X86, (56, 0x10000011), EPERM),  # with a new user namespace
        ("x86_64", X86, (435,), refused(errno.ENOSYS)),  # clone3
        ("x86_64", X86, (425, 8), EPERM),  # io_uring_setup
        ("x86_64", X86, (470,), refused(errno.ENOSYS)),  # a call of a later kernel
        ("x86_64", X86, (272,), EPERM),  # unshare
        ("x86_64", X86, (250,), EPERM),  # keyctl
        ("x86_64", X86, (319,), EPERM),  # memfd_create
        ("x86_64", X86, (9, 0, 4096, 3, 0x22), ALLOWED),  # mmap
        ("x86_64", X86, (9, 0, 4096, 3, 0x40022), EPERM),  # with huge pages
        ("x86_64", X86, (302, 0, 0, 0x7FFF0000), ALLOWED),  # prlimit64 of oneself
        ("x86_64", X86, (302, 7, 0, 0), EPERM),  # of another
        ("x86_64", X86, (302, 0, 4, 0), ALLOWED),  # RLIMIT_CORE, read
        ("x86_64", X86, (302, 0, 4, 0x7FFF0000), EPERM),
        ("x86_64", X86, (302, 0, 4, 0x7F00000000), EPERM),  # an address whose lower half is 0
        ("x86_64", X86, (160, 4, 1), EPERM),
        ("x86_64", X86, (160, 0, 1), ALLOWED),
        ("x86_64", X86, (72, 3, 1031, 1 << 20), EPERM),  # fcntl(F_SETPIPE_SZ)
        ("x86_64", X86, (72, 3, 3), ALLOWED),
        ("x86_64", X86, (54, 3, 1, 7), EPERM),  # setsockopt(SO_SNDBUF)
        ("x86_64", X86, (16, 0, 0x5412), EPERM),  # ioctl(TIOCSTI)
        ("x86_64", X86, (16, 0, 0x5401), ALLOWED),
        ("x86_64", X86, (141, 2, 0), EPERM),  # setpriority of a user
        ("x86_64", X86, (203, 0), ALLOWED),
        ("x86_64", X86, (0x40000029, 2), EPERM),  # socket, as x32 numbers it
        ("x86_64", I386, (359, 40), KILLED),  # socket, of a 32-bit program
        ("aarch64", ARM, (63, 3), ALLOWED),  # read
        ("aarch64", ARM, (198, 2), EAFNOSUPPORT),
        ("aarch64", ARM, (199, 1, 1), ALLOWED),
        ("aarch64", ARM, (220, 0x10000011), EPERM),
        ("aarch64", ARM, (97,), EPERM),  # unshare
        ("aarch64", ARM, (279,), EPERM),  # memfd_create
        ("aarch64", X86, (0,), KILLED),
    ],
)
def test_what_a_program_may_ask_of_the_kernel(processor, architecture, call, expected):
    assert verdict(call_filter(processor=processor), architecture, *call) == expected


def test_every_refused_call_is_refused_on_each_processor():
    for column, (processor, architecture) in enumerate(AUDIT_ARCH.items()):
        program = call_filter(processor=processor)
        for name, numbers in REFUSED.items():
            assert verdict(program, architecture, numbers[column]) == EPERM, (processor, name)


def test_a_process_may_be_left_signals_to_itself_only():
    program = signal_filter(77, processor="x86_64")
    calls = [(62, 77, 9), (62, 78, 9), (234, 77, 80, 6), (234, 1, 1, 9), (62, 0xFFFFFFFF, 9), (39,)]
    assert [verdict(program, X86, *call) for call in calls] == [ALLOWED, EPERM, ALLOWED, EPERM, EPERM, ALLOWED]


def test_an_unknown_processor_is_refused():
    with pytest.raises(ValueError, match="no filter of system calls for the processor riscv64"):
        call_filter(processor="riscv64")
