"""Who is answered: keys, Host and Origin on every endpoint, and what a paused server says."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slimectl.engines.server.access import Access
from slimectl.engines.server.app import ROUTES

STEERING = [path for path, (_, _, access) in ROUTES.items() if access is Access.ADMIN_KEY]
ASK = {"input_ids": list(b"once"), "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
KEY = "admin-key-of-the-tests"


def exchange(server: Any, raw: bytes) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an answer to bytes on a connection of their own, which the server closes."""
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=300) as client:
        client.sendall(raw)
        answer = b""
        while part := client.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def request(path: str, *, method: str = "POST", body: bytes = b"{}", **headers: str) -> bytes:
    """A request with these headers; `Sec_Fetch_Site` is Sec-Fetch-Site."""
    fields = {"Host": "127.0.0.1", "Content-Type": "application/json", "Connection": "close"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    fields["Content-Length"] = str(len(body))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def message(answer: dict[str, Any]) -> str:
    return str(answer["error"]["message"])


@pytest.mark.parametrize("path", STEERING)
def test_what_changes_state_takes_the_admin_key(path: str, server: Any) -> None:
    wrong = ["", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer \xff\xfe"]
    for sent in wrong:
        status, answer = exchange(server, request(path, Authorization=sent))
        assert (status, message(answer)) == (
            401,
            f'{path}: needs the admin key of this server. Send the header "Authorization: Bearer KEY" '
            f"(docs/serving.md tells where to find the key)",
        )
    twice = request(path).replace(
        b"\r\n", f"\r\nAuthorization: Bearer {KEY}\r\nAuthorization: Bearer x\r\n".encode(), 1
    )
    assert exchange(server, twice)[0] == 401
    assert server.ask(path, method="GET")[0] == 405


def test_another_site_cannot_give_back_the_memory_and_generate_answers(server: Any) -> None:
    """A page that a browser shows may send this, with the key or without."""
    for key in ("", f"Bearer {KEY}"):
        raw = request("/release_memory_occupation", Origin="http://evil.example", Authorization=key)
        status, answer = exchange(server, raw)
        assert (status, message(answer)) == (
            403,
            "Origin: 'http://evil.example' is another site, which is not allowed to use this server",
        )
    assert len(server.good("/generate", ASK)["output_ids"]) == 2


@pytest.mark.parametrize("path", [*ROUTES, "/nowhere"])
def test_every_endpoint_looks_at_host_and_origin(path: str, server: Any) -> None:
    path = path.replace("{name:.+}", "x")
    method = "POST" if path in STEERING or path in ("/generate", "/v1/completions") else "GET"
    port = server.url.rsplit(":", 1)[1]
    refused = [
        {"Host": "evil.example"},
        {"Host": f"evil.example:{port}"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "10.1.2.3"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://127.0.0.1:{int(port) + 1}"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ]
    for headers in refused:
        status, answer = exchange(server, request(path, method=method, Authorization=f"Bearer {KEY}", **headers))
        assert status == 403, headers
        assert message(answer).split(":")[0].replace("-", "_") in headers
    for headers in ({"Host": ""}, {"Host": "a b"}, {"Host": "[::1"}, {"Host": "localhost:port"}):
        assert exchange(server, request(path, method=method, **headers))[0] == 400, headers


def test_its_own_names_and_pages_are_answered(server: Any) -> None:
    for headers in (
        {"Host": "localhost"},
        {"Host": "LOCALHOST:8080"},
        {"Host": "127.0.0.1:1"},
        {"Host": "[::1]:30000"},
        {"Host": "127.0.0.1:99", "Origin": "http://127.0.0.1:99", "Sec_Fetch_Site": "same-origin"},
    ):
        status, answer = exchange(server, request("/model_info", method="GET", body=b"", **headers))
        assert (status, answer["engine"]) == (200, "slimectl"), headers


def test_a_name_that_was_allowed_is_answered(serving: Callable[..., Any], model_dir: Callable[[str], Path]) -> None:
    with serving(model_dir("llama"), load=False, allowed_hosts=("models.example",)) as made:
        assert exchange(made, request("/ping", method="GET", body=b"", Host="Models.example:443"))[0] == 200
        status, answer = exchange(made, request("/ping", method="GET", body=b"", Host="other.example"))
        assert status == 403
        assert message(answer).endswith("or start it with --allow-host other.example")


def test_an_api_key_closes_the_rest(serving: Callable[..., Any], model_dir: Callable[[str], Path]) -> None:
    with serving(model_dir("llama"), api_key="key-of-agents") as made:
        asked = json.dumps(ASK).encode()
        status, answer = exchange(made, request("/generate", body=asked))
        assert (status, message(answer)[:36]) == (401, "/generate: needs the API key of this")
        for key in ("key-of-agents", KEY):
            assert exchange(made, request("/generate", body=asked, Authorization=f"bearer {key}"))[0] == 200
        assert exchange(made, request("/flush_cache", Authorization="Bearer key-of-agents"))[0] == 401
        for path in ("/ping", "/health", "/ready", "/health_generate"):
            assert exchange(made, request(path, method="GET", body=b""))[0] == 200


@pytest.fixture
def impatient(serving: Callable[..., Any], model_dir: Callable[[str], Path]) -> Iterator[Any]:
    with serving(model_dir("llama"), pause_timeout_s=0.5) as made:
        yield made


@pytest.mark.parametrize(
    ("hold", "go_on"),
    [
        ("/release_memory_occupation", "/resume_memory_occupation"),
        ("/pause_generation", "/continue_generation"),
        ("/begin_weight_update", "/end_weight_update"),
    ],
)
def test_a_request_to_a_paused_server_is_told_so_after_a_while(
    hold: str, go_on: str, impatient: Any, ask: Callable[..., Any], events: Callable[..., Any]
) -> None:
    impatient.good(hold, {})

    async def scene(session: aiohttp.ClientSession) -> list[Any]:
        async def streamed() -> tuple[int, Any]:
            async with session.post("/generate", json={**ASK, "stream": True}) as response:
                return response.status, await response.json()

        return await asyncio.gather(ask(session, "/generate", ASK), streamed())

    words = f"the engine has been paused for more than 0.5 s. Try again after {go_on}."
    for status, answer in impatient.run(scene):
        assert (status, message(answer), answer["error"]["type"]) == (503, words, "engine_paused")
    impatient.good(go_on, {})
    assert len(impatient.good("/generate", ASK)["output_ids"]) == 2
    assert impatient.good("/v1/loads")["loads"][0]["num_total_reqs"] == 0


def test_a_pause_that_is_short_ends_nothing(impatient: Any, ask: Callable[..., Any]) -> None:
    async def scene(session: aiohttp.ClientSession) -> Any:
        for _ in range(4):  # in all longer than the limit
            await ask(session, "/pause_generation", {"mode": "retract"})
            task = asyncio.create_task(ask(session, "/generate", ASK))
            while not impatient.engine.waiting:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            await ask(session, "/continue_generation", {})
            assert (await task)[0] == 200

    impatient.run(scene)


@pytest.mark.slow
def test_a_client_of_ours_waits_for_a_paused_server(impatient: Any, model_dir: Callable[[str], Path]) -> None:
    """The server says 503 again and again; that is no silence, whatever connect_timeout_s says."""
    from serving import client

    from slimectl.engines.api_keys import ServerKeys
    from slimectl.types import SamplingParams

    engine = client([impatient.url], model_dir("llama"), keys=ServerKeys(admin_api_key=KEY), connect_timeout_s=0.1)

    async def scene() -> list[int]:
        task = asyncio.create_task(engine.generate(list(b"once"), params=SamplingParams(max_tokens=3, ignore_eos=True)))
        begun = time.monotonic()
        while time.monotonic() - begun < 1.5 and not task.done():
            await asyncio.sleep(0.05)
        assert not task.done()
        await asyncio.to_thread(impatient.good, "/continue_generation", {})
        return (await task).tokens

    impatient.good("/pause_generation", {"mode": "abort"})
    assert len(asyncio.run(scene())) == 3
    asyncio.run(engine.close())
