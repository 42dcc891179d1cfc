"""Runs a program's test cases where they can do no harm; started as a script of its own by sandbox.py.

Three processes: the launcher enters new namespaces and waits; its child is their first process, shuts itself in, and
forks once for every case. The job comes as JSON on stdin; one JSON line a case goes to stdout. Expected outputs never
come in here: whoever asked compares. Nothing of slimectl is imported, so that starting takes milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from types import ModuleType
from typing import Any, NoReturn

NOBODY = 65534
NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000  # NS UTS IPC USER PID NET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = -100, 0x8000, 442
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
TAIL = 2000
"""Bytes of a case's stderr that are kept."""

libc = ctypes.CDLL(None, use_errno=True)


def must(result: int, what: str) -> None:
    """Raises OSError with the name of the call that failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with(parent: int) -> None:
    """Ask to be killed when the parent ends; a change of user forgets it."""
    must(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() not in (parent, 0):  # 0: the parent is outside our namespace
        os._exit(1)


def enter_namespaces() -> None:
    """Leave the network, the processes and the mounts of the machine; the next child is process 1."""
    if os.getuid():
        uid, gid = os.getuid(), os.getgid()
        must(libc.unshare(NEW_NAMESPACES), "unshare")
        _map_ids("self", f"{uid} {uid} 1", f"{gid} {gid} 1", deny_groups=True)
        return
    # The limit on processes does not bind root: it needs a second user, whom only somebody outside can let in.
    asked, ask = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(ask)
        os.read(asked, 1)
        both = f"0 0 1\n{NOBODY} {NOBODY} 1"
        try:
            _map_ids(str(os.getppid()), both, both, deny_groups=False)
        except OSError:
            os._exit(1)
        os._exit(0)
    try:
        must(libc.unshare(NEW_NAMESPACES), "unshare")
    finally:
        os.write(ask, b"x")
        status = os.waitpid(helper, 0)[1]
    if status:
        raise OSError(f"user {NOBODY} cannot be mapped into a user namespace")


def _map_ids(process: str, users: str, groups: str, *, deny_groups: bool) -> None:
    lines = {"setgroups": "deny"} if deny_groups else {}
    for name, text in {**lines, "uid_map": users, "gid_map": groups}.items():
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(text)


def shut_in(home: str, readable: list[str], disk_mib: int) -> None:
    """A root of its own: `readable` paths, read-only, and an empty /tmp in memory; no other file of the machine."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", home, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.makedirs(home + "/tmp")  # first: the interpreter may live below /tmp
    _mount("tmpfs", home + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_mib}m,nr_inodes=4096,mode=1777")
    for path in readable:
        target = home + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
        elif os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
            _mount(path, target, None, MS_BIND | MS_REC)
            _freeze(target, recursive=True)
        elif os.path.exists(path):
            _bind_file(path, target)
            _freeze(target, recursive=False)
    os.makedirs(home + "/dev", exist_ok=True)
    for device in DEVICES:
        _bind_file(device, home + device)
    os.chdir(home)
    must(libc.pivot_root(b".", b"."), "pivot_root")
    must(libc.umount2(b".", MNT_DETACH), "umount2")
    _freeze("/", recursive=False)
    os.chdir("/tmp")


