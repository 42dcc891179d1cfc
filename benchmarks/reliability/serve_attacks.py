"""Attacks on a server: each draws itself, carries itself out, and says what it did and what came of it."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from serve_target import ADMIN_KEY, BODIES, Outcome, Target, judged, status_of, written

STEERING = [
    "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/release_memory_occupation",
    "/resume_memory_occupation", "/begin_weight_update", "/end_weight_update", "/update_weights_from_disk",
    "/update_weights_from_tensor", "/update_weights_from_distributed", "/init_weights_update_group",
    "/destroy_weights_update_group", "/update_weight_version", "/weights_checker",
]  # fmt: skip
ASKING = ["/generate", "/v1/completions", "/v1/chat/completions"]
READING = ["/ping", "/health", "/ready", "/health_generate", "/model_info", "/server_info", "/v1/models", "/v1/loads"]


def foreign_sites(target: Target, draw: random.Random) -> tuple[str, Outcome]:
    path = draw.choice(STEERING + ASKING + READING + ["/nowhere", "/"])
    method = draw.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"])
    header, value = draw.choice(
        [
            ("Host", "evil.example"), ("Host", f"rebound.example:{target.port}"), ("Host", "127.0.0.1.evil.example"),
            ("Host", "localhost.evil.example"), ("Host", "10.0.0.1"), ("Host", "[fe80::1]"), ("Host", "0.0.0.0"),
            ("Origin", "http://evil.example"), ("Origin", "null"), ("Origin", "https://127.0.0.1:8443"),
            ("Origin", "http://localhost"), ("Origin", "file://"), ("Sec_Fetch_Site", "cross-site"),
            ("Sec_Fetch_Site", "same-site"),
        ]
    )  # fmt: skip
    key = draw.choice(["", f"Bearer {ADMIN_KEY}"])
    answer = target.request(method, path, b"{}", Authorization=key, **{header: value})
    outcome = judged(answer, {403})
    if method == "HEAD":
        outcome = (status_of(answer) == 403, outcome[1])
    return f"{method} {path} {header}: {value}", outcome


def wrong_keys(target: Target, draw: random.Random) -> tuple[str, Outcome]:
    path = draw.choice(STEERING)
    value = draw.choice(
        [
            "", "Bearer", "Bearer ", f"Bearer {ADMIN_KEY[:-1]}", f"Bearer {ADMIN_KEY}0", f"Bearer  {ADMIN_KEY}",
            f"Basic {ADMIN_KEY}", ADMIN_KEY, f"Bearer {ADMIN_KEY.upper()}", "Bearer " + "x" * 7000,
            "Bearer \xff\xfe\x80", f"Bearer {ADMIN_KEY},Bearer x",
            f"Token {ADMIN_KEY}", "Bearer null", "Bearer undefined", "Bearer ../../etc",
        ]
    )  # fmt: skip
    method = draw.choice(["POST"] * 4 + ["GET"])
    answer = target.request(method, path, b"{}" if method == "POST" else b"", Authorization=value)
    return f"{method} {path} Authorization: {value[:40]!a}", judged(answer, {401} if method == "POST" else {405})


HOST = b"Host: 127.0.0.1\r\nConnection: close\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def no_http(target: Target, draw: random.Random) -> tuple[str, Outcome]:
    head = b"POST /generate HTTP/1.1\r\n" + HOST
    body = json.dumps(BODIES["/generate"]).encode()
    length = b"Content-Length: %d\r\n" % len(body)
    raws = {
        "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(200) + b"\r\n\r\n",
        "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "no version": b"GET /\r\n\r\n",
        "version 9": b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
        "NUL in a header": head + b"X: a\0b\r\n" + length + b"\r\n" + body,
        "line feed alone": head.replace(b"\r\n", b"\n") + b"\n",
        "obsolete folding": head + b"X: a\r\n b\r\n" + length + b"\r\n" + body,
        "space before colon": head + b"Content-Length : 5\r\n\r\nabcde",
        "two lengths": head + length + b"Content-Length: 1\r\n\r\n" + body,
        "length and chunks": head + length + CHUNKED + b"0\r\n\r\nGET /flush_cache HTTP/1.1\r\n",
        "odd transfer coding": head + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "two transfer codings": head + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        "negative length": head + b"Content-Length: -5\r\n\r\n",
        "length in words": head + b"Content-Length: ten\r\n\r\n",
        "length of 40 digits": head + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n",
        "chunk of no size": head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        "endless chunk size": head + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 64 + b"\r\n",
        "a header of 1 MB": head + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n",
        "a path of 100 kB": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "20 000 headers": head + b"".join(b"X-%d: a\r\n" % i for i in range(20_000)) + b"\r\n",
        "two hosts": head + b"Host: evil.example\r\n" + length + b"\r\n" + body,
        "no host": head.replace(b"Host: 127.0.0.1\r\n", b"") + length + b"\r\n" + body,
        "another host's target": b"GET http://evil.example/health HTTP/1.1\r\n" + HOST + b"\r\n",
        "CONNECT": b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + b"\r\n",
        "odd expectation": head + b"Expect: 200-maybe\r\n" + length + b"\r\n" + body,
        "line feeds in the path": b"GET /a%0d%0aSet-Cookie:%20x HTTP/1.1\r\n" + HOST + b"\r\n",
        "noise": draw.randbytes(2000) + b"\r\n\r\n",
        "percent nonsense": b"GET /%zz%00%ff HTTP/1.1\r\n" + HOST + b"\r\n",
        "an upgrade": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    }  # fmt: skip
    name = draw.choice(sorted(raws))
    answer = finished(target, raws[name])
    return name, judged(answer, {200, 400, 403, 404, 405, 413, 417}, may_close=name in MAY_CLOSE)


MAY_CLOSE = {"noise", "TLS hello", "line feed alone", "length of 40 digits", "a header of 1 MB", "endless chunk size"}


def finished(target: Target, raw: bytes) -> bytes:
    """The answer to bytes after which the client says that no more come."""
    with target.connect() as client:
        with suppress(ConnectionError):
            client.sendall(raw)
        answer = b""
        client.settimeout(5.0)
        # Not at once: who hangs up is not answered.
        with suppress(OSError):
            while part := client.recv(65536):
                answer += part
                if complete(answer):
                    break
        return answer


def complete(answer: bytes) -> bool:
    """Whether an answer with a Content-Length is there as a whole."""
    head, found, body = answer.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return bool(found) and bool(lengths) and len(body) >= int(lengths[0])


def strange_bodies(target: Target, draw: random.Random) -> tuple[str, Outcome]:
    path = draw.choice(ASKING + STEERING)
    deep = draw.choice([1000, 100_000, 3_000_000])
    raws = {
        f"{deep} brackets": b"[" * deep,
        f"{deep} objects": b'{"a":' * deep,
        "31 MiB of spaces": b" " * (31 << 20),
        "33 MiB": b" " * (33 << 20),
        "4 million objects": b'{"input_ids":[' + b"{}," * 4_000_000 + b"{}]}",
        "a number of a million digits": b'{"input_ids":[' + b"9" * 1_000_000 + b"]}",
        "NaN": b'{"sampling_params":{"temperature":NaN}}',
        "half a surrogate": b'{"text":"\\ud800","model_path":"\\ud800","rid":"\\ud800"}',
        "no UTF-8": b"\xff\xfe\x00{",
        "an array": b"[1,2,3]",
        "a string": b'"' + b"x" * 100_000 + b'"',
        "wrong types": json.dumps({name: draw.choice([[], {}, 1.5, True, "x", -1]) for name in FIELDS}).encode(),
        "a path": b'{"model_path": "/etc", "name": "../../etc/passwd", "load_format": "shared_memory"}',
        "a terabyte": b'{"names": ["a"], "dtypes": ["float32"], "shapes": [[274877906944]], "group_name": "g"}',
    }  # fmt: skip
    name = draw.choice(sorted(raws))
    kind = draw.choice(["application/json"] * 5 + ["text/plain", "application/x-www-form-urlencoded"])
    more = draw.choice([{}] * 5 + [{"Content_Encoding": "gzip"}])
    answer = target.request("POST", path, raws[name], Authorization=f"Bearer {ADMIN_KEY}", Content_Type=kind, **more)
    target.request("POST", "/continue_generation", b"{}", Authorization=f"Bearer {ADMIN_KEY}")
    target.request("POST", "/resume_memory_occupation", b"{}", Authorization=f"Bearer {ADMIN_KEY}")
    target.request("POST", "/end_weight_update", b"{}", Authorization=f"Bearer {ADMIN_KEY}")
    return f"{path}: {name}, {kind}{', gzip' if more else ''}", judged(answer, {200, 400, 413, 415, 503})


FIELDS = [
    "input_ids", "text", "sampling_params", "rid", "stream", "prompt", "messages", "n", "mode", "abort_all", "names",
    "model_path", "tensors", "name", "group_name", "world_size", "master_address", "master_port", "new_version",
    "action",
]  # fmt: skip


def slow_clients(target: Target, draw: random.Random) -> tuple[str, Outcome]:
    """Clients that stop in the middle, while others ask."""
    count = draw.randrange(5, 30)
    body = json.dumps(BODIES["/generate"]).encode()
    starts = {
        "nothing": b"",
        "half a request line": b"POST /gene",
        "headers that never end": b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ",
        "bodies that never end": written("POST", "/generate", body)[:-10],
        "chunks that never end": b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\"a\":",
        "large bodies that stop": written("POST", "/generate", b" " * (1 << 20))[: 1 << 19],
    }  # fmt: skip
    name = draw.choice(sorted(starts))
    clients = []
    try:
        for _ in range(count):
            client = target.connect()
            clients.append(client)
            client.sendall(starts[name])
        trouble = target.answers()
    finally:
        for client in clients:
            client.close()
    return f"{count} x {name}", (not trouble, trouble)


def leaving_clients(target: Target, draw: random.Random) -> tuple[str, Outcome]:
    """Clients that go away: with a reset, half-closed, or in the middle of a stream."""
    path = draw.choice(ASKING)
    body = dict(BODIES[path]) | {"stream": draw.random() < 0.7}
    long = {"max_new_tokens": 200, "ignore_eos": True}
    body |= {"sampling_params": long} if path == "/generate" else {"max_tokens": 200, "ignore_eos": True}
    how = draw.choice(["reset", "close", "half-close", "reset in the stream"])
    for _ in range(draw.randrange(1, 12)):
        client = target.connect()
        client.sendall(written("POST", path, json.dumps(body).encode()))
        if how.endswith("stream"):
            client.recv(100)
        if how.startswith("reset"):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if how == "half-close":
            client.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                client.recv(100)
        client.close()
    trouble = target.answers()
    return f"{path}: {how}", (not trouble, trouble)


def floods(target: Target, draw: random.Random) -> tuple[str, Outcome]:
    """More connections than there are descriptors, idle or asking; who waits is answered when they have gone."""
    count = draw.randrange(200, 600)
    asking = draw.random() < 0.5
    clients: list[socket.socket] = []
    for _ in range(count):
        with suppress(OSError):
            client = target.connect(5.0)
            if asking:
                client.sendall(written("GET", "/health"))
            clients.append(client)
    size = target.errors.stat().st_size
    held = draw.random() < 0.5
    if not held:
        for client in clients:
            client.close()
    trouble = target.answers()
    for client in clients:
        client.close()
    grown = target.errors.stat().st_size - size
    trouble = trouble or (f"{grown} bytes on stderr" if grown > 2000 else "")
    return f"{count} connections, {'asking' if asking else 'idle'}, {'held' if held else 'closed'}", (
        not trouble,
        trouble,
    )


def pipelines(target: Target, draw: random.Random) -> tuple[str, Outcome]:
    """Thousands of requests in one go, and another smuggled behind a refused one."""
    count = draw.randrange(500, 5000)
    smuggled = written("POST", "/release_memory_occupation", b"{}")
    raw = written("GET", "/ping", Connection="keep-alive") * count + smuggled
    with target.connect() as client:
        sender = threading.Thread(target=lambda: _send_quietly(client, raw))
        sender.start()
        answer = b""
        with suppress(OSError):
            while part := client.recv(1 << 16):
                answer += part
        sender.join()
    refused = b"401 Unauthorized" in answer
    served = answer.count(b"HTTP/1.1 200")
    trouble = target.answers() or ("" if refused else "the smuggled request was not refused")
    return f"{count} requests at once", (not trouble and served == count, trouble or f"{served} of {count} answered")


def _send_quietly(client: socket.socket, raw: bytes) -> None:
    with suppress(OSError):
        client.sendall(raw)


def paused(target: Target, draw: random.Random) -> tuple[str, Outcome]:
    """A key holder pauses and forgets: whoever asks is told after a while."""
    hold, go_on, body = draw.choice(
        [
            ("/pause_generation", "/continue_generation", {"mode": draw.choice(["abort", "retract", "in_place"])}),
            ("/release_memory_occupation", "/resume_memory_occupation", {}),
            ("/begin_weight_update", "/end_weight_update", {}),
        ]
    )
    path = draw.choice(ASKING)
    key = f"Bearer {ADMIN_KEY}"
    target.request("POST", hold, json.dumps(body).encode(), Authorization=key)
    asked = BODIES[path] | {"stream": draw.random() < 0.5}
    answer = target.request("POST", path, json.dumps(asked).encode())
    target.request("POST", go_on, b"{}", Authorization=key)
    return f"{hold}, then {path}", judged(answer, {503})


ATTACKS: dict[str, tuple[int, Callable[[Target, random.Random], tuple[str, Outcome]]]] = {
    "foreign Host or Origin": (36, foreign_sites),
    "missing or wrong key": (28, wrong_keys),
    "malformed HTTP, smuggling": (36, no_http),
    "huge, deep or wrong bodies": (24, strange_bodies),
    "slow clients": (10, slow_clients),
    "clients that go away": (12, leaving_clients),
    "floods beyond the descriptors": (6, floods),
    "pipelined requests": (4, pipelines),
    "a server left paused": (6, paused),
}
"""Share of each in the attacks, and what carries one out."""
