"""Server processes, with a small real HTTP server as the child."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from small_server import server

from slimectl.engines.supervisor import server_process
from slimectl.engines.supervisor.server_process import ServerOptions, ServerProcess, ServerProgram, error_line
from slimectl.errors import BackendError
from slimectl.system.http import get


def status(url: str) -> int:
    return asyncio.run(get(f"{url}/health", timeout_s=5)).status


def gone(pid: int) -> bool:
    """Ended; a zombie whose parent has not yet looked counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def soon(happens: Any, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(happens())


def test_a_server_starts_where_it_was_unpickled_and_ends_whole(tmp_path: Path):
    child = "print(subprocess.Popen(['sleep', '1000']).pid, flush=True)"
    made = pickle.loads(pickle.dumps(server(tmp_path, child)))
    assert not made.alive()
    url = made.start()
    assert (status(url), made.alive()) == (200, True)
    grandchild = int(made.log_tail())
    assert not gone(grandchild)
    made.stop()
    made.stop()
    assert not made.alive()
    assert gone(made.pid())
    assert gone(grandchild)
    with pytest.raises(BackendError, match="is not answering"):
        status(url)


def test_a_stopped_server_starts_again(tmp_path: Path):
    made = server(tmp_path)
    made.start()
    first = made.pid()
    assert status(made.start()) == 200
    assert made.pid() != first
    assert gone(first)
    made.stop()


def test_a_port_that_is_taken_is_left_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(server_process, "FIXED_PORTS", [port] * 16)
        made = server(tmp_path)
        url = made.start()
        assert url != f"http://127.0.0.1:{port}"
        assert status(url) == 200
        made.stop()


def test_a_port_lost_between_choice_and_start_is_tried_no_longer(tmp_path: Path):
    flag = tmp_path / "once"
    lost = f"""
        if not os.path.exists({str(flag)!r}):
            open({str(flag)!r}, 'w').close()
            print("ERROR: [Errno 98] address already in use", flush=True)
            raise TimeoutError('timed out')  # an error of the shutdown that follows, as SGLang logs one
    """
    made = server(tmp_path, lost.replace("\n        ", "\n    "))
    assert status(made.start()) == 200
    made.stop()


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("raise MemoryError('cannot allocate 80 GiB')", "small server died while starting (exit code 1): "
                                                        "MemoryError: cannot allocate 80 GiB. See its log: "),
        ("os.kill(os.getpid(), 9)", "small server died while starting (killed; out of memory?): the log is empty"),
        ("sys.exit(3)", "died while starting (exit code 3)"),
    ],
)  # fmt: skip
def test_a_server_that_dies_at_its_start_says_why_in_one_line(tmp_path: Path, before: str, words: str):
    made = server(tmp_path, before)
    with pytest.raises(BackendError) as died:
        made.start()
    assert words in str(died.value)
    assert "\n" not in str(died.value)
    assert not made.alive()


@pytest.mark.slow
def test_a_server_that_never_answers_is_ended_after_its_time(tmp_path: Path):
    made = server(tmp_path, "time.sleep(1000)", start_timeout_s=1.0)
    with pytest.raises(BackendError, match="small server did not respond within 1 s"):
        made.start()
    assert gone(made.pid())


def test_a_command_that_is_not_there_is_named(tmp_path: Path):
    made = ServerProcess("odd", ServerProgram(lambda host, port: ["/no/such/command"]), ServerOptions(tmp_path / "log"))
    with pytest.raises(BackendError, match="odd: /no/such/command cannot be run: No such file"):
        made.start()


def test_stop_ends_a_start_that_is_under_way(tmp_path: Path):
    made = server(tmp_path, "time.sleep(1000)")
    errors: list[BaseException] = []

    def start() -> None:
        try:
            made.start()
        except BackendError as error:
            errors.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    assert soon(made.alive)
    made.stop()
    starting.join(5)
    assert not starting.is_alive()
    assert len(errors) == 1
    assert gone(made.pid())


@pytest.mark.slow
def test_servers_started_from_a_thread_outlive_it_and_leave_with_the_process(tmp_path: Path):
    """A server started by a short-lived thread stays; kill -9 of the process takes it along."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys, threading, time
        from functools import partial
        from pathlib import Path
        from slimectl.engines.supervisor.server_process import ServerOptions, ServerProcess, ServerProgram

        def command(host, port):
            code = ("import sys, time; sys.path.insert(0, {str(bootstrap())!r}); import parent_watch; "
                    "parent_watch.leave_with_parent(); import http.server; "
                    "http.server.test(http.server.SimpleHTTPRequestHandler, bind=sys.argv[1], port=int(sys.argv[2]))")
            return [sys.executable, "-c", code, host, str(port)]

        program = ServerProgram(command, ready="/", own_tmp=True)
        made = ServerProcess("child", program, ServerOptions(Path({str(tmp_path / "log")!r})))
        thread = threading.Thread(target=made.start)
        thread.start()
        thread.join()
        print(made.pid(), made._scratch, flush=True)
        time.sleep(1000)
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    child = int(pid)
    time.sleep(1.0)
    assert not gone(child)
    assert Path(folder).is_dir()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert soon(lambda: gone(child), within_s=5)
    assert not Path(folder).exists()


def bootstrap() -> Path:
    from slimectl.engines.supervisor import bootstrap

    return Path(bootstrap.__path__[0])


def test_the_cause_of_a_death_is_found_among_other_lines():
    log = """[2026-01-01 10:00:00] Load weight begin.
    /usr/lib/x.py:3: UserWarning: something is odd
    Traceback (most recent call last):
      File "scheduler.py", line 3, in run
    torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
    [2026-01-01 10:00:05] Received sigquit from a child process. It usually means the child failed.
    EOFError: it went away"""
    assert error_line(log) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert error_line("fine\nValueError: head_dim 12 is odd\nRuntimeError: later") == "ValueError: head_dim 12 is odd"
    assert error_line("starting\nsaid something last\n\n") == "said something last"
    assert error_line("") == "the log is empty"
