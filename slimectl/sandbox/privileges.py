"""Rights and limits of a process: user, capabilities, Landlock, system-call filter and rlimits."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from typing import Any

from slimectl.sandbox.namespaces import DEVICES, NOBODY, check_errno, libc
from slimectl.sandbox.seccomp import signal_filter

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_EXECUTE, LANDLOCK_WRITE, LANDLOCK_READ, LANDLOCK_READ_DIR = 1, 2, 4, 8
SCOPED_SIGNALS = 6
"""First version of Landlock that keeps signals inside its domain (Linux 6.12)."""

PENDING_SIGNALS = 256


def drop_privileges(uid: int | None) -> None:
    """Switch to an unprivileged user if root, and drop every capability permanently.

    Raises OSError if the change of user is refused, as in a user namespace without a second user.
    """
    if uid is not None and os.getuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError as error:
            raise OSError(error.errno, f"root cannot become user {uid}: {error.strerror}") from None
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    check_errno(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
    check_errno(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def set_dumpable(dumpable: bool) -> None:
    """Set whether other processes of the user may inspect this one."""
    check_errno(libc.prctl(PR_SET_DUMPABLE, int(dumpable), 0, 0, 0), "prctl")


def install_filter(program: bytes) -> None:
    """Install a system-call filter for this process and all its descendants."""
    instructions = ctypes.create_string_buffer(program, len(program))
    description = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    check_errno(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, description, 0, 0), "seccomp")


def landlock_version() -> int:
    """Return the kernel's version of Landlock. Below 1 it is missing or switched off."""
    return int(libc.syscall(SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def apply_landlock(home: str, readable: list[str]) -> None:
    """Restrict this process to `home`, and `readable` read-only, without TCP, and without signals if the kernel can.

    Newer kernels know more rights (man 7 landlock). Requesting a right that this kernel does not know is an error.
    """
    version = landlock_version()
    if version < 1:
        raise OSError("the kernel has no Landlock")
    everything = (1 << 13) - 1 | (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15
    handled = (ctypes.c_uint64 * 3)(everything, 3 * (version >= 4), 3 * (version >= SCOPED_SIGNALS))
    size = 24 if version >= SCOPED_SIGNALS else 16 if version >= 4 else 8
    rules = libc.syscall(SYS_LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(size), 0)
    check_errno(min(rules, 0), "landlock_create_ruleset")
    rights = dict.fromkeys(readable, LANDLOCK_EXECUTE | LANDLOCK_READ | LANDLOCK_READ_DIR) | {home: everything}
    for path, right in (rights | dict.fromkeys(DEVICES, LANDLOCK_READ | LANDLOCK_WRITE)).items():
        if not os.path.exists(path):
            continue
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = right if os.path.isdir(path) else right & (LANDLOCK_EXECUTE | LANDLOCK_WRITE | LANDLOCK_READ)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, beneath), 12)
        check_errno(libc.syscall(SYS_LANDLOCK_ADD, rules, 1, ctypes.byref(rule), 0), "landlock_add_rule")
        os.close(beneath)
    check_errno(libc.syscall(SYS_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def set_limits(job: dict[str, Any]) -> None:
    """Set the limits of each process of a case, and the maximum number of processes."""
    memory, file_size = job["memory_mib"] << 20, job["disk_mib"] << 20
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: int(job["test_timeout_s"]) + 1,
        resource.RLIMIT_FSIZE: file_size,
        resource.RLIMIT_NPROC: job["processes"] + job["other_processes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: PENDING_SIGNALS,
        # 1, not 0: a core_pattern that is a pipe ignores 0, and would pass our memory to a program of the machine.
        resource.RLIMIT_CORE: 1,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def confine(job: dict[str, Any]) -> None:
    """Drop every right of this process that an untrusted program must not have, just before running one.

    Raises OSError if a step is unavailable, because without namespaces every step is needed to protect the machine.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(0, os.getpriority(os.PRIO_PROCESS, 0)))
    drop_privileges(job["uid"])
    if not job["isolated"]:
        apply_landlock(job["home"], job["readable"])
    set_dumpable(True)  # the supervisor inspects this process to measure memory
    set_limits(job)
    if not job["isolated"] and landlock_version() < SCOPED_SIGNALS:
        install_filter(signal_filter(os.getpid()))
    install_filter(bytes.fromhex(job["filter"]))


def check_confinement(job: dict[str, Any]) -> None:
    """Try `confine` in a child, and check that it takes effect. Raises OSError with the step that failed."""
    reason, answer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            confine({**job, "processes": 0, "other_processes": 0})
            text = _unbound() or _unreadable(job["readable"])
        except OSError as error:
            text = str(error.strerror or error)
        os.write(answer, text.encode())
        os._exit(0)
    os.close(answer)
    text = os.read(reason, 4096).decode()
    os.close(reason)
    if os.waitpid(child, 0)[1] or text:
        raise OSError(text or "the check of the sandbox was killed")


def _unbound() -> str:
    """Return why the limit on processes does not apply to this user, or "" if it does."""
    try:
        child = os.fork()
    except OSError:
        return ""
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return f"the limit on processes does not apply to user {os.getuid()}"


def _unreadable(readable: list[str]) -> str:
    """Return the error for a path of the interpreter that this user cannot read, or "" if all are readable."""
    for path in readable:
        if not os.access(path, os.R_OK):
            return f"user {os.getuid()} cannot read {path}. Install Python where all users can read it."
    return ""


def unprivileged_uid() -> int | None:
    """Return a user for root to become. Nothing else runs as this user, so that limits on processes do not add up.

    In user namespaces that map fewer ids it is user 65534, and None if they map only root.
    """
    if os.getuid():
        return None
    with open("/proc/self/uid_map") as file:
        ranges = [[int(number) for number in line.split()] for line in file]
    for uid in (1 << 30 | os.getpid(), NOBODY):
        if any(first <= uid < first + count for first, _, count in ranges):
            return uid
    return None
