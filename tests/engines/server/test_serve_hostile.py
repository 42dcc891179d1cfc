"""Whatever a client sends or does, the server answers with one line, lives on and frees what the client held."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PROMPT = list(b"once upon a time")
ENDLESS = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 230, "ignore_eos": True}}
SENT: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}, "rid": "r", "return_logprob": True},
    "/v1/completions": {"prompt": "x", "max_tokens": 3, "temperature": 1.0, "logprobs": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "tools": []},
    "/abort_request": {"rid": "r"},
    "/pause_generation": {"mode": "retract"},
    "/update_weights_from_disk": {"model_path": "/", "weight_version": "1"},
    "/update_weights_from_tensor": {"load_format": "shared_memory", "name": "none", "tensors": [["a", "int8", [1], 0]]},
    "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["int8"], "shapes": [[1]], "group_name": "g"},
    "/init_weights_update_group": {"master_address": "127.0.0.1", "world_size": 2, "rank_offset": 1},
    "/destroy_weights_update_group": {"group_name": "g"},
    "/update_weight_version": {"new_version": "1"},
    "/weights_checker": {"action": "checksum"},
}
"""What a client might send, before something in it goes wrong."""
FIELDS = [
    "input_ids", "text", "sampling_params", "rid", "stream", "return_logprob", "prompt", "messages", "n", "stop",
    "temperature", "top_p", "max_tokens", "logprobs", "seed", "tools", "mode", "abort_all", "model_path", "names",
    "dtypes", "shapes", "tensors", "name", "load_format", "group_name", "world_size", "weight_version", "action",
    "serialized_named_tensors", "chat_template_kwargs", "stream_options", "response_format", "stop_token_ids",
    "new_version", "model", "rank_offset", "backend", "logit_bias", "image_data",
]  # fmt: skip
SAMPLING = ["temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens", "stop", "sampling_seed", "n"]


def strange(draw: random.Random, depth: int = 0) -> Any:
    """A value that hardly any field wants."""
    kinds = [
        lambda: None, lambda: draw.choice([True, False]), lambda: draw.choice([-1, 0, 10**30, -(2**70), 2**63]),
        lambda: draw.choice([1e308, -0.0, 1e-320, 3.5]), lambda: "x" * draw.choice([0, 1, 5000]), lambda: "\ud800",
        lambda: "\0", lambda: [strange(draw, depth + 1) for _ in range(draw.randrange(4))],
        lambda: {draw.choice(FIELDS + SAMPLING): strange(draw, depth + 1) for _ in range(draw.randrange(3))},
    ]  # fmt: skip
    return draw.choice(kinds[:7] if depth > 2 else kinds)()


def malformed(draw: random.Random) -> tuple[str, bytes, str]:
    """Path, body and content type of one bad request: mostly a good one with one or two fields gone wrong."""
    path = draw.choice(list(SENT))
    body = dict(SENT[path])
    for name in draw.sample(sorted(body) if draw.random() < 0.7 else FIELDS, 1):
        body[name] = strange(draw)
    if "sampling_params" in body and draw.random() < 0.5:
        body["sampling_params"] = {name: strange(draw) for name in draw.sample(SAMPLING, 2)}
    if "input_ids" in body and draw.random() < 0.3:
        body["input_ids"] = draw.choice([[10**20], [-1], [], [[]], ["a"], [1.5], [[1], "a"], [True], [1] * 300])
    raw = json.dumps(body).encode()
    raw = draw.choice([raw] * 9 + [raw[: len(raw) // 2], b"[" * 100_000, b'{"n": NaN}', b"\xff\xfe{", b"[1]"])
    kind = draw.choice(["application/json"] * 9 + ["text/plain", "multipart/form-data", "application/x-tar"])
    return path, raw, kind


@pytest.fixture(scope="module")
def hostile(serving: Callable[..., Any], model_dir: Callable[[str], Path]) -> Iterator[Any]:
    """A server of its own: what is sent here may pause it, or ask for a group."""
    with serving(model_dir("llama")) as made:
        yield made


def idle(server: Any) -> bool:
    load = server.good("/v1/loads")["loads"][0]
    return load["num_total_reqs"] == 0


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_malformed_requests_are_told_what_is_wrong_in_one_line(hostile: Any, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(0)
    requests = [malformed(draw) for _ in range(600)]

    async def scene(session: aiohttp.ClientSession) -> list[tuple[int, bytes]]:
        gate = asyncio.Semaphore(16)

        async def sent(path: str, raw: bytes, kind: str) -> tuple[int, bytes]:
            async with gate, session.post(path, data=raw, headers={"Content-Type": kind}) as response:
                return response.status, await response.read()

        async def unpaused() -> None:
            while True:
                await asyncio.sleep(0.05)
                await session.post("/continue_generation", json={})

        keeper = asyncio.create_task(unpaused())
        answers = await asyncio.gather(*(sent(*each) for each in requests))
        keeper.cancel()
        return answers

    answers = hostile.run(scene)
    statuses = [status for status, _ in answers]
    assert {status for status in statuses if status != 200} == {400, 415}
    assert sum(status != 200 for status in statuses) > 300
    for status, raw in answers:
        if status != 200:
            message = json.loads(raw)["error"]["message"]
            assert 0 < len(message) < 400
            assert "\n" not in message
            assert "Traceback" not in message
    assert "serve: /" not in caplog.text  # nothing surprised the server
    hostile.good("/continue_generation", {})
    assert soon(lambda: idle(hostile))
    assert len(hostile.good("/generate", ENDLESS)["output_ids"]) == 230


def test_numbers_at_the_edge_do_not_harm_the_neighbours(server: Any, ask: Callable[..., Any]) -> None:
    edges = [
        {"temperature": 1e-300}, {"temperature": 1e4}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 2**31},
        {"sampling_seed": -1}, {"sampling_seed": 2**64}, {"max_new_tokens": 2**31}, {"min_new_tokens": 20},
    ]  # fmt: skip

    async def scene(session: aiohttp.ClientSession) -> list[Any]:
        short = {"max_new_tokens": 20, "ignore_eos": True}
        bodies = [{"input_ids": PROMPT, "sampling_params": short | edge} for edge in [*edges, {}]]
        return await asyncio.gather(*(ask(session, "/generate", body) for body in bodies))

    answers = server.run(scene)
    assert [status for status, _ in answers] == [200] * len(answers)
    assert all(len(answer["output_ids"]) >= 20 for _, answer in answers)


def test_a_body_of_100_mb_is_refused_and_health_is_told_meanwhile(server: Any, ask: Callable[..., Any]) -> None:
    async def scene(session: aiohttp.ClientSession) -> tuple[int, float]:
        async def pieces() -> Any:
            for _ in range(100):
                yield b" " * (1 << 20)

        async def sent() -> int:
            try:
                async with session.post(
                    "/generate", data=pieces(), headers={"Content-Type": "application/json"}
                ) as got:
                    return got.status
            except aiohttp.ClientConnectionError:
                return 413  # it hung up before all had been sent

        sending = asyncio.create_task(sent())
        slowest = 0.0
        while not sending.done():
            start = time.monotonic()
            assert (await ask(session, "/health"))[0] == 200
            slowest = max(slowest, time.monotonic() - start)
        return await sending, slowest

    status, slowest = server.run(scene)
    assert status == 413
    assert slowest < 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(stream: bool, server: Any) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    raw = json.dumps({**ENDLESS, "stream": stream, "rid": "left"}).encode()
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(raw)}\r\n\r\n"
    for _ in range(20):
        steps = server.engine.stats.steps
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head.encode() + raw)
            assert soon(lambda steps=steps: server.engine.stats.steps > steps + 2)
        assert soon(lambda: server.engine.running == 0)
        if server.engine.stats.steps - steps < 200:
            break
    else:
        pytest.fail("never ended before its last token")
    server.good("/generate", {**ENDLESS, "rid": "left", "sampling_params": {"max_new_tokens": 1}})  # its id is free


def test_512_requests_at_once(server: Any, ask: Callable[..., Any]) -> None:
    async def scene(session: aiohttp.ClientSession) -> list[Any]:
        params = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
        bodies = ({"input_ids": [65 + i % 60, *PROMPT], "sampling_params": params} for i in range(512))
        return await asyncio.gather(*(ask(session, "/generate", body) for body in bodies))

    answers = server.run(scene)
    assert [(status, len(answer["output_ids"])) for status, answer in answers] == [(200, 4)] * 512
    assert answers[0][1]["output_ids"] == answers[60][1]["output_ids"]


@pytest.mark.slow
def test_health_is_told_while_long_prompts_are_computed_and_many_decoded(
    serving: Callable[..., Any], model_dir: Callable[[str], Path], ask: Callable[..., Any]
) -> None:
    with serving(model_dir("llama"), max_context=40_000, max_running=256) as long:

        async def scene(session: aiohttp.ClientSession) -> tuple[float, float]:
            prompts = [[i % 256 for i in range(n, n + 6000)] for n in range(2)]
            tasks = [
                asyncio.create_task(
                    ask(session, "/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}})
                )
                for prompt in prompts
            ]
            many = {"max_new_tokens": 100, "ignore_eos": True, "n": 256}
            tasks.append(asyncio.create_task(ask(session, "/generate", {"input_ids": PROMPT, "sampling_params": many})))
            begun, slowest = time.monotonic(), 0.0
            while not all(task.done() for task in tasks):
                start = time.monotonic()
                assert (await ask(session, "/health"))[0] == 200
                slowest = max(slowest, time.monotonic() - start)
            return slowest, time.monotonic() - begun

        slowest, whole = long.run(scene)
        assert whole > 1  # long enough to be noticed
        assert slowest < 1
