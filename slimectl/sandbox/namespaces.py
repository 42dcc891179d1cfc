"""Namespaces and mounts of the jail: its own root folder, no network, and no other processes."""

from __future__ import annotations

import ctypes
import os
import signal

NOBODY = 65534
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET
"""Process namespaces follow later, one for each side of the jail."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = -100, 0x8000, 442
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
MAX_FILES = 4096

libc = ctypes.CDLL(None, use_errno=True)


def check_errno(result: int, call: str) -> None:
    """Raise OSError with the name of the call that failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def kill_with_parent(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """Request a signal when the parent ends. A change of user clears the request."""
    check_errno(libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")
    if os.getppid() not in (parent, 0):  # 0: the parent is outside our namespace
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends."""
    check_errno(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def enter_namespaces() -> None:
    """Leave the network, the mounts, the IPC objects and the host name of the machine.

    If root may not create a user namespace, it creates the others without one, which it has the right to do.
    """
    if os.getuid():
        uid, gid = os.getuid(), os.getgid()
        check_errno(libc.unshare(NAMESPACES | CLONE_NEWUSER), "unshare")
        _map_ids("self", f"{uid} {uid} 1", f"{gid} {gid} 1", deny_groups=True)
        return
    try:
        _enter_as_root()
    except OSError:
        check_errno(libc.unshare(NAMESPACES), "unshare")


def _enter_as_root() -> None:
    # The limit on processes does not apply to root. It needs a second user, which only a process outside can map.
    is_unshared, unshared = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        os.close(unshared)
        id_map = f"0 0 1\n{NOBODY} {NOBODY} 1"
        try:
            if os.read(is_unshared, 1):
                _map_ids(str(os.getppid()), id_map, id_map, deny_groups=False)
        except OSError:
            os._exit(1)
        os._exit(0)
    os.close(is_unshared)
    try:
        check_errno(libc.unshare(NAMESPACES | CLONE_NEWUSER), "unshare")
        os.write(unshared, b"x")
    finally:
        os.close(unshared)
        status = os.waitpid(mapper, 0)[1]
    if status:
        raise OSError(f"user {NOBODY} cannot be mapped into a user namespace")


def _map_ids(process: str, users: str, groups: str, *, deny_groups: bool) -> None:
    lines = {"setgroups": "deny"} if deny_groups else {}
    for name, text in {**lines, "uid_map": users, "gid_map": groups}.items():
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(text)


def enter_pid_namespace() -> None:
    """Make the next child the first process of a new PID namespace. When it ends, the kernel kills all others."""
    check_errno(libc.unshare(CLONE_NEWPID), "unshare")


def isolate_filesystem(home: str, readable: list[str], disk_mib: int, writable: list[str]) -> None:
    """Enter a root folder that contains only `readable` paths, read-only, and `writable` ones, empty and in memory.

    The `writable` folders share one file system, so `disk_mib` limits their total size.
    """
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", home, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    scratch = home + "/scratch"
    os.makedirs(scratch)
    size = f"size={disk_mib}m,nr_inodes={MAX_FILES},mode=755"
    _mount("tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, size)
    for folder in writable:  # first, because the interpreter may be below /tmp
        source, target = scratch + "/" + folder.replace("/", "_"), home + folder
        os.makedirs(target)
        os.mkdir(source)
        os.chmod(source, 0o1777)
        _mount(source, target, None, MS_BIND)
    for path in readable:
        _bind_readable(path, home + path)
    for device in DEVICES:
        _bind_file(device, home + device)
    check_errno(libc.umount2(scratch.encode(), MNT_DETACH), "umount2")
    os.rmdir(scratch)
    os.chdir(home)
    check_errno(libc.pivot_root(b".", b"."), "pivot_root")
    check_errno(libc.umount2(b".", MNT_DETACH), "umount2")
    _make_read_only("/", recursive=False)
    os.chdir("/tmp")


def _bind_readable(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
    elif os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
        _mount(path, target, None, MS_BIND | MS_REC)
        _make_read_only(target, recursive=True)
    elif os.path.exists(path):
        _bind_file(path, target)
        _make_read_only(target, recursive=False)


def _bind_file(path: str, target: str) -> None:
    with open(target, "w"):
        pass
    _mount(path, target, None, MS_BIND)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    check_errno(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _make_read_only(path: str, *, recursive: bool) -> None:
    """Make a mount read-only, and with `recursive` all mounts below it too."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    arguments = (AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), ctypes.c_size_t(32))
    check_errno(libc.syscall(SYS_MOUNT_SETATTR, *arguments), f"mount_setattr {path}")
