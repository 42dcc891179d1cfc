"""The filter of system calls, run by hand: what the kernel would say to a call."""

from __future__ import annotations

import errno
import struct

import pytest

from slimectl.rewards.seccomp import call_filter

X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003
ALLOWED, KILLED = 0x7FFF0000, 0x80000000


def verdict(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """What classic BPF comes to for a call: {nr, arch, instruction pointer, arguments}."""
    described = struct.pack("=iIQ6Q", number, architecture, 0, argument, 0, 0, 0, 0, 0)
    words, at, loaded = list(struct.iter_unpack("=HBBI", program)), 0, 0
    tests = {0x15: lambda k: loaded == k, 0x35: lambda k: loaded >= k, 0x45: lambda k: bool(loaded & k)}
    while True:
        code, jump_true, jump_false, k = words[at]
        at += 1
        if code == 0x06:
            return k
        if code == 0x20:
            (loaded,) = struct.unpack_from("=I", described, k)
        else:
            at += jump_true if tests[code](k) else jump_false


def refused(number: int) -> int:
    return 0x00050000 | number


@pytest.mark.parametrize(
    ("processor", "architecture", "number", "argument", "expected"),
    [
        ("x86_64", X86, 0, 3, ALLOWED),  # read
        ("x86_64", X86, 41, 1, ALLOWED),  # socket(AF_UNIX)
        ("x86_64", X86, 41, 2, ALLOWED),
        ("x86_64", X86, 41, 10, refused(errno.EAFNOSUPPORT)),
        ("x86_64", X86, 41, 40, refused(errno.EAFNOSUPPORT)),  # vsock
        ("x86_64", X86, 56, 0x01200011, ALLOWED),  # clone, as fork does it
        ("x86_64", X86, 56, 0x003D0F00, ALLOWED),  # clone, as threads do it
        ("x86_64", X86, 56, 0x10000011, refused(errno.EPERM)),  # with a new user namespace
        ("x86_64", X86, 435, 0, refused(errno.ENOSYS)),  # clone3
        ("x86_64", X86, 425, 8, refused(errno.EPERM)),  # io_uring_setup
        ("x86_64", X86, 272, 0, refused(errno.EPERM)),  # unshare
        ("x86_64", X86, 250, 0, refused(errno.EPERM)),  # keyctl
        ("x86_64", X86, 0x40000029, 2, refused(errno.EPERM)),  # socket, as x32 numbers it
        ("x86_64", I386, 359, 40, KILLED),  # socket, of a 32-bit program
        ("aarch64", ARM, 63, 3, ALLOWED),  # read
        ("aarch64", ARM, 198, 2, ALLOWED),  # socket(AF_INET)
        ("aarch64", ARM, 198, 40, refused(errno.EAFNOSUPPORT)),
        ("aarch64", ARM, 220, 0x10000011, refused(errno.EPERM)),
        ("aarch64", ARM, 97, 0, refused(errno.EPERM)),  # unshare
        ("aarch64", X86, 0, 0, KILLED),
    ],
)
def test_what_a_program_may_ask_of_the_kernel(processor, architecture, number, argument, expected):
    assert verdict(call_filter((1, 2), processor), architecture, number, argument) == expected


def test_an_unknown_processor_has_no_filter():
    assert call_filter((1,), "riscv64") == b""