def _bind_file(path: str, target: str) -> None:
    with open(target, "w"):
        pass
    _mount(path, target, None, MS_BIND)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, options)]
    must(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def _freeze(path: str, *, recursive: bool) -> None:
    """Make a mount read-only, with all that is mounted under it."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    arguments = (AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), ctypes.c_size_t(32))
    must(libc.syscall(SYS_MOUNT_SETATTR, *arguments), f"mount_setattr {path}")


def give_up_power() -> None:
    """Become nobody, without any capability, for good; and let no child look into this process."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    must(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
    must(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    must(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def filter_calls(program: bytes) -> None:
    """Hand the kernel a filter of system calls, for this process and all that come of it."""
    if not program:
        return
    held = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(held))
    must(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0), "seccomp")


def fence_off(home: str, readable: list[str]) -> None:
    """What Landlock can do where there are no namespaces: files, TCP, signals, as far as the kernel has it.

    Newer kernels know more rights (man 7 landlock); asking for one that this kernel does not know is an error.
    """
    must(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    version = libc.syscall(SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    everything = (1 << 13) - 1 | (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15
    asked = (ctypes.c_uint64 * 3)(everything, 3 * (version >= 4), 3 * (version >= 6))
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = libc.syscall(SYS_LANDLOCK_CREATE, ctypes.byref(asked), ctypes.c_size_t(size), 0)
    must(min(rules, 0), "landlock_create_ruleset")
    execute, write, read, list_folder = 1, 2, 4, 8
    rights = dict.fromkeys(readable, execute | read | list_folder) | {home: everything}
    for path, right in (rights | dict.fromkeys(DEVICES, read | write)).items():
        if not os.path.exists(path):
            continue
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = right if os.path.isdir(path) else right & (execute | write | read)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, beneath), 12)
        must(libc.syscall(SYS_LANDLOCK_ADD, rules, 1, ctypes.byref(rule), 0), "landlock_add_rule")
        os.close(beneath)
    must(libc.syscall(SYS_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def run_cases(job: dict[str, Any], out: int) -> None:
    """Every case in turn, until the time for all of them is used up."""
    ends = time.monotonic() + job["timeout_s"]
    for number, case in enumerate(job["cases"]):
        case["folder"] = f"{os.getcwd()}/{number}"
        left = min(ends - time.monotonic(), job["test_timeout_s"])
        if left < 0.01:
            return
        report = run_case(job, case, left)
        write_all(out, json.dumps(report).encode() + b"\n")


def run_case(job: dict[str, Any], case: dict[str, Any], seconds: float) -> dict[str, Any]:
    """How one case ended, what it printed, and what the child reported over a pipe of its own."""
    stdin = os.memfd_create("stdin")
    write_all(stdin, case.get("input", "").encode("utf-8", "surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    pipes = {name: os.pipe() for name in ("stdout", "stderr", "report")}
    child = os.fork()
    if child == 0:
        play(job, case, stdin, *(write for _, write in pipes.values()))
    os.close(stdin)
    for _, write in pipes.values():
        os.close(write)
    kept, status = gather({read: name for name, (read, _) in pipes.items()}, seconds, job["max_output"])
    if status == "ended":
        status = reap(child, 0.2)
    kill_all(job.get("children"))
    for read, _ in pipes.values():
        os.close(read)
    error = kept["stderr"][-TAIL:].decode("utf-8", "replace").strip().rpartition("\n")[2]
    try:
        report = json.loads(kept["report"] or b"null")
    except (ValueError, RecursionError):
        report = None
    return {"status": status, "stdout": kept["stdout"].decode("utf-8", "replace"), "error": error, "report": report}


def gather(names: dict[int, str], seconds: float, max_output: int) -> tuple[dict[str, bytes], str]:
    """What comes out of the pipes, until all are closed, time is up or there is too much."""
    kept = dict.fromkeys(names.values(), b"")
    ends, still = time.monotonic() + seconds, set(names)
    while still:
        ready = select.select(list(still), [], [], max(0.0, ends - time.monotonic()))[0]
        if not ready:
            return kept, "out of time"
        for pipe in ready:
            piece = os.read(pipe, 65536)
            if not piece:
                still.discard(pipe)
            kept[names[pipe]] += piece
            if len(kept[names[pipe]]) > max_output:
                return kept, "too much output"
            if names[pipe] == "stderr":
                kept["stderr"] = kept["stderr"][-TAIL:]
    return kept, "ended"


def reap(child: int, seconds: float) -> str:
    """How the child ended; one that has closed its pipes but goes on has no time left."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return "ended" if code == 0 else f"exit code {code}" if code > 0 else signal.Signals(-code).name
        time.sleep(0.001)
    return "out of time"


def kill_all(children: int | None) -> None:
    """Whatever a case has left running: in a namespace all but ourselves, else all that the open list names."""
    while True:
        for pid in [-1] if children is None else os.pread(children, 1 << 16, 0).split():
            _kill(int(pid))
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def play(job: dict[str, Any], case: dict[str, Any], stdin: int, stdout: int, stderr: int, report: int) -> NoReturn:
    """The program, then the case's statement or call, in this very process; never returns."""
    code = 1
    try:
        for at, given in enumerate((stdin, stdout, stderr, report)):
            os.dup2(given, 100 + at)
        os.closerange(0, 100)
        for at in range(4):
            os.dup2(100 + at, at)
        os.closerange(4, 200)
        live_in(case["folder"])
        limit(job)
        code = perform(job["program"], case)
    except BaseException as error:
        code = fail(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = code or 1
        os._exit(code)


def live_in(folder: str) -> None:
    """Work in a folder that no earlier case has written to."""
    os.mkdir(folder)
    os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = folder


def limit(job: dict[str, Any]) -> None:
    """Limits that each process of the case has, and on how many processes there may be."""
    memory, file_size = job["memory_mib"] << 20, job["disk_mib"] << 20
    seconds = int(job["test_timeout_s"]) + 1
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: file_size,
        resource.RLIMIT_NPROC: job["processes"] + job.get("others", 1),
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for which, value in limits.items():
        resource.setrlimit(which, (value, value))


def perform(program: str, case: dict[str, Any]) -> int:
    """Run the program as __main__; then report what the case's statement or call gave. The exit code."""
    main = ModuleType("__main__")
    sys.modules["__main__"], sys.argv = main, ["solution.py"]
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
    exec(compile(program, "solution.py", "exec"), main.__dict__)
    if "code" in case:
        exec(compile(case["code"], "test.py", "exec"), main.__dict__)
        write_all(3, b'{"passed": true}')
    if "call" in case:
        owner = main if hasattr(main, case["call"]) or not hasattr(main, "Solution") else main.Solution()
        value = getattr(owner, case["call"])(*case["arguments"])
        write_all(3, json.dumps({"value": value}).encode())
    return 0


def fail(error: BaseException) -> int:
    """The exit code of a program that raised, its reason on stderr."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    text = f"{type(error).__name__}: {error}"[:TAIL].removesuffix(": ")
    write_all(2, b"\n" + text.encode("utf-8", "replace").replace(b"\n", b" "))
    return 1


def write_all(file: int, text: bytes) -> None:
    while text:
        text = text[os.write(file, text) :]


def main() -> None:
    job = json.load(sys.stdin)
    die_with(int(sys.argv[1]))
    launcher = os.getpid()
    if job["confine"]:
        enter_namespaces()
    first = os.fork()
    if first:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) != 0)
    if job["confine"]:
        shut_in(job["home"], job["readable"], job["disk_mib"])
        give_up_power()
    else:
        must(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
        os.chdir(job["home"])
        job["children"] = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY | os.O_CLOEXEC)
        fence_off(job["home"], job["readable"])
    filter_calls(bytes.fromhex(job["filter"]))
    die_with(launcher)
    write_all(1, b'{"ready": true}\n')
    run_cases(job, 1)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        write_all(1, json.dumps({"refused": str(error.strerror or error)}).encode() + b"\n")
        sys.exit(1)
