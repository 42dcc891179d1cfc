"""The server that serve_requests.py attacks: requests to it, and what to make of its answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

ADMIN_KEY = "campaign-admin-key-0123456789"
BODIES = {
    "/generate": {"input_ids": [65, 66, 67], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}},
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
}
GRACE_S = 90.0
"""How long the server may take to answer again after an attack; a busy machine is no failure."""
Outcome = tuple[bool, str]


class Target:
    """The server under attack."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, errors: Path) -> None:
        self.process, self.port, self.errors = process, port, errors

    def connect(self, timeout_s: float = GRACE_S) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)

    def send(self, raw: bytes, *, timeout_s: float = GRACE_S) -> bytes:
        """What comes back to these bytes until the server closes; empty if it only closes."""
        with self.connect(timeout_s) as client:
            answer = b""
            with suppress(ConnectionError):
                client.sendall(raw)
            with suppress(ConnectionError):
                while part := client.recv(65536):
                    answer += part
            return answer

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
        return self.send(written(method, path, body, **headers))

    def answers(self) -> str:
        """Empty if the server lives and writes; else what is wrong."""
        deadline = time.monotonic() + GRACE_S
        words = "no try"
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return f"the server ended with {self.process.returncode}"
            try:
                healthy = self.request("GET", "/health")
                answer = self.request("POST", "/generate", json.dumps(BODIES["/generate"]).encode())
            except OSError as error:
                words = str(error)
                continue
            if status_of(healthy) == status_of(answer) == 200 and len(body_of(answer)["output_ids"]) == 4:
                return ""
            words = f"{status_of(healthy)}, {status_of(answer)}"
            time.sleep(0.2)
        return f"no answer within {GRACE_S:g} s: {words}"

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def written(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """A request that asks the server to close; `Sec_Fetch_Site` is Sec-Fetch-Site, an empty value leaves one out."""
    fields = {"Host": "127.0.0.1", "Connection": "close", "Content-Type": "application/json"}
    fields |= {"Content-Length": str(len(body))} if body or method in ("POST", "PUT") else {}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "surrogateescape") + body


def status_of(answer: bytes) -> int:
    try:
        return int(answer.split(b" ", 2)[1])
    except (IndexError, ValueError):
        return 0


def body_of(answer: bytes) -> dict:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def judged(answer: bytes, expected: set[int], *, may_close: bool = False) -> Outcome:
    """Whether the answer has an expected status and, if it is a refusal, one line; and what it was."""
    if not answer:
        return may_close, "the connection was closed"
    status = status_of(answer)
    shown = answer[:160].decode(errors="replace")
    if status not in expected:
        return False, shown
    if status in (200, 417):
        return True, shown
    try:
        message = body_of(answer)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return False, f"no JSON: {shown}"
    return bool(message) and message.isprintable() and len(message) < 500, shown
