"""What one client, or many, may hold of a server: connections, time, memory; and what it says of it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import forkserver
import pytest

from slimectl.engines.server import connections, schema
from slimectl.engines.server.errors import Notices

pytestmark = pytest.mark.slow

KEY = "key-of-this-test"
HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
ASK = {"input_ids": list(b"once"), "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}


def connect(server: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=300)


def received(client: socket.socket) -> bytes:
    """Everything until the server closes."""
    answer = b""
    while part := client.recv(65536):
        answer += part
    return answer


@pytest.fixture
def small(
    monkeypatch: pytest.MonkeyPatch, serving: Callable[..., Any], model_dir: Callable[[str], Path]
) -> Iterator[Any]:
    """A server of five connections that is soon tired of silent clients while others wait."""
    monkeypatch.setattr(connections, "most_connections", lambda: 5)
    monkeypatch.setattr(connections, "PRESSED_S", 0.2)
    with serving(model_dir("llama")) as made:
        yield made


@pytest.mark.parametrize(
    "begin",
    [b"", b"POST /gen", HEAD, HEAD + b"Content-Length: 50\r\n\r\n{", HEAD + b"Transfer-Encoding: chunked\r\n\r\n5"],
)
def test_silent_clients_keep_others_waiting_for_a_moment_only(
    begin: bytes, small: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as clients:
        for _ in range(12):
            clients.enter_context(connect(small)).sendall(begin)
        assert small.ask("/health")[0] == 200
        assert len(small.good("/generate", ASK)["output_ids"]) == 2
    assert [record.message for record in caplog.records if record.name == "slimectl"] == [
        "slimectl serve: 5 connections are open, the most that the descriptor limit allows. New ones wait until "
        "one closes. Raise the limit with ulimit -n, or use fewer."
    ]


def test_busy_clients_are_not_sent_away_for_those_who_wait(small: Any, ask: Callable[..., Any]) -> None:
    """Sixteen answers over five connections: each waits for its turn, and none is lost."""

    async def scene(session: aiohttp.ClientSession) -> list[Any]:
        return await asyncio.gather(*(ask(session, "/generate", ASK) for _ in range(16)))

    assert [status for status, _ in small.run(scene)] == [200] * 16


def test_without_pressure_a_slow_client_has_its_time(small: Any) -> None:
    raw = json.dumps(ASK).encode()
    with connect(small) as client:
        client.sendall(HEAD[:20])
        time.sleep(0.6)
        client.sendall(HEAD[20:] + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw[:5])
        time.sleep(0.6)
        client.sendall(raw[5:])
        assert received(client).startswith(b"HTTP/1.1 200 OK")


def test_a_body_that_does_not_come_is_a_line(monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
    monkeypatch.setattr(schema, "BODY_S", 0.2)
    with connect(server) as client:
        client.sendall(HEAD + b"Content-Length: 50\r\n\r\n{")
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the body did not arrive within 0 s. Send it again." in answer


def test_compressed_bodies_are_refused(server: Any) -> None:
    with connect(server) as client:
        client.sendall(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 5\r\nConnection: close\r\n\r\nabcde")
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 415")
    assert b"compressed bodies are not supported" in answer


def test_large_bodies_share_a_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, serving: Callable[..., Any], model_dir: Callable[[str], Path]
) -> None:
    monkeypatch.setattr(schema, "MOST_TOGETHER", 3 << 20)
    whole = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % (2 << 20)
    with serving(model_dir("llama"), load=False) as made:
        with ExitStack() as holders:

            def hold() -> socket.socket:
                holder = holders.enter_context(connect(made))
                holder.sendall(whole + b" " * ((2 << 20) - 1))
                return holder

            holder, answers = hold(), []
            while not answers or answers[-1].startswith(b"HTTP/1.1 400"):  # until the first is being read
                with connect(made) as client:
                    client.sendall(whole + b"x" * (2 << 20))
                    answers.append(received(client))
                if select.select([holder], [], [], 0)[0]:  # the server refused the first in favor of the other
                    holder = hold()
        assert answers[-1].startswith(b"HTTP/1.1 503")
        assert b"too many large bodies at once. Try again in a moment." in answers[-1]
        answer = b"HTTP/1.1 503"
        while answer.startswith(b"HTTP/1.1 503"):  # until the first has gone
            with connect(made) as client:
                client.sendall(whole + b"x" * (2 << 20))
                answer = received(client)
        assert answer.startswith(b"HTTP/1.1 400")


def test_what_is_no_http_is_one_line_and_nothing_is_said_of_it(
    server: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for raw in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"X: " + b"a" * 9000 + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: a\r\n" % i for i in range(1000)) + b"\r\n",
    ):
        with connect(server) as client:
            client.sendall(raw)
            head, _, body = received(client).partition(b"\r\n\r\n")
        assert b" 400 " in head.splitlines()[0]
        message = json.loads(body)["error"]["message"]
        assert message.startswith("malformed HTTP request: ")
        assert message.isprintable()
    assert capfd.readouterr().err == caplog.text == ""


def test_the_same_trouble_is_told_once() -> None:
    lines: list[str] = []
    notices = Notices(lines.append)
    for _ in range(1000):
        notices.tell("full", "no descriptor is left")
        notices.tell("other", "something else")
    assert lines == ["slimectl serve: no descriptor is left", "slimectl serve: something else"]


def test_at_its_limit_of_descriptors_it_says_one_line_and_lives(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """300 connections to a process that may have 96 descriptors; it used to write a traceback for every try."""
    arguments = ["RLIMIT_NOFILE", "96", "serve", "--model", str(model_dir("llama")), "--port", "0"]
    environment = os.environ | {"SLIMECTL_ENGINE_ADMIN_API_KEY": KEY}
    process = forkserver.start_python(
        forkserver.LIMITED, arguments, cwd=tmp_path, env=environment, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    port = int(process.stderr.readline().decode().split(": ")[0].rsplit(":", 1)[1])
    with ExitStack() as clients:
        for _ in range(300):
            clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300))
        line = process.stderr.readline().decode().rstrip("\n")  # while all of them are there
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert received(client).startswith(b"HTTP/1.1 200 OK")
    process.terminate()
    _, words = process.communicate(timeout=300)
    assert process.returncode == 0
    assert words == b""
    assert line.startswith("slimectl serve: ")
    assert line.endswith(" connections are open, the most that the descriptor limit allows. New ones wait until "
                         "one closes. Raise the limit with ulimit -n, or use fewer.")  # fmt: skip
