"""Programs where the kernel grants no namespaces: refused, or confined by everything else, as root and as another."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sandboxes import RUN_JOB, needs_landlock, run_without_namespaces

from slimectl.sandbox.privileges import landlock_version
from slimectl.sandbox.runner import Outcome

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def users() -> list[int]:
    return [0, 65534] if os.getuid() == 0 else [os.getuid()]


def test_it_is_refused_unless_it_is_allowed():
    refused = run_without_namespaces("", allowed=False)
    assert refused == (
        "score.rm_type=code: the kernel grants no sandbox (unshare: Operation not permitted). Allow user namespaces "
        "(Docker: --security-opt seccomp=unconfined), or accept less: "
        "score.rm_options.allow_unsandboxed_namespaces=true"
    )


@needs_landlock
@pytest.mark.parametrize("user", users())
def test_a_program_is_confined_by_everything_else(user: int, tmp_path: Path):
    (tmp_path / "secret").write_text("s")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    kills = "import os; os.kill(os.getppid(), 0)"
    programs = {
        "open('kept', 'w').write('x'); print(open('kept').read())": "ended",
        f"open('{tmp_path}/made', 'w')": "PermissionError",
        f"open('{tmp_path}/secret')": "PermissionError",
        "import socket; socket.create_connection(('127.0.0.1', 1), 1)": "OSError",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)": "OSError",
        kills: "PermissionError",
        "bytearray(600 << 20)": "MemoryError",
        "import os; os.setuid(0)": "PermissionError",
        "import os; os.listdir('/proc')": "PermissionError",
        "import os; os.listdir('/dev/shm')": "PermissionError",
    }
    program = f"programs = {list(programs)!r}\nexec(programs[int(input())])"
    cases = [{"input": str(number)} for number in range(len(programs))]
    outcomes = run_without_namespaces(program, *cases, user=user)
    ends = {line: "ended" if one.status == "ended" else one.error.partition(":")[0]
            for line, one in zip(programs, outcomes, strict=True)}  # fmt: skip
    assert ends == programs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


@needs_landlock
@pytest.mark.parametrize("user", users())
def test_the_program_has_no_capability_and_no_socket_that_connects(user: int, tmp_path: Path):
    path = str(tmp_path / "docker.sock")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    program = (
        "import ctypes, os, socket\n"
        "libc = ctypes.CDLL(None)\n"
        "header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
        "libc.capget(ctypes.byref(header), ctypes.byref(data))\n"
        "print(list(data), libc.prctl(39, 0, 0, 0, 0), os.getuid() != 0, os.getgroups())\n"
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)\n"
        "for action in (lambda: socket.socket(socket.AF_UNIX), lambda: a.connect(PATH), lambda: a.sendto(b'x', PATH),\n"
        "               lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)):\n"
        "    try: action(); print('reached')\n"
        "    except OSError: pass\n"
    ).replace("PATH", repr(path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        os.chmod(path, 0o777)
        listener.setblocking(False)
        (outcome,) = run_without_namespaces(program, user=user)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert outcome == Outcome("ended", "[0, 0, 0, 0, 0, 0] 1 True []\n")


@pytest.mark.slow
@needs_landlock
@pytest.mark.parametrize("user", users())
def test_processes_are_bounded_and_none_is_left(user: int):
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    mark = f"{os.getpid()}{user}"
    daemon = (
        f"import subprocess\nsubprocess.Popen(['/bin/sleep', '6{mark}'], start_new_session=True, stdout=-3, stderr=-3)"
    )
    program = f"exec({{'bomb': {bomb!r}, 'daemon': {daemon!r}}}[input()])"
    (first,) = run_without_namespaces(program, {"input": "bomb"}, user=user, test_timeout_s=1.0)
    (second,) = run_without_namespaces(program, {"input": "daemon"}, user=user)
    assert first.status in ("too many processes", "out of time")
    assert second == Outcome("ended")
    command_lines = [path.read_text() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in command_lines if mark in line]


@needs_landlock
def test_files_on_the_disk_are_bounded():
    many = "for i in range(99999): open(str(i), 'w').close()"
    large = "for i in range(99): open(str(i), 'wb').write(bytes(1 << 20))\nimport time; time.sleep(60)"
    removed = "import os\nfiles = []\nfor i in range(50):\n    files.append(open('x', 'wb')); os.unlink('x')\n" \
              "    files[-1].write(bytes(1 << 20)); files[-1].flush()\nimport time; time.sleep(60)"  # fmt: skip
    program = f"exec({[many, large, removed]!r}[int(input())])"
    outcomes = run_without_namespaces(program, *({"input": str(at)} for at in range(3)), disk_mib=8)
    assert [one.status for one in outcomes] == ["too many files"] * 3


@needs_landlock
@pytest.mark.parametrize("user", users())
def test_statements_are_judged_as_ever(user: int):
    program = "def f(x):\n    x.append(1)\n    return len(x)"
    right, wrong = run_without_namespaces(program, {"code": "x = []\nassert f(x) == 1 and x == [1]"},
                                          {"code": "assert f([]) == 2"}, user=user)  # fmt: skip
    assert (right.report, wrong.status, wrong.error) == ({"passed": True}, "failed", "AssertionError")


@needs_landlock
@pytest.mark.parametrize("user", users())
def test_what_a_program_leaves_is_removed_without_following_a_link(user: int, tmp_path: Path):
    target = tmp_path / "target"
    target.write_text("t")
    target.chmod(0o644)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    if os.getuid() == 0:
        os.chown(target, user, user)
    program = (
        "import os\nos.makedirs('locked/' + 'd/' * 200)\n"
        f"os.symlink({str(target)!r}, 'locked/link'); os.symlink({str(tmp_path)!r}, 'locked/folder')\n"
        f"os.symlink({str(target)!r}, '../link')\n"
        "os.chmod('locked', 0); os.chmod('.', 0); os.chmod('..', 0)\n"
    )
    (outcome,) = run_without_namespaces(program, user=user)
    assert outcome.status in ("ended", "exit code 1")
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("t", 0o644)
    assert target.exists()


@needs_root
@pytest.mark.skipif(landlock_version() < 1, reason="the kernel has no Landlock")
def test_root_whose_interpreter_nobody_can_read_is_refused():
    if not os.path.realpath(sys.base_prefix).startswith("/root/") or os.stat("/root").st_mode & 0o001:
        pytest.skip("the interpreter lies where all may read")
    job = json.dumps(["", [{"input": ""}], {}, True, False])
    result = subprocess.run([sys.executable, "-c", RUN_JOB], input=job, capture_output=True, text=True, check=True)
    assert "cannot read" in result.stdout
    assert "without namespaces a program cannot be confined" in result.stdout
