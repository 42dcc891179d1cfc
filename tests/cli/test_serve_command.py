"""`slimectl serve` as a process: it says where it is, and ends at once whoever asks, leaving nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forkserver
import pytest
from forkserver import Process

from slimectl.engines.api_keys import ServerKeys
from slimectl.engines.sglang.weight_client import SglangWorkers
from slimectl.errors import BackendError
from slimectl.runtime import builders
from slimectl.runtime.builders import serving
from slimectl.settings import Settings
from slimectl.settings.engine import EngineSettings

pytestmark = pytest.mark.slow

Start = Callable[..., Process]
KEY = "key-of-this-test"
COMMAND = [sys.executable, "-m", "slimectl", "serve"]


@pytest.fixture
def start(model_dir: Callable[[str], Path], tmp_path: Path) -> Iterator[Start]:
    """Starts `slimectl serve` on any free port, and sees to it that nothing stays."""
    started: list[Process] = []

    def begin(*options: str) -> Process:
        command = ["serve", "--model", str(model_dir("llama")), "--port", "0", *options]
        env = os.environ | {"OMP_NUM_THREADS": "1", "SLIMECTL_ENGINE_ADMIN_API_KEY": KEY}
        pipe = subprocess.PIPE
        started.append(forkserver.start(command, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.__exit__(None, None, None)


def address(process: Process) -> tuple[str, str]:
    """The URL that a server says when it is ready, and what it says of it."""
    assert process.stderr is not None
    line = process.stderr.readline().decode()
    url, _, words = line.partition(": ")
    assert url.startswith("http://127.0.0.1:"), line
    return url, words.strip()


def asked(url: str, path: str, body: Any = None) -> Any:
    raw = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=raw, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.loads(response.read())


def received(client: socket.socket) -> bytes:
    """What came before the server closed the connection or broke it off."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            data += part
    return data


def ended(process: Process) -> tuple[int | None, str]:
    _, words = process.communicate(timeout=300)
    return process.returncode, words.decode()


def test_it_says_where_it_is_answers_and_an_interrupt_ends_it_at_once(start: Start) -> None:
    process = start("-s", "engine.dtype=bfloat16")
    url, words = address(process)
    assert words.startswith("serving ")
    answer = asked(url, "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}})
    assert len(answer["output_ids"]) == 3
    assert asked(url, "/server_info")["dtype"] == "bfloat16"
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, "slimectl: interrupted\n")


def test_an_interrupt_in_the_middle_of_much_work(start: Start) -> None:
    process = start("-s", "rollout.max_context_len=60000")
    url, _ = address(process)
    port = int(url.rsplit(":", 1)[1])
    prompt = [i % 256 for i in range(50_000)]
    raw = json.dumps({"input_ids": prompt, "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head + raw)
        while not asked(url, "/v1/loads")["loads"][0]["num_total_reqs"]:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        code, words = ended(process)
        assert b'"output_ids"' not in received(client)  # it did not wait for the end of the work
    assert code == 130
    assert "Traceback" not in words


def test_a_termination_is_no_failure(start: Start) -> None:
    process = start("--wait-for-weights")
    url, words = address(process)
    assert words == "waiting for weights"
    assert asked(url, "/ping") == {"status": "waiting for weights"}
    process.terminate()
    assert ended(process) == (0, "")


def test_a_key_that_was_drawn_lies_where_its_user_alone_reads_it(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SLIMECTL_ENGINE_ADMIN_API_KEY", raising=False)
    command = ["serve", "--model", str(model_dir("llama")), "--port", "0", "--wait-for-weights", "--host", "0.0.0.0"]
    process = forkserver.start(command, cwd=tmp_path, env={**os.environ}, stderr=subprocess.PIPE)
    assert process.stderr is not None
    port = process.stderr.readline().decode().partition(": ")[0].rpartition(":")[2]
    where, _, path = process.stderr.readline().decode().rpartition(" ")
    exposed = process.stderr.readline().decode()
    file = Path(path.strip())
    assert where == "the admin key (weights, pauses, aborts) is in"
    assert (file.parent, file.stat().st_mode & 0o777) == (tmp_path / ".cache/slimectl/keys", 0o600)
    assert exposed == (
        "0.0.0.0: other machines can reach this server and sample from it without a key (/generate, /v1). Weights, "
        "pauses and aborts need the admin key. Set engine.api_key to protect everything else.\n"
    )
    key = file.read_text().strip()
    assert len(key) > 40
    assert key not in Path(f"/proc/{process.pid}/cmdline").read_text()
    SglangWorkers([f"http://127.0.0.1:{port}"], keys=ServerKeys(admin_api_key=key)).sleep()
    with pytest.raises(BackendError, match=r"401.*Set its key in engine\.admin_api_key"):
        SglangWorkers([f"http://127.0.0.1:{port}"]).wake()
    # As `--engine-url` does: a server of this user on this machine is opened without a word.
    settings = Settings.model_validate({"engine": {"url": f"http://127.0.0.1:{port}"}})
    builders.workers(settings, [f"http://127.0.0.1:{port}"]).wake()
    process.terminate()
    assert process.communicate(timeout=300)[1] == b""
    assert not file.exists()


def test_a_server_that_others_reach_says_what_is_open() -> None:
    closed = Settings.model_validate({"engine": {"api_key": "k"}})
    assert serving.exposure(EngineSettings(), "127.0.0.1") is serving.exposure(EngineSettings(), "localhost") is None
    assert serving.exposure(EngineSettings(), "::1") is None
    assert serving.exposure(closed.engine, "10.0.0.5") == (
        "10.0.0.5: other machines can reach this server, unencrypted, with the API key or the admin key."
    )


def refused(folder: Path, *options: str) -> tuple[int | None, str]:
    """Exit code and stderr of a server that does not start."""
    process = forkserver.start(["serve", *options], cwd=folder, env={**os.environ}, stderr=subprocess.PIPE)
    return ended(process)


def test_a_taken_port_is_one_line_with_another_to_try(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, words = refused(tmp_path, "--model", str(model_dir("llama")), "--port", str(port))
    assert code == 4
    start, _, other = words.strip().rpartition(" ")
    assert start == f"slimectl: 127.0.0.1:{port}: address already in use. Try --port"
    assert int(other) != port


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (["--model", "/nowhere"], 1, "/nowhere: no such model directory"),
        ([], 2, "model.path: no model is given. Add --model DIR"),
        (["--host", "no.such.host.invalid"], 2, "--host: no.such.host.invalid is not an address"),
        (["--host", "192.0.2.1"], 4, "192.0.2.1:30000: cannot listen here"),
    ],
)
def test_what_it_cannot_serve_is_one_line(
    options: list[str], code: int, named: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    if "--host" in options:
        options = [*options, "--model", str(model_dir("llama"))]
    returned, words = refused(tmp_path, *options)
    assert (returned, words.count("\n")) == (code, 1)
    assert named in words


def test_it_ends_with_its_parent_however_that_ends(model_dir: Callable[[str], Path]) -> None:
    command = [*COMMAND, "--model", str(model_dir("llama")), "--port", "0", "--with-parent", "--wait-for-weights"]
    script = f"import subprocess, time; p = subprocess.Popen({command!r}); print(p.pid, flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    address(parent)  # the child shares its stderr
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and Path(f"/proc/{child}/cmdline").exists() and _alive(child):
        time.sleep(0.05)
    assert not _alive(child)
    parent.communicate()


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
