"""What the sandbox keeps a program from, and what it may do."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from sandboxes import PATIENT, ROOT, RUN_JOB, needs_sandbox, run, run_as

from slimectl.sandbox.processes import clear_folder
from slimectl.sandbox.runner import Outcome


@needs_sandbox
def test_what_a_solution_may_do():
    program = (
        "import collections, heapq, itertools, json, math, random, re, subprocess, sys, tempfile, threading\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x' * 1000)\n"
        "thread = threading.Thread(target=lambda: None); thread.start(); thread.join()\n"
        "print(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout, sys.stdin.read(), __name__)\n"
    )
    assert run(program, {"input": "é\n" * 50_000})[0] == Outcome("ended", "hi\n " + "é\n" * 50_000 + " __main__\n")


@needs_sandbox
@pytest.mark.parametrize("call", [
    "socket.create_connection(('127.0.0.1', PORT), 1)",
    "socket.create_connection(('1.1.1.1', 53), 1)",
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "socket.getaddrinfo('example.com', 80)",
    "socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect('/run/docker.sock')",
])  # fmt: skip
def test_there_is_no_network(call: str):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = run("import socket\n" + call.replace("PORT", str(server.getsockname()[1])))[0]
    assert outcome.status == "exit code 1"
    assert outcome.error.split(":")[0].endswith(("Error", "error"))


@needs_sandbox
def test_nothing_outside_its_folder_is_written_or_seen(tmp_path: Path):
    (tmp_path / "secret").write_text("s")
    (tmp_path / "secret").chmod(0o777)
    tmp_path.chmod(0o777)
    for line in (f"open('{tmp_path}/made', 'w')", f"open('{tmp_path}/secret')", "open('/made', 'w')",
                 f"open('{sys.prefix}/made', 'w')", "open('/usr/made', 'w')", "open('/etc/passwd')",
                 f"open('{Path.home()}/made', 'w')", "open('/proc/1/environ')", "open('/dev/sda')",
                 "import os; os.chdir('..'); os.chroot('.')", "import os; os.setuid(0)"):  # fmt: skip
        outcome = run(line)[0]
        assert outcome.status == "exit code 1", line
        assert outcome.error.split(":")[0] in ("FileNotFoundError", "PermissionError", "OSError"), outcome.error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]
    assert run("open('kept', 'w').write('x'); print(open('/tmp/0/kept').read())")[0].stdout == "x\n"


@needs_sandbox
def test_an_unmount_from_a_namespace_of_its_own_uncovers_nothing():
    program = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.unshare(0x10020000))\n"  # a user and a mount namespace
        "for path in (b'/usr', b'/tmp', b'/'): libc.umount2(path, 2)\n"
        "libc.mount(None, b'/usr', None, 4096 | 32, None)\n"
        "print(sorted(os.listdir('/')) and os.path.exists('/proc/self'))\n"
        "open('/usr/made', 'w')\n"
    )
    outcome = run(program)[0]
    assert outcome.stdout == "-1\nFalse\n"
    assert outcome.error.startswith(("OSError", "PermissionError"))


@needs_sandbox
def test_sockets_beyond_the_network_are_refused():
    # Without a filter of system calls vsock reaches the host of a virtual machine, whatever the network namespace.
    program = (
        "import socket\nopened = set()\n"
        "for family in range(46):\n"
        "    for kind in (1, 2, 3, 5):\n"
        "        try: socket.socket(family, kind).close(); opened.add(family)\n"
        "        except OSError: pass\n"
        "print(sorted(opened))"
    )
    assert run(program)[0].stdout == "[]\n"
    assert run("import socket\na, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))")[0].stdout == "b'x'\n"


@needs_sandbox
def test_the_parent_can_neither_be_looked_into_nor_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIMECTL_SECRET", "s3cret")
    look = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print('SLIMECTL_SECRET' in os.environ, os.path.exists('/proc'))\n"
        "print(libc.ptrace(16, os.getppid(), None, None))\n"
        "buffer = ctypes.create_string_buffer(16)\n"
        "vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 16)\n"
        "print(libc.process_vm_readv(os.getppid(), vector, 1, vector, 1, 0))\n"
        "def is_open(fd):\n"
        "    try: return bool(os.fstat(fd))\n"
        "    except OSError: return False\n"
        "print([fd for fd in range(1024) if is_open(fd)])\n"
    )
    assert run(look)[0].stdout == "False False\n-1\n-1\n[0, 1, 2, 3]\n"
    kill = (
        "import os\n"
        "if input() == 'kill':\n"
        "    for who in (1, os.getppid(), -1):\n"
        "        for number in (9, 11, 15, 19):\n"
        "            try: os.kill(who, number)\n"
        "            except OSError: pass\n"
        "print('still here')\n"
    )
    outcomes = run(kill, {"input": "kill"}, {"input": "live"})
    assert [one.stdout for one in outcomes] == ["still here\n"] * 2


@needs_sandbox
def test_no_call_leads_around_the_filter():
    # io_uring would make calls of its own, keyrings would outlive the program.
    program = (
        "import ctypes, platform\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "numbers = (425, 219, 282, 280) if platform.machine() == 'aarch64' else (425, 250, 323, 321)\n"
        "for number in numbers:\n"
        "    print(libc.syscall(number, 4, ctypes.create_string_buffer(200), 0, 0, 0), ctypes.get_errno())\n"
    )
    assert run(program)[0].stdout == "-1 1\n" * 4


@pytest.mark.slow
@needs_sandbox
def test_a_fork_bomb_is_bounded_and_leaves_nothing_behind():
    program = "import os\nwhile True:\n    try: os.fork()\n    except BlockingIOError: pass\n"
    assert run(program, test_timeout_s=1.0)[0].status == "out of time"
    counted = (
        "import os, time\nn = 0\ntry:\n    while os.fork(): n += 1\n    time.sleep(60)\n"
        "except OSError:\n    print(n)\n    os.kill(-1, 9)"
    )
    assert run(counted, processes=8)[0] == Outcome("ended", "7\n")


@pytest.mark.slow
@needs_sandbox
def test_nobody_outlives_the_limit(tmp_path: Path):
    mark = f"slimectl-{os.getpid()}"
    daemon = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen(['/bin/sh', '-c', 'trap \"\" TERM HUP; sleep 60; : {mark}'], start_new_session=True,"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
    )
    assert run(daemon)[0].status == "ended"
    assert run(daemon + "time.sleep(60)", test_timeout_s=0.3)[0].status == "out of time"
    assert run("import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
               test_timeout_s=0.5)[0].status == "out of time"  # fmt: skip
    assert mark not in "".join(command_lines())


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text())
        except OSError:
            continue
    return found


@needs_sandbox
def test_it_dies_with_whoever_asked(tmp_path: Path):
    mark = f"slimectl-orphan-{os.getpid()}"
    program = f"import subprocess\nsubprocess.run(['/bin/sh', '-c', 'sleep 60; : {mark}'])"
    asking = f"from slimectl.sandbox.runner import *\nrun_program({program!r}, [{{'input': ''}}], Limits(60, 60))"
    asker = subprocess.Popen([sys.executable, "-c", asking])
    try:
        deadline = time.monotonic() + 120
        while not any("sleep 60" in line and mark in line and "-P" not in line for line in command_lines()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        asker.kill()
        asker.wait()
    deadline = time.monotonic() + 60
    while any(mark in line for line in command_lines()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_sandbox
def test_memory_output_disk_and_cpu_are_limited():
    assert run("x = bytearray(600 << 20)")[0].error == "MemoryError"
    assert run("x = []\nwhile True: x.append(bytes(1 << 20))")[0].error == "MemoryError"
    assert run("while True: print('x' * 1000)")[0].status == "too much output"
    assert run("import sys\nwhile True: sys.stderr.write('x' * 1000)", test_timeout_s=0.5)[0].status == "out of time"
    assert "No space left" in run("for i in range(99): open(str(i), 'wb').write(bytes(1 << 20))", disk_mib=8)[0].error
    assert run("import os\nfor i in range(9999): open(str(i), 'w').close()")[0].error.startswith("OSError: [Errno 28]")


@pytest.mark.slow
@needs_sandbox
def test_one_hanging_test_does_not_cost_the_others_and_all_together_keep_the_time():
    program = "x = input()\nwhile x == 'stuck': pass\nprint(x)"
    cases = [{"input": word} for word in ("a", "stuck", "b")]
    assert [one.status for one in run(program, *cases, test_timeout_s=1.0)] == ["ended", "out of time", "ended"]
    first, *_, last = run("while True: pass", *cases, *cases, timeout_s=1.0, test_timeout_s=0.4)
    assert (first.status, last.status) == ("out of time", "no time left")


def test_the_interpreter_is_left_where_the_files_of_a_case_are_removed(tmp_path: Path):
    interpreter = tmp_path / "work" / "venv"
    for folder in (interpreter / "bin", tmp_path / "work" / "left" / "deep", tmp_path / "other"):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    clear_folder(str(tmp_path), [str(interpreter), "/usr"])
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"work", "work/venv", "work/venv/bin", "work/venv/bin/file"}


@pytest.mark.slow
@needs_sandbox
def test_time_is_that_of_the_processor_with_the_clock_far_behind():
    waits = "import time\ntime.sleep(0.6)\nprint('done')"  # as on a machine that is busy with something else
    assert run(waits, test_timeout_s=0.5)[0] == Outcome("ended", "done\n")
    assert run("import time\ntime.sleep(60)", test_timeout_s=0.1)[0].status == "out of time"
    children = "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'while :; do :; done'])"
    assert run(children, test_timeout_s=0.5)[0].status == "out of time"


@needs_sandbox
def test_cases_do_not_see_each_other():
    program = "import os\nprint(os.path.exists('x'), 'X' in os.environ)\nopen('x', 'w').close(); os.environ['X'] = '1'"
    assert [one.stdout for one in run(program, {"input": ""}, {"input": ""})] == ["False False\n"] * 2


HOLD = "import os, time\nfor _ in range(6):\n    if os.fork() == 0: break\n{}\ntime.sleep(60)"


@needs_sandbox
@pytest.mark.parametrize("action", [
    "held = bytearray(100 << 20)",
    "import mmap; held = mmap.mmap(-1, 100 << 20); held[:] = bytes(1 << 20) * 100",
    "held = [bytearray(1 << 20) for _ in range(100)]",
])  # fmt: skip
def test_memory_of_all_processes_together_is_limited(action: str):
    assert run(HOLD.format(action), memory_mib=256)[0].status == "too much memory"


@needs_sandbox
def test_pages_that_processes_share_count_once():
    program = (
        "import os\nheld = bytearray(150 << 20)\nfor at in range(0, len(held), 4096): held[at] = 1\n"
        "children = [os.fork() for _ in range(1)] + [0]\n"
        "if children[0]:\n    print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "else:\n    import time; time.sleep(0.3)\n"
    )
    assert run(program, memory_mib=256)[0] == Outcome("ended", "0\n")


@needs_sandbox
@pytest.mark.parametrize("line", [
    "os.memfd_create('x')", "os.ftruncate(0, 1 << 30)", "fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))", "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
    "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)",
])  # fmt: skip
def test_memory_that_no_limit_counts_cannot_be_had(line: str):
    outcome = run(f"import fcntl, os, resource, socket\n{line}")[0]
    assert outcome.status == "exit code 1"
    assert outcome.error.startswith(("PermissionError", "OSError", "ValueError: not allowed"))


@needs_sandbox
def test_system_v_objects_are_refused():
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for name in ('shmget', 'msgget', 'semget'):\n"
        "    print(getattr(libc, name)(0, 1 << 20, 0o1600), ctypes.get_errno())\n"
    )
    assert run(program)[0].stdout == "-1 1\n" * 3


@needs_sandbox
def test_multiprocessing_and_numpy_work_within_the_limits():
    program = (
        "import multiprocessing, numpy\nfrom multiprocessing import shared_memory\n"
        "def double(x): return 2 * x\n"
        "context = multiprocessing.get_context('fork')\n"
        "lock, queue = context.Lock(), context.Queue()\n"
        "def send():\n    with lock: queue.put(7)\n"
        "process = context.Process(target=send); process.start(); print(queue.get()); process.join()\n"
        "block = shared_memory.SharedMemory(create=True, size=1 << 20)\n"
        "array = numpy.ndarray((4,), dtype='i8', buffer=block.buf); array[:] = 3\n"
        "with context.Pool(2) as pool: print(pool.map(double, [1, 2]), array.sum())\n"
        "del array; block.close(); block.unlink()\n"
    )
    assert run(program, processes=16)[0] == Outcome("ended", "7\n[2, 4] 12\n")


@needs_sandbox
def test_files_of_a_case_are_gone_for_the_next_whatever_they_are():
    program = (
        "import os\nprint(sorted(os.listdir('/tmp')), os.listdir('/dev/shm'))\n"
        "open('/tmp/x', 'w').close(); open('/dev/shm/y', 'w').close(); os.symlink('/usr', '/tmp/link')\n"
        "try:\n    for _ in range(3000): os.mkdir('d'); os.chdir('d')\n"
        "except OSError: pass\n"
        "os.makedirs('/tmp/locked/in/side'); os.chmod('/tmp/locked/in', 0); os.chmod('/tmp/locked', 0)\n"
    )
    # An interpreter below /tmp is mounted there.
    mounted = {path.parts[2] for path in map(Path, (sys.prefix, sys.base_prefix)) if path.is_relative_to("/tmp")}
    outputs = [outcome.stdout for outcome in run(program, {"input": ""}, {"input": ""})]
    assert outputs == [f"{sorted([case, *mounted])} []\n" for case in "01"]


@needs_sandbox
def test_a_program_sees_of_a_project_that_is_a_virtual_environment_only_python(tmp_path: Path):
    project = tmp_path / "my project"  # below /tmp, as a rule, and with a blank
    venv.create(project, symlinks=True)
    for place in (project / "answers.jsonl", project / "data" / "labels", tmp_path / "mine" / "thesis"):
        place.parent.mkdir(exist_ok=True)
        place.write_text("42")
    program = (
        f"import os, sys\nprint(sys.prefix)\nprint(sorted(os.listdir({str(project)!r})), "
        f"os.listdir({str(tmp_path)!r}), os.path.exists(sys.prefix + '/bin/python'))"
    )
    job = json.dumps([program, [{"input": ""}], PATIENT, False, True])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *site.getsitepackages()])}
    command = [project / "bin" / "python", "-c", RUN_JOB]
    result = subprocess.run(command, input=job, env=environment, capture_output=True, text=True, check=True)
    (outcome,) = json.loads(result.stdout)
    own = sorted({"bin", "include", "lib", "lib64", "pyvenv.cfg"} & set(os.listdir(project)))
    assert outcome["stdout"].splitlines() == [str(project), f"{own} ['my project'] True"]


@needs_sandbox
def test_an_interpreter_that_ends_late_after_closing_its_pipes_has_ended():
    program = "import os, time\nos.closerange(0, 10)\ntime.sleep(0.5)\nos._exit(0)"
    assert run(program)[0].status == "ended"


@needs_sandbox
def test_an_ordinary_user_has_the_same_sandbox():
    count = (
        "import os, time\nn = 0\ntry:\n    while os.fork(): n += 1\n    time.sleep(60)\n"
        "except OSError:\n    print(n, os.path.exists('/proc'), 'etc' in os.listdir('/'))\n    os.kill(-1, 9)"
    )
    outcomes = run_as(65534, count, {"input": ""}, processes=8)
    if isinstance(outcomes, str) and "unshare" in outcomes:
        pytest.skip("ordinary users get no namespaces here")
    assert outcomes == [Outcome("ended", "7 False True\n")]
    assert run_as(65534, HOLD.format("held = bytearray(100 << 20)"), memory_mib=256)[0].status == "too much memory"
    right, wrong = run_as(65534, "def f(x): return x * x", {"code": "assert f(3) == 9"}, {"code": "assert f(3) == 8"})
    assert (right.report, wrong.error) == ({"passed": True}, "AssertionError")
